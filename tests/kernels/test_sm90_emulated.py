# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels without a GPU: their PTX, emulated, gives results and gradients of every variant and feature."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_hopper
import hopper_emulator
import numpy as np
from emulated_backward import Sizes

from jax_fastattn.ffi.compiler import _open_runtime
from jax_fastattn.kernels.spec import KernelSpec

pytestmark = pytest.mark.slow

ALL = {
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
}
CAUSAL = {"window_right": True}
SQUARE = Sizes(batch=2, kv_heads=3, queries=300, keys=400, right=0)
# A row of each table: head dims, dtype, features, sizes.
FORWARD = {
    "d64-short-everything": (64, 64, "bfloat16", {**ALL, "group": 2, "short": True}, None),
    "d64-causal": (64, 64, "float16", {**CAUSAL, "sinks": True}, SQUARE),
    "d96-short": (96, 96, "bfloat16", {**CAUSAL, "short": True}, None),
    "d96-everything": (96, 96, "bfloat16", {**ALL, "group": 3}, None),
    "d128-full": (128, 128, "bfloat16", {}, SQUARE),
    "d128-everything": (128, 128, "bfloat16", {**ALL, "group": 2, "logits_soft_cap": True, "sinks": True}, None),
    "d128-sections-of-heads": (
        128,
        128,
        "bfloat16",
        {**CAUSAL, "window_left": True},
        Sizes(batch=1, kv_heads=20, queries=150, keys=150),
    ),
    "d192v128": (192, 128, "float16", ALL, None),
    "d256-causal": (256, 256, "bfloat16", CAUSAL, SQUARE),
}
BACKWARD = {
    "d8-causal": (8, 8, "bfloat16", CAUSAL, None),
    "d16v48": (16, 48, "float16", {}, None),
    "d64-causal-negative-scale": (64, 64, "bfloat16", CAUSAL, Sizes(2, 300, 400, 3, right=0, scale=-0.3)),
    "d64-everything": (64, 64, "bfloat16", {**ALL, "group": 2, "dlse": True}, None),
    "d64-soft-cap": (64, 64, "bfloat16", {**ALL, "logits_soft_cap": True}, None),
    "d96-everything": (96, 96, "float16", {**ALL, "group": 3}, None),
    "d128-causal": (128, 128, "bfloat16", CAUSAL, SQUARE),
    "d128-everything": (
        128,
        128,
        "bfloat16",
        {**ALL, "group": 2, "logits_soft_cap": True, "sinks": True, "dlse": True},
        None,
    ),
    "d128-two-heads-of-odd-lengths": (128, 128, "bfloat16", {**ALL, "group": 2, "dlse": True}, None),
    "d128-one-tile-of-keys": (128, 128, "float16", {"group": 3}, Sizes(1, 100, 70, 1)),
    "d64v128-lengths": (64, 128, "bfloat16", {"query_seq_lengths": True, "key_value_seq_lengths": True}, None),
    "d128v64-left": (128, 64, "bfloat16", {"window_left": True}, None),
    "d160-soft-cap": (160, 160, "float16", {"logits_soft_cap": True, "key_value_seq_lengths": True}, None),
    "d192v128-causal": (192, 128, "bfloat16", CAUSAL, SQUARE),
    "d40v256-full": (40, 256, "bfloat16", {}, None),
    "d256-everything": (256, 256, "bfloat16", {**ALL, "group": 2, "dlse": True}, None),
}


def _spec(op: str, head_dim: int, v_head_dim: int, dtype: str, features: dict) -> KernelSpec:
    return KernelSpec(op, "sm_90a", dtype, head_dim, v_head_dim, family="sm90", **features)


@pytest.fixture(autouse=True)
def _runtime() -> None:
    _open_runtime()


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    *kernel, sizes = FORWARD[name]
    emulated_hopper.check_forward(_spec("forward", *kernel), sizes)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    *kernel, sizes = BACKWARD[name]
    emulated_hopper.check_backward(_spec("backward", *kernel), sizes)


@pytest.mark.parametrize("name", [name for name, row in BACKWARD.items() if _spec("backward", *row[:4]).fused])
def test_ordered_backward(name: str) -> None:
    """CTAs add to tiles of dq in one order."""
    *kernel, sizes = BACKWARD[name]
    emulated_hopper.check_backward(dataclasses.replace(_spec("backward", *kernel), ordered=True), sizes)


@pytest.fixture
def computed_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts lanes of the forward kernels' mma.sync, which computes the scores of a full tile again."""
    lanes = []
    compute = hopper_emulator.Warpgroup.do_mma

    def count(group: hopper_emulator.Warpgroup, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        lanes.append(active.sum())
        compute(group, parts, operands, active)

    monkeypatch.setattr(hopper_emulator.Warpgroup, "do_mma", count)
    return lanes


@pytest.mark.parametrize(("head_dim", "short"), [(64, True), (64, False), (128, False), (256, False)])
def test_scores_far_above_the_maxima(head_dim: int, short: bool, computed_again: list[int]) -> None:
    """If scores differ by hundreds, some warps have to compute a full tile again."""
    sizes = Sizes(batch=1, kv_heads=2, queries=133, keys=520, scale=2.0)
    emulated_hopper.check_forward(_spec("forward", head_dim, head_dim, "bfloat16", {"short": short}), sizes)
    assert computed_again


def test_nan_in_padding_queries_computes_no_tile_again(computed_again: list[int]) -> None:
    """Other rows of the warp would be rounded in another way, and every full tile would take twice as long."""
    sizes = Sizes(batch=1, queries=133, keys=520, query_lengths=(70,))
    emulated_hopper.check_forward(_spec("forward", 128, 128, "bfloat16", {"query_seq_lengths": True}), sizes)
    assert not computed_again
