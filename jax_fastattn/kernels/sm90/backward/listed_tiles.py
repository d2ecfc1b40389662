# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Lists and bits of the backward kernels: of a tile of keys and its queries. docs/kernels/masks.md has their layout."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.visits.compared import ComparedRows
from jax_fastattn.kernels.visits.lists import GlobalList, Planes, TileBits
from jax_fastattn.kernels.visits.visit import Visit


class KeyTilePlace(NamedTuple):
    """Describes a tile of keys of a batch entry.

    Attributes:
        batch: index of the batch entry.
        kv_head: index of the key/value head.
        kv_heads: how many there are.
        tile: index of the tile.
    """

    batch: Int32
    kv_head: Int32
    kv_heads: Int32
    tile: Int32


@dataclass(frozen=True)
class KeyTileList:
    """Holds what lists say of a tile of keys.

    Attributes:
        config: sizes of the tiles.
        place: which tile of keys it is.
        entries: its list, which the heads of a group share.
        visit: the tiles of queries in it.
        has_dead_keys: whether it has keys that no query sees.
    """

    config: PrepassConfig
    place: KeyTilePlace
    entries: GlobalList
    visit: Visit
    has_dead_keys: Int32
    buffers: Buffers
    sizes: Sizes

    @classmethod
    def of(cls, spec: KernelSpec, buffers: Buffers, sizes: Sizes, place: KeyTilePlace) -> "KeyTileList":
        """Returns what lists say of a tile of keys."""
        config = spec.tiles_of(spec.config.main)
        batch, kv_head, kv_heads, tile = place
        plane = Planes.of(sizes).query_lists(batch, kv_head, kv_heads)
        row = plane * copies.count(sizes.key_length, config.keys) + tile
        entries = GlobalList.of(buffers.query_lists, row, copies.count(sizes.query_length, config.rows))
        edges, fulls, has_dead_keys, last_edges = entries.counts()
        last = last_edges if config.splits_edges else None
        visit = Visit.listed(entries, edges, fulls, fulls_first=False, last_edges=last)
        if spec.alike:
            visit = replace(visit, first_entry=entries.load(Int32(0)))
        return cls(config, place, entries, visit, has_dead_keys, buffers, sizes)

    def head_bits(self, head: Int32) -> TileBits:
        """Returns the bits of the tiles of a query head that see the tile of keys."""
        buffers, sizes, config, place = self.buffers, self.sizes, self.config, self.place
        plane = Planes.of(sizes).bits(place.batch, head, place.kv_head)
        key_tiles = copies.count(sizes.key_length, config.keys)
        row = plane * key_tiles + place.tile
        query_tiles = copies.count(sizes.query_length, config.rows)
        arrays = buffers.key_records, buffers.query_ids
        compared = ComparedRows.of(config, arrays, plane, place.tile, (key_tiles, query_tiles))
        return TileBits.of(config, buffers.query_bits, row, query_tiles, compared)


@dataclass(frozen=True)
class StageBits:
    """Reads the bits, if there are some, and live queries of an edge tile, where they came with a stage of Q.

    Attributes:
        config: sizes of the tiles.
        address: address of the stage.
    """

    config: PrepassConfig
    address: Int32

    def load(self, fragment: Int32, lane: Int32) -> list[Int32]:
        """Loads the words of a lane for 16 keys."""
        words = self.config.words
        first = self.address + (fragment * (32 * words) + lane) * 4
        return [ptx.load_shared(first + 128 * word) for word in range(words)]

    def live_queries(self) -> list[Int32]:
        """Loads which queries of the tile see some key of the tile of keys, in words of 32."""
        chunk = ptx.load_shared_chunk(self.address + self.config.bits_nbytes)
        return chunk[: (self.config.rows + 31) // 32]


def key_tile_count(spec: KernelSpec, buffers: Buffers, scalars: Scalars, work: Work, tile: Int32, rows: int) -> Int32:
    """Returns how many tiles of keys visit a query tile.

    Args:
        work: says which batch entry and head.
        tile: the query tile; it may be one of padding.
        rows: rows of a query tile.
    """
    count, kv_heads = copies.count(scalars.query_length, rows), scalars.num_heads // spec.group
    plane = Planes.of(scalars).query_lists(work.sequence.queries.batch, work.kv_head, kv_heads)
    index = Int64(plane) * count + Int32(cutlass.min(tile, count - 1))
    found = ptx.load_constant_int(buffers.key_tile_counts.toint() + index * 4)
    return ptx.where(Boolean(tile < count), found, Int32(0))
