# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Where a kernel of any family finds its lists and bits in global memory; `tiles/lists.py` defines both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.tiles import lists as tile_lists
from jax_fastattn.kernels.tiles.lists import HEADER_WORDS, LIVE, PrepassConfig
from jax_fastattn.kernels.visits.compared import ComparedRows

Int = Any  # a Python int or a device integer


class Planes(NamedTuple):
    """Where batch entries and heads have their lists and bits, as launches know it.

    Attributes:
        batch: planes of bits from one batch entry to the next; 0 if all entries share them.
        head, kv_head: planes from one query head, or from one key/value head, to the next. One of them is 1 and the
            other one 0; both are 0 if all heads share a plane.
        tile: 1; 0 if all tiles of queries share the first one's list, since no query differs from another.
    """

    batch: Any
    head: Any
    kv_head: Any
    tile: Any

    @classmethod
    def of(cls, scalars: Scalars | Sizes) -> Planes:
        """Returns the planes of a launch."""
        return cls(scalars.visit_batch, scalars.visit_head, scalars.visit_kv_head, scalars.visit_tile)

    def bits(self, batch: Int, head: Int, kv_head: Int) -> Int:
        """Returns the plane of bits of a query head; tiles of queries have their lists in the same plane."""
        return batch * self.batch + head * self.head + kv_head * self.kv_head

    def query_lists(self, batch: Int, kv_head: Int, kv_heads: Int) -> Int:
        """Returns the plane of lists of tiles of keys, which the heads of a group share."""
        return batch * cutlass.min(self.batch, kv_heads) + kv_head * (self.head + self.kv_head)

    def row(self, plane: Int, tile: Int, tiles: Int) -> Int:
        """Returns the index of the list of an own tile, given the number of own tiles; its bits have the same index."""
        return plane * ((tiles - 1) * self.tile + 1) + tile * self.tile


@dataclass(frozen=True)
class GlobalList:
    """A list in global memory, see `tiles/lists.py`.

    Attributes:
        address: the address of its header.
    """

    address: Int64

    @classmethod
    def of(cls, lists: cute.Pointer, row: Int32, visited_tiles: Int32) -> GlobalList:
        """Returns the list of an own tile, given its index (`Planes.row`) and how many tiles the visited side has."""
        return cls(lists.toint() + Int64(row) * tile_lists.list_words(visited_tiles) * 4)

    def counts(self) -> tuple[Int32, Int32, Int32, Int32]:
        """Loads how many edge and full tiles there are, whether some own row is dead, and how many edges come last."""
        edges, fulls, dead, last = (cute.arch.make_warp_uniform(x) for x in ptx.load_global_chunk(self.address))
        return edges, fulls, dead, last

    def live_rows(self) -> list[Int32]:
        """Loads which of up to 128 own rows are live."""
        return ptx.load_global_chunk(self.address + 4 * LIVE)

    def are_live(self, row: Int32) -> list[Boolean]:
        """Loads whether the two own rows of a lane are live, given the first one; the other one is 8 rows below."""
        word = ptx.load_constant_int(self.address + (LIVE + row // 32) * 4)
        return [Boolean(((word >> (row % 32 + 8 * i)) & 1) != 0) for i in range(2)]

    def load(self, position: Int32) -> Int32:
        """Loads an entry. One load in 32 misses L1."""
        return ptx.load_constant_int(self.address + (HEADER_WORDS + position) * 4)


@dataclass(frozen=True)
class TileBits:
    """The bits and live rows of the tiles that an own tile visits.

    Attributes:
        config: sizes of the tiles.
        address: the address of the bits of the first visited tile.
        compared: what makes bits where none are in memory; else None.
    """

    config: PrepassConfig
    address: Int64
    compared: ComparedRows | None = None

    @classmethod
    def of(
        cls,
        config: PrepassConfig,
        bits: cute.Pointer,
        row: Int32,
        visited_tiles: Int32,
        compared: ComparedRows | None = None,
    ) -> TileBits:
        """Returns the bits of an own tile, given its index (`Planes.row`) and how many tiles the visited side has."""
        return cls(config, bits.toint() + Int64(row) * visited_tiles * config.tile_nbytes, compared)

    def tile(self, tile: Int32) -> Int64:
        """Returns the address of the bits of a visited tile, which its live rows follow."""
        return self.address + Int64(tile) * self.config.tile_nbytes

    def fragment(self, tile: Int32, fragment: Int32, lane: Int32) -> list[Int32]:
        """Loads or makes the words of a lane for 16 accumulator rows, one for each 64 columns."""
        if self.compared is not None:
            return self.compared.fragment(tile, fragment, lane)
        first = self.tile(tile) + (fragment * (32 * self.config.words) + lane) * 4
        return [ptx.load_global_int(first + 128 * word) for word in range(self.config.words)]

    def live_rows(self, tile: Int32) -> list[Int32]:
        """Loads which rows of a visited tile are live."""
        return ptx.load_global_chunk(self.tile(tile) + self.config.bits_nbytes)
