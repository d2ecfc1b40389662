# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of the forward kernel knows of a key tile before its scores: from ranges, or from a list.

Limits that hold for a whole range need no memory. A list has an entry, and words of bits, for each edge tile. They are
loaded a tile ahead, while products are in flight.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.sm90.forward.hidden_rows import SharedOperands
from jax_fastattn.kernels.sm90.forward.softmax import ScoreRows
from jax_fastattn.kernels.sm90.forward.state import QueryTile
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.visit import Visit


class Edge(NamedTuple):
    """Holds what is known of a key tile before its scores are.

    Attributes:
        rows: what becomes of the scores of the lane's two rows.
        masked: whether the tile has a mask.
        blind: whether a tile without a mask may be the first one that a row sees.
        entry: the tile's entry in its list; None without lists, and for tiles without a mask.
    """

    rows: ScoreRows
    masked: bool
    blind: bool = False
    entry: Int32 | None = None


class KeyEdges(Protocol):
    """Finds edges of the key tiles that a warpgroup visits with a tile of queries, from the last to the first."""

    def first(self, index: Int32) -> Edge:
        """Returns what is known of the first tile that is visited, at a position. It counts as masked."""
        ...

    def next(self, *, masked: bool, blind: bool) -> Edge:
        """Returns what is known of the next tile, which `load_ahead` has loaded."""
        ...

    def load_ahead(self, index: Int32, edge: Edge) -> None:
        """Loads what is known of the tile after the one at a position.

        It comes after products are issued, which would wait for it otherwise.
        """
        ...

    def zero_dead(self, index: Int32, edge: Edge) -> None:
        """Zeroes the rows of V of the tile at a position that no query of the CTA sees."""
        ...


@dataclass(frozen=True, eq=False)
class RangeEdges:
    """Finds the edges of a range of tiles: the limits of the rows say everything.

    Attributes:
        rows: what becomes of the scores of the lane's two rows.
    """

    rows: ScoreRows

    def first(self, index: Int32) -> Edge:
        """Returns what is known of the first tile."""
        del index
        return Edge(self.rows, masked=True)

    def next(self, *, masked: bool, blind: bool) -> Edge:
        """Returns what is known of any other tile."""
        return Edge(self.rows, masked, blind)

    def load_ahead(self, index: Int32, edge: Edge) -> None:
        """Loads nothing."""

    def zero_dead(self, index: Int32, edge: Edge) -> None:
        """Zeroes nothing: dead rows lie at the ends of the range, see `SharedOperands.zero_values`."""


@dataclass(frozen=True, eq=False)
class ListedEdges:
    """Finds the edges of the tiles of a list.

    Attributes:
        rows: what becomes of the scores of the lane's two rows, without bits.
        tile: the CTA's tile of queries.
        visit: the key tiles that the warpgroup's rows see.
        bits: which scores of edge tiles count.
        ahead: the entry of the next tile, and the lane's words of its bits.
        operands: what the warpgroup changes in shared memory.
        ring: its position in the ring of K and V.
    """

    rows: ScoreRows
    tile: QueryTile
    visit: Visit
    bits: TileBits
    ahead: cute.Tensor
    operands: SharedOperands
    ring: wgmma.Ring

    @classmethod
    def start(
        cls,
        rows: ScoreRows,
        tile: QueryTile,
        visit: Visit,
        bits: TileBits,
        operands: SharedOperands,
        ring: wgmma.Ring,
    ) -> "ListedEdges":
        """Returns the edges with their registers."""
        ahead = cute.make_rmem_tensor((1 + bits.config.words,), Int32)
        return cls(rows, tile, visit, bits, ahead, operands, ring)

    def first(self, index: Int32) -> Edge:
        """Returns what is known of the first tile. The bits of a full one are all 1."""
        words = cute.make_rmem_tensor((self.bits.config.words,), Int32)
        words.fill(-1)
        entry = cute.arch.make_warp_uniform(self.visit.entry(index))

        def load() -> None:
            for i, word in enumerate(self._words(self.visit.tile_of(entry))):
                words[i] = word

        cutlass.if_generate(Boolean(self.visit.is_edge(index)), load)
        return self._edge([words[i] for i in range(self.bits.config.words)], entry)

    def next(self, *, masked: bool, blind: bool) -> Edge:
        """Returns what has been loaded ahead, if the tile is an edge tile."""
        if not masked:
            return Edge(self.rows, masked, blind)
        entry, *words = [self.ahead[i] for i in range(cute.size(self.ahead))]
        return self._edge(words, cute.arch.make_warp_uniform(entry))

    def load_ahead(self, index: Int32, edge: Edge) -> None:
        """Loads entry and bits of the tile after an edge tile, or the same again after the last one.

        A full tile's bits are not used.
        """
        if edge.entry is None:
            return
        self.ahead[0] = self.visit.entry(Int32(cutlass.max(index - 1, self.visit.begin)))
        for i, word in enumerate(self._words(self.visit.tile_of(self.ahead[0]))):
            self.ahead[1 + i] = word

    def zero_dead(self, index: Int32, edge: Edge) -> None:
        """Zeroes dead rows of V of an edge tile, whose entry says whether there are some."""
        if edge.entry is None:
            return
        # With overlap V of this tile follows K of the next one, which exists unless this tile is the last one.
        follows, overlap = Boolean(index > self.visit.begin), self.operands.call.config.overlap_qk_pv
        keys = ptx.where(follows, Int32(1), Int32(0)) if overlap else Int32(0)
        self.operands.zero_dead_values(self.tile, edge.entry, lambda: self.ring.peek(keys))

    def _edge(self, words: list[Int32], entry: Int32) -> Edge:
        return Edge(replace(self.rows, seen=Bits([words])), masked=True, entry=entry)

    def _words(self, tile: Int32) -> list[Int32]:
        """Returns the lane's words of the bits of a tile."""
        lane = self.operands.lane
        # A fragment is the 16 of the CTA's rows that the warp has.
        fragment = lane.group * (WARPGROUP_ROWS // 16) + lane.warp
        return self.bits.fragment(tile, fragment, lane.thread % 32)
