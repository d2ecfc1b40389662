# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Hopper's backward kernels with a bias, and its gradient, in the emulator; NaN in whatever no visible pair reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_hopper
import emulated_masks_backward
from cutlass import Int32
from emulated_backward import Sizes, draw_operands
from test_masks_backward_emulated import FUSED, SPLIT
from test_sm90_emulated import ALL, CAUSAL

from jax_fastattn.compilation.compiler import _open_runtime
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward import bias_order
from jax_fastattn.kernels.sm90.backward.launches import BackwardKernel
from jax_fastattn.kernels.sums.tiles import dbias_parts

pytestmark = pytest.mark.slow

Dtype = Literal["bfloat16", "float16"]

MATRIX = {"bias": "matrix", "bias_dtype": "bfloat16", "dbias": True}
GROUPS = {**MATRIX, "group": 2}
KEYS = {"bias": "keys", "dbias": True}
ROWS = {"bias": "rows", "dbias": True, "features": (codes.SOFT_CAP,)}

# By name: head dims, dtype, features, sizes. Compiling takes most of the time, and cases of the same features share it.
CASES: dict[str, tuple[int, int, Dtype, dict[str, Any], Sizes]] = {
    "d64-holes": (64, 64, "bfloat16", GROUPS, Sizes(1, 133, 201, 1, bias=(1, 1, 133, 201), bias_holes=0.1)),
    "d64-causal": (64, 64, "bfloat16", {**CAUSAL, **GROUPS}, Sizes(2, 300, 270, 1, right=0, bias=(1, 2, 300, 270))),
    "d64-everything": (
        64,
        64,
        "float16",
        {**ALL, **MATRIX, "group": 2, "dlse": True, "bias_dtype": "float16"},
        Sizes(bias=(3, 2, 133, 201)),
    ),
    "d64-cap": (64, 64, "bfloat16", {**ALL, **MATRIX, "features": (codes.SOFT_CAP,)}, Sizes(bias=(3, 1, 133, 201))),
    "d64-sinks": (64, 64, "bfloat16", {**ALL, **MATRIX, "dlse": True, "dsinks": True}, Sizes(bias=(1, 1, 133, 201))),
    "d64-per-kv-head": (64, 64, "bfloat16", GROUPS, Sizes(2, 133, 140, 2, bias=(2, 2, 133, 140))),
    "d96-causal": (96, 96, "bfloat16", {**CAUSAL, **MATRIX}, Sizes(2, 133, 140, 1, right=0, bias=(1, 1, 133, 140))),
    "d128-parts": (
        128,
        128,
        "bfloat16",
        {**CAUSAL, **MATRIX, "group": 2, "splits_dbias": True},
        Sizes(3, 133, 201, 1, right=0, bias=(1, 1, 133, 201), bias_parts=2),
    ),
    "d128-one-stage": (
        128,
        128,
        "bfloat16",
        {**MATRIX, "bias_dtype": "float32"},
        Sizes(1, 133, 140, 1, bias=(1, 1, 133, 140)),
    ),
    "d192v128-causal": (
        192,
        128,
        "bfloat16",
        {**CAUSAL, **MATRIX},
        Sizes(2, 133, 140, 1, right=0, bias=(1, 1, 133, 140)),
    ),
    "d64v160-ring": (
        64,
        160,
        "bfloat16",
        {**MATRIX, "bias_dtype": "float32"},
        Sizes(1, 70, 140, 1, bias=(1, 1, 70, 140)),
    ),
    "d256-everything": (256, 256, "bfloat16", {**ALL, **MATRIX, "dlse": True}, Sizes(bias=(3, 1, 133, 201))),
    "d256-float32": (
        256,
        256,
        "bfloat16",
        {**GROUPS, "bias_dtype": "float32"},
        Sizes(1, 133, 140, 1, bias=(1, 2, 133, 140)),
    ),
    "keys-everything": (64, 64, "bfloat16", {**ALL, **KEYS, "group": 2, "dlse": True}, Sizes(bias=(3, 1, 1, 201))),
    "keys-per-head": (
        64,
        64,
        "bfloat16",
        {**CAUSAL, **KEYS, "group": 2},
        Sizes(2, 133, 140, 2, right=0, bias=(1, 4, 1, 140), bias_holes=0.2),
    ),
    "keys-per-kv-head": (
        128,
        128,
        "bfloat16",
        {**CAUSAL, **KEYS, "group": 2, "ordered": True},
        Sizes(2, 133, 140, 2, right=0, bias=(2, 2, 1, 140)),
    ),
    "keys-cap": (64, 64, "bfloat16", {**ALL, **KEYS, "features": (codes.SOFT_CAP,)}, Sizes(bias=(3, 1, 1, 201))),
    "keys-d192v128": (192, 128, "bfloat16", {**ALL, **KEYS}, Sizes(bias=(1, 1, 1, 201))),
    "rows-everything": (
        64,
        64,
        "float16",
        {**ALL, **ROWS, "group": 2, "dlse": True},
        Sizes(bias=(3, 2, 133, 1)),
    ),
    "rows-d192v128": (
        192,
        128,
        "bfloat16",
        {**CAUSAL, **ROWS},
        Sizes(3, 133, 140, 1, right=0, bias=(1, 1, 133, 1), bias_parts=2),
    ),
}


def key(name: str, **changes: Any) -> tuple[KernelSpec, Sizes]:
    """Returns the compile key of a case, and its sizes."""
    head_dim, v_head_dim, dtype, features, sizes = CASES[name]
    spec = KernelSpec("backward", "sm_90a", dtype, head_dim, v_head_dim, family="sm90", **(features | changes))
    return configured(spec), sizes


@pytest.fixture(autouse=True)
def _runtime() -> None:
    _open_runtime()


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_the_reference(name: str) -> None:
    emulated_hopper.check_backward(*key(name))


def test_rows_of_padding_in_full_tiles_add_nothing() -> None:
    """Lengths of queries alone: no window hides a key, so that every tile with keys is full."""
    features: dict[str, Any] = {**MATRIX, "query_seq_lengths": True}
    spec = configured(KernelSpec("backward", "sm_90a", "bfloat16", 64, 64, family="sm90", **features))
    emulated_hopper.check_backward(spec, Sizes(2, 200, 256, 1, query_lengths=(70, 200), bias=(1, 1, 200, 256)))


def test_the_number_of_the_key_after_the_last_visible_one_is_not_read() -> None:
    """A bias of keys under a causal mask. There are more keys than queries; NaN is in the numbers that nobody sees."""
    spec = configured(KernelSpec("backward", "sm_90a", "bfloat16", 64, 64, family="sm90", **CAUSAL, **KEYS))
    emulated_hopper.check_backward(spec, Sizes(1, 37, 45, 1, right=0, bias=(1, 1, 1, 45)))


# By name: a case without a bias, and the shape of a bias.
LISTED = {
    "d64-blocks": (FUSED["d64-blocks"], (1, 1, 300, 400)),
    "d64-sparse-sinks": (FUSED["d64-sparse-sinks"], (2, 1, 300, 333)),
    "d64-cap-lengths": (FUSED["d64-cap-lengths"], (1, 2, 133, 333)),
    "d64v128-padding": (FUSED["d64v128-padding"], (1, 1, 200, 333)),
    "d128-padding-of-heads": (FUSED["d128-padding-of-heads-sinks-cap"], (2, 4, 200, 333)),
    "keys-d64v128-padding": (FUSED["d64v128-padding"], (1, 2, 1, 333)),
    "d96-per-head": (FUSED["d96-per-head"], (1, 4, 200, 333)),
    "d128-ids-causal": (FUSED["d128-ids-causal"], (1, 1, 300, 320)),
    "d192v128-random": (SPLIT["d192v128-random"], (1, 1, 133, 201)),
    "d192-padding-in-one-row": (SPLIT["d192-padding-in-one-row"], (1, 1, 200, 333)),
    "d256-lengths": (SPLIT["d256-lengths"], (1, 1, 133, 333)),
    "keys-d64-cap-lengths": (FUSED["d64-cap-lengths"], (1, 2, 1, 333)),
    "keys-d192-sparse-sinks": (SPLIT["d192-sparse-sinks"], (1, 2, 1, 333)),
}


@pytest.mark.parametrize("name", LISTED)
def test_gradients_by_lists(name: str) -> None:
    case, bias = LISTED[name]
    emulated_masks_backward.check(replace(case, bias=bias))


@pytest.mark.parametrize("ordered", [False, True])
def test_batch_entries_that_share_a_large_bias_come_together(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_order, "RESIDENT_BIAS", 0)
    spec, _ = key("d64-causal", ordered=ordered)
    sizes = Sizes(3, 133, 201, 2, right=0, bias=(1, 4, 133, 201))
    scalars = emulated_hopper.launch_scalars(spec, sizes)
    order = BackwardKernel(spec).orders(scalars).keys
    heads = [emulated_hopper.number(order.head_at(Int32(place))) for place in range(6)]
    assert heads == [0, 2, 4, 1, 3, 5]
    assert [emulated_hopper.number(order.place_of(Int32(head))) for head in heads] == list(range(6))
    emulated_hopper.check_backward(spec, sizes)


LAUNCHED = {
    "d64-holes": ["prologue", "background", "DkdvDqKernel", "DbiasKernel"],
    "d192v128-causal": ["prologue", "DqKernel", "DkdvKernel", "DbiasKernel"],
    "keys-everything": ["prologue", "background", "DkdvDqKernel"],
    "rows-everything": ["prologue", "background", "DkdvDqKernel", "DbiasKernel"],
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_gradient_of_a_bias_is_computed_if_it_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(**changes: Any) -> tuple[list[str], set[str]]:
        found: list[str] = []

        def start(launch: Launch, *_: Any) -> None:
            kernel: Any = launch.kernel
            found.append(type(kernel.__self__).__name__ if kernel.__name__ == "kernel" else kernel.__name__)

        monkeypatch.setattr(emulated_hopper, "start", start)
        monkeypatch.setattr(emulated_hopper, "backward_texts", lambda _: {})
        spec, sizes = key(name, **changes)
        results = emulated_hopper.run_backward(spec, sizes, draw_operands(spec, sizes)[0])
        return found, results.keys() - {"dq", "dk", "dv"}

    gradient = "dkey_bias" if name.startswith("keys") else "dbias"
    assert launched() == (LAUNCHED[name], {gradient})
    assert launched(dbias=False) == ([x for x in LAUNCHED[name] if x != "DbiasKernel"], set())


def test_few_tiles_have_parts() -> None:
    """Planes, queries and keys of a bias; how many share a plane; SMs."""
    assert dbias_parts((16, 2048, 2048), 8, 132) == 1
    assert dbias_parts((12, 512, 512), 64, 132) == 2
    assert dbias_parts((8, 256, 256), 512, 132) == 4
    # No more parts than items, nor than there is memory for.
    assert dbias_parts((1, 128, 128), 3, 132) == 3
    assert dbias_parts((1, 1 << 14, 1 << 14), 64, 1 << 20) == 1
