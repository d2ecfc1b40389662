# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout in the kernels, without a GPU: masks bit by bit, and gradients, of whole calls in the emulators."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from emulated_dropout import Call, check_gradients, check_mask

pytestmark = pytest.mark.slow

_RANDOM = np.random.default_rng(7)


def _floats(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(_RANDOM.standard_normal(shape), dtype)


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


CAUSAL = _options(is_causal=True)
# Three key/value heads show 150 keys. Sequences begin anywhere, and padding is before and after them.
WIDE = Call(lengths=(77, 150), kv_heads=3, group=1)
PACKED = Call(batch=1, lengths=(150, 150), kv_heads=3, packed=((3, 37, 37, 61, 140), (0, 50, 70, 75, 140)))

# Of calls at every commit, the smallest that meet more than one tile, part, role or head.
PORTABLE_MASKS = {
    "d64-causal": Call(lengths=(77, 150), kv_heads=3, group=1, options=CAUSAL, broadcast=True),
    "d128": Call(head_dim=128, lengths=(77, 61), batch=1),
    "packed": PACKED,
    "block-of-a-ring": Call(lengths=(48, 64), batch=1, first=(112, 32)),
}
MORE_MASKS = {
    "d64": WIDE,
    "d96": Call(head_dim=96),
    "d160": Call(head_dim=160, lengths=(50, 133)),
    "d192": Call(head_dim=192, lengths=(50, 133)),
    "d256": Call(head_dim=256, lengths=(50, 133)),
    "mask": Call(lengths=(77, 150), kv_heads=3, options=_options(mask=_RANDOM.random((2, 1, 77, 150)) < 0.8)),
    "lengths": Call(lengths=(77, 61), options=_options(key_value_seq_lengths=jnp.array([50, 33]))),
    "float16": Call(dtype="float16"),
    "float32": Call(dtype="float32", head_dim=128),
    "one-product": Call(dtype="float32", precision="tensorfloat32", lengths=(50, 61), batch=1),
}
PORTABLE_GRADIENTS = {
    "d64-causal": Call(lengths=(77, 100), batch=1, options=CAUSAL),
    "d128": Call(head_dim=128, lengths=(50, 133), batch=1, rate=0.9),
    "d256": Call(head_dim=256, lengths=(50, 70), batch=1),
    # The sum of dv has the heads of a group.
    "rates-d128": Call(head_dim=128, lengths=(50, 61), batch=1, group=3, rates=(0.2, 0.6, 0.9)),
    "bias": Call(lengths=(77, 100), batch=1, options=_options(bias=_floats(1, 2, 77, 100, dtype=jnp.bfloat16))),
    "float32": Call(dtype="float32", head_dim=128, lengths=(50, 70), batch=1),
    "packed": PACKED,
}
MORE_GRADIENTS = {
    "d96": Call(head_dim=96),
    "d160": Call(head_dim=160, lengths=(50, 133)),
    "d192": Call(head_dim=192, lengths=(50, 133)),
    "broadcast": Call(lengths=(77, 150), broadcast=True),
    "rate-1": Call(head_dim=128, rate=1.0, lengths=(50, 61)),
    "mask": Call(lengths=(77, 150), options=_options(mask=_RANDOM.random((2, 1, 77, 150)) < 0.8)),
    "window-cap-sinks": Call(
        head_dim=128,
        lengths=(77, 150),
        options=_options(local_window_size=(60, 20), logits_soft_cap=3.0, sinks=_floats(2), query_offset=40),
    ),
    "lengths": Call(
        lengths=(77, 150),
        options=_options(key_value_seq_lengths=jnp.array([100, 33]), query_seq_lengths=jnp.array([70, 77])),
    ),
    "bias-d128": Call(head_dim=128, lengths=(77, 150), options=_options(bias=_floats(2, 2, 77, 150), is_causal=True)),
    "bias-mask": Call(
        lengths=(77, 150),
        options=_options(bias=_floats(1, 1, 77, 150), mask=_RANDOM.random((2, 1, 77, 150)) < 0.8),
    ),
    "key-bias": Call(lengths=(77, 150), options=_options(bias=_floats(2, 1, 1, 150))),
    "row-bias": Call(lengths=(77, 150), options=_options(bias=_floats(2, 1, 77, 1))),
    "row-bias-cap": Call(lengths=(77, 150), options=_options(bias=_floats(2, 1, 77, 1), logits_soft_cap=3.0)),
    "deterministic": Call(head_dim=128, lengths=(77, 150), options=_options(deterministic=True)),
    # On Hopper the heads of a group take turns.
    "deterministic-causal": Call(lengths=(77, 150), options=_options(deterministic=True, is_causal=True)),
    "float16": Call(dtype="float16", lengths=(77, 150)),
    "float16-d128": Call(dtype="float16", head_dim=128, rate=0.9, lengths=(77, 150)),
    "float32-d64": Call(dtype="float32", lengths=(77, 100)),
    # P and dS have the factor of dropout, which float16 does not hold next to other powers.
    "one-product": Call(dtype="float32", precision="tensorfloat32", rates=(0.3, 0.999), lengths=(50, 61), batch=1),
    "one-product-d128": Call(
        dtype="float32", precision="tensorfloat32", head_dim=128, rate=0.9, lengths=(50, 61), options=CAUSAL
    ),
    "one-product-packed": dataclasses.replace(PACKED, dtype="float32", precision="tensorfloat32"),
    "float32-d256": Call(dtype="float32", head_dim=256, lengths=(50, 70)),
    "float32-bias": Call(dtype="float32", lengths=(77, 100), options=_options(bias=_floats(1, 2, 77, 100))),
    "packed-d128": Call(head_dim=128, batch=1, lengths=(150, 120), packed=((3, 37, 61, 140), (5, 50, 75, 111))),
}
# float32 operands have two terms of 8 bits each.
TOLERANCES = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-12}


def _tolerance(call: Call) -> float:
    return TOLERANCES[call.dtype if call.precision == "default" else "float16"]


@pytest.mark.whole
@pytest.mark.parametrize("name", PORTABLE_MASKS)
def test_portable_masks(name: str) -> None:
    """Each weight that the forward kernel keeps, `dropout_mask` keeps."""
    check_mask(PORTABLE_MASKS[name], "sm_80")


@pytest.mark.parametrize("name", MORE_MASKS)
def test_more_portable_masks(name: str) -> None:
    check_mask(MORE_MASKS[name], "sm_80")


@pytest.mark.whole
@pytest.mark.parametrize("name", PORTABLE_GRADIENTS)
def test_portable_gradients(name: str) -> None:
    call = PORTABLE_GRADIENTS[name]
    check_gradients(call, "sm_80", _tolerance(call))


@pytest.mark.parametrize("name", MORE_GRADIENTS)
def test_more_portable_gradients(name: str) -> None:
    call = MORE_GRADIENTS[name]
    check_gradients(call, "sm_80", _tolerance(call))


# Every commit runs each of Hopper's kernels once: forward of three and two warpgroups, dk with dv and dq, dk with dv,
# dq alone, and the gradient of a bias.
HOPPER_MASKS = ("d64-causal", "d128")
HOPPER_GRADIENTS = ("d64-causal", "d128", "bias")


@pytest.mark.whole
@pytest.mark.parametrize("name", HOPPER_MASKS)
def test_hopper_masks(name: str) -> None:
    check_mask(PORTABLE_MASKS[name], "sm_90a")


@pytest.mark.parametrize("name", sorted({*PORTABLE_MASKS, *MORE_MASKS} - {*HOPPER_MASKS}))
def test_more_hopper_masks(name: str) -> None:
    check_mask({**PORTABLE_MASKS, **MORE_MASKS}[name], "sm_90a")


@pytest.mark.whole
@pytest.mark.parametrize("name", HOPPER_GRADIENTS)
def test_hopper_gradients(name: str) -> None:
    call = PORTABLE_GRADIENTS[name]
    check_gradients(call, "sm_90a", _tolerance(call))


@pytest.mark.whole
def test_hopper_gradients_over_head_dim_128() -> None:
    check_gradients(Call(head_dim=192, lengths=(50, 133), batch=1), "sm_90a")


@pytest.mark.parametrize("name", sorted({*PORTABLE_GRADIENTS, *MORE_GRADIENTS} - {*HOPPER_GRADIENTS, "d192"}))
def test_more_hopper_gradients(name: str) -> None:
    call = {**PORTABLE_GRADIENTS, **MORE_GRADIENTS}[name]
    check_gradients(call, "sm_90a", _tolerance(call))
