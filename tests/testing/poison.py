# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""NaN, infinities and 1e38 in everything that no result may depend on.

NaN shows a product with 0 in place of a mask. A large number, which may pass where NaN is looked for, shows a mask that
is added.

`visible_pairs` decides what is invisible, pair by pair. It uses no plan, range or tile of an implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_fastattn.programs.code import places
from jax_fastattn.reference import first_rows, padding_rows, visible_pairs
from jax_fastattn.spec import AttentionSpec, Operands


@functools.partial(jax.jit, static_argnums=0)
def poison(
    spec: AttentionSpec,
    operands: Operands,
    dout: jax.Array,
    dlse: jax.Array | None = None,
    turn: ArrayLike = 0,
) -> tuple[Operands, jax.Array, jax.Array | None]:
    """Returns operands and cotangents with the `values` of poison in everything that no result depends on.

    These are queries that see no key and their `dout`, keys and values that no query sees, biases and numbers of a
    `score_mod` that no visible pair reads, and `dlse` of padding rows and, without sinks, of every query that sees no
    key.

    Args:
        operands, dout, dlse: what is poisoned.
        turn: says which of the values comes first; see `fill`.
    """
    hide = functools.partial(fill, turn=turn)
    sees, seen, pairs = visible_rows(spec, operands)
    unread = jnp.logical_not(sees)
    if operands.sinks is not None:
        unread = jnp.logical_and(unread, padding_rows(operands)[:, :, None])
    bias = operands.bias
    if bias is not None:
        shared = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
        read = jnp.any(pairs, axis=shared, keepdims=True)
        if read.shape[1] > bias.shape[1]:  # one row for each key/value head
            read = jnp.any(read.reshape(*bias.shape[:2], -1, *read.shape[2:]), axis=2)
        bias = hide(bias, jnp.logical_not(read), axis=3)
    poisoned = operands._replace(
        query=hide(operands.query, jnp.logical_not(sees)),
        key=hide(operands.key, jnp.logical_not(seen)),
        value=hide(operands.value, jnp.logical_not(seen)),
        bias=bias,
        **_hidden_numbers(spec, operands, pairs, hide),
    )
    return poisoned, hide(dout, jnp.logical_not(sees)), None if dlse is None else hide(dlse, unread)


def _hidden_numbers(
    spec: AttentionSpec, operands: Operands, pairs: jax.Array, hide: Callable[..., jax.Array]
) -> dict[str, jax.Array]:
    """Returns floats of queries, keys and distances that `score_mod` reads, with poison where no pair reads them.

    Args:
        pairs: which pairs are visible, `[B, n, T, S]`.
        hide: fills an array where another one is True.
    """
    found: dict[str, jax.Array] = {}
    for place in places((spec.score_mod,))[0]:
        kind = place.plane.kind
        if place.plane.dtype != "f" or kind not in ("query", "key", "distance"):
            continue
        x: jax.Array = found[place.operand] if place.operand in found else getattr(operands, place.operand)
        read = jnp.any(pairs, axis=3 if kind == "query" else 2)
        if kind == "distance":
            rows, columns = (jax.lax.iota(jnp.int32, size) for size in pairs.shape[2:])
            read = jnp.zeros((*pairs.shape[:2], x.shape[3]), jnp.bool)
            distance = (columns[None] - rows[:, None] + len(rows))[None]
            if operands.sequences is not None:
                of_queries, of_keys = first_rows(operands)
                distance = distance + of_queries[:, :, None] - of_keys[:, None]
            entries, heads = (jax.lax.broadcasted_iota(jnp.int32, pairs.shape, axis) for axis in range(2))
            read = read.at[entries, heads, jnp.broadcast_to(distance[:, None], pairs.shape)].max(pairs)
        shared = tuple(axis for axis in range(2) if x.shape[axis] == 1)
        read = jnp.any(read, axis=shared, keepdims=True)
        plane = hide(x[:, :, place.start], jnp.broadcast_to(jnp.logical_not(read), x[:, :, place.start].shape), axis=2)
        found[place.operand] = x.at[:, :, place.start].set(plane)
    return found


def visible_rows(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns which queries see a key, `[B, T, n]`; which keys a query sees, `[B, S, k]`; and the pairs `[B, n, T, S]`.

    With a mask or a function, n and k are axes of heads. Else their size is 1, since all heads see the same.
    """
    if operands.mask is None and spec.mask_mod is None:
        operands = operands._replace(query=operands.query[:, :, :1], key=operands.key[:, :, :1])
    pairs = visible_pairs(spec, operands)
    batch, num_heads, _, key_length = pairs.shape
    heads = operands.key.shape[2]
    by_query = jnp.any(pairs, axis=2).reshape(batch, heads, num_heads // max(heads, 1), key_length)
    return jnp.any(pairs, axis=3).swapaxes(1, 2), jnp.any(by_query, axis=2).swapaxes(1, 2), pairs


def fill(x: jax.Array, hidden: jax.Array, axis: int = 1, turn: ArrayLike = 0) -> jax.Array:
    """Returns x with `values` where `hidden` is True, in turns along an axis, the first one as `turn` says.

    `hidden` may lack trailing axes of x.
    """
    found = jnp.asarray(values(x.dtype))
    place = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + turn) % len(found)
    hidden = jnp.broadcast_to(hidden.reshape(hidden.shape + (1,) * (x.ndim - hidden.ndim)), x.shape)
    return jnp.where(hidden, found[place], x)


def values(dtype: DTypeLike) -> np.ndarray:
    """Returns the values of poison: NaN, Inf, -Inf and 1e38, or the largest number of the dtype if that is less."""
    return np.array([np.nan, np.inf, -np.inf, min(1e38, float(jnp.finfo(dtype).max))], dtype)


def full(shape: tuple[int, ...], dtype: DTypeLike, axis: int = 1) -> np.ndarray:
    """Returns an array of the `values`, which take turns along an axis."""
    along = np.resize(values(dtype), shape[axis])
    return np.broadcast_to(along.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape).copy()
