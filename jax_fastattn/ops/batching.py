# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Batching: a vmapped axis V is folded into the batch, `[V, B, ...] <-> [V * B, ...]`, and back in the results."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Ops that are kept, forward and backward each. One of them is made for every new spec, such as a new scale.
CACHED_OPS = 256

# Operands whose batch axis may be of size 1 and then serves every batch entry.
BROADCAST = ("bias", "mask", "sinks", "scale")


def fold(x: jax.Array, is_mapped: bool, size: int, batch: int, *, may_broadcast: bool) -> jax.Array:
    """One operand, `[V, B, ...]` or not mapped `[B, ...]`, to `[V * B, ...]`.

    An operand that is the same for all of V and B stays of size 1 where it `may_broadcast`.
    """
    if not is_mapped:
        if may_broadcast and x.shape[0] == 1:
            return x
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    if x.shape[1] != batch:
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape((size * batch, *x.shape[2:]))


def unfold(x: jax.Array, size: int) -> jax.Array:
    """Inverse of `fold` on a result: `[V * B, ...]` to `[V, B, ...]`."""
    return x.reshape((size, x.shape[0] // size, *x.shape[1:]))


def inner_batch(x: jax.Array, is_mapped: bool) -> int:
    """B of an array with or without a vmapped axis in front."""
    return x.shape[1 if is_mapped else 0]
