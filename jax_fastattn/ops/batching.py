# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Folds a vmapped axis V into the batch, `[V, B, ...] <-> [V * B, ...]`, or into the groups of query heads.

In the forward pass V becomes query heads if keys and values are not mapped, so that they are not repeated: query head g
of example v shares its key/value head with the G query heads of every example, `K * G <-> K * V * G`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Ops that are kept, forward and backward each. One of them is made for every new spec, such as a new scale.
CACHED_OPS = 256

# Operands whose batch axis may be of size 1 and then serves every batch entry.
BROADCAST = ("bias", "mask", "sinks", "scale")


# Where the head axis is in the operands that may be mapped if V becomes query heads.
HEAD_AXIS = {"query": 2, "bias": 1, "mask": 1, "sinks": 1}


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


def of_no_example(op: Callable[..., Any], mapped: Sequence[bool], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Results `[0, ...]` of an op under `vmap` over an axis of size 0."""
    one = [jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype) for x, is_mapped in zip(arrays, mapped, strict=True)]
    return [jnp.zeros((0, *x.shape), x.dtype) for x in jax.eval_shape(op, *one)]


def inner_batch(x: jax.Array, is_mapped: bool) -> int:
    """B of an array with or without a vmapped axis in front."""
    return x.shape[1 if is_mapped else 0]


def becomes_heads(names: Sequence[str], mapped: Sequence[bool], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether the mapped axis, ahead in each of `shapes` that is mapped, should become query heads.

    Not if that repeats a bias or mask which the batch would not repeat: these can be larger than keys and values.
    """
    if not mapped[0] or any(m and name not in HEAD_AXIS for name, m in zip(names, mapped, strict=True)):
        return False
    _, batch, _, heads, _ = shapes[0]

    def is_repeated(size: int, whole: int, is_mapped: bool) -> bool:
        return size < whole if is_mapped else size > 1

    for name, shape, is_mapped in zip(names, shapes, mapped, strict=True):
        if name in ("bias", "mask"):
            b, n = shape[is_mapped : is_mapped + 2]
            if is_repeated(n, heads, is_mapped) and not is_repeated(b, batch, is_mapped):
                return False
    return True


def fold_heads(names: Sequence[str], mapped: Sequence[bool], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Folds all operands, `[V, ..., K * G, ...]` or not mapped, to `[..., K * V * G, ...]` where they have heads."""
    size, heads, kv_heads = arrays[0].shape[0], arrays[0].shape[3], arrays[1].shape[2]

    def fold_one(name: str, x: jax.Array, is_mapped: bool) -> jax.Array:
        axis = HEAD_AXIS.get(name)
        if axis is None or (not is_mapped and x.shape[axis] == 1 and name != "sinks"):
            return x
        if not is_mapped:
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        before, after = x.shape[1 : axis + 1], x.shape[axis + 2 :]
        x = jnp.broadcast_to(x, (size, *before, heads, *after))
        x = jnp.moveaxis(x.reshape((size, *before, kv_heads, heads // max(kv_heads, 1), *after)), 0, axis + 1)
        return x.reshape((*before, size * heads, *after))

    return [fold_one(*x) for x in zip(names, arrays, mapped, strict=True)]


def unfold_heads(x: jax.Array, size: int, kv_heads: int) -> jax.Array:
    """Inverse of `fold_heads` on a result: `[B, T, K * V * G, ...]` to `[V, B, T, K * G, ...]`."""
    rows, heads, rest = x.shape[:2], x.shape[2], x.shape[3:]
    x = x.reshape((*rows, kv_heads, size, heads // max(kv_heads * size, 1), *rest))
    return jnp.moveaxis(x, 3, 0).reshape((size, *rows, heads // size, *rest))
