# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A sample of the random calls in which features meet, in the emulators of both families.

`benchmarks/cpu_checks.py --emulate` runs more of them, and `test_gpu.py` has such calls on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_draws
import emulated_ops
import jax.numpy as jnp
from testing.combinations import features_of
from testing.random_dropout import has_random_dropout
from testing.random_functions import has_random_score

from jax_fastattn.cases.case import Case

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cpu_checks

# For each architecture: one each with a mask, a bias, ids and a function, and one with none of these.
DRAWS = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_sample:
        seed = metafunc.config.getoption("--seed")
        found = [(arch, case) for arch in emulated_draws.ARCHS for case in emulated_draws.draws(seed, DRAWS, arch)]
        metafunc.parametrize(("arch", "case"), found, ids=[f"{arch}-{case}" for arch, case in found])


@pytest.mark.slow
def test_a_sample(arch: str, case: Case) -> None:
    emulated_draws.check(case, arch)


@pytest.mark.parametrize("arch", emulated_draws.ARCHS)
def test_samples_have_masks_ids_functions_and_biases(arch: str) -> None:
    sorts = {"mask", "bias", "ids", "function"}
    for seed in range(34, 39):
        features = [features_of(case) & sorts for case in emulated_draws.draws(seed, DRAWS, arch)]
        assert [bool(has - {"bias"}) for has in features] == [True, False, True, True, False]
        assert set().union(*features) == sorts and not features[-1]


def test_samples_have_functions_of_scores() -> None:
    for arch in emulated_draws.ARCHS:
        cases = emulated_draws.draws(34, 24, arch)
        assert 4 <= sum(map(has_random_score, cases)) <= len(cases) - 6
        assert any(case.packed and has_random_score(case) for case in emulated_draws.draws(34, 80, arch))


def test_samples_have_dropout() -> None:
    for arch in emulated_draws.ARCHS:
        found = [has_random_dropout(case) for case in emulated_draws.draws(34, 24, arch)]
        assert 4 <= sum(found) <= 14


def test_samples_have_dropout_of_few_queries() -> None:
    for arch in emulated_draws.ARCHS:
        found = [case for case in emulated_draws.draws(34, 80, arch) if case.query_length <= 16]
        assert 2 <= len(found) <= 10 and all(map(has_random_dropout, found))


def test_samples_have_functions_next_to_dropout() -> None:
    for arch in emulated_draws.ARCHS:
        cases = [case for case in emulated_draws.draws(34, 24, arch) if has_random_dropout(case)]
        assert 2 <= sum(map(has_random_score, cases)) <= len(cases) - 2


@pytest.mark.parametrize(("op", "result"), [("forward", 0), ("backward", 1)])
def test_a_wrong_result_fails(op: str, result: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of the log-sum-exp, or of a gradient."""
    case = Case("bfloat16", 1, 20, 24, num_kv_heads=1, head_dim=64, mask="ts", dlse=True, draw=0)
    right: Callable[..., Any] = emulated_ops.bind

    def wrong(*operands: Any, kernel: Any, **options: Any) -> Any:
        found = right(*operands, kernel=kernel, **options)
        if kernel.op == op:
            found[result] = found[result].at[(0,) * found[result].ndim].add(jnp.asarray(0.5, found[result].dtype))
        return found

    monkeypatch.setattr(emulated_ops, "bind", wrong)
    with pytest.raises(AssertionError, match="out:" if op == "forward" else "dkey:"):
        emulated_draws.check(case, "sm_90a")


def test_runs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[Case, str]] = []
    monkeypatch.setattr(emulated_draws, "check", lambda case, arch: checked.append((case, arch)))
    cpu_checks.main(["--output", str(tmp_path / "record.json"), "--draws", "5", "--seed", "2", "--emulate", "sm_80"])
    record = json.loads((tmp_path / "record.json").read_text())
    assert checked == [(case, "sm_80") for case in emulated_draws.draws(2, 5, "sm_80")]
    names = ("emulated", "seed", "draws", "kinds", "failures")
    assert [record[name] for name in names] == ["sm_80", 2, 5, 5, 0]
