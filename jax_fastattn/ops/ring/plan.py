# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of a ring, as far as they are known when a call is traced: they are the same on every device.

In step s, device i meets the keys of device i - s. The rows of a device lie in chunks: one chunk if they are
contiguous, two in zigzag order. A block is a part of the queries against a part of the keys, computed by one call. A
step leaves out the blocks that no device needs, and a call leaves out the steps without blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn.ops.ring.layout import chunk_starts
from jax_fastattn.ring import Ring
from jax_fastattn.spec import AttentionSpec, Operands

Bounds = tuple[int | None, int | None]


class View(NamedTuple):
    """A part of a device's rows, or all of them in another arrangement.

    Attributes:
        start, stop: the rows of "range".
        kind: "fold" makes batch entries of the two halves; "swap" puts the second half first.
    """

    start: int
    stop: int
    kind: Literal["range", "fold", "swap"] = "range"

    def take(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Returns this part of an array whose rows are on `axis`."""
        if self.kind == "range":
            return (
                x
                if self.stop - self.start == x.shape[axis]
                else jax.lax.slice_in_dim(x, self.start, self.stop, 1, axis)
            )
        half = x.shape[1] // 2
        if self.kind == "fold":
            return x.reshape(x.shape[0] * 2, half, *x.shape[2:])
        return jnp.concatenate([x[:, half:], x[:, :half]], axis=1)

    def restore(self, x: jax.Array) -> jax.Array:
        """Inverts "fold" and "swap" on rows on axis 1."""
        if self.kind == "fold":
            return x.reshape(x.shape[0] // 2, x.shape[1] * 2, *x.shape[2:])
        return self.take(x) if self.kind == "swap" else x


@dataclass(frozen=True)
class Block:
    """One call of the ops.

    Attributes:
        queries, keys: the rows that take part; `keys` counts from the first key that was fetched.
        query_chunks, key_chunks: indices of the chunks in which these rows lie. Chunks of "fold" are batch entries.
        bounds: the window that applies, with causality folded in.
        is_diagonal: whether queries and keys are the same chunks of one device. Diagonal blocks of step 0 come first,
            and have all rows between them.
        is_half: the block of causal zigzag order between two devices. All queries see the first half of the keys, or
            the second half of the queries sees all keys; nothing is hidden then.
    """

    queries: View
    keys: View
    query_chunks: tuple[int, ...]
    key_chunks: tuple[int, ...]
    bounds: Bounds
    is_diagonal: bool = False
    is_half: bool = False


@dataclass(frozen=True)
class Step:
    """The work of a device with the keys of the device `shift` before it.

    Attributes:
        fetched: the range of that device's keys that are sent.
        pairs: which device sends to which.
    """

    shift: int
    blocks: tuple[Block, ...]
    fetched: tuple[int, int]
    pairs: tuple[tuple[int, int], ...]


def steps(spec: AttentionSpec, operands: Operands) -> list[Step]:
    """Returns the steps of a call whose ring does not balance."""
    planner = _Planner.of(spec, operands)
    if planner.ring.whole_keys:
        queries, keys = View(0, planner.rows), View(0, planner.keys)
        return [Step(0, (Block(queries, keys, (0,), (0,), spec.bounds, is_diagonal=True),), (0, planner.keys), ())]
    found = [planner.step(shift) for shift in range(planner.ring.size)]
    return [step for step in found if step.blocks]


def touched(steps: Sequence[Step], rows: int) -> tuple[int, int]:
    """Returns the range of queries that blocks other than the diagonal ones of step 0 change."""
    blocks = [block for step in steps for block in step.blocks if step.shift or not block.is_diagonal]
    ranges = [(0, rows) if x.queries.kind != "range" else (x.queries.start, x.queries.stop) for x in blocks]
    return (min(x for x, _ in ranges), max(x for _, x in ranges)) if ranges else (0, 0)


def is_placed(bounds: Bounds) -> bool:
    """Returns whether it matters at which key a query stands."""
    return bounds != (None, None)


def is_prunable(spec: AttentionSpec) -> bool:
    """Returns whether positions are known when a call is traced, so that a window says which devices meet."""
    ring = spec.ring
    assert ring is not None
    return "query_offset" not in spec.present and ("sequences" not in spec.present or ring.shared_boundaries)


@dataclass(frozen=True)
class _Planner:
    """Makes the steps of one call.

    Attributes:
        rows, keys: how many of each a device has.
        has_pairs: whether a bias or a mask is given, of which a block takes contiguous columns, or a function or
            dropout, for which a block has to know its first rows.
    """

    ring: Ring
    bounds: Bounds
    rows: int
    keys: int
    prunable: bool
    packed: bool
    has_pairs: bool
    has_query_lengths: bool
    has_dropout: bool

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands) -> _Planner:
        assert spec.ring is not None
        present = spec.present
        return cls(
            ring=spec.ring,
            bounds=spec.bounds,
            rows=operands.query.shape[1],
            keys=operands.key.shape[1],
            prunable=is_prunable(spec),
            packed="sequences" in present,
            has_pairs=bool({"bias", "mask", "dropout"} & set(present)) or spec.has_programs,
            has_query_lengths="query_seq_lengths" in present,
            has_dropout="dropout" in present,
        )

    def step(self, shift: int) -> Step:
        if self.ring.layout == "zigzag":
            blocks, fetched = self._zigzag(shift), (0, self.keys)
        else:
            blocks, fetched = self._contiguous(shift)
        size = self.ring.size
        chunks = range(2 if self.ring.layout == "zigzag" else 1)
        needed = [a for a in range(size) if any(self._sees(a, shift, *x) for x in itertools.product(chunks, chunks))]
        return Step(shift, tuple(blocks), fetched, tuple(((a - shift) % size, a) for a in needed))

    def _contiguous(self, shift: int) -> tuple[list[Block], tuple[int, int]]:
        offsets = [x for a in range(self.ring.size) if (x := self._offset(a, shift, 0, 0)) is not None]
        if not offsets and shift:
            return [], (0, 0)
        queries, keys = (0, self.rows), (0, self.keys)
        if shift and self.prunable and not self.packed and is_placed(self.bounds):
            queries, keys = self._ranges(offsets)
            if self.has_dropout:
                queries, keys = (_whole_words(*x) for x in ((queries, self.rows), (keys, self.keys)))
        whole = View(0, keys[1] - keys[0])
        return [Block(View(*queries), whole, (0,), (0,), self.bounds, is_diagonal=shift == 0)], keys

    def _ranges(self, offsets: list[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the queries and the keys that take part on any device; offsets are of queries against keys."""
        far = 1 << 30
        left, right = (far if x is None else x for x in self.bounds)
        queries = min(max(0, -x - right) for x in offsets), max(min(self.rows, self.keys - x + left) for x in offsets)
        keys = min(max(0, x - left) for x in offsets), max(min(self.keys, self.rows + x + right) for x in offsets)
        return queries, keys

    def _zigzag(self, shift: int) -> list[Block]:
        everything = View(0, self.rows), View(0, self.keys), (0, 1), (0, 1)
        is_one_sequence = not self.packed and not self.has_pairs
        if is_one_sequence and not is_placed(self.bounds):
            return [Block(*everything, self.bounds, is_diagonal=shift == 0)]
        is_causal = self.bounds == (None, 0) and self.prunable and self.rows == self.keys
        if is_one_sequence and is_causal and shift == 0:  # the order of rows is the true one
            return [Block(*everything, self.bounds, is_diagonal=True)]
        if is_one_sequence and is_causal and not self.has_query_lengths:
            swapped = View(0, self.rows, "swap")
            return [Block(swapped, *everything[1:], (None, None), is_half=True)]
        return self._diagonal(shift) + [x for pair in ((1, 0), (0, 1)) for x in self._chunk_pair(shift, *pair)]

    def _diagonal(self, shift: int) -> list[Block]:
        """Returns the block, or two, of chunks with equal indices."""
        if self.has_pairs:
            return [block for chunk in range(2) for block in self._chunk_pair(shift, chunk, chunk)]
        if shift and not any(self._sees(a, shift, x, x) for a in range(self.ring.size) for x in range(2)):
            return []
        queries, keys = View(0, self.rows, "fold"), View(0, self.keys, "fold")
        return [Block(queries, keys, (0, 1), (0, 1), self.bounds, is_diagonal=shift == 0)]

    def _chunk_pair(self, shift: int, query_chunk: int, key_chunk: int) -> list[Block]:
        is_diagonal = shift == 0 and query_chunk == key_chunk
        if not is_diagonal and not any(self._sees(a, shift, query_chunk, key_chunk) for a in range(self.ring.size)):
            return []
        queries, keys = (
            View(chunk * size // 2, (chunk + 1) * size // 2)
            for chunk, size in ((query_chunk, self.rows), (key_chunk, self.keys))
        )
        return [Block(queries, keys, (query_chunk,), (key_chunk,), self.bounds, is_diagonal)]

    def _sees(self, device: int, shift: int, query_chunk: int, key_chunk: int) -> bool:
        return self._offset(device, shift, query_chunk, key_chunk) is not None

    def _offset(self, device: int, shift: int, query_chunk: int, key_chunk: int) -> int | None:
        """Returns the offset of a device's queries against the keys that it meets; None if it sees none of them."""
        sizes, source = (self.rows, self.keys), (device - shift) % self.ring.size
        (query, rows), (key, keys) = (
            (chunk_starts(self.ring, place, size)[chunk], size // len(chunk_starts(self.ring, place, size)))
            for place, size, chunk in zip((device, source), sizes, (query_chunk, key_chunk), strict=True)
        )
        left, right = self.bounds
        offset = query - key
        if not self.prunable:
            return offset
        nearest, farthest = 1 - rows - offset, keys - 1 - offset
        is_seen = (left is None or farthest >= -left) and (right is None or nearest <= right)
        return offset if is_seen else None


def _whole_words(rows: tuple[int, int], size: int) -> tuple[int, int]:
    """Returns a range of a device's rows, extended to begin and end where words of dropout do.

    If the rows of a device are no whole number of words, it is all of them: kernels refuse such a block.
    """
    begin, end = rows
    return (0, size) if size % 16 else (begin // 16 * 16, -(-end // 16) * 16)
