# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Makes what edge tiles compare where a launch has no bits: records of own rows and ids of visited rows.

A query sees a key if both have the same id, and the visited one of them lies between the limits of the other one.
Segment ids are ids, and window, offset and lengths are limits. A mask broadcasts over queries or over keys, and hides
rows of the other side: an own row by limits between which nothing lies, a visited row by an id that no own row has.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn.kernels.tiles.lists import RECORD_WORDS, PrepassConfig, Sizes
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.spec import AttentionSpec, Operands

# Visited rows that a mask hides have this id; the ids of other rows are at least 0 then.
_NO_ID = -1


class ComparedRowsArrays(NamedTuple):
    """Operands of a launch.

    Attributes:
        records: `[planes, own rows, RECORD_WORDS]`, int32.
        ids: `[planes, visited rows]`, int32. The rows fill whole tiles.
    """

    records: jax.Array
    ids: jax.Array


def compared_rows(spec: AttentionSpec, operands: Operands, config: PrepassConfig, sizes: Sizes) -> ComparedRowsArrays:
    """Returns the rows of a call.

    Args:
        operands: the arrays; a mask broadcasts over queries or over keys.
        config: sizes of the tiles.
        sizes: which batch entries and heads have planes of their own.
    """
    sides = _sides(operands)
    own, visited = reversed(sides) if config.transposed else sides
    low, high = _limits(spec, operands, own, visited, of_keys=config.transposed)
    ids = visited.ids if visited.seen is None else jnp.where(visited.seen, visited.ids, _NO_ID)
    if own.seen is not None:
        high = jnp.where(own.seen, high, 0)
    planes = sizes.batch, sizes.heads
    fields = [jnp.broadcast_to(x, (*planes, own.length)) for x in (own.ids, low, high)]
    padding = [jnp.zeros_like(fields[0])] * (RECORD_WORDS - len(fields))
    records = _whole_tiles(jnp.stack([*fields, *padding], axis=-1), config.own)
    ids = _whole_tiles(jnp.broadcast_to(ids, (*planes, visited.length)), config.visited)
    return ComparedRowsArrays(records, ids)


class _Side(NamedTuple):
    """Queries or keys.

    Attributes:
        length: the rows of the arrays.
        ids: `[1 or B, 1, length]`.
        lengths: the lengths of sequences, `[B, 1, 1]`; None without.
        seen: `[b, n, length]`, False for rows that the mask hides; None if it hides rows of the other side.
    """

    length: int
    ids: jax.Array
    lengths: jax.Array | None
    seen: jax.Array | None


def _sides(operands: Operands) -> tuple[_Side, _Side]:
    """Returns queries and keys."""
    mask, query_ids, key_ids = operands.mask, operands.query_segment_ids, operands.key_value_segment_ids
    lengths = operands.query.shape[1], operands.key.shape[1]
    if query_ids is None or key_ids is None:
        ids = tuple(jnp.zeros((1, length), jnp.int32) for length in lengths)
    else:
        ids = (narrow_ids if mask is None else _ranks)(query_ids, key_ids)
    seen: list[jax.Array | None] = [None, None]
    if mask is not None:
        of_keys = mask.shape[2] == 1
        seen[of_keys] = mask[:, :, 0] if of_keys else mask[..., 0]
    limits = (operands.query_seq_lengths, operands.key_value_seq_lengths)
    queries, keys = (
        _Side(length, x[:, None], None if limit is None else limit[:, None, None], hides)
        for length, x, limit, hides in zip(lengths, ids, limits, seen, strict=True)
    )
    return queries, keys


def _limits(
    spec: AttentionSpec, operands: Operands, own: _Side, visited: _Side, *, of_keys: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the first visited row that each own row sees, and the one after the last: `[1 or B, 1, length]`.

    See `plan.Bounds.key_limits` and `query_limits`.
    """
    before, after = reversed(spec.bounds) if of_keys else spec.bounds
    offset = jnp.zeros((1,), jnp.int32) if operands.query_offset is None else operands.query_offset
    offset = jnp.clip(offset, -UNBOUNDED, UNBOUNDED).astype(jnp.int32)[:, None, None]
    rows = jnp.arange(own.length, dtype=jnp.int32)[None, None]
    position = rows - offset if of_keys else rows + offset
    low, high = jnp.zeros_like(position), jnp.full_like(position, visited.length)
    if before is not None:
        low = jnp.maximum(position - min(before, UNBOUNDED), 0)
    if after is not None:
        high = jnp.minimum(position + (min(after, UNBOUNDED) + 1), visited.length)
    if visited.lengths is not None:
        high = jnp.minimum(high, visited.lengths.astype(jnp.int32))
    if own.lengths is not None:
        high = jnp.where(rows < own.lengths, high, 0)
    return low, high


def _whole_tiles(x: jax.Array, rows: int) -> jax.Array:
    """Returns x `[batch, heads, length, ...]` as `[planes, padded length, ...]`; padding is zeros, and sees nothing."""
    padding = [(0, 0), (0, 0), (0, -x.shape[2] % rows), *[(0, 0)] * (x.ndim - 3)]
    return jnp.pad(x, padding).reshape(-1, x.shape[2] + padding[2][1], *x.shape[3:])


def narrow_ids(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ids `[B, T]` and `[B, S]` as int32 that are equal where these are."""
    if queries.dtype.itemsize <= 4:
        return queries.astype(jnp.int32), keys.astype(jnp.int32)
    return _ranks(queries, keys)


def _ranks(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns places of ids in the sorted ids of both sides: no bit gets lost, and none is negative."""
    both = jnp.sort(jnp.concatenate([queries, keys], axis=1), axis=1)
    places = jax.vmap(jnp.searchsorted)
    return places(both, queries).astype(jnp.int32), places(both, keys).astype(jnp.int32)
