# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which rows take part in a call: queries that see some key, and keys that some query sees.

What other rows hold may have no effect, not even on a factor that rows share. Windows, offsets and lengths decide row
by row. A mask, a function or segment ids decide pair by pair, in chunks of queries, so that memory holds no plane of
pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.layouts.packed import by_token, token_ids
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla.chunks import Axis, Span
from jax_fastattn.xla.predicate import Predicate

# A chunk has about this many pairs, over batch entries and heads that differ.
_PAIRS = 1 << 28


class LiveRows(NamedTuple):
    """Which rows take part; None where all do.

    Attributes:
        queries: `[b, T, n]`, of which b and n are 1 where all batch entries, or all heads, agree.
        keys: `[b, S, k]`, likewise.
    """

    queries: jax.Array | None
    keys: jax.Array | None


def live_rows(spec: AttentionSpec, operands: Operands) -> LiveRows:
    """Returns which rows of a call take part."""
    if operands.mask is not None or operands.query_segment_ids is not None or spec.mask_mod is not None:
        return _of_pairs(spec, by_token(operands))
    if operands.sequences is not None:
        return _of_sequences(spec, operands.sequences, (operands.query.shape[1], operands.key.shape[1]))
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    query_end, key_end, offset = operands.query_seq_lengths, operands.key_value_seq_lengths, operands.query_offset
    is_static = query_end is None and key_end is None and offset is None
    numpy: Any = np if is_static else jnp
    place, key_place = (numpy.arange(x, dtype=np.int32)[None] for x in (queries, keys))
    query_end = queries if query_end is None else query_end[:, None]
    key_end = keys if key_end is None else key_end[:, None]
    shift = 0 if offset is None else jnp.clip(offset, -UNBOUNDED, UNBOUNDED)[:, None]
    left, right = _window(spec)
    sees = _reaches(numpy, place + shift, (left, right), (0, key_end)) & (place < query_end)
    seen = _reaches(numpy, key_place - shift, (right, left), (0, query_end)) & (key_place < key_end)
    if is_static:
        return LiveRows(*(None if x.all() else jnp.asarray(x)[..., None] for x in (sees, seen)))
    return LiveRows(sees[..., None], seen[..., None])


def _window(spec: AttentionSpec) -> tuple[int, int]:
    left, right = (UNBOUNDED if x is None else min(x, UNBOUNDED) for x in spec.bounds)
    return left, right


def _reaches(numpy: Any, place: Any, reach: tuple[int, int], others: tuple[Any, Any]) -> Any:
    """Returns whether some place of a range `others` lies at most `reach` before or after a place."""
    low, high = numpy.maximum(place - reach[0], others[0]), numpy.minimum(place + reach[1], others[1] - 1)
    return low <= high


def _of_sequences(spec: AttentionSpec, sequences: jax.Array, lengths: tuple[int, int]) -> LiveRows:
    """Returns what `live_rows` does for packed sequences, `[B, T, 1]` and `[B, S, 1]`."""
    left, right = _window(spec)
    found = []
    for side, reach in enumerate(((left, right), (right, left))):
        ids = token_ids(sequences, lengths[side], of_keys=bool(side))
        # First query, queries, first key, keys and offset of the sequence of each token.
        columns = jnp.moveaxis(jnp.take_along_axis(sequences, jnp.maximum(ids, 0)[..., None], axis=1), 2, 0)
        first, others = columns[2 * side], columns[2 - 2 * side : 4 - 2 * side]
        offset = columns[4] if len(columns) == 5 else jnp.zeros_like(first)
        place = jnp.arange(lengths[side], dtype=jnp.int32)[None] - first + (-offset if side else offset)
        found.append((_reaches(jnp, place, reach, (0, others[1])) & (ids >= 0))[..., None])
    return LiveRows(*found)


def _of_pairs(spec: AttentionSpec, operands: Operands) -> LiveRows:
    """Returns what `live_rows` does where pairs have to be looked at."""
    predicate = Predicate.of(spec, operands)
    queries, keys = operands.query.shape[1], operands.key.shape[1]

    def pairs(span: Span) -> jax.Array:
        seen = predicate.visible(span, Span(0, keys))
        assert seen is not None, spec
        heads = seen.shape[1:3] if seen.shape[1:3] == (1, 1) else all_heads
        return jnp.broadcast_to(seen, (seen.shape[0], *heads, span.size, keys))

    all_heads = operands.key.shape[2], operands.query.shape[2] // operands.key.shape[2]
    entries, kv_heads, group = jax.eval_shape(lambda: pairs(Span(0, 1))).shape[:3]
    rows = max(_PAIRS // (entries * kv_heads * group * keys), 1)
    axis = Axis.cut(queries, rows)

    def add(i: Any, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        span, (sees, seen) = axis.span(i), found
        chunk = pairs(span)
        return span.put(sees, chunk.any(4), 3), seen | chunk.any((2, 3))

    start = jnp.zeros((entries, kv_heads, group, queries), bool), jnp.zeros((entries, kv_heads, keys), bool)
    sees, seen = axis.loop((0, axis.count), add, start)
    return LiveRows(sees.reshape(entries, kv_heads * group, queries).swapaxes(1, 2), seen.swapaxes(1, 2))
