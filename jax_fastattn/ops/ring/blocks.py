# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The operands of a block: what a device computes with the keys of another one, as an ordinary call.

Lengths, offsets, sequences, the columns of bias and mask, and the planes of `score_mod` and `mask_mod` count from the
start of the whole sequence in a call with a ring. A block gets the ones of its own rows. All of them depend on the
device's index, so they are run-time data.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn import dropout
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.ops.ring.layout import chunk_starts
from jax_fastattn.ops.ring.plan import Block, is_placed
from jax_fastattn.programs.parts import Part, of_part
from jax_fastattn.ring import Ring
from jax_fastattn.spec import PLANES, AttentionSpec, Operands


class BlockPlace(NamedTuple):
    """The place of the queries and the keys of a step.

    Attributes:
        device, source: indices of the devices that have the queries and the keys.
        rows, keys: how many of each a device has.
        first_key: the first key of `source` that was fetched.
        first_query: the first query of `device` that the operands have.
    """

    device: jax.Array
    source: jax.Array
    rows: int
    keys: int
    first_key: int
    first_query: jax.Array | int = 0


def block_call(
    spec: AttentionSpec, operands: Operands, block: Block, place: BlockPlace, *, with_sinks: bool = False
) -> tuple[AttentionSpec, Operands]:
    """Returns spec and operands of a block.

    Args:
        spec: the spec of the call with a ring.
        operands: the device's, except that keys, values and their ids are the ones that were fetched.
        place: where the block is.
        with_sinks: whether the block's queries get their sinks: once in a forward pass, and never in a backward pass.
    """
    assert spec.ring is not None
    chunks = _Chunks.of(spec.ring, block, place)
    is_aligned = block.is_diagonal and place.rows == place.keys and not spec.ring.whole_keys
    query_ids, key_ids = operands.query_segment_ids, operands.key_value_segment_ids
    found = Operands(
        query=block.queries.take(operands.query),
        key=block.keys.take(operands.key),
        value=block.keys.take(operands.value),
        bias=_plane(operands.bias, block, chunks),
        mask=_plane(operands.mask, block, chunks),
        query_seq_lengths=chunks.lengths(operands.query_seq_lengths, chunks.queries, chunks.rows),
        key_value_seq_lengths=chunks.lengths(operands.key_value_seq_lengths, chunks.sources, chunks.keys),
        query_offset=_offset(operands, block, is_aligned, chunks),
        query_segment_ids=None if query_ids is None else block.queries.take(query_ids),
        key_value_segment_ids=None if key_ids is None else block.keys.take(key_ids),
        sinks=chunks.per_entry(operands.sinks) if with_sinks else None,
        scale=chunks.per_entry(operands.scale),
        dropout=_dropout(operands.dropout, chunks),
        sequences=_sequences(spec.ring, operands, block, is_aligned, chunks),
    )
    if spec.has_programs:
        spec, found = _with_programs(spec, operands, found, part_of(spec.ring, block, place))
    if block.is_half:
        found = _half(found, place)
    return _block_spec(spec, block, place, found), found


def _block_spec(spec: AttentionSpec, block: Block, place: BlockPlace, operands: Operands) -> AttentionSpec:
    """Returns the spec of a block. A side of a window beyond all rows of the ring is unlimited."""
    assert spec.ring is not None
    longest, is_near = spec.ring.size * max(place.rows, place.keys), "query_offset" not in spec.present
    left, right = (None if x is not None and is_near and x >= longest else x for x in block.bounds)
    is_causal = right == 0
    window = left, None if is_causal else right
    present = operands.present()
    return dataclasses.replace(
        spec, is_causal=is_causal, window=window, present=present, ring=None, is_part=True, kept=()
    )


def _with_programs(
    spec: AttentionSpec, operands: Operands, found: Operands, part: Part
) -> tuple[AttentionSpec, Operands]:
    """Returns a spec with the programs of a block, and the operands `found` of the block with their planes."""
    stacks = {name: x for name in PLANES if (x := getattr(operands, name)) is not None}
    (score, mask), planes = of_part((spec.score_mod, spec.mask_mod), stacks, part)
    return dataclasses.replace(spec, score_mod=score, mask_mod=mask), found._replace(**planes)


def part_of(ring: Ring, block: Block, place: BlockPlace) -> Part:
    """Returns which rows of the whole sequence a block with one chunk has."""
    chunks = _Chunks.of(ring, block, place)
    return Part(chunks.queries[0], chunks.sources[0], chunks.rows, chunks.keys, ring.size * place.rows)


def first_column(ring: Ring, block: Block, place: BlockPlace) -> jax.Array:
    """Returns where the keys of a block with one chunk start in the whole sequence."""
    return _Chunks.of(ring, block, place).sources[0]


class _Chunks(NamedTuple):
    """The chunks of a block.

    Attributes:
        queries, sources: where its chunks of queries and of keys start in the whole sequence.
        rows, keys: how many of a chunk take part.
        is_folded: whether chunks are batch entries.
    """

    queries: list[Any]
    sources: list[Any]
    rows: int
    keys: int
    is_folded: bool

    @classmethod
    def of(cls, ring: Ring, block: Block, place: BlockPlace) -> _Chunks:
        queries, keys = (
            [chunk_starts(ring, device, size)[chunk] for chunk in chunks]
            for device, size, chunks in (
                (place.device, place.rows, block.query_chunks),
                (place.source, place.keys, block.key_chunks),
            )
        )
        rows, count = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        if ring.layout == "contiguous":
            queries, keys = [queries[0] + block.queries.start + place.first_query], [keys[0] + place.first_key]
        return cls(queries, keys, rows // len(queries), count // len(keys), block.queries.kind == "fold")

    def join(self, parts: list[jax.Array]) -> jax.Array:
        """Joins an array `[B, ...]` of each chunk to `[B * chunks, ...]`; the chunks of an entry are adjacent."""
        return parts[0] if len(parts) == 1 else jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])

    def per_entry(self, x: jax.Array | None) -> jax.Array | None:
        """Repeats an operand `[b, ...]` for the chunks of each batch entry."""
        return x if x is None or not self.is_folded or x.shape[0] == 1 else jnp.repeat(x, 2, axis=0)

    def lengths(self, x: jax.Array | None, starts: list[Any], size: int) -> jax.Array | None:
        """Returns how many rows of the block are before lengths `[B]`; of two chunks these are a prefix of both."""
        if x is None:
            return None
        # x is clipped first: int32 may not hold `x - start`.
        parts = [jnp.subtract(jnp.clip(x, start, start + size), start).astype(jnp.int32) for start in starts]
        return self.join(parts) if self.is_folded else sum(parts[1:], start=parts[0])


def _offset(operands: Operands, block: Block, is_aligned: bool, chunks: _Chunks) -> jax.Array | None:
    base = operands.query_offset
    if not is_placed(block.bounds) or operands.sequences is not None:
        return None
    if base is None and is_aligned:
        return None
    batch = operands.query.shape[0]
    base = jnp.zeros(batch, jnp.int32) if base is None else jnp.clip(base, -UNBOUNDED, UNBOUNDED)
    return chunks.join([base + (q - k) for q, k in zip(chunks.queries, chunks.sources, strict=True)])


def _dropout(x: jax.Array | None, chunks: _Chunks) -> jax.Array | None:
    """Returns the operand of dropout, which counts the block's rows in the whole sequence; such a call has blocks of
    one chunk.
    """
    return None if x is None else dropout.moved(x, chunks.queries[0], chunks.sources[0])


def _plane(x: jax.Array | None, block: Block, chunks: _Chunks) -> jax.Array | None:
    """Returns the part of a bias or a mask `[b, n, t, s]`; such a call has blocks of one chunk."""
    if x is None:
        return None
    x = block.queries.take(x, axis=2) if x.shape[2] > 1 else x
    return jax.lax.dynamic_slice_in_dim(x, chunks.sources[0], chunks.keys, axis=3) if x.shape[3] > 1 else x


def _sequences(ring: Ring, operands: Operands, block: Block, is_aligned: bool, chunks: _Chunks) -> jax.Array | None:
    """Returns the parts of packed sequences that lie in a block, `[B * chunks, M, 4 or 5]`."""
    if operands.sequences is None:
        return None
    sequences = operands.sequences
    is_aligned = is_aligned and ring.shared_boundaries
    has_offset = is_placed(block.bounds) and not is_aligned

    def part(start_q: jax.Array, start_k: jax.Array) -> jax.Array:
        columns, passed = [], []
        for first, count, start, size in (
            (sequences[:, :, 0], sequences[:, :, 1], start_q, chunks.rows),
            (sequences[:, :, 2], sequences[:, :, 3], start_k, chunks.keys),
        ):
            begin, end = (jnp.clip(x - start, 0, size) for x in (first, first + count))
            columns += [begin, end - begin]
            passed.append(jnp.maximum(start - first, 0))
        if has_offset:
            own = sequences[:, :, 4] if sequences.shape[2] == 5 else 0
            columns.append(passed[0] - passed[1] + own)
        return jnp.stack(columns, axis=2).astype(jnp.int32)

    return chunks.join([part(*x) for x in zip(chunks.queries, chunks.sources, strict=True)])


def _half(operands: Operands, place: BlockPlace) -> Operands:
    """Hides half of the keys or of the queries of a causal block between two devices, in zigzag order."""
    is_before = place.source < place.device
    rows = jnp.where(is_before, place.rows, place.rows // 2).astype(jnp.int32)
    keys = jnp.where(is_before, place.keys // 2, place.keys).astype(jnp.int32)
    visible, batch = operands.key_value_seq_lengths, operands.query.shape[0]
    return operands._replace(
        query_seq_lengths=jnp.broadcast_to(rows, (batch,)),
        key_value_seq_lengths=jnp.broadcast_to(keys, (batch,)) if visible is None else jnp.minimum(visible, keys),
    )
