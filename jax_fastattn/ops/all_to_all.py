# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Rows exchanged for heads: each device computes whole sequences of its share of the heads.

Operands are the same as in a ring with contiguous rows: a device's rows, while lengths, offsets, sequences, the columns
of bias and mask, and the planes of functions count from the start of the whole sequence. They mean the same once a
device has all rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_fastattn.ops import call_sites, vjp
from jax_fastattn.ring import Ring
from jax_fastattn.spec import PLANES, AttentionSpec, Operands


def attend(spec: AttentionSpec, operands: Operands, return_residual: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns a device's rows of what `vjp.attend` returns."""
    assert spec.ring is not None
    ring, operands = spec.ring, _spread(spec.ring, operands)
    spec = dataclasses.replace(spec, ring=None)
    call_sites.note(spec, operands)
    out, lse = vjp.attend(spec, operands, return_residual)
    return _exchange(ring, out, split=1, concat=2), None if lse is None else _exchange(ring, lse, split=1, concat=2)


def _spread(ring: Ring, operands: Operands) -> Operands:
    """Returns the operands with all rows, and with this device's heads."""
    rows, heads = operands.query.shape[1:3]
    kv_heads, times = operands.key.shape[2], _repeats(ring, heads, operands.key.shape[2])

    def exchange(x: jax.Array) -> jax.Array:
        return _exchange(ring, x, split=2, concat=1)

    def repeat(x: jax.Array, axis: int) -> jax.Array:
        return x if times == 1 else jnp.repeat(x, times, axis=axis)

    def gather(x: jax.Array | None, axis: int = 1) -> jax.Array | None:
        return None if x is None else jax.lax.all_gather(x, ring.axes, axis=axis, tiled=True)

    def own(x: jax.Array | None) -> jax.Array | None:
        return x if x is None or x.shape[1] == 1 else _own_heads(ring, x)

    def spread(x: jax.Array | None) -> jax.Array | None:
        """Returns a bias or a mask `[b, n, t, s]`. One row on each of several stands for all rows, or for its own."""
        if x is None:
            return None
        x = repeat(x, 1) if 1 < x.shape[1] == kv_heads < heads else x
        if x.shape[2] == 1 and rows != 1:
            return own(x)
        return gather(x, 2) if x.shape[1] == 1 else _exchange(ring, x, split=1, concat=2)

    return operands._replace(
        query=exchange(operands.query),
        key=exchange(repeat(operands.key, 2)),
        value=exchange(repeat(operands.value, 2)),
        bias=spread(operands.bias),
        mask=spread(operands.mask),
        query_segment_ids=gather(operands.query_segment_ids),
        key_value_segment_ids=gather(operands.key_value_segment_ids),
        sinks=None if operands.sinks is None else _own_heads(ring, operands.sinks),
        dropout=own(operands.dropout),
        **{name: own(getattr(operands, name)) for name in PLANES},
    )


def _exchange(ring: Ring, x: jax.Array, *, split: int, concat: int) -> jax.Array:
    """Splits one axis over the devices and gathers another one."""
    return jax.lax.all_to_all(x, ring.axes, split_axis=split, concat_axis=concat, tiled=True)


def _repeats(ring: Ring, heads: int, kv_heads: int) -> int:
    """Returns how often key/value heads are repeated, so that the devices divide them evenly."""
    size = ring.size
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"`query` has {heads} heads and `key` has {kv_heads} on {size} devices of {ring.axes}, expected multiples "
            f"of {size}, or key heads that divide {size}; call `ring_attention`, which takes any heads"
        )
    return 1 if kv_heads % size == 0 else size // kv_heads


def _own_heads(ring: Ring, x: jax.Array) -> jax.Array:
    """Returns this device's part of all heads, on axis 1."""
    count = x.shape[1] // ring.size
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(ring.axes) * count, count, 1)
