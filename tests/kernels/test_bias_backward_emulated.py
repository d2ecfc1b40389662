# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Hopper's backward kernels with a bias, and its gradient, in the emulator; NaN in whatever no visible pair reads."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_hopper
import emulated_masks_backward
import numpy as np
from cutlass import Int32
from emulated_backward import Sizes, draw_operands
from emulated_masks_backward import Case
from emulated_prepass import Predicate

from jax_fastattn.ffi.compiler import _open_runtime
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward import bias_order
from jax_fastattn.kernels.sm90.backward.dbias_config import dbias_parts
from jax_fastattn.kernels.sm90.backward.launches import BackwardKernel

pytestmark = pytest.mark.slow

Dtype = Literal["bfloat16", "float16"]

ALL = {
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
}
CAUSAL = {"window_right": True}
MATRIX = {"bias": "matrix", "bias_dtype": "bfloat16", "dbias": True}
KEYS = {"bias": "keys", "dbias": True}

# By name: head dims, dtype, features, sizes.
CASES: dict[str, tuple[int, int, Dtype, dict[str, Any], Sizes]] = {
    "d64-holes": (64, 64, "bfloat16", MATRIX, Sizes(1, 133, 201, 1, bias=(1, 1, 133, 201), bias_holes=0.1)),
    "d64-causal": (64, 64, "bfloat16", {**CAUSAL, **MATRIX}, Sizes(2, 300, 270, 2, right=0, bias=(1, 2, 300, 270))),
    "d64-everything": (
        64,
        64,
        "float16",
        {**ALL, **MATRIX, "group": 2, "dlse": True, "bias_dtype": "float16"},
        Sizes(bias=(3, 2, 133, 201)),
    ),
    "d64-padding-in-full-tiles": (
        64,
        64,
        "bfloat16",
        {**MATRIX, "query_seq_lengths": True},
        Sizes(2, 200, 256, 1, query_lengths=(70, 200), bias=(1, 1, 200, 256)),
    ),
    "d64-cap": (64, 64, "bfloat16", {**ALL, **MATRIX, "logits_soft_cap": True}, Sizes(bias=(3, 1, 133, 201))),
    "d64-sinks": (64, 64, "bfloat16", {**ALL, **MATRIX, "dlse": True, "dsinks": True}, Sizes(bias=(1, 1, 133, 201))),
    "d64-per-kv-head": (64, 64, "bfloat16", {**MATRIX, "group": 2}, Sizes(2, 133, 140, 2, bias=(2, 2, 133, 140))),
    "d64-float32": (
        64,
        64,
        "bfloat16",
        {**MATRIX, "group": 2, "bias_dtype": "float32"},
        Sizes(1, 133, 140, 2, bias=(1, 4, 133, 140)),
    ),
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
        {**MATRIX, "bias_dtype": "float32"},
        Sizes(1, 133, 140, 1, bias=(1, 1, 133, 140)),
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
    "keys-cap": (64, 64, "bfloat16", {**ALL, **KEYS, "logits_soft_cap": True}, Sizes(bias=(3, 1, 1, 201))),
    "keys-d192v128": (192, 128, "bfloat16", {**ALL, **KEYS}, Sizes(bias=(1, 1, 1, 201))),
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
def test_gradients(name: str) -> None:
    emulated_hopper.check_backward(*key(name))


RANDOM = Predicate(mask=(2, 1, 133, 201), group=2)
BLOCKS = Predicate(mask=(2, 1, 300, 400), queries=300, keys=400, blocks=64, density=0.6)
SPARSE = Predicate(mask=(2, 1, 300, 333), queries=300, keys=333, group=2, blocks=17, density=0.1)
PER_HEAD = Predicate(mask=(2, 4, 200, 333), queries=200, keys=333, query_heads=4, group=2, blocks=33, density=0.2)
PADDING = Predicate(mask=(2, 1, 1, 333), queries=200, keys=333, blocks=90, density=0.7)
IDS = Predicate(segments=4, queries=300, keys=320, right=0)
LENGTHS = Predicate(
    mask=(1, 1, 133, 333), keys=333, query_lengths=(70, 0), key_lengths=(333, 200), density=0.9, blocks=20, group=2
)
LISTED = {
    "d64-blocks": Case(BLOCKS, 64, bias=(1, 1, 300, 400)),
    "d64-sparse-sinks": Case(SPARSE, 64, sinks=True, bias=(2, 1, 300, 333)),
    "d64-cap-lengths": Case(LENGTHS, 64, cap=True, bias=(1, 2, 133, 333)),
    "d96-per-head": Case(PER_HEAD, 96, dtype="float16", bias=(1, 4, 200, 333)),
    "d128-ids-causal": Case(IDS, 128, bias=(1, 1, 300, 320)),
    "d192v128-random": Case(RANDOM, 192, 128, bias=(1, 1, 133, 201)),
    "d192-padding-in-one-row": Case(PADDING, 192, one_row=True, bias=(1, 1, 200, 333)),
    "d256-lengths": Case(LENGTHS, 256, bias=(1, 1, 133, 333)),
    "keys-d64-cap-lengths": Case(LENGTHS, 64, cap=True, bias=(1, 2, 1, 333)),
    "keys-d128-sparse": Case(SPARSE, 128, bias=(2, 1, 1, 333)),
    "keys-d192-sparse-sinks": Case(SPARSE, 192, sinks=True, bias=(1, 2, 1, 333)),
}


@pytest.mark.parametrize("name", LISTED)
def test_gradients_by_lists(name: str) -> None:
    emulated_masks_backward.check(LISTED[name])


@pytest.mark.parametrize("ordered", [False, True])
def test_batch_entries_that_share_a_large_bias_come_together(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_order, "RESIDENT_BIAS", 0)
    spec, _ = key("d64-causal", group=2, ordered=ordered)
    sizes = Sizes(3, 133, 201, 2, right=0, bias=(1, 4, 133, 201))
    scalars = emulated_hopper.launch_scalars(spec, sizes)
    order = BackwardKernel(spec).orders(scalars).keys
    heads = [emulated_hopper.number(order.head_at(Int32(place))) for place in range(6)]
    assert heads == [0, 2, 4, 1, 3, 5]
    assert [emulated_hopper.number(order.place_of(Int32(head))) for head in heads] == list(range(6))
    emulated_hopper.check_backward(spec, sizes)


@pytest.mark.parametrize("name", ["d64-holes", "d192v128-causal"])
def test_a_row_that_is_far_below_all_others_gets_no_gradient(name: str) -> None:
    """Its log-sum-exp is rounded to more than its logits differ, and probabilities from it could be infinite."""
    spec, sizes = key(name)
    assert sizes.bias is not None
    arrays, _ = draw_operands(spec, sizes)
    arrays["bias"] = arrays["bias"].copy()
    arrays["bias"][..., 70, :] = -1e9
    arrays["lse"][:, 70] = np.float32(-1e9) + 64 * np.array([-1, 1, 0], np.float32)[: sizes.batch, None]
    found = emulated_hopper.run_backward(spec, sizes, arrays)
    assert not found["dq"][:, 70].any()
    assert not found["dbias"][..., 70, : sizes.keys].any()
    assert all(np.isfinite(found[x]).all() for x in ("dq", "dk", "dv"))


LAUNCHED = {
    "d64-holes": ["prologue", "background", "DkdvDqKernel", "DbiasKernel"],
    "d192v128-causal": ["prologue", "DqKernel", "DkdvKernel", "DbiasKernel"],
    "keys-everything": ["prologue", "background", "DkdvDqKernel"],
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
