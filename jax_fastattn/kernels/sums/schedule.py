# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles of a gradient a CTA of the dbias kernel works on, and which tiles of scores it sums over for each.

A tile of scores that adds to a tile of the gradient is an item. The items of a tile of a matrix are the pairs of a
batch entry and a head that read it: batch entries fastest, then heads. The items of a tile of queries of a bias of rows
are its tiles of keys. A CTA sums over items in their order. If there are too few tiles for all SMs, tiles are split in
parts, each with some of the items; XLA sums the parts. Both families have such a kernel.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.codes import score_parts
from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.features.places import Head, LoadedTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.tiles import KEYS, ROWS, key_list_tiles
from jax_fastattn.kernels.tiles.lists import ALL, HAS_DEAD_ROWS, SOME, PrepassConfig
from jax_fastattn.kernels.tiles.plan import Bounds
from jax_fastattn.kernels.visits.compared import ComparedRows
from jax_fastattn.kernels.visits.lists import GlobalList, Planes, TileBits

# The kind of a tile is a word of bits about the scores of an item: for each 64 keys one bit says whether some pair is
# visible and one whether all are; the last bit says whether some query sees nothing.
HIDDEN, EDGE, FULL, DEAD_ROWS = 0b0000, 0b0101, 0b1111, 0b10000
# This kind says that no item follows.
LAST = -1


class DbiasItem(NamedTuple):
    """A tile of scores.

    Attributes:
        head: its batch entry and query head.
        row: its index among the tiles of queries.
        column: its index among the tiles of keys.
    """

    head: Head
    row: Int32
    column: Int32

    def scores(self) -> LoadedTile:
        """Returns the tile as features load it."""
        return LoadedTile(self.head, self.row * ROWS, self.column * KEYS, ROWS, KEYS)


class MatrixTile(NamedTuple):
    """A tile of a bias of pairs, and some of its items.

    Attributes:
        row: its index among the tiles of queries.
        column: its index among the tiles of keys.
        target: which plane `[T, S]` of the result.
        first: batch entry and head of item 0.
        entries: how many batch entries share the plane: as many items have one head.
        begin: the first item.
        end: the item after the last one.
    """

    row: Int32
    column: Int32
    target: Int32
    first: Head
    entries: Int32
    begin: Int32
    end: Int32

    @classmethod
    def of(cls, index: Int32, sizes: Scalars | Sizes) -> "MatrixTile":
        """Returns the tile that has an index in the order: along the keys, the queries, the planes, the parts."""
        columns, rows = copies.count(sizes.key_length, KEYS), copies.count(sizes.query_length, ROWS)
        column, index = index % columns, index // columns
        row, target = index % rows, index // rows
        plane, part = target % sizes.bias_planes, target // sizes.bias_planes
        shared = sizes.bias_batch == 0
        heads = ptx.where(shared, sizes.bias_planes, sizes.bias_batch)
        entries, members = ptx.where(shared, sizes.batch, Int32(1)), sizes.num_heads // heads
        first = Head(plane // heads, plane % heads * members)
        return cls(row, column, target, first, entries, *_part(entries * members, part, sizes))

    @staticmethod
    def total(sizes: Scalars | Sizes) -> Int32:
        """Returns how many tiles all planes have."""
        tiles = copies.count(sizes.query_length, ROWS) * copies.count(sizes.key_length, KEYS)
        return tiles * sizes.bias_planes

    def item(self, index: Int32) -> DbiasItem:
        """Returns an item."""
        head = Head(self.first.batch + index % self.entries, self.first.head + index // self.entries)
        return DbiasItem(head, self.row, self.column)

    def any_item(self) -> DbiasItem:
        """Returns an item whose bias is loaded for all of them."""
        return DbiasItem(self.first, self.row, self.column)

    @staticmethod
    def names(item: DbiasItem) -> list[Int32]:
        """Returns the words that tell an item from the others."""
        return [item.head.batch, item.head.head]

    def named(self, names: Iterable[Int32]) -> DbiasItem:
        """Returns the item that has these words."""
        return DbiasItem(Head(*names), self.row, self.column)


class RowsTile(NamedTuple):
    """A tile of queries of a head, whose bias is one of rows, and some of its items.

    Attributes:
        row: its index among the tiles of queries.
        target: its batch entry and head, and its part, as one index.
        head: the batch entry and the head.
        begin: the first item.
        end: the item after the last one.
    """

    row: Int32
    target: Int32
    head: Head
    begin: Int32
    end: Int32

    @classmethod
    def of(cls, index: Int32, sizes: Scalars | Sizes) -> "RowsTile":
        """Returns the tile that has an index in the order: along the queries, the heads, the batch, the parts."""
        rows, heads = copies.count(sizes.query_length, ROWS), sizes.num_heads
        row, target = index % rows, index // rows
        head = Head(target // heads % sizes.batch, target % heads)
        part = target // heads // sizes.batch
        return cls(row, target, head, *_part(copies.count(sizes.key_length, KEYS), part, sizes))

    @staticmethod
    def total(sizes: Scalars | Sizes) -> Int32:
        """Returns how many tiles all heads have."""
        return copies.count(sizes.query_length, ROWS) * sizes.num_heads * sizes.batch

    def item(self, index: Int32) -> DbiasItem:
        """Returns an item."""
        return DbiasItem(self.head, self.row, index)

    def any_item(self) -> DbiasItem:
        """Returns an item, though a bias of rows is not loaded for a tile."""
        return self.item(Int32(0))

    @staticmethod
    def names(item: DbiasItem) -> list[Int32]:
        """Returns the words that tell an item from the others."""
        return [item.column]

    def named(self, names: Iterable[Int32]) -> DbiasItem:
        """Returns the item that has these words."""
        return self.item(*names)


def _part(items: Int32, part: Int32, sizes: Scalars | Sizes) -> list[Int32]:
    """Returns the index of the first item of a part, and the index after its last one."""
    each = copies.count(items, sizes.bias_parts)
    begin = Int32(cutlass.min(part * each, items))
    return [begin, Int32(cutlass.min(begin + each, items))]


class DiagonalTile(NamedTuple):
    """A diagonal of tiles, whose scores have the same distances tile by tile, in all heads that share a plane.

    Attributes:
        delta: tile of keys less tile of queries.
        target: the plane, the diagonal and the part as one index.
        first: batch entry and head of item 0.
        row: tile of queries of item 0.
        rows: how many tiles the diagonal has in a head.
        members: how many heads of a batch entry share the plane.
        begin: the first item.
        end: the item after the last one.
    """

    delta: Int32
    target: Int32
    first: Head
    row: Int32
    rows: Int32
    members: Int32
    begin: Int32
    end: Int32

    def item(self, index: Int32) -> DbiasItem:
        """Returns an item: tiles along the diagonal, then heads, then batch entries."""
        row, other = self.row + index % self.rows, index // self.rows
        head = Head(self.first.batch + other // self.members, self.first.head + other % self.members)
        return DbiasItem(head, row, row + self.delta)

    def any_item(self) -> DbiasItem:
        """Returns an item, though nothing is loaded for a tile."""
        return self.item(Int32(0))

    @staticmethod
    def names(item: DbiasItem) -> list[Int32]:
        """Returns the words that tell an item from the others."""
        return [item.head.batch, item.head.head, item.row]

    def named(self, names: Iterable[Int32]) -> DbiasItem:
        """Returns the item that has these words."""
        batch, head, row = names
        return DbiasItem(Head(batch, head), row, row + self.delta)


@dataclass(frozen=True)
class DiagonalTiles:
    """The diagonals of an operand's planes, of which batch entries and heads may have their own."""

    per_batch: bool
    per_head: bool

    def _counts(self, sizes: Scalars | Sizes) -> tuple[Int32, ...]:
        """Returns how many batch entries and heads have planes, and how many tiles of queries and of keys there are."""
        batch, heads = (sizes.batch if self.per_batch else 1), (sizes.num_heads if self.per_head else 1)
        return Int32(batch), Int32(heads), *map(copies.count, (sizes.query_length, sizes.key_length), (ROWS, KEYS))

    def total(self, sizes: Scalars | Sizes) -> Int32:
        """Returns how many diagonals all planes have."""
        batch, heads, rows, columns = self._counts(sizes)
        return batch * heads * (rows + columns - 1)

    def of(self, index: Int32, sizes: Scalars | Sizes) -> DiagonalTile:
        """Returns the diagonal that has an index in the order: the planes, the diagonals, the parts."""
        # Of packed sequences a few diagonals have all the work. CTAs that follow each other take them for other planes.
        batch, heads, rows, columns = self._counts(sizes)
        planes, count = batch * heads, rows + columns - 1
        plane, index = index % planes, index // planes
        diagonal, part = index % count, index // count
        delta, target = diagonal - (rows - 1), (part * planes + plane) * count + diagonal
        row = Int32(cutlass.max(-delta, 0))
        length = Int32(cutlass.min(rows, columns - delta)) - row
        entries = Int32(1) if self.per_batch else sizes.batch
        members = Int32(1) if self.per_head else sizes.num_heads
        first = Head(plane // heads, plane % heads)
        items = _part(length * entries * members, part, sizes)
        return DiagonalTile(delta, target, first, row, length, members, *items)


DbiasTile = MatrixTile | RowsTile | DiagonalTile


@dataclass(frozen=True)
class DbiasSchedule:
    """Gives persistent CTAs one tile after the other."""

    spec: KernelSpec

    def count(self, sizes: Scalars | Sizes) -> Int32:
        """Returns how many tiles all parts have."""
        return self._kind.total(sizes) * sizes.bias_parts

    @property
    def _kind(self) -> type[MatrixTile | RowsTile] | DiagonalTiles:
        """Has the tiles."""
        parts = score_parts(self.spec.features)
        if self.spec.sums_diagonals and parts is not None and self.spec.dplane is not None:
            operand = parts.operands[parts.places[self.spec.dplane].operand]
            return DiagonalTiles(operand.per_batch, operand.per_head)
        return RowsTile if self.spec.sums_rows else MatrixTile

    def tile(self, index: Int32, sizes: Scalars | Sizes) -> DbiasTile:
        """Returns the tile that has an index."""
        return self._kind.of(index, sizes)

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has."""
        return Int32(cutlass.min(self.count(scalars), scalars.multiprocessors))

    def each(self, sizes: Scalars | Sizes, visit: Callable[[DbiasTile], None]) -> None:
        """Calls `visit` for the tiles of a CTA."""
        first, count = cute.arch.block_idx()[0], self.count(sizes)
        with while_generate([first], lambda index: Boolean(index < count)) as (index,):
            visit(self.tile(index, sizes))
            yield_out([index + cute.arch.grid_dim()[0]])

    def bounds(self, head: Head, buffers: Buffers, sizes: Scalars | Sizes) -> Bounds:
        """Returns what the queries of a batch entry may see."""
        return Sequence.of_entry(self.spec, head.batch, buffers, sizes).bounds()

    def look(self, item: DbiasItem, buffers: Buffers, sizes: Scalars | Sizes) -> tuple[Int32, ...]:
        """Returns the kind of an item, see `HIDDEN`, and what identifies hidden pairs.

        The latter is `ItemList.place`, or if live keys say everything their bits in words of 32; 0 without lists. It
        may differ from lane to lane.
        """
        if self.spec.alike:
            return self._live_keys(item, buffers, sizes)
        if self.spec.listed:
            items = ItemList.of(self.spec, item, buffers, sizes)
            kind = items.kind()
            if self.spec.sums_diagonals:
                past = Boolean((item.row + 1) * ROWS > sizes.query_length)
                kind = ptx.where(Boolean(past & Boolean(kind != HIDDEN)), kind | DEAD_ROWS, kind)
            return kind, items.place
        bounds, first, column = self.bounds(item.head, buffers, sizes), item.row * ROWS, item.column
        seen = bounds.key_tiles(first, ROWS, KEYS)
        visible = Boolean((column >= seen.begin) & (column < seen.end))
        full = Boolean((column >= seen.full_begin) & (column < seen.full_end))
        if bounds.kind.query_end or self.spec.sums_diagonals:
            # Rows of padding count as full in `seen`; here they would add to the sum.
            full = Boolean(full & (first + ROWS <= cutlass.max(bounds.query_end, 0)))
        return ptx.where(visible, ptx.where(full, Int32(FULL), Int32(EDGE)), Int32(HIDDEN)), Int32(0)

    def _live_keys(self, item: DbiasItem, buffers: Buffers, sizes: Scalars | Sizes) -> tuple[Int32, ...]:
        """Returns the kind of an item and its live keys, from the list of its tile of keys in the main kernel."""
        main, kv_heads = self.spec.config.main, sizes.num_heads // self.spec.group
        assert main.keys == KEYS
        plane = Planes.of(sizes).query_lists(item.head.batch, item.head.head // self.spec.group, kv_heads)
        row = plane * copies.count(sizes.key_length, KEYS) + item.column
        found = GlobalList.of(buffers.query_lists, row, copies.count(sizes.query_length, main.queries))
        edges, fulls, dead, _ = ptx.load_global_chunk(found.address)
        kind = ptx.where(dead != 0, Int32(EDGE), Int32(FULL))
        return ptx.where(edges + fulls == 0, Int32(HIDDEN), kind), *found.live_rows()


@dataclass(frozen=True)
class ItemList:
    """What lists of keys say of an item, which has one or two tiles of the lists, side by side.

    Attributes:
        config: tiles of the lists.
        place: index of the list, or of its plane if edge tiles compare rows: what `words` needs.
        row: index of the list; None if only `words` is asked for.
    """

    config: PrepassConfig
    item: DbiasItem
    buffers: Buffers
    sizes: Scalars | Sizes
    place: Int32
    row: Int32 | None = None

    @classmethod
    def of(cls, spec: KernelSpec, item: DbiasItem, buffers: Buffers, sizes: Scalars | Sizes) -> "ItemList":
        """Returns the list of an item."""
        planes, (batch, head, _) = Planes.of(sizes), item.head
        plane = planes.bits(batch, head, head // spec.group)
        row = planes.row(plane, item.row, copies.count(sizes.query_length, ROWS))
        return cls(key_list_tiles(spec), item, buffers, sizes, plane if spec.compared else row, row)

    @property
    def parts(self) -> int:
        """How many tiles of the lists the tile has."""
        return KEYS // self.config.keys

    @property
    def key_tiles(self) -> Int32:
        """How many tiles of keys the lists have."""
        return copies.count(self.sizes.key_length, self.config.keys)

    def kind(self) -> Int32:
        """Loads the kind of the tile, see `HIDDEN`."""
        assert self.row is not None
        entries = GlobalList.of(self.buffers.key_lists, self.row, self.key_tiles)
        dead = ptx.load_global_int(entries.address + 4 * HAS_DEAD_ROWS)
        classes = self.buffers.key_classes.toint() + Int64(self.row) * self.key_tiles * 4
        kind = Int32(HIDDEN)
        for part in range(self.parts):
            index, last = self.item.column * self.parts + part, self.key_tiles - 1
            word = ptx.load_global_int(classes + Int64(cutlass.min(index, last)) * 4)
            # Some tiles where nothing is visible are listed as full.
            visible = Boolean(Boolean(index <= last) & Boolean((word & SOME) != 0))
            kind = kind | ptx.where(visible, (word & (SOME | ALL)) << (2 * part), Int32(HIDDEN))
        if self.parts == 1:
            kind = kind | (kind << 2)
        return kind | ptx.where(Boolean(Boolean(dead != 0) & Boolean(kind != HIDDEN)), Int32(DEAD_ROWS), Int32(0))

    def words(self, kind: Int32, fragment: Int32, lane: Int32) -> list[Int32]:
        """Loads or makes the bits of a lane for 16 rows, a word for each 64 keys; of a half without an edge none."""
        bits, words = self._bits(), []
        for part in range(self.parts):
            tile = Int32(cutlass.min(self.item.column * self.parts + part, self.key_tiles - 1))
            words += bits.fragment(tile, fragment, lane)
        found = []
        for half, word in enumerate(words):
            of_half = kind >> (2 * half) & (SOME | ALL)
            word = ptx.where(of_half == (SOME | ALL), Int32(-1), word)
            found.append(ptx.where(of_half == HIDDEN, Int32(0), word))
        return found

    def _bits(self) -> TileBits:
        """Returns the bits of the tiles of the list."""
        buffers, config, key_tiles = self.buffers, self.config, self.key_tiles
        if config.bits:
            return TileBits.of(config, buffers.key_bits, self.place, key_tiles)
        tiles = copies.count(self.sizes.query_length, ROWS), key_tiles
        compared = ComparedRows.of(config, (buffers.query_records, buffers.key_ids), self.place, self.item.row, tiles)
        return TileBits.of(config, buffers.key_bits, Int32(0), key_tiles, compared)
