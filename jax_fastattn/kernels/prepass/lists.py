# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Lists from classes: one warp puts the classes of an own tile in order, one numbers the lists of a query tile."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.arguments import PrepassBuffers
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.plan import TileRange
from jax_fastattn.kernels.tile_lists import (
    DEAD_ROWS,
    EDGES,
    HAS_DEAD_ROWS,
    HEADER_WORDS,
    LAST,
    LIVE,
    LIVE_WORDS,
    RANK_SHIFT,
    list_words,
)

# A class: whether something is visible, and whether everything is; then `DEAD_ROWS`.
SOME, ALL = 1, 2


class Classes:
    """Makes and reads classes."""

    @staticmethod
    def of(some: Boolean, everything: Boolean, has_dead_rows: Boolean) -> Int32:
        """Returns a class."""
        flags = ((some, SOME), (everything, ALL), (has_dead_rows, DEAD_ROWS))
        first, second, third = (ptx.where(flag, Int32(bit), Int32(0)) for flag, bit in flags)
        return first | second | third

    @staticmethod
    def is_full(word: Int32) -> Boolean:
        """Returns whether a tile is full."""
        return Boolean((word & (SOME | ALL)) == (SOME | ALL))

    @staticmethod
    def is_edge(word: Int32) -> Boolean:
        """Returns whether a tile is an edge."""
        return Boolean((word & (SOME | ALL)) == SOME)


@dataclass(frozen=True, eq=False)
class ListWriter:
    """Writes the list of an own tile. One warp calls it.

    Attributes:
        buffers: of the launch.
        transposed: whether the own side are keys.
        plane: of the lists.
        own: the own tile.
        tiles: how many own tiles and visited tiles there are.
        lane: of the warp.
    """

    buffers: PrepassBuffers
    transposed: bool
    plane: Int32
    own: Int32
    tiles: tuple[Int32, Int32]
    lane: Int32

    @property
    def _row(self) -> Int64:
        """The own tile among those of all planes."""
        return Int64(self.plane) * self.tiles[0] + self.own

    @property
    def _header(self) -> Int64:
        """Address of the list."""
        return self.buffers.lists.toint() + self._row * list_words(self.tiles[1]) * 4

    def class_address(self, tile: Int32) -> Int64:
        """Returns the address of the class of a visited tile."""
        return self.buffers.classes.toint() + (self._row * self.tiles[1] + tile) * 4

    def write(self, visited: TileRange, live: Int32) -> None:
        """Writes header and entries, given the tiles that have classes, and the live own rows of each lane."""
        counts = wgmma.Uniform(Int32(0), Int32(0))

        def look(i: Int32) -> tuple[Int32, Boolean, Boolean, Int32, Int32, Int32]:
            tile = i * 32 + self.lane
            inside = Boolean((tile >= visited.begin) & (tile < visited.end))
            word = ptx.load_global_int(self.class_address(Int32(cutlass.min(tile, self.tiles[1] - 1))))
            word = ptx.where(inside, word, Int32(0))
            edge, full = Classes.is_edge(word), Classes.is_full(word)
            return tile, edge, full, word, cute.arch.vote_ballot_sync(edge), cute.arch.vote_ballot_sync(full)

        def count(i: Int32) -> None:
            *_, edges, fulls = look(i)
            counts[0] = counts[0] + cute.arch.popc(edges)
            counts[1] = counts[1] + cute.arch.popc(fulls)

        rounds = (self.tiles[1] + 31) // 32
        wgmma.loop(rounds, count)
        self._write_header(counts, live)
        zero = Int32(0)
        at = wgmma.Uniform(zero, counts[0]) if self.transposed else wgmma.Uniform(counts[1], zero)
        before = (Int32(1) << self.lane) - 1

        def write(i: Int32) -> None:
            tile, edge, full, word, edges, fulls = look(i)
            place = ptx.where(edge, at[0] + cute.arch.popc(edges & before), at[1] + cute.arch.popc(fulls & before))
            entry = tile | (word & DEAD_ROWS)
            listed = Boolean(edge | full)
            target = self._header + (HEADER_WORDS + place) * 4
            cutlass.if_generate(listed, lambda: ptx.store_global_int(target, entry))
            if self.transposed:
                self._write_place(tile, ptx.where(listed, place, Int32(-1)))
            at[0] = at[0] + cute.arch.popc(edges)
            at[1] = at[1] + cute.arch.popc(fulls)

        wgmma.loop(rounds, write)

    def _write_header(self, counts: wgmma.Uniform, live: Int32) -> None:
        has_dead_rows = cute.arch.vote_any_sync(live != -1)

        def write_counts() -> None:
            dead = ptx.where(has_dead_rows, Int32(1), Int32(0))
            ptx.store_global_chunk(self._header + 4 * EDGES, [counts[0], counts[1], dead, Int32(0)])

        cutlass.if_generate(self.lane == HAS_DEAD_ROWS, write_counts)
        target = self._header + (LIVE + self.lane) * 4
        cutlass.if_generate(self.lane < LIVE_WORDS, lambda: ptx.store_global_int(target, live))

    def _write_place(self, tile: Int32, place: Int32) -> None:
        """Notes where a query tile is in the list of the own tile of keys."""
        keys, queries = self.tiles
        target = self.buffers.places.toint() + ((Int64(self.plane) * queries + tile) * keys + self.own) * 4
        cutlass.if_generate(tile < queries, lambda: ptx.store_global_int(target, place))


@dataclass(frozen=True, eq=False)
class RankWriter:
    """Numbers the lists that a query tile is in, and counts them. One warp calls it.

    Attributes:
        buffers: of the launch.
        plane: of the lists.
        tile: the query tile.
        tiles: how many tiles of keys and of queries there are.
        lane: of the warp.
    """

    buffers: PrepassBuffers
    plane: Int32
    tile: Int32
    tiles: tuple[Int32, Int32]
    lane: Int32

    def write(self) -> None:
        """Completes the entries of the tile in all lists."""
        keys, queries = self.tiles
        row = Int64(self.plane) * queries + self.tile
        places, rounds = self.buffers.places.toint() + row * keys * 4, (keys + 31) // 32
        total, seen = wgmma.Uniform(Int32(0)), wgmma.Uniform(Int32(0))

        def look(i: Int32) -> tuple[Int32, Int32, Boolean, Int32]:
            key_tile = i * 32 + self.lane
            at = Int32(cutlass.min(key_tile, keys - 1))
            place = ptx.load_global_int(places + Int64(at) * 4)
            listed = Boolean((place >= 0) & (key_tile < keys))
            return at, place, listed, cute.arch.vote_ballot_sync(listed)

        def count(i: Int32) -> None:
            total[0] = total[0] + cute.arch.popc(look(i)[3])

        def write(i: Int32) -> None:
            key_tile, place, listed, lists = look(i)
            rank = seen[0] + cute.arch.popc(lists & ((Int32(1) << self.lane) - 1))
            last = ptx.where(rank + 1 == total[0], Int32(LAST), Int32(0))
            list_row = (Int64(self.plane) * keys + key_tile) * list_words(queries)
            entry = self.buffers.lists.toint() + (list_row + HEADER_WORDS + place) * 4

            def complete() -> None:
                ptx.store_global_int(entry, ptx.load_global_int(entry) | (rank << RANK_SHIFT) | last)

            cutlass.if_generate(listed, complete)
            seen[0] = seen[0] + cute.arch.popc(lists)

        wgmma.loop(rounds, count)
        wgmma.loop(rounds, write)
        target = self.buffers.counts.toint() + row * 4
        cutlass.if_generate(self.lane == 0, lambda: ptx.store_global_int(target, total[0]))
