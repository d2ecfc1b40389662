# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random calls in which features meet, on the XLA path; `tests/kernels/test_gpu.py` has such calls on a GPU.

`benchmarks/cpu_checks.py` runs thousands of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from testing import combinations, compare
from testing.combinations import BIASES, MASKS, features_of
from testing.draw_sizes import EMULATED, FEATURES, LARGE, SMALL, Sizes
from testing.poison import fill, poison, visible_rows

from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.cases.mask_functions import mask_function
from jax_fastattn.kernels.codes import MASK_OPS
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.programs.code import Code
from jax_fastattn.reference import visible_pairs
from jax_fastattn.spec import HIDDEN_BIAS

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import cpu_checks
import test_gpu

DRAWS, KINDS = 200, 12


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cases" in metafunc.fixturenames:
        drawn = combinations.combined_draws(metafunc.config.getoption("--seed"), DRAWS, KINDS, SMALL)
        kinds = [drawn[i::KINDS] for i in range(KINDS)]
        metafunc.parametrize("cases", kinds, ids=[str(dataclasses.replace(kind[0], draw=None)) for kind in kinds])


@pytest.mark.numbers
def test_random_calls(cases: list[Case]) -> None:
    """All draws of a kind."""
    for case in cases:
        try:
            combinations.check(case)
        except AssertionError as error:
            error.add_note(str(case))
            raise


def test_every_pair_and_triple_is_drawn_once() -> None:
    kinds = len(combinations.allowed())
    drawn = combinations.combined_draws(0, kinds, kinds, SMALL)
    found = [features_of(case) for case in drawn]
    for wanted in map(set, combinations.allowed()):
        # An offset comes with bounds.
        wanted |= {"causal"} if "offset" in wanted and "window" not in wanted else set()
        assert wanted in found
    for name in ("mask", "bias"):
        assert {"packing", name} not in map(set, combinations.allowed())
    assert {"mask", "bias"} in found
    assert set(FEATURES) == set().union(*found)


@pytest.mark.parametrize("sizes", [SMALL, LARGE, EMULATED], ids=["small", "large", "emulated"])
def test_draws_of_a_kind_share_what_is_static(sizes: Sizes) -> None:
    """One program, or one set of kernels, for all of them; their data differ."""
    kinds = 60
    drawn = combinations.combined_draws(7, 3 * kinds, kinds, sizes)
    for i in range(kinds):
        problems = {case.problem() for case in drawn[i::kinds]}
        assert len(problems) == 1
        assert len({str(case) for case in drawn[i::kinds]}) == 3
    assert combinations.combined_draws(7, 3 * kinds, kinds, sizes) == drawn
    assert combinations.combined_draws(8, 3 * kinds, kinds, sizes) != drawn


def test_masks_and_ids_of_every_sort_are_drawn() -> None:
    kinds = len(combinations.allowed())
    drawn = combinations.combined_draws(4, 12 * kinds, kinds, SMALL)
    masks = [case for case in drawn if case.mask is not None]
    assert {case.mask for case in masks} == set(MASKS)
    spelled = [case.spelled for case in masks if case.spelled is not None]
    assert {tuple(sorted(features_of(case))) for case in spelled} == {
        ("causal",), ("window",), ("lengths",), ("ids",), ("causal", "ids"),
    }  # fmt: skip
    assert any(case.documents for case in spelled) and any(case.segments for case in spelled)
    with_ids = [case for case in drawn if "ids" in features_of(case)]
    assert {case.ids for case in with_ids} == {"sorted", "unsorted", "negative"}
    alone = [case for case in with_ids if features_of(case) == {"ids", "residual"}]
    arrays = [case.operands(jax.random.key(0)) for case in alone]
    queries = [np.asarray(x.query_segment_ids) for x in arrays]
    keys = [np.asarray(x.key_value_segment_ids) for x in arrays]
    assert any((np.diff(ids) < 0).any() for ids in queries)
    assert any(ids.min() == np.iinfo(np.int32).min for ids in queries)
    both = [min(x.shape[1], y.shape[1]) for x, y in zip(queries, keys, strict=True)]
    assert any((x[:, :n] != y[:, :n]).any() for x, y, n in zip(queries, keys, both, strict=True))


def test_biases_of_every_sort_are_drawn() -> None:
    kinds = len(combinations.allowed())
    drawn = combinations.combined_draws(3, 12 * kinds, kinds, SMALL)
    biases = [case for case in drawn if case.bias is not None]
    assert {case.bias for case in biases} == set(BIASES)
    for dtype in ("float32", "bfloat16"):
        of_dtype = [case for case in biases if case.dtype == dtype]
        assert {case.bias_dtype for case in of_dtype} == {"float32", "bfloat16", "float16"}
        assert {case.constant_bias for case in of_dtype} == {False, True}
    spelled = [case.bias_spelled for case in biases if case.bias_spelled is not None]
    assert {tuple(sorted(features_of(case))) for case in spelled} == {
        ("causal",), ("window",), ("lengths",), ("ids",), ("causal", "ids"),
    }  # fmt: skip
    assert {case.bias_density for case in biases} == {0.0, 0.02, 0.2, 0.7, 0.97, 1.0}
    assert sum(case.bias_density == 1.0 and case.bias_spelled is None for case in biases) > len(biases) / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_elements_of_a_bias_that_count_as_minus_infinity(dtype: str) -> None:
    case = Case(bias="ts", bias_dtype=dtype, bias_density=0.5)
    bias = np.asarray(case.operands(jax.random.key(0)).bias, np.float32)
    hidden = bias[bias <= HIDDEN_BIAS]
    assert 0.4 < hidden.size / bias.size < 0.6 and np.abs(bias[bias > HIDDEN_BIAS]).max() < 10
    assert len(np.unique(hidden)) == (1 if dtype == "float16" else 3) and hidden.min() == -np.inf


def test_every_precision_is_drawn_with_float32_and_with_16_bits() -> None:
    kinds = len(combinations.allowed())
    drawn = [case for case in combinations.combined_draws(1, kinds, kinds, LARGE) if "precision" in features_of(case)]
    for dtype in LARGE.dtypes:
        assert {case.precision for case in drawn if case.dtype == dtype} == set(LARGE.precisions)
    wide = [case for case in drawn if case.dtype == "float32"]
    assert {kernel.operand_dtype for kernel in kernel_specs(wide, "sm_90a")} == {"bfloat16", "float16"}


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_calls_are_traced_under_their_precision(precision: str) -> None:
    case = Case(query_length=9, key_length=11, num_kv_heads=2, head_dim=4, precision=precision, draw=0)
    spec, *arrays = combinations.inputs(case)
    assert spec.precision == precision
    text = str(jax.make_jaxpr(lambda *given: combinations.evaluate(case, spec, *given))(*arrays))
    assert set(re.findall("precision='([^']*)'", text)) == {precision}


def test_constant_bias_has_no_gradient() -> None:
    case = Case(query_length=9, key_length=11, num_kv_heads=2, head_dim=4, bias="ts", constant_bias=True, draw=0)
    spec, operands, dout, dlse = combinations.inputs(case)
    assert combinations.evaluate(case, spec, operands, dout, dlse).dbias is None
    combinations.check(case)
    with pytest.raises(AssertionError, match="dbias: is present"):
        found = combinations.evaluate(dataclasses.replace(case, constant_bias=False), spec, operands, dout, dlse)
        compare.assert_within_budget(found, *combinations.expected(case, spec, operands, dout, dlse))


@pytest.mark.parametrize("feature", ["mask", "ids", "function"])
def test_what_a_mask_or_ids_hide_from_everybody_is_poisoned(feature: str) -> None:
    """In draws where no other argument hides anything."""
    kinds = len(combinations.allowed())
    drawn = combinations.combined_draws(4, 12 * kinds, kinds, SMALL)
    cases = [case for case in drawn if features_of(case) == {feature, "residual"}]
    rows_of = jax.jit(visible_rows, static_argnums=0)
    hidden_queries = hidden_keys = 0
    for case in cases:
        spec, operands, dout, dlse = combinations.inputs(case)
        sees, seen, _ = rows_of(spec, operands)
        poisoned, *_ = poison(spec, operands, dout, dlse, turn=case.draw)
        for rows, array in ((sees, poisoned.query), (seen, poisoned.key)):
            visible = np.broadcast_to(np.asarray(rows), array.shape[:3])
            np.testing.assert_array_equal((np.abs(np.asarray(array, np.float32)) < 1e4).all(3), visible)
        hidden_queries += not sees.all()
        hidden_keys += not seen.all()
    assert len(cases) == 12 and hidden_keys > 2
    assert hidden_queries > 2 or feature == "function"  # all draws of a kind have one function


def test_functions_of_every_sort_are_drawn() -> None:
    """Each has a code that the prepass evaluates, and shows what the function shows pair by pair."""
    kinds, opcodes = len(combinations.allowed()), set[str]()
    drawn = combinations.combined_draws(3, kinds, kinds, SMALL)
    numbers = [case.mask_mod for case in drawn if case.mask_mod is not None]
    assert len(set(numbers)) > 50
    read, sizes = set[str](), dict[str, Any](batch=2, query_length=7, key_length=9, num_kv_heads=2, head_dim=4)
    for number in numbers[:40]:
        case, key = Case("bfloat16", **sizes, group=2, mask_mod=number), jax.random.key(number)
        program = case.spec().mask_mod
        assert isinstance(program, Code)
        opcodes |= {op for op, *_ in program.instructions}
        read |= {plane.kind for plane in program.planes}
        found = visible_pairs(case.spec(), case.operands(key))
        of_pairs = mask_function(number, 7, case.captured(key))
        for _ in range(4):
            of_pairs = jax.vmap(of_pairs)
        expected = of_pairs(*map(jax.numpy.asarray, np.indices((2, 4, 7, 9), np.int32)))
        np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)
    assert opcodes <= MASK_OPS and read == {"head", "query", "key", "distance", "table"}


def test_the_values_of_poison_vary() -> None:
    x = jax.numpy.zeros((1, 3, 2))
    first = [fill(x, x == 0, turn=turn)[0, 0, 0] for turn in range(5)]
    np.testing.assert_array_equal(first, np.float32([np.nan, np.inf, -np.inf, 1e38, np.nan]))
    half = x.astype("float16")
    assert fill(half, half == 0, turn=3)[0, 0, 0] == 65504


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nothing_falls_back(arch: str) -> None:
    kinds = len(combinations.allowed())
    drawn = combinations.combined_draws(1, kinds, kinds, LARGE)
    assert {case.bias for case in drawn} == {None, *BIASES}
    assert not any(unsupported_reasons(case.problem(), arch) for case in drawn)


# 34 is the default of `--seed`.
@pytest.mark.parametrize("seed", range(34, 38))
def test_a_run_on_a_gpu_takes_few_kernels(seed: int) -> None:
    """Four such runs draw more than a thousand calls. A function makes prepasses of its own."""
    found = combinations.combined_draws(seed, test_gpu.COMBINED_DRAWS, test_gpu.COMBINED_KINDS, LARGE)
    assert 4 * len(found) >= 1000
    for arch in ("sm_80", "sm_90a"):
        assert len(kernel_specs(found, arch)) <= 64
    assert test_gpu.combined_draws(seed) == found


def test_draws_for_emulators_are_small() -> None:
    drawn = combinations.emulated_draws(34, 12)
    assert len({frozenset(features_of(case)) for case in drawn}) == 12
    for case in drawn:
        assert max(case.query_length, case.key_length) <= 200
        assert case.batch * case.num_heads <= 36
        assert case.dtype in ("bfloat16", "float16", "float32")


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that a mask hides, or NaN of a hidden row."""
    case = Case(query_length=9, key_length=11, num_kv_heads=2, head_dim=4, mask="bts", mask_density=0.3, draw=0)
    combinations.check(case)
    right = combinations.evaluate

    def wrong(case: Case, spec: Any, operands: Any, *arrays: Any) -> Any:
        return right(case, spec, operands._replace(mask=operands.mask.at[0, 0, 0].set(True)), *arrays)

    monkeypatch.setattr(combinations, "evaluate", wrong)
    with pytest.raises(AssertionError):
        combinations.check(case)


def test_runs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Case] = []

    def check(case: Case) -> None:
        checked.append(case)
        assert case.draw != 5, "it is five"

    monkeypatch.setattr(combinations, "check", check)
    monkeypatch.setattr(cpu_checks, "KINDS_AT_ONCE", 1000)
    cpu_checks.main(["--output", str(tmp_path / "record.json"), "--draws", "40", "--kinds", "9", "--seed", "2"])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [record[name] for name in ("seed", "draws", "kinds", "failures")] == [2, 40, 9, 1]
    assert len(checked) == 40
    ((name, error),) = record["failed"].items()
    assert name.endswith("draw5") and error.startswith("AssertionError: it is five")
