# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Lists from classes: what the first launch of the prepass writes of each pair of tiles, and the second one reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.arguments.prepass import PrepassBuffers
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.tiles.lists import (
    ALL,
    DEAD_ROWS,
    EDGES,
    HAS_DEAD_ROWS,
    HEADER_WORDS,
    LAST,
    LIVE,
    LIVE_WORDS,
    RANK_SHIFT,
    SOME,
    PrepassConfig,
    list_words,
    visitor_nbytes,
)


class OwnTilePlace(NamedTuple):
    """An own tile.

    Attributes:
        plane: the plane of the lists.
        tiles: how many own tiles and visited tiles there are.
    """

    plane: Int32
    own: Int32
    tiles: tuple[Int32, Int32]

    def of(self, plane: Int64, visited: Int32) -> Int64:
        """Returns the index of a visited tile of the own tile among the pairs of all planes, given the plane."""
        return (plane * self.tiles[0] + self.own) * self.tiles[1] + visited

    def pair(self, visited: Int32) -> Int64:
        """Returns the index of a visited tile of the own tile in the plane of the lists."""
        return self.of(Int64(self.plane), visited)

    def visitors(self, buffers: PrepassBuffers, query_tile: Int32) -> Int64:
        """Returns the address of the bytes that say which tiles of keys visit a query tile."""
        row = Int64(self.plane) * self.tiles[1] + query_tile
        return buffers.visitors.toint() + row * visitor_nbytes(self.tiles[0])


@dataclass(frozen=True, eq=False)
class ClassWriter:
    """Writes what is known of the visited tiles of an own tile. One warp calls it.

    Attributes:
        transposed: whether the own side are keys.
        lane: index of the lane in the warp.
    """

    buffers: PrepassBuffers
    transposed: bool
    place: OwnTilePlace
    lane: Int32

    def write(self, visited: Int32, word: Int32, live: Int32) -> None:
        """Writes the class of a visited tile, and the live own rows of each lane."""
        pair = self.place.pair(visited)
        target = self.buffers.live.toint() + (pair * LIVE_WORDS + self.lane) * 4
        cutlass.if_generate(self.lane < LIVE_WORDS, lambda: ptx.store_global_int(target, live))

        def write() -> None:
            ptx.store_global_int(self.buffers.classes.toint() + pair * 4, word)
            if self.transposed:
                ptx.store_global_byte(self.place.visitors(self.buffers, visited) + self.place.own, word & SOME)

        cutlass.if_generate(self.lane == 0, write)


class _Tile(NamedTuple):
    """A visited tile as a lane sees it, and the visited tiles of the warp.

    Attributes:
        word: its class.
        is_edge, is_full: what the class says.
        edges, fulls: a bit for each lane with such a tile.
    """

    word: Int32
    is_edge: Boolean
    is_full: Boolean
    edges: Int32
    fulls: Int32

    @classmethod
    def of(cls, word: Int32) -> "_Tile":
        """Reads a class. All lanes of the warp call it."""
        is_edge, is_full = (Boolean((word & (SOME | ALL)) == x) for x in (SOME, SOME | ALL))
        return cls(word, is_edge, is_full, cute.arch.vote_ballot_sync(is_edge), cute.arch.vote_ballot_sync(is_full))

    def edges_before_last_full(self, before: Int32) -> Int32:
        """Returns how many edges come before the last full tile, `before` in earlier chunks; 0 if none is full."""
        lower = self.fulls
        for shift in (1, 2, 4, 8, 16):
            # If the sign bit is set, all bits are wanted, and shifts spread it.
            lower = lower | (lower >> shift)
        return ptx.where(self.fulls != 0, before + cute.arch.popc(self.edges & lower), Int32(0))


@dataclass(frozen=True, eq=False)
class ListWriter:
    """Writes the entries of 32 visited tiles in the list of an own tile. One warp calls it.

    Attributes:
        config: sizes of the tiles, and the order of a list.
        chunk: which 32 tiles. With the first ones comes the header.
        lane: index of the lane in the warp.
    """

    buffers: PrepassBuffers
    config: PrepassConfig
    place: OwnTilePlace
    chunk: Int32
    lane: Int32

    @property
    def _header(self) -> Int64:
        """Address of the list."""
        row = Int64(self.place.plane) * self.place.tiles[0] + self.place.own
        return self.buffers.lists.toint() + row * list_words(self.place.tiles[1]) * 4

    @property
    def _tile(self) -> Int32:
        """The visited tile of the lane."""
        return self.chunk * 32 + self.lane

    def write(self, existing: Callable[[Int32], Int32]) -> None:
        """Writes the entries and the header; `existing` adds rows past the end to the live own rows of each lane."""
        # All loads of a short list come before the first one is used.
        loaded = self._load_class(self._tile)
        live = [wgmma.Uniform(word) for word in self._load_live(self._tile)]
        rank, total = self._rank()
        own = _Tile.of(loaded)
        counts = wgmma.Uniform(cute.arch.popc(own.edges), cute.arch.popc(own.fulls))
        before, split = wgmma.Uniform(Int32(0), Int32(0)), wgmma.Uniform(Int32(0))

        def count(i: Int32) -> None:
            chunk = i + ptx.where(i >= self.chunk, Int32(1), Int32(0))
            other = _Tile.of(self._load_class(chunk * 32 + self.lane))
            if self.config.splits_edges:
                own_edges = ptx.where(chunk < self.chunk, cute.arch.popc(own.edges), Int32(0))
                split[0] = cutlass.max(split[0], other.edges_before_last_full(counts[0] - own_edges))
            for k, tiles in enumerate((other.edges, other.fulls)):
                counts[k] = counts[k] + cute.arch.popc(tiles)
                before[k] = before[k] + ptx.where(chunk < self.chunk, cute.arch.popc(tiles), Int32(0))

        def join(i: Int32) -> None:
            for word, found in zip(live, self._load_live((i + 1) * 32 + self.lane), strict=True):
                word[0] = word[0] | found

        others = (self.place.tiles[1] - 1) // 32
        wgmma.loop(others, count)
        turn = (rank << RANK_SHIFT) | ptx.where(rank + 1 == total, Int32(LAST), Int32(0))
        # `first` is how many edges come before the full tiles.
        if self.config.splits_edges:
            first = Int32(cutlass.max(split[0], own.edges_before_last_full(before[0])))
        else:
            first = counts[0] if self.config.transposed else Int32(0)
        self._write_entry(own, counts, before, first, turn)

        def write_header() -> None:
            wgmma.loop(others, join)
            self._write_header(counts, counts[0] - first, existing(self._own_words([word[0] for word in live])))

        cutlass.if_generate(self.chunk == 0, write_header)
        if self.config.transposed:
            index = Int64(self.place.plane) * self.place.tiles[1] + self._tile
            target = self.buffers.counts.toint() + index * 4
            counted = Boolean((self.place.own == 0) & (self._tile < self.place.tiles[1]))
            cutlass.if_generate(counted, lambda: ptx.store_global_int(target, total))

    # What the first launch has found.

    def _load_class(self, tile: Int32) -> Int32:
        """Loads the class of a visited tile; the class is 0 for a tile that does not exist."""
        visited = self.place.tiles[1]
        index = self.place.pair(Int32(cutlass.min(tile, visited - 1)))
        word = ptx.load_global_int(self.buffers.classes.toint() + index * 4)
        return ptx.where(tile < visited, word, Int32(0))

    def _load_live(self, tile: Int32) -> list[Int32]:
        """Loads live own rows of a visited tile, or of the last one."""
        index = self.place.pair(Int32(cutlass.min(tile, self.place.tiles[1] - 1)))
        return ptx.load_global_chunk(self.buffers.live.toint() + index * (4 * LIVE_WORDS))

    def _own_words(self, words: list[Int32]) -> Int32:
        """Returns the union of all lanes' live rows: lane i has rows 32 i to 32 i + 31."""
        found = Int32(0)
        for i, word in enumerate(words):
            union = cute.arch.warp_redux_sync(word, "or")
            found = ptx.where(self.lane == i, union, found)
        return found

    def _rank(self) -> tuple[Int32, Int32]:
        """Returns how many tiles of keys before this one visit the lane's query tile, and how many do at all.

        Key lists have no ranks: both are 0.
        """
        if not self.config.transposed:
            return Int32(0), Int32(0)
        keys, queries = self.place.tiles
        address = self.place.visitors(self.buffers, Int32(cutlass.min(self._tile, queries - 1)))
        found = wgmma.Uniform(Int32(0), Int32(0))

        def count(i: Int32) -> None:
            for j, word in enumerate(ptx.load_global_chunk(address + Int64(i) * 16)):
                for k, end in enumerate((self.place.own, keys)):
                    # Bytes of tiles that do not exist are not written.
                    exist = ptx.bit_range(Int32(0), copies.clamp(end - 16 * i - 4 * j, 0, 4) * 8)
                    found[k] = found[k] + cute.arch.popc(word & exist)

        wgmma.loop(visitor_nbytes(keys) // 16, count)
        return found[0], found[1]

    # The list.

    def _write_entry(self, own: _Tile, counts: wgmma.Uniform, before: wgmma.Uniform, first: Int32, turn: Int32) -> None:
        """Writes the entry of the lane's tile, if it is listed; `first` edges come first, then all full tiles."""
        lower = (Int32(1) << self.lane) - 1
        edge = before[0] + cute.arch.popc(own.edges & lower)
        edge = edge + ptx.where(edge >= first, counts[1], Int32(0))
        full = first + before[1] + cute.arch.popc(own.fulls & lower)
        target = self._header + (HEADER_WORDS + ptx.where(own.is_edge, edge, full)) * 4
        entry = self._tile | (own.word & DEAD_ROWS)
        if self.config.transposed:
            entry = entry | turn
        cutlass.if_generate(Boolean(own.is_edge | own.is_full), lambda: ptx.store_global_int(target, entry))

    def _write_header(self, counts: wgmma.Uniform, last_edges: Int32, live: Int32) -> None:
        has_dead_rows = cute.arch.vote_any_sync(live != -1)

        def write_counts() -> None:
            dead = ptx.where(has_dead_rows, Int32(1), Int32(0))
            ptx.store_global_chunk(self._header + 4 * EDGES, [counts[0], counts[1], dead, last_edges])

        cutlass.if_generate(self.lane == HAS_DEAD_ROWS, write_counts)
        target = self._header + (LIVE + self.lane) * 4
        cutlass.if_generate(self.lane < LIVE_WORDS, lambda: ptx.store_global_int(target, live))
