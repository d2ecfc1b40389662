# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the warps that add up dq keep from tile to tile, for any order of CTAs (`dq_atomic.py`, `dq_semaphore.py`).

All of it is frozen: what changes in loops lies in registers of `wgmma.Uniform` and of accumulators.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import result_words
from jax_fastattn.kernels.device.row_store import RowStore, strided
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import BLOCK, ROW_ALIGNMENT
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sums.units import over_ds


class Chunk(NamedTuple):
    """Describes a part of a tile of dq.

    Attributes:
        row_block: its block of 64 rows.
        column: its first column.
    """

    row_block: int
    column: int


class DqPlace(NamedTuple):
    """Describes a tile of dq of a query head.

    Attributes:
        head: query head of its batch entry.
        tile: its index within its sequence.
        entry: what the visit knows of it, see `Visit.entry`.
    """

    head: Int32
    tile: Int32
    entry: Int32


class TileRows(NamedTuple):
    """Says where the rows of a tile of dq are.

    Attributes:
        first: its first row, counted from the first one of the sequence.
        place: index of that row and the head in an array `[batch, rows, heads]`.
    """

    first: Int32
    place: Int64


@dataclass(frozen=True, eq=False)
class TileCursor:
    """Holds a tile of dq that loops carry, the same in all lanes.

    Attributes:
        position: the query head of its batch entry, and the position of the tile in the visit.
        entry: the tile's entry in its list, which is loaded as soon as the position is known: a load waits for the
            additions before it. None without lists, or where the entry is rarely needed.
        together: query heads that visit a tile before the next one is visited, see `BackwardConfig.interleaves_heads`.
    """

    position: wgmma.Uniform
    entry: wgmma.Uniform | None
    together: int

    @classmethod
    def start(cls, together: int, *, loads_early: bool = False) -> "TileCursor":
        """Returns a cursor with registers of its own; `move_to_first` gives it a tile."""
        entry = wgmma.Uniform(Int32(0)) if loads_early else None
        return cls(wgmma.Uniform(Int32(0), Int32(0)), entry, together)

    def place(self, work: KeyTile) -> DqPlace:
        """Returns the tile."""
        head, position = self.position[0], self.position[1]
        if work.listed is None:
            return DqPlace(head, work.visit.tile(position), position)
        entry = work.visit.entry(position) if self.entry is None else self.entry[0]
        entry = cute.arch.make_warp_uniform(entry)
        return DqPlace(head, work.visit.tile_of(entry), entry)

    def move_to_first(self, work: KeyTile) -> None:
        """Goes to the first tile to visit for a tile of keys: the last visible one of the first head."""
        self.position[0], self.position[1] = work.first_head, work.visit.end - 1
        self._load(work)

    def advance(self, work: KeyTile) -> None:
        """Goes to the next tile: all visible ones of one head, the last first, then the tiles of the next head.

        Interleaved heads visit the last tile, then the one before it.
        """
        at = self.position
        if self.together > 1:
            ends = at[0] + 1 == work.first_head + self.together
            at[0], at[1] = ptx.where(ends, work.first_head, at[0] + 1), at[1] - ptx.where(ends, Int32(1), Int32(0))
        else:
            ends = at[1] == work.visit.begin
            at[0], at[1] = at[0] + ptx.where(ends, Int32(1), Int32(0)), ptx.where(ends, work.visit.end, at[1]) - 1
        self._load(work)

    def _load(self, work: KeyTile) -> None:
        if self.entry is not None:
            self.entry[0] = work.visit.entry(self.position[1])


@dataclass(frozen=True, eq=False)
class CountingWarp:
    """Describes a warp that counts the tiles of one stage.

    Attributes:
        stage: the stage; negative in a warp that does not count.
        position: the stage of the first tile of the next tile of keys, and the parity of the tiles counted so far.
    """

    stage: Int32
    position: wgmma.Uniform

    @classmethod
    def start(cls, stage: Int32) -> "CountingWarp":
        """Returns the counting warp of a stage before its first tile."""
        return cls(stage, wgmma.Uniform(Int32(0), Int32(0)))

    def wait_for_additions(self, shared: BackwardShared) -> None:
        """Waits until the third warpgroup has added to the next tile of the stage."""
        wgmma.wait(shared.added + self.stage, self.position[1])
        self.position[1] = self.position[1] ^ 1


@dataclass(frozen=True, eq=False)
class DqWarpgroup:
    """Holds what the third warpgroup keeps from one tile of keys to the next, and its product dQ = dS K.

    dq_accum is float32 in the order of wgmma's accumulators: every lane adds 16 bytes at a time next to the bytes of
    its neighbors.

    Attributes:
        mma: the product dS K.
        dq: accumulator `[64, columns]` of a part of a tile.
        dscore: descriptors of both buffers of dS.
        key: descriptors of K as right factor, of all parts of its columns.
        thread: index of this thread in the warpgroup.
        warp: index of its warp.
        row: the lane's first row of the accumulator; the other one is 8 rows below.
        buffers: the arrays of the launch.
        dq_address: address of dq.
        dq_accum: address of the sums.
        scale: factor on the sums.
        added: the next tile to add to.
        counted: the next tile to finish.
        stage: stage of the tile to add to, and the parity of its lap.
        done: stage of the tile to finish, and the parity of its lap.
        turn: tiles added to so far; says which buffer of dS is next, and its phase.
    """

    spec: KernelSpec
    shared: BackwardShared
    mma: cute.TiledMma
    dq: cute.Tensor
    dscore: cute.Tensor
    key: cute.Tensor
    thread: Int32
    warp: Int32
    row: Int32
    buffers: Buffers
    dq_address: Int64
    dq_accum: Int64
    scale: Float32
    added: TileCursor
    counted: TileCursor
    stage: wgmma.Uniform
    done: wgmma.Uniform
    turn: wgmma.Uniform

    @classmethod
    def start(
        cls, spec: KernelSpec, shared: BackwardShared, buffers: Buffers, thread: Int32, scale: Float32
    ) -> "DqWarpgroup":
        """Returns the warpgroup with its registers, before its first tile of keys.

        Args:
            buffers: hold dq and its sums.
            thread: index in the warpgroup.
            scale: factor on the sums.
        """
        columns, together = shared.memory.dq_columns, shared.memory.config.together(spec.group)
        mma = wgmma.product(shared.key[0].element_type, columns, a_in_registers=False, b_transposed=True)
        lane_row, _ = accumulator_lane(thread % 32)
        warp = cute.arch.make_warp_uniform(thread // 32)
        return cls(
            spec=spec,
            shared=shared,
            mma=mma,
            dq=wgmma.accumulator(mma, (WARPGROUP_ROWS, columns)),
            dscore=wgmma.operand_a(mma, shared.dscore),
            key=wgmma.operand_b(mma, wgmma.transposed(shared.key_columns)),
            thread=thread,
            warp=warp,
            row=warp * 16 + lane_row,
            buffers=buffers,
            dq_address=buffers.dq.toint(),
            dq_accum=buffers.dq_accum.toint(),
            scale=scale,
            added=TileCursor.start(together, loads_early=spec.listed),
            counted=TileCursor.start(together),
            stage=wgmma.Uniform(Int32(0), Int32(0)),
            done=wgmma.Uniform(Int32(0), Int32(0)),
            turn=wgmma.Uniform(Int32(0)),
        )

    @property
    def queries(self) -> int:
        """Returns how many rows a tile of dq has."""
        return self.shared.memory.config.queries

    def chunks(self) -> list[Chunk]:
        """Returns the parts of a tile that are computed one after the other."""
        rows, columns, step = self.queries // BLOCK, self.shared.memory.head_dim, self.shared.memory.dq_columns
        return [Chunk(row, column) for row in range(rows) for column in range(0, columns, step)]

    def multiply(self, buffer: Int32, chunk: Chunk, accumulate: bool = False) -> None:
        """Starts dS K of a part of a tile, given the buffer of dS."""
        memory = self.shared.memory
        row_blocks, column_blocks = self.queries // BLOCK, memory.head_dim // memory.dq_columns
        steps = (
            (
                self.mma,
                self.dscore[None, None, k, (buffer * 2 + half) * row_blocks + chunk.row_block],
                self.key[None, None, k, half * column_blocks + chunk.column // memory.dq_columns],
            )
            for half in range(2)
            for k in range(BLOCK // 16)
        )
        wgmma.gemm_steps(self.dq, steps, accumulate=accumulate)

    def lane_address(self, work: KeyTile, at: DqPlace, index: int) -> Int64:
        """Returns the address of the lane's first sums of a part of a tile; the next ones are 512 bytes apart each."""
        memory = self.shared.memory
        rows = work.queries.padded_row(work.queries.head(work.num_heads, at.head), ROW_ALIGNMENT)
        rows = rows + work.queries.padded(at.tile * self.queries, ROW_ALIGNMENT)
        part_nbytes = 4 * BLOCK * memory.dq_columns
        first = self.dq_accum + rows * (4 * memory.head_dim) + (index * part_nbytes + self.warp * (part_nbytes // 4))
        return first + self.thread % 32 * 16

    def places(self, address: Int64) -> list[Int64]:
        """Returns the addresses of all of a lane's sums of a part of a tile, given the address from `lane_address`."""
        return [address + 512 * n for n in range(self.shared.memory.dq_columns // 8)]

    def load(self, places: list[Int64]) -> None:
        """Loads sums of a part of a tile into the accumulator."""
        for n, place in enumerate(places):
            for k, x in enumerate(ptx.load_global_ordered(place)):
                self.dq[4 * n + k] = x

    def rows(self, work: KeyTile, at: DqPlace) -> TileRows:
        """Returns where the rows of a tile of dq are."""
        row = at.tile * self.queries
        return TileRows(row, work.queries.row_head(row, work.num_heads, at.head))

    def store(self, work: KeyTile, rows: TileRows, chunk: Chunk) -> None:
        """Stores dq of a part of a tile, whose `rows` these are, from the accumulator."""
        spec, nbytes = self.spec, self.spec.result_nbytes
        factor = over_ds(work.units(spec, self.buffers), self.scale)
        RowStore(
            address=strided(
                self.dq_address + rows.place * (nbytes * spec.head_dim) + nbytes * chunk.column,
                Int64(work.num_heads) * (nbytes * spec.head_dim),
            ),
            columns=min(self.shared.memory.dq_columns, spec.head_dim - chunk.column),
            row=self.row + chunk.row_block * BLOCK,
            end=work.queries.length - rows.first,
            quad_lane=self.thread % 4,
            words=result_words(spec),
        ).store_live(self.dq, copies.Rows(None, work.bounds.query_end - rows.first), factor)
