# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles of a bias a CTA of `dbias.py` works on, and which pairs of a batch entry and a head read each.

Such a pair is an item. A CTA sums over the items of a tile in their order: batch entries fastest, then heads. Few tiles
are split in parts, each with some of the items, for want of work for all SMs; XLA sums the parts. Both families
have such a kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments import BackwardBuffers, PortableBackwardBuffers, Scalars, Sizes
from jax_fastattn.kernels.dbias_tiles import KEYS, ROWS, key_list_tiles
from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.features.compared import ComparedRows
from jax_fastattn.kernels.features.places import Head, LoadedTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.lists import GlobalList, Planes, TileBits
from jax_fastattn.kernels.plan import Bounds
from jax_fastattn.kernels.tile_lists import ALL, HAS_DEAD_ROWS, SOME, PrepassConfig

Buffers = BackwardBuffers | PortableBackwardBuffers

# Kinds of a tile in the scores of an item: for each 64 keys whether some pair is visible, and whether all are, a bit
# each, then whether some query sees nothing.
HIDDEN, EDGE, FULL, DEAD_ROWS = 0b0000, 0b0101, 0b1111, 0b10000
# Says that no item follows.
LAST = -1


class DbiasTile(NamedTuple):
    """A tile of the bias, and some of its items.

    Attributes:
        row: its index among the tiles of queries.
        column: its index among the tiles of keys.
        target: which plane `[T, S]` of the result.
        first: batch entry and head of item 0.
        entries: how many batch entries share the plane: as many items have one head.
        begin: the first item.
        end: after the last one.
    """

    row: Int32
    column: Int32
    target: Int32
    first: Head
    entries: Int32
    begin: Int32
    end: Int32

    @classmethod
    def of(cls, index: Int32, sizes: Scalars | Sizes) -> "DbiasTile":
        """Returns the tile that has an index in the order: along the keys, the queries, the planes, the parts."""
        columns, rows = copies.count(sizes.key_length, KEYS), copies.count(sizes.query_length, ROWS)
        column, index = index % columns, index // columns
        row, target = index % rows, index // rows
        plane, part = target % sizes.bias_planes, target // sizes.bias_planes
        shared = sizes.bias_batch == 0
        heads = ptx.where(shared, sizes.bias_planes, sizes.bias_batch)
        entries, members = ptx.where(shared, sizes.batch, Int32(1)), sizes.num_heads // heads
        items = entries * members
        each = copies.count(items, sizes.bias_parts)
        first = Head(plane // heads, plane % heads * members)
        begin = Int32(cutlass.min(part * each, items))
        return cls(row, column, target, first, entries, begin, Int32(cutlass.min(begin + each, items)))

    def head(self, item: Int32) -> Head:
        """Returns the batch entry and the query head of an item."""
        return Head(self.first.batch + item % self.entries, self.first.head + item // self.entries)

    def scores(self, head: Head) -> LoadedTile:
        """Returns the scores of an item."""
        return LoadedTile(head, self.row * ROWS, self.column * KEYS, ROWS, KEYS)


@dataclass(frozen=True)
class DbiasSchedule:
    """Gives persistent CTAs one tile after the other.

    Attributes:
        spec: the compile key.
    """

    spec: KernelSpec

    def count(self, sizes: Scalars | Sizes) -> Int32:
        """Returns how many tiles all parts have."""
        tiles = copies.count(sizes.query_length, ROWS) * copies.count(sizes.key_length, KEYS)
        return tiles * sizes.bias_planes * sizes.bias_parts

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has."""
        return Int32(cutlass.min(self.count(scalars), scalars.multiprocessors))

    def each(self, sizes: Scalars | Sizes, visit: Callable[[DbiasTile], None]) -> None:
        """Calls `visit` for the tiles of a CTA."""
        first, count = cute.arch.block_idx()[0], self.count(sizes)
        with while_generate([first], lambda index: Boolean(index < count)) as (index,):
            visit(DbiasTile.of(index, sizes))
            yield_out([index + cute.arch.grid_dim()[0]])

    def bounds(self, head: Head, buffers: Buffers, sizes: Scalars | Sizes) -> Bounds:
        """Returns what the queries of a batch entry may see."""
        return Sequence.of_entry(self.spec, head.batch, buffers, sizes).bounds()

    def look(self, tile: DbiasTile, head: Head, buffers: Buffers, sizes: Scalars | Sizes) -> tuple[Int32, ...]:
        """Returns the kind of a tile in the scores of a head, see `HIDDEN`, and what tells hidden pairs.

        That is `ItemList.place`, or if live keys say everything their bits in words of 32; 0 without lists. They may be
        others in each lane.
        """
        if self.spec.alike:
            return self._live_keys(tile, head, buffers, sizes)
        if self.spec.listed:
            items = ItemList.of(self.spec, tile, head, buffers, sizes)
            return items.kind(), items.place
        bounds, first, column = self.bounds(head, buffers, sizes), tile.row * ROWS, tile.column
        seen = bounds.key_tiles(first, ROWS, KEYS)
        visible = Boolean((column >= seen.begin) & (column < seen.end))
        full = Boolean((column >= seen.full_begin) & (column < seen.full_end))
        if bounds.kind.query_end:
            # Rows of padding count as full there; here they would add to the sum.
            full = Boolean(full & (first + ROWS <= cutlass.max(bounds.query_end, 0)))
        return ptx.where(visible, ptx.where(full, Int32(FULL), Int32(EDGE)), Int32(HIDDEN)), Int32(0)

    def _live_keys(self, tile: DbiasTile, head: Head, buffers: Buffers, sizes: Scalars | Sizes) -> tuple[Int32, ...]:
        """Returns the kind of a tile and its live keys, from the list of its tile of keys in the main kernel."""
        main, kv_heads = self.spec.config.main, sizes.num_heads // self.spec.group
        assert main.keys == KEYS
        plane = Planes.of(sizes).query_lists(head.batch, head.head // self.spec.group, kv_heads)
        row = plane * copies.count(sizes.key_length, KEYS) + tile.column
        found = GlobalList.of(buffers.query_lists, row, copies.count(sizes.query_length, main.queries))
        edges, fulls, dead, _ = ptx.load_global_chunk(found.address)
        kind = ptx.where(dead != 0, Int32(EDGE), Int32(FULL))
        return ptx.where(edges + fulls == 0, Int32(HIDDEN), kind), *found.live_rows()


@dataclass(frozen=True)
class ItemList:
    """What lists of keys say of a tile and an item. A tile has one or two tiles of the lists, side by side.

    Attributes:
        config: tiles of the lists.
        tile: the tile.
        buffers, sizes: of the launch.
        place: index of the list, or of its plane if edge tiles compare rows: what `words` needs.
        row: index of the list; None if only `words` is asked for.
    """

    config: PrepassConfig
    tile: DbiasTile
    buffers: Buffers
    sizes: Scalars | Sizes
    place: Int32
    row: Int32 | None = None

    @classmethod
    def of(cls, spec: KernelSpec, tile: DbiasTile, head: Head, buffers: Buffers, sizes: Scalars | Sizes) -> "ItemList":
        """Returns that of an item, given its head."""
        planes = Planes.of(sizes)
        plane = planes.bits(head.batch, head.head, head.head // spec.group)
        row = planes.row(plane, tile.row, copies.count(sizes.query_length, ROWS))
        return cls(key_list_tiles(spec), tile, buffers, sizes, plane if spec.compared else row, row)

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
            index, last = self.tile.column * self.parts + part, self.key_tiles - 1
            word = ptx.load_global_int(classes + Int64(cutlass.min(index, last)) * 4)
            # Of tiles where nothing is visible, some say that everything is.
            visible = Boolean(Boolean(index <= last) & Boolean((word & SOME) != 0))
            kind = kind | ptx.where(visible, (word & (SOME | ALL)) << (2 * part), Int32(HIDDEN))
        if self.parts == 1:
            kind = kind | (kind << 2)
        return kind | ptx.where(Boolean(Boolean(dead != 0) & Boolean(kind != HIDDEN)), Int32(DEAD_ROWS), Int32(0))

    def words(self, kind: Int32, fragment: Int32, lane: Int32) -> list[Int32]:
        """Loads or makes the bits of a lane for 16 rows, a word for each 64 keys; of a half without an edge none."""
        bits, words = self._bits(), []
        for part in range(self.parts):
            tile = Int32(cutlass.min(self.tile.column * self.parts + part, self.key_tiles - 1))
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
        compared = ComparedRows.of(config, (buffers.query_records, buffers.key_ids), self.place, self.tile.row, tiles)
        return TileBits.of(config, buffers.key_bits, Int32(0), key_tiles, compared)
