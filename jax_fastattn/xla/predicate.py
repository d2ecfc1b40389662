# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Computes which queries see which keys, as booleans that broadcast: for blocks of logits, and for bits of rows.

`reference.visible_pairs` says the same a second time, and tests compare both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_fastattn.layouts.heads import split_heads
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla import mods
from jax_fastattn.xla.chunks import Span


@dataclass(frozen=True)
class Predicate:
    """The arguments of a call that hide pairs.

    Attributes:
        spec: has the window.
        operands: lengths, offset and segment ids, by token if sequences are packed.
        mask: `[b, k, g, t, s]`, see `split_heads`; None without.
        query_length: T.
        key_length: S.
        starts: see `mods.Block`.
    """

    spec: AttentionSpec
    operands: Operands
    mask: jax.Array | None
    query_length: int
    key_length: int
    starts: tuple[jax.Array, jax.Array] | None = None

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands) -> Predicate:
        """Returns the predicate of a call without packed sequences."""
        (_, queries, _, _), (_, keys, kv_heads, _) = operands.query.shape, operands.key.shape
        mask = None if operands.mask is None else split_heads(operands.mask, kv_heads, 1)
        return cls(spec, operands, mask, queries, keys)

    def query_positions(self, queries: Span) -> jax.Array:
        """Returns the positions of the queries among the keys, int32 `[b, t]`."""
        positions = queries.positions()[None, :]
        offset = self.operands.query_offset
        if offset is None:
            return positions
        offset = offset[:, None] if offset.ndim == 1 else queries.take(offset, 1, self.query_length)
        return positions + jnp.clip(offset, -UNBOUNDED, UNBOUNDED)

    def visible(self, queries: Span, keys: Span, *, skip_stored_queries: bool = False) -> jax.Array | None:
        """Returns which pairs are visible, broadcastable to `[B, K, G, t, s]`; None if every pair of every block is."""
        operands = self.operands
        query_positions, key_positions = queries.positions(), keys.positions()
        terms: list[jax.Array] = []
        if keys.own is not None:
            terms.append((key_positions >= keys.own)[None, None, :])
        if skip_stored_queries and queries.own is not None:
            terms.append((query_positions >= queries.own)[None, :, None])
        if operands.key_value_seq_lengths is not None:
            terms.append(key_positions[None, None, :] < operands.key_value_seq_lengths[:, None, None])
        if operands.query_seq_lengths is not None:
            terms.append(query_positions[None, :, None] < operands.query_seq_lengths[:, None, None])
        left, right = self.spec.bounds
        distance = key_positions[None, None, :] - self.query_positions(queries)[:, :, None]
        if left is not None:
            terms.append(distance >= -min(left, UNBOUNDED))
        if right is not None:
            terms.append(distance <= min(right, UNBOUNDED))
        query_ids, key_ids = operands.query_segment_ids, operands.key_value_segment_ids
        if query_ids is not None and key_ids is not None:
            query_ids = queries.take(query_ids, 1, self.query_length)
            key_ids = keys.take(key_ids, 1, self.key_length)
            terms.append(query_ids[:, :, None] == key_ids[:, None, :])
        terms = [term[:, None, None] for term in terms]
        if self.spec.mask_mod is not None:
            lengths = self.query_length, self.key_length
            terms.append(mods.counts(self.spec, operands, queries, keys, lengths, self.starts))
        if self.mask is not None:
            rows = queries.take(self.mask, 3, self.query_length)
            terms.append(keys.take(rows, 4, self.key_length))
        return functools.reduce(jnp.logical_and, terms) if terms else None
