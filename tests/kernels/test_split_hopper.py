# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper forward kernel of float32 operands, in the emulator."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_draws
import emulated_hopper
import hopper_emulator
import numpy as np
import split_calls
from emulated_backward import Sizes, draw_operands
from split_calls import EVERYTHING, LENGTHS

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels import codes

_spec = functools.partial(split_calls.spec, "forward")
CASES = {
    "d32-everything": (_spec(32, 32, **EVERYTHING), LENGTHS),
    "d64": (_spec(64, 64), Sizes(batch=1, queries=140, keys=300)),
    "d96-causal": (_spec(96, 64, window_right=True), Sizes(batch=2, queries=140, keys=230, right=0)),
    "d128-everything": (_spec(128, 128, **EVERYTHING, features=(codes.EXACT_SOFT_CAP, codes.SINKS)), LENGTHS),
    "negative-scale": (_spec(32, 96, features=(codes.SINKS,)), Sizes(1, 70, 150, scale=-0.3)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow if x != "d32-everything" else ()) for x in CASES]
)
def test_forward(case: str) -> None:
    emulated_hopper.check_forward(*CASES[case])


# Draws 0 and 1 have one product, see `emulated_draws.check`.
_CALL = Case("float32", 1, 70, 150, num_kv_heads=2, dlse=True, draw=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "bnts", "head_dim": 32},
        {"bias": "nts", "bias_dtype": "float32", "head_dim": 128},
        {"bias": "ts", "bias_dtype": "bfloat16", "is_causal": True},
        {"bias": "s", "bias_dtype": "float32"},
        {"bias": "nt", "bias_dtype": "float32", "logits_soft_cap": 5.0},
        {"packed": ((30, 0, 35), (40, 20, 80)), "first": (1, 5)},
    ],
    ids=lambda x: "-".join(x),
)
def test_calls(changes: dict[str, Any]) -> None:
    """With lists, biases and packed sequences."""
    emulated_draws.check(Case(**{**vars(_CALL), **changes}), "sm_90a", has_gradients=False)


@pytest.mark.parametrize("head_dim", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_scores_far_above_the_maxima(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp computes them again from both terms. Without one of them the error is a hundred times as large."""
    lanes, compute = [], hopper_emulator.Warpgroup.do_mma

    def count(group: hopper_emulator.Warpgroup, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        lanes.append(active.sum())
        compute(group, parts, operands, active)

    monkeypatch.setattr(hopper_emulator.Warpgroup, "do_mma", count)
    spec, sizes = _spec(head_dim, head_dim), Sizes(batch=1, queries=70, keys=400, scale=3.0 * (32 / head_dim) ** 0.5)
    arrays, wanted = draw_operands(spec, sizes)
    found = emulated_hopper.run_forward(spec, sizes, arrays)["out"]
    assert lanes
    np.testing.assert_allclose(found, wanted["out"], atol=2**-10 * np.abs(wanted["out"]).max())


def test_the_error_does_not_grow_with_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores truncate sums, here after 15 bits. Threads add the sums of tiles of keys, and round."""
    spec = _spec(32, 32)

    def truncated(_: Any, old: np.ndarray, product: np.ndarray) -> np.ndarray:
        return ((old + product).view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)

    monkeypatch.setattr(hopper_emulator.Warpgroup, "add", truncated)
    errors = []
    for tiles in (1, 5):
        # Weights are nearly equal and values positive, so that all sums grow.
        sizes = Sizes(batch=1, queries=64, keys=tiles * spec.config.keys, scale=1e-3, value_mean=256.0)
        arrays, wanted = draw_operands(spec, sizes)
        found = emulated_hopper.run_forward(spec, sizes, arrays)["out"]
        errors.append(np.sqrt(np.mean((found / wanted["out"] - 1) ** 2)))
    assert errors[0] > 2**-15 and errors[1] < 1.5 * errors[0], errors
