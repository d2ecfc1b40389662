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

from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import CHUNK, PieceRing
from jax_fastattn.kernels.features.bias.pairs import PairBias, total
from jax_fastattn.kernels.features.bias.planes import Planes
from jax_fastattn.kernels.features.places import Element, Head, ScoreTile
from jax_fastattn.kernels.key import KernelSpec


@dataclass(frozen=True)
class WarpBias(PairBias):
    """Adds a matrix from the warp's pieces.

    A tile's first pieces are copied before it is read (`copy_first`). If there are more pieces than places, the others
    are copied while the tile is read, in its order.

    Attributes:
        operand: see `Buffers.bias`.
        dtype: the dtype of a term.
        ring: the pieces.
        address: the address of the warp's pieces in shared memory.
        row: the warp's first row in all tiles: a key of transposed tiles, else a query.
        head: the query head, since `start`.
        tile: where the scores lie, since `read`.
        registers: registers of the lane, by piece, since `read`.
    """

    operand: cute.Pointer
    dtype: str
    planes: Planes
    ring: PieceRing
    address: Int32
    row: Int32
    head: Any = None
    tile: Any = None
    registers: Any = None

    @classmethod
    def of_pieces(
        cls, spec: KernelSpec, operand: cute.Pointer, scalars: Scalars, shared: Int32, row: Int32
    ) -> "WarpBias":
        """Returns the matrix of a launch, given the address of the warp's pieces and its first row."""
        planes = Planes(scalars, spec.group)
        return cls(operand, spec.bias_storage, planes, spec.config.bias_ring, shared, row)

    def start(self, head: Head) -> "WarpBias":
        """Returns the feature for a query head."""
        return replace(self, head=head)

    def read(self, tile: ScoreTile) -> "WarpBias":
        """Returns the feature for one pass over the scores of a tile."""
        assert tile.transposed == self._transposed
        return replace(self, tile=tile, registers={})

    def value(self, at: Element) -> Float32:
        """Returns the bias of a pair, the sum of its terms."""
        if self._transposed:
            index, word = at.column // 8, at.i
        else:
            index, word = at.i // 2 * self.ring.across + at.column // 16, at.column // 8 % 2 * 2 + at.i % 2
        if index not in self.registers:
            self.registers[index] = self._load(index)
        pairs = [ptx.unpack(words[word], dtype=ptx.MMA_DTYPE[self.dtype]) for words in self.registers[index]]
        return total([pair[at.column % 2] for pair in pairs])

    def copy_first(self, head: Head, column: Int32) -> None:
        """Starts the copies of the first pieces of a tile, given its head and the warp's first column in it."""
        for index in range(self.ring.places):
            self._copy(head, column, index)

    @property
    def _transposed(self) -> bool:
        """Whether rows of tiles are keys: a lane has them in one piece of 8 queries."""
        return self.ring.piece.rows == 8

    def _load(self, index: int) -> list[list[Int32]]:
        """Loads the lane's pairs of each term of a piece, and starts the copy of the piece that takes its place."""
        ring = self.ring
        if index >= ring.places:
            # Copies of later pieces, which this tile has started, may still be in flight.
            cute.arch.cp_async_wait_group(min(index + ring.places, ring.count) - index - 1)
            cute.arch.sync_warp()
        address = self.address + ring.piece.read_offset(ptx.thread_index() & 31)
        offsets = [ring.offset(index, term) for term in range(ring.terms)]
        found = [ptx.ldmatrix(address + offset, transpose=self._transposed) for offset in offsets]
        if index + ring.places < ring.count:
            cute.arch.sync_warp()
            self._copy(self.head, self.tile.index * self.tile.columns, index + ring.places)
            cute.arch.cp_async_commit_group()
        return found

    def _copy(self, head: Head, column: Int32, index: int) -> None:
        """Starts the copies of a piece. Pairs past the end are replaced by others that exist."""
        scalars, ring, lane = self.planes.scalars, self.ring, ptx.thread_index() & 31
        query, key = (column, self.row) if self._transposed else (self.row, column)
        first_row, first_column = ring.corner(index)
        row, chunk = ring.piece.lane_chunk(lane)
        query = Int32(cutlass.min(query + (row + first_row), scalars.query_length - 1))
        key = Int32(cutlass.min(key + (chunk * CHUNK + first_column), scalars.bias_pitch - CHUNK))
        pitch = scalars.bias_pitch * 2
        first = self.operand.toint() + Int64(key) * 2
        for term in range(ring.terms):
            plane = Int64(self.planes.of_head(head) + scalars.bias_planes * term)
            source = first + plane * (Int64(scalars.query_length) * pitch) + Int64(query) * pitch
            ptx.copy_async(self.address + ring.piece.copy_offset(lane) + ring.offset(index, term), source)
