# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of pairs, a matrix that is added to the logits, by way of stages.

TMA loads tiles of it, from which ldmatrix reads the pairs of an accumulator.
"""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Float32, Int8, Int32, cute

from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.layout import crossed_lane, plain_lane
from jax_fastattn.kernels.device.tma import TmaOperand
from jax_fastattn.kernels.device.warp_scores import swizzled_offset
from jax_fastattn.kernels.features.bias.pairs import PairBias, total
from jax_fastattn.kernels.features.bias.planes import Planes
from jax_fastattn.kernels.features.places import Element, LoadedTile, ScoreTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.plan import LiveRange


@dataclass(frozen=True)
class StagedBias(PairBias):
    """Adds a matrix that TMA loads. A stage has the tile `[queries, keys]` of each term, one after the other.

    Attributes:
        terms: their number.
        dtype: the dtype of a term.
        operand: the terms, `[T, columns, 1, terms planes]`.
        held_tile: queries and keys of transposed tiles, if a lane's offset in them stays in a register; else None.
        offset: that offset, since `hold`.
        tile: that has been loaded.
        address: the address of its stage.
        lane: what the lane passes to ldmatrix for the first 16 columns of the accumulator, since `read`.
        registers: registers of the lane, by the 16 rows and the 16 columns that they belong to, since `read`.
    """

    terms: int
    dtype: str
    planes: Planes
    operand: TmaOperand
    held_tile: tuple[int, int] | None = None
    offset: Any = None
    tile: Any = None
    address: Any = None
    lane: Any = None
    registers: Any = None

    @classmethod
    def of_stages(
        cls,
        spec: KernelSpec,
        scalars: Scalars | Sizes,
        operand: TmaOperand | None,
        held_tile: tuple[int, int] | None = None,
    ) -> "StagedBias | None":
        """Returns the bias of a launch, given its terms; None if TMA loads none."""
        if operand is None:
            return None
        return cls(spec.bias_terms, spec.bias_storage, Planes(scalars, spec.group), operand, held_tile)

    def copy(self, tile: LoadedTile, address: Int32, barrier: cute.Pointer) -> None:
        """Starts the copies of a tile."""
        shape, plane = (tile.queries, tile.keys), self.planes.of_head(tile.head)
        for term in range(self.terms):
            start = address + term * _term_nbytes(*shape)
            target = cute.make_ptr(Int8, start, cute.AddressSpace.smem, assumed_align=1024)
            shared = wgmma.staged_tile(target, wgmma.OPERAND_DTYPE[self.dtype], shape, 1, shape[0] * shape[1])
            entry = plane + term * self.planes.scalars.bias_planes
            self.operand.copy_block(shared, (tile.query, tile.key), entry, barrier)

    def hold(self, key: Int32, live: LiveRange) -> "StagedBias":
        """Returns the feature with the lane's offset, if that stays in a register."""
        del key, live
        if self.held_tile is None:
            return self
        return replace(self, offset=_lane_offset(*self.held_tile, transposed=True))

    def load(self, tile: LoadedTile, address: Int32) -> "StagedBias":
        """Returns the feature with a tile in shared memory."""
        return replace(self, tile=tile, address=address)

    def read(self, tile: ScoreTile) -> "StagedBias":
        """Returns the feature for one pass over the scores of a tile."""
        return replace(self, registers={}, lane=self._lane_address(tile))

    def preload(self, tile: ScoreTile) -> "StagedBias":
        """Returns the feature with all that a pass reads in registers, before the pass begins."""
        terms, rows = range(self.terms), tile.n_blocks // 2
        registers = {block: [self._load_block(tile, block, term) for term in terms] for block in range(rows)}
        return replace(self, registers=registers)

    def value(self, at: Element) -> Float32:
        """Returns the bias of a pair, the sum of its terms."""
        block, half = divmod(at.column // 8, 2)
        if block not in self.registers:
            self.registers[block] = [self._load_block(at.tile, block, term) for term in range(self.terms)]
        words = [registers[2 * half + at.i] for registers in self.registers[block]]
        return total([ptx.unpack(word, dtype=ptx.MMA_DTYPE[self.dtype])[at.column % 2] for word in words])

    def _lane_address(self, tile: ScoreTile) -> Int32:
        """Returns the address that a lane passes to ldmatrix for the first 16 columns of the accumulator."""
        if self.offset is not None:
            return self.address + self.offset
        # It is read anew: a register for it would live through the loops.
        return self.address + _lane_offset(self.tile.queries, self.tile.keys, transposed=tile.transposed)

    def _load_block(self, tile: ScoreTile, block: int, term: int) -> list[Int32]:
        """Loads what a lane needs for 16 columns of the accumulator: for both of its rows, then 8 columns later."""
        queries, keys = self.tile.queries, self.tile.keys
        columns, start = wgmma.atom_columns(keys), term * _term_nbytes(queries, keys)
        if tile.transposed:
            # The swizzle repeats every 8 rows.
            address = self.lane + (start + block * (16 * 2 * columns))
        else:
            # Chunks of 16 bytes are swizzled: 16 columns are two of them.
            atom, step = divmod(block, columns // 16)
            address = (self.lane ^ (32 * step)) + (start + atom * (queries * 2 * columns))
        return ptx.ldmatrix(address, transpose=tile.transposed)


def _term_nbytes(queries: int, keys: int) -> int:
    """Returns the bytes of the tile of a term."""
    return 2 * queries * keys


def _lane_offset(queries: int, keys: int, *, transposed: bool) -> Int32:
    """Returns where in a tile a lane's address for ldmatrix lies, for the first 16 columns of the accumulator."""
    # Bit operations tell the compiler that nothing here is negative.
    thread = ptx.thread_index()
    warp, lane = thread >> 5 & (keys if transposed else queries) // 16 - 1, thread & 31
    if transposed:
        row, column = crossed_lane(lane)
        return swizzled_offset(row, warp, column // 8, queries, keys)
    row, column = plain_lane(lane)
    return swizzled_offset(warp * 16 + row, 0, column // 8, queries, keys)
