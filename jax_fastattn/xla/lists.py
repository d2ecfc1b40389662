# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Lists of tiles and bits of scores in plain JAX: what the prepass writes, on any platform.

A `BlockMask` that is made on one platform may be read on another one, so its lists have to be right on each of them.
All pairs exist at once here, in booleans.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.kernels.tiles.lists import (
    DEAD_ROWS,
    HEADER_WORDS,
    LIVE_WORDS,
    MAX_LIVE_ROWS,
    RANK_SHIFT,
    PrepassConfig,
    Sizes,
    list_words,
)


def tile_lists(
    config: PrepassConfig, sizes: Sizes, seen: jax.Array, query_ends: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Returns lists, bits and, of tiles of keys, counts by name, see `kernels/tiles/lists.py`.

    Args:
        config: sizes of the tiles.
        sizes: which batch entries and heads have lists of their own.
        seen: which pairs are visible `[b, n, T, S]`, axes of size 1 broadcast; lengths of queries hide nothing in it.
        query_ends: the lengths of queries `[B]`; None is T.
    """
    batch, heads, members, queries, keys = sizes
    rows = jnp.arange(queries, dtype=jnp.int32)[None, None, :, None]
    ends = jnp.int32(queries) if query_ends is None else query_ends[:batch, None, None, None]
    seen = jnp.broadcast_to(seen, (batch, heads, queries, keys)) & (rows < ends)
    # These queries make no tile an edge; lists of queries hide those that exist.
    ignored = jnp.broadcast_to(rows >= (queries if config.transposed else ends), seen.shape)
    shown, ignored = _tiles(config, seen, past_queries=False), _tiles(config, ignored, past_queries=True)
    live = shown.any(3) | _past(shown.shape[4:], queries if config.transposed else keys)
    by_list = (batch, heads // members, members, shown.shape[2], shown.shape[4])
    whole = (shown | ignored).all((3, 5))
    some, whole, dead = (x.reshape(by_list) for x in (shown.any((3, 5)), whole, ~live.all(4)))
    listed, full = some.any(2), some.any(2) & whole.all(2)
    edge = listed & ~full
    lists = _lists(config, edge, full, dead.any(2) & edge, _own_live(config, sizes, seen))
    counts = {"counts": listed.sum(2, dtype=jnp.int32)} if config.transposed else {}
    return {"lists": lists, "bits": _bits(config, shown, live)} | counts


def _tiles(config: PrepassConfig, x: jax.Array, *, past_queries: bool) -> jax.Array:
    """Returns pairs `[b, n, T, S]` as `[b, n, own tiles, own rows, visited tiles, visited rows]`.

    Keys past the end are False, and queries past the end as given.
    """
    x = jnp.pad(x, [(0, 0)] * 2 + [(0, -x.shape[2] % config.rows), (0, 0)], constant_values=past_queries)
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % config.keys)])
    x = x.swapaxes(2, 3) if config.transposed else x
    return x.reshape(*x.shape[:2], -1, config.own, x.shape[3] // config.visited, config.visited)


def _past(shape: tuple[int, ...], length: int) -> jax.Array:
    """Returns which rows of tiles `[1, 1, 1, tiles, rows]` lie past the end."""
    tiles, rows = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (tiles * shape[1] + rows >= length)[None, None, None]


def _words(x: jax.Array) -> jax.Array:
    """Returns booleans `[..., 128]` as four words."""
    bits = x.reshape(*x.shape[:-1], LIVE_WORDS, 32).astype(jnp.uint32)
    places = lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
    return (bits << places).sum(-1, dtype=jnp.uint32)


def _of_rows(x: jax.Array) -> jax.Array:
    """Returns live rows `[..., rows]` as four words; rows that they do not hold are live."""
    missing = max(MAX_LIVE_ROWS - x.shape[-1], 0)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=True)
    return _words(x[..., :MAX_LIVE_ROWS])


def _own_live(config: PrepassConfig, sizes: Sizes, seen: jax.Array) -> jax.Array:
    """Returns which own rows see something, or are seen: `[b, lists, own tiles, own rows]`."""
    live = seen.any(2 if config.transposed else 3)
    live = live.reshape(sizes.batch, sizes.heads // sizes.members, sizes.members, -1).any(2)
    live = jnp.pad(live, [(0, 0), (0, 0), (0, -live.shape[2] % config.own)], constant_values=True)
    live = live.reshape(*live.shape[:2], -1, config.own)
    return live if config.own <= MAX_LIVE_ROWS else jnp.ones_like(live)


def _lists(config: PrepassConfig, edge: jax.Array, full: jax.Array, dead: jax.Array, live: jax.Array) -> jax.Array:
    """Returns the lists of classes `[b, lists, own tiles, visited tiles]`."""
    tiles = lax.broadcasted_iota(jnp.int32, edge.shape, 3)
    last_full = jnp.where(full, tiles, -1).max(3, keepdims=True)
    is_last = jnp.full(edge.shape, not config.transposed)
    if config.splits_edges:
        is_last = tiles > last_full
    group = jnp.where(full, 1, jnp.where(is_last, 2, 0))
    order = jnp.argsort(jnp.where(edge | full, group, 3), axis=3, stable=True)
    entries = tiles | jnp.where(dead, DEAD_ROWS, 0)
    entries = entries.astype(jnp.uint32)
    if config.transposed:
        visits = (edge | full).astype(jnp.int32)
        rank = jnp.cumsum(visits, axis=2) - visits
        is_final = rank + 1 == visits.sum(2, keepdims=True)
        entries = entries | rank.astype(jnp.uint32) << RANK_SHIFT | is_final.astype(jnp.uint32) << 31
    entries = jnp.take_along_axis(entries, order, axis=3)
    missing = list_words(edge.shape[3]) - HEADER_WORDS - edge.shape[3]
    entries = jnp.pad(entries, [(0, 0)] * 3 + [(0, missing)])
    counts = [edge.sum(3), full.sum(3), ~live.all(3), (edge & is_last).sum(3)]
    header = jnp.stack([x.astype(jnp.uint32) for x in counts], axis=3)
    return _int32(jnp.concatenate([header, _of_rows(live), entries], axis=3))


def _bits(config: PrepassConfig, shown: jax.Array, live: jax.Array) -> jax.Array:
    """Returns the bits of each tile, then its live visited rows: `[b, n, own tiles, visited tiles, words]`."""
    x = jnp.moveaxis(shown, 4, 3)
    x = jnp.pad(x, [(0, 0)] * 5 + [(0, 64 * config.words - config.visited)])
    # Of 16 rows and 64 columns, lane 4 g + t has the rows g + 8 i and the columns 8 n + 2 t + e.
    x = x.reshape(*x.shape[:4], config.own // 16, 2, 8, config.words, 8, 4, 2)
    i, n, e = (lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in (5, 8, 10))
    words = (x.astype(jnp.uint32) << (16 * i + 2 * n + e)).sum((5, 8, 10), dtype=jnp.uint32)
    words = words.swapaxes(5, 6).reshape(*words.shape[:4], -1)
    return _int32(jnp.concatenate([words, _of_rows(live)], axis=4))


def _int32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)
