# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of pairs, a matrix that is added to the logits, from pieces that each warp copies to shared memory for itself.

A piece has what one `ldmatrix` of the warp reads. No warp reads another one's pieces, so a warp copies the next piece
over one that it has read without a barrier of the CTA.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import CHUNK, PieceRing
from jax_fastattn.kernels.features.pair_bias import PairBias, total
from jax_fastattn.kernels.features.places import Element, Head, ScoreTile
from jax_fastattn.kernels.features.planes import Planes


@dataclass(frozen=True)
class WarpBias(PairBias):
    """Adds a matrix from the warp's pieces, for scores whose rows are keys.

    A tile's first pieces are copied before the tile begins (`copy_first`). If there are more pieces than places, the
    others are copied while the tile is read, in its order.

    Attributes:
        operand: see `ForwardBuffers.bias`.
        dtype: of a term.
        planes: of the bias.
        ring: the pieces.
        address: of the warp's pieces in shared memory.
        key: the warp's first key.
        head: the query head, since `start`.
        query: the warp's first query in the tile, since `read`.
        registers: of the lane, by piece, since `read`.
    """

    operand: cute.Pointer
    dtype: str
    planes: Planes
    ring: PieceRing
    address: Int32
    key: Int32
    head: Any = None
    query: Any = None
    registers: Any = None

    def start(self, head: Head) -> "WarpBias":
        """Returns the feature for a query head."""
        return replace(self, head=head)

    def read(self, tile: ScoreTile) -> "WarpBias":
        """Returns the feature for one pass over the scores of a tile, whose rows are keys."""
        assert tile.transposed
        return replace(self, query=tile.index * tile.columns, registers={})

    def value(self, at: Element) -> Float32:
        """Returns the bias of a pair, the sum of its terms."""
        index = at.column // self.ring.piece.rows
        if index not in self.registers:
            self.registers[index] = self._load(index)
        words = [registers[at.i] for registers in self.registers[index]]
        return total([ptx.unpack(word, dtype=ptx.MMA_DTYPE[self.dtype])[at.column % 2] for word in words])

    def copy_first(self, head: Head, query: Int32) -> None:
        """Starts the copies of the first pieces of a tile, given its head and the warp's first query in it."""
        for index in range(self.ring.places):
            self._copy(head, query, index)

    def _load(self, index: int) -> list[list[Int32]]:
        """Loads the lane's pairs of each term of a piece, and starts the copy of the piece that takes its place."""
        ring = self.ring
        if index >= ring.places:
            # Of the copies that this tile has started, those of later pieces may be on their way.
            cute.arch.cp_async_wait_group(min(index + ring.places, ring.count) - index - 1)
            cute.arch.sync_warp()
        address = self.address + ring.piece.read_offset(ptx.thread_index() & 31)
        found = [ptx.ldmatrix(address + ring.offset(index, term), transpose=True) for term in range(ring.terms)]
        if index + ring.places < ring.count:
            cute.arch.sync_warp()
            self._copy(self.head, self.query, index + ring.places)
            cute.arch.cp_async_commit_group()
        return found

    def _copy(self, head: Head, query: Int32, index: int) -> None:
        """Starts the copies of a piece. Pairs past the end are others that exist."""
        scalars, piece, lane = self.planes.scalars, self.ring.piece, ptx.thread_index() & 31
        row, chunk = piece.lane_chunk(lane)
        row = Int32(cutlass.min(query + (row + piece.rows * index), scalars.query_length - 1))
        key = Int32(cutlass.min(self.key + chunk * CHUNK, scalars.bias_pitch - CHUNK))
        pitch = scalars.bias_pitch * 2
        first = self.operand.toint() + Int64(key) * 2
        for term in range(self.ring.terms):
            plane = Int64(self.planes.of_head(head) + scalars.bias_planes * term)
            source = first + plane * (Int64(scalars.query_length) * pitch) + Int64(row) * pitch
            ptx.copy_async(self.address + piece.copy_offset(lane) + self.ring.offset(index, term), source)
