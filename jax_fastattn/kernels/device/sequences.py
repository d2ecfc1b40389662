# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a batch entry, or of a packed sequence, lie in the arrays of a launch.

array                              row r of a batch entry                   row r of a packed sequence, batch 1
`[batch, rows, heads, columns]`    `batch * rows + r`                       `first + r`
`[batch, heads, rows]`             `(batch * heads + head) * rows + r`      `head * rows + first + r`
`[batch, heads, padded rows]`      `(batch * heads + head) * padded + r`    `head * padded + slot * alignment + r`

Rows of a batch entry are padded to a multiple of an alignment. Packed sequences begin at multiples of it, in the first
slots of their query tiles, see `kernels/tiles/records.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.plan import Bounds
from jax_fastattn.kernels.tiles.records import WORDS, Record, slot_count


class Span(Protocol):
    """The queries or the keys that attend to each other, on one side; the table above has the addresses of both kinds.

    Methods emit code where they are called; a member would be computed once, and kept in a register.
    """

    @property
    def batch(self) -> Int32:
        """Returns the index of the batch entry, for operands that have a row for each."""
        ...

    @property
    def length(self) -> Int32:
        """Returns how many rows are stored."""
        ...

    def row(self, row: Int32 | None = None) -> Int64:
        """Returns the index of a row, or of the first one, in an array `[batch, rows]`."""
        ...

    def row_head(self, row: Int32, heads: Int32, head: Int32) -> Int64:
        """Returns the index of a row and head in an array `[batch, rows, heads]`."""
        ...

    def head(self, heads: Int32, head: Int32) -> Int64:
        """Returns the index of a head in an array `[batch, heads]`."""
        ...

    def head_row(self, heads: Int32, head: Int32, row: Int32 | None = None) -> Int64:
        """Returns the index of a head's row, or of its first one, in an array `[batch, heads, rows]`."""
        ...

    def tma_rows(self, coordinates: cute.Tensor, head: Int32) -> Any:
        """Returns the rows of a head in the coordinates of an operand.

        Args:
            coordinates: `[rows, columns, heads, batch]`.
            head: its index.

        Returns:
            `[rows, columns]`, from the first row of the span on.
        """
        ...

    def zeros_from(self) -> Int32 | None:
        """Returns the row from which on TMA loads zeros; None where rows of other sequences may follow."""
        ...

    def padded_rows(self, alignment: int) -> Int32:
        """Returns the rows from one head to the next in an array `[batch, heads, padded rows]`.

        They are a multiple of `alignment`.
        """
        ...

    def padded_row(self, head: Int64, alignment: int, row: Int32 | None = None) -> Int64:
        """Returns the index of a row, or of the head's first one, in an array `[batch, heads, padded rows]`.

        `head` is the index of the head in an array `[batch, heads]`. In packed sequences, the head's first row is the
        first row of all sequences.
        """
        ...

    def padded(self, index: Int32, per_slot: int) -> Int32:
        """Returns the index of a row, or of a tile, among all of a head in padded arrays.

        A slot has `per_slot` of them.
        """
        ...


def _padded_row(span: Span, head: Int64, alignment: int, row: Int32 | None) -> Int64:
    """Returns what `Span.padded_row` does, from the other answers of a span."""
    first = head * span.padded_rows(alignment)
    return first if row is None else first + span.padded(row, alignment)


@dataclass(frozen=True)
class EntrySpan:
    """The queries or the keys of a batch entry.

    Attributes:
        batch: index of the entry.
        length: rows of it that are stored.
    """

    batch: Int32
    length: Int32

    def row(self, row: Int32 | None = None) -> Int64:
        """Returns the index of a row, or of the first one, in an array `[batch, rows]`."""
        first = Int64(self.batch) * self.length
        return first if row is None else first + row

    def row_head(self, row: Int32, heads: Int32, head: Int32) -> Int64:
        """Returns the index of a row and head in an array `[batch, rows, heads]`."""
        return self.row(row) * heads + head

    def head(self, heads: Int32, head: Int32) -> Int64:
        """Returns the index of a head in an array `[batch, heads]`."""
        return Int64(self.batch) * heads + head

    def head_row(self, heads: Int32, head: Int32, row: Int32 | None = None) -> Int64:
        """Returns the index of a head's row, or of its first one, in an array `[batch, heads, rows]`."""
        first = self.head(heads, head) * self.length
        return first if row is None else first + row

    def tma_rows(self, coordinates: cute.Tensor, head: Int32) -> Any:
        """Returns the rows of a head: `[rows, columns, heads, batch]` to `[rows, columns]`."""
        return coordinates[None, None, head, self.batch]

    def zeros_from(self) -> Int32 | None:
        """Returns the row from which on TMA loads zeros: the one after the last."""
        return self.length

    def padded_rows(self, alignment: int) -> Int32:
        """Returns the rows from one head to the next in an array `[batch, heads, padded rows]`."""
        return (self.length + (alignment - 1)) // alignment * alignment

    def padded_row(self, head: Int64, alignment: int, row: Int32 | None = None) -> Int64:
        """Returns the index of a row, or of the head's first one, in an array `[batch, heads, padded rows]`."""
        return _padded_row(self, head, alignment, row)

    def padded(self, index: Int32, per_slot: int) -> Int32:
        """Returns the index as it is: the first row of an entry is the first one of the padded rows."""
        del per_slot
        return index


@dataclass(frozen=True)
class PackedSpan:
    """The queries or the keys of a packed sequence.

    Attributes:
        batch: the batch entry that the sequence belongs to, for operands that have a row for each.
        length: rows of the sequence that are stored.
        first: first row of the sequence.
        rows: all rows of the array.
        first_slot: the first slot of the query tiles of the sequence.
        sequences: how many sequences there are.
    """

    batch: Int32
    length: Int32
    first: Int32
    rows: Int32
    first_slot: Int32
    sequences: Int32

    def row(self, row: Int32 | None = None) -> Int64:
        """Returns the index of a row, or of the first one, in an array `[rows]`."""
        return Int64(self.first if row is None else self.first + row)

    def row_head(self, row: Int32, heads: Int32, head: Int32) -> Int64:
        """Returns the index of a row and head in an array `[rows, heads]`."""
        return self.row(row) * heads + head

    def head(self, heads: Int32, head: Int32) -> Int64:
        """Returns the index of a head, which it is."""
        del heads
        return Int64(head)

    def head_row(self, heads: Int32, head: Int32, row: Int32 | None = None) -> Int64:
        """Returns the index of a head's row, or of its first one, in an array `[heads, rows]`."""
        return self.head(heads, head) * self.rows + self.row(row)

    def tma_rows(self, coordinates: cute.Tensor, head: Int32) -> Any:
        """Returns the rows of a head, from the first row of the sequence on."""
        return cute.domain_offset((self.first, 0), coordinates[None, None, head, 0])

    def zeros_from(self) -> Int32 | None:
        """Returns None: other sequences follow."""
        return None

    def padded_rows(self, alignment: int) -> Int32:
        """Returns the rows from one head to the next in an array `[heads, padded rows]`: `alignment` for each slot."""
        return slot_count(self.rows, alignment, self.sequences) * alignment

    def padded_row(self, head: Int64, alignment: int, row: Int32 | None = None) -> Int64:
        """Returns the index of a row, or of the head's first one, in an array `[heads, padded rows]`."""
        return _padded_row(self, head, alignment, row)

    def padded(self, index: Int32, per_slot: int) -> Int32:
        """Returns the index of a query, or of a tile of queries, among all of a head in padded arrays."""
        return self.first_slot * per_slot + index


def first_rows(queries: Span, keys: Span) -> tuple[Int32, Int32] | None:
    """Returns the first rows of queries and of keys of a packed sequence; None for a batch entry."""
    if isinstance(queries, PackedSpan) and isinstance(keys, PackedSpan):
        return queries.first, keys.first
    return None


def load_record(records: cute.Pointer, slot: Int32) -> Record:
    """Loads the record of a slot, which may be another one in each lane."""
    address = records.toint() + Int64(slot) * (4 * WORDS)
    return Record(*ptx.load_global_chunk(address), *ptx.load_global_chunk(address + 16))


@dataclass(frozen=True)
class Sequence:
    """The queries and the keys that attend to each other.

    Attributes:
        queries: their rows.
        keys: their rows.
        bounds: computes what the rows may see, where it is called.
    """

    queries: Span
    keys: Span
    bounds: Callable[[], Bounds]

    @property
    def starts(self) -> tuple[Int32, Int32] | None:
        """The first rows of a packed sequence, see `first_rows`."""
        return first_rows(self.queries, self.keys)

    @classmethod
    def of_entry(cls, spec: KernelSpec, batch: Int32, buffers: Buffers, scalars: Scalars | Sizes) -> "Sequence":
        """Returns the queries and the keys of a batch entry."""
        bounds = functools.partial(copies.entry_bounds, spec, batch, buffers, scalars)
        return cls(EntrySpan(batch, scalars.query_length), EntrySpan(batch, scalars.key_length), bounds)

    @classmethod
    def of_record(
        cls, spec: KernelSpec, records: cute.Pointer, slot: Int32, scalars: Scalars | Sizes, *, of_keys: bool
    ) -> "tuple[Int32, Sequence]":
        """Returns the tile that owns a slot, and its packed sequence.

        Args:
            records: records of tiles, see `tiles/records.py`.
            slot: index of the slot, the same in all lanes of a warp.
            of_keys: whether keys have the tiles, else queries.
        """
        record = Record(*[cute.arch.make_warp_uniform(word) for word in load_record(records, slot)])
        return record.tile, cls.from_record(spec, record, scalars, of_keys=of_keys)

    @classmethod
    def from_record(cls, spec: KernelSpec, record: Record, scalars: Scalars | Sizes, *, of_keys: bool) -> "Sequence":
        """Returns the packed sequence of a record, see `of_record`."""
        batch = Int32(cutlass.max(record.entry, 0))
        live = ptx.where(record.entry < 0, Int32(0), record.rows)
        lengths = (scalars.query_length, scalars.key_length)
        own, other = reversed(lengths) if of_keys else lengths
        span = PackedSpan(batch, record.rows, record.first, own, record.first_slot, scalars.batch)
        others = PackedSpan(batch, record.others, record.first_other, other, record.first_slot, scalars.batch)
        queries, keys = (others, span) if of_keys else (span, others)
        kind = spec.bounds_kind
        offset = record.offset if kind.offset else Int32(0)
        query_end, key_end = (record.others, live) if of_keys else (live, record.others)
        bounds = functools.partial(copies.bounds, kind, query_end, key_end, offset, scalars)
        return cls(queries, keys, bounds)
