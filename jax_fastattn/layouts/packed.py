# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts boundaries of packed sequences to sequences, and to the ids of tokens, which the XLA path compares.

The operand `sequences` is int32 `[B, M, 4]`: first query row, queries, first key row and keys of each sequence; with
offsets `[B, M, 5]`, the offset last. The first and the last sequence are padding: they lie outside of all boundaries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fastattn.spec import Operands, is_known

# Queries that belong to no sequence have this segment id, and such keys have one less.
PADDING_ID = -1


def sequences(cu_seqlens_q: jax.Array, cu_seqlens_k: jax.Array, totals: tuple[int, int]) -> jax.Array:
    """Returns the sequences `[M, 4]` between boundaries `[C]`, M = C + 1.

    Boundaries that decrease, or lie outside of the rows, become the boundaries of empty or shorter sequences.
    """
    columns = []
    for boundaries, total in zip((cu_seqlens_q, cu_seqlens_k), totals, strict=True):
        inside = jax.lax.cummax(jnp.clip(boundaries, 0, total).astype(jnp.int32))
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), inside, jnp.full(1, total, jnp.int32)])
        columns += [ends[:-1], ends[1:] - ends[:-1]]
    return jnp.stack(columns, axis=1)


def with_offsets(sequences: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Returns the sequences with their offsets `[C - 1]`, or unchanged if `offset` is None."""
    if offset is None:
        return sequences
    return jnp.concatenate([sequences, jnp.pad(offset, 1)[:, None]], axis=1)


def by_token(operands: Operands) -> Operands:
    """Returns packed operands with segment ids and offsets of each token, `[B, T]`, and without sequences."""
    if operands.sequences is None:
        return operands
    query_ids = token_ids(operands.sequences, operands.query.shape[1], of_keys=False)
    key_ids = token_ids(operands.sequences, operands.key.shape[1], of_keys=True)
    return operands._replace(
        query_offset=token_offsets(operands.sequences, query_ids),
        query_segment_ids=query_ids,
        key_value_segment_ids=key_ids,
        sequences=None,
    )


def key_range(sequences: jax.Array, begin: jax.Array | int, end: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Returns the first key, and one past the last, of the sequences with queries [begin, end) of any batch entry.

    It makes no search: XLA for GPUs (jax 0.11) cannot compile slices in a loop whose starts a search in it has found.
    """
    first_query, queries, first_key, keys = (sequences[:, 1:-1, column] for column in range(4))
    has_any = (queries > 0) & (first_query < end) & (first_query + queries > begin)
    key_begin = jnp.min(first_key, where=has_any, initial=jnp.iinfo(jnp.int32).max)
    return key_begin, jnp.max(first_key + keys, where=has_any, initial=0)


def padding_rows(operands: Operands) -> jax.Array | None:
    """Returns which rows belong to no sequence, bool `[B, T]`; None if no sequences are packed."""
    if operands.sequences is None:
        return None
    return token_ids(operands.sequences, operands.query.shape[1], of_keys=False) == PADDING_ID


def token_ids(sequences: jax.Array, length: int, *, of_keys: bool) -> jax.Array:
    """Returns the sequence of each token, int32 `[B, length]`. Padding has PADDING_ID, or one less among keys."""
    first = sequences[:, :, 2 * of_keys]
    tokens = jnp.arange(length, dtype=jnp.int32)
    if is_known(first.shape[1]):
        find = jax.vmap(lambda x: jnp.searchsorted(x, tokens, side="right", method="scan_unrolled"))
        ids = find(first).astype(jnp.int32) - 1
    else:  # jax 0.8 cannot search through a symbolic number of sequences
        ids = jnp.sum(first[:, :, None] <= tokens[None, None], axis=1, dtype=jnp.int32) - 1
    inside = (ids > 0) & (ids < first.shape[1] - 1)
    return jnp.where(inside, ids, PADDING_ID - of_keys)


def token_starts(sequences: jax.Array, query_ids: jax.Array, key_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first row of the sequence of each query and of each key, int32 `[B, T]` and `[B, S]`."""
    found = (
        jnp.take_along_axis(sequences[:, :, column], jnp.maximum(ids, 0), axis=1)
        for column, ids in ((0, query_ids), (2, key_ids))
    )
    return next(found), next(found)


def token_offsets(sequences: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns where query t stands among all keys, minus t: int32 `[B, T]`, from `token_ids` of queries."""
    offsets = sequences[:, :, 2] - sequences[:, :, 0]
    if sequences.shape[2] == 5:
        offsets = offsets + sequences[:, :, 4]
    return jnp.take_along_axis(offsets, jnp.maximum(ids, 0), axis=1)
