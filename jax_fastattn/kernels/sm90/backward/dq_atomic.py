# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The third warpgroup of a fused backward kernel: dQ = dS K, added to float32 sums; and who turns those into dq.

The two consumers hand it dS through shared memory, in two buffers by turns, and go on: neither the product nor the
additions hold them up. The sums lie in the order of wgmma's accumulators (`_sums`), so that every lane adds 16 bytes at
a time next to those of its neighbours. Query tile by query tile a counter says how many CTAs have still to add;
`StatisticsKernel` sets it. Warps that do nothing else count a tile once its additions are visible, which takes as long
as a product. The CTA that was the last one reads the sums back, scales and rounds them, and stores dq: no other
kernel passes over them. The same warps have zeroed sums before, for heads that are added to later: CTAs take tiles of
keys in order, so that who waits for zeros waits for CTAs that run, as do those of `StatisticsKernel.later`.

The last bits of these sums depend on the order of the additions, which varies; `dq_semaphore.py` has one order.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments import BackwardBuffers
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward import gradient
from jax_fastattn.kernels.sm90.backward.config import BLOCK, ROW_ALIGNMENT, SLOTS, BackwardMemory
from jax_fastattn.kernels.sm90.backward.row_schedule import tile_counter
from jax_fastattn.kernels.sm90.backward.shared import FusedShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


class Chunk(NamedTuple):
    """A part of a tile of dq: its block of 64 rows, and its first column."""

    row_block: int
    column: int


class TileRows(NamedTuple):
    """The first row of a tile of dq, and its place among all rows of all heads."""

    first: Int32
    place: Int64


class DqSum:
    """Emits the warpgroup's code.

    Args:
        spec: the compile key.
        memory: of the kernel, with its config.
        dtype: of the operands.
    """

    def __init__(self, spec: KernelSpec, memory: BackwardMemory, dtype: type):
        self.spec, self.memory, self.config, self.dtype = spec, memory, memory.config, dtype

    def start(
        self,
        shared: FusedShared,
        buffers: BackwardBuffers,
        thread: Int32,
        scale: Float32,
    ) -> SimpleNamespace:
        """What the third warpgroup keeps from one tile of keys to the next.

        Args:
            shared: tiles and barriers.
            buffers: of the launch: dq, its sums, and the counters.
            thread: index in the warpgroup.
            scale: factor on the sums.
        """
        mma = wgmma.product(self.dtype, self.memory.dq_columns, a_in_registers=False, b_transposed=True)
        lane_row, _ = accumulator_lane(thread % 32)
        warp = cute.arch.make_warp_uniform(thread // 32)
        return SimpleNamespace(
            shared=shared,
            mma=mma,
            dq=wgmma.accumulator(mma, (WARPGROUP_ROWS, self.memory.dq_columns)),
            dscore=wgmma.operand_a(mma, shared.dscore),
            key=wgmma.operand_b(mma, wgmma.transposed(shared.key_columns)),
            thread=thread,
            warp=warp,
            row=warp * 16 + lane_row,
            dq_address=buffers.dq.toint(),
            sums=buffers.dq_sum.toint(),
            arrivals=buffers.arrivals,
            scale=scale,
            # Query head and tile of the next one to add, and of the next one to finish; and the slots of both.
            added=wgmma.Uniform(Int32(0), Int32(0)),
            counted=wgmma.Uniform(Int32(0), Int32(0)),
            slot=wgmma.Uniform(Int32(0), Int32(0)),
            done=wgmma.Uniform(Int32(0), Int32(0)),
            turn=wgmma.Uniform(Int32(0)),
        )

    def prepare(self, work: SimpleNamespace, arrivals: cute.Pointer) -> None:
        """Waits for a head's zeros and statistics, before the producer loads a tile of its keys. Runs in one warp.

        Those of packed sequences are written before the kernel begins, see `StatisticsKernel.order`.
        """
        if self.spec.packed:
            return
        counter = self._zeroed(work, arrivals, work.head_index)

        def wait() -> None:
            ptx.wait_global(counter, self._zeroing_warps(work) + 1)
            # Bulk copies load statistics.
            cute.arch.fence_proxy("async.global")

        cutlass.if_generate(work.head_index >= work.ahead, wait)

    def run(self, state: SimpleNamespace, work: SimpleNamespace, phase: Int32) -> None:
        """Everything that the third warpgroup does for a tile of keys."""
        state.work = work
        for at in (state.added, state.counted):
            at[0], at[1] = work.first_head, work.visit.end - 1
        # Whoever gives K back has seen it: else a tile that nobody sees would be given back before the one before it.
        wgmma.wait(state.shared.key_full, phase)
        for uniform in (state.added, state.counted, state.slot, state.done, state.turn):
            uniform.settle()

        def step(i: Int32) -> None:
            cutlass.if_generate(i >= SLOTS, lambda: self._finish(state))
            self._add(state)
            wgmma.advance(state.slot, SLOTS)

        wgmma.loop(work.steps, step)
        wgmma.release(state.shared.keys_empty, state.thread % 32 == 31)
        wgmma.loop(Int32(cutlass.min(work.steps, SLOTS)), lambda _: self._finish(state))

    def _add(self, state: SimpleNamespace) -> None:
        """Adds dQ of the next tile to its sums."""
        shared, turn = state.shared, state.turn[0]
        buffer = turn % 2
        wgmma.wait(shared.dscore_full + buffer, turn // 2 % 2)
        chunks = self._chunks()
        for index, chunk in enumerate(chunks):
            self._start(state, buffer, chunk)
            warpgroup.wait_group(0)
            if index == len(chunks) - 1:
                wgmma.release(shared.dscore_empty + buffer)
            address = self._sums(state, state.added, index) + state.thread % 32 * 16
            for n in range(self.memory.dq_columns // 8):
                ptx.add_global_chunk(address + 512 * n, [state.dq[4 * n + k] for k in range(4)])
        wgmma.release(shared.added + state.slot[0], state.thread % 32 == 31)
        self._advance(state.work, state.added)
        state.turn[0] = turn + 1

    def _counter(self, work: SimpleNamespace, arrivals: cute.Pointer, head: Int64, tile: Int32) -> Int64:
        """Address of the counter of a tile of a query head; of tile -1 that of `_zeroed`."""
        return arrivals.toint() + tile_counter(work.queries, head, tile, self.config.queries) * 4

    def _advance(self, work: SimpleNamespace, at: wgmma.Uniform) -> None:
        """Goes to the next tile: all visible ones of one head, the last first, then those of the next head."""
        ends = at[1] == work.visit.begin
        at[0], at[1] = at[0] + ptx.where(ends, Int32(1), Int32(0)), ptx.where(ends, work.visit.end, at[1]) - 1

    def _chunks(self) -> list[Chunk]:
        """The parts of a tile that are computed one after the other."""
        rows, columns = self.config.queries // BLOCK, self.memory.head_dim
        return [Chunk(row, column) for row in range(rows) for column in range(0, columns, self.memory.dq_columns)]

    def _start(self, state: SimpleNamespace, buffer: Int32, chunk: Chunk, accumulate: bool = False) -> None:
        """Starts dS K of a part of a tile."""
        tall, wide = self.config.queries // BLOCK, self.memory.head_dim // self.memory.dq_columns
        warpgroup.fence()
        for half in range(2):
            for k in range(BLOCK // 16):
                mma = cute.make_mma_atom(state.mma.op)
                mma.set(warpgroup.Field.ACCUMULATE, accumulate or half + k > 0)
                a = state.dscore[None, None, k, (buffer * 2 + half) * tall + chunk.row_block]
                b = state.key[None, None, k, half * wide + chunk.column // self.memory.dq_columns]
                cute.gemm(mma, state.dq, a, b, state.dq)
        warpgroup.commit_group()

    def _sums(self, state: SimpleNamespace, at: wgmma.Uniform, index: int) -> Int64:
        """Address of the warp's first sums of a part of a tile."""
        work, columns = state.work, self.memory.head_dim
        rows = work.queries.padded_row(work.queries.head(work.num_heads, at[0]), ROW_ALIGNMENT)
        rows = rows + work.queries.padded(at[1] * self.config.queries, ROW_ALIGNMENT)
        part_nbytes = 4 * BLOCK * self.memory.dq_columns
        return state.sums + rows * (4 * columns) + (index * part_nbytes + state.warp * (part_nbytes // 4))

    # Zeros, some heads ahead.

    def _zeroing_warps(self, work: SimpleNamespace) -> Int32:
        """Warps that zero the sums of a key/value head."""
        return work.key_tiles * SLOTS

    def _zeroed(self, work: SimpleNamespace, arrivals: cute.Pointer, head_index: Int32) -> Int64:
        """Address of the counter of the warps that have zeroed the sums of a key/value head: its first query head's.

        Whoever has written the statistics of the head counts there too.
        """
        return self._counter(work, arrivals, Int64(head_index) * self.spec.group, Int32(-1))

    def zero(self, work: SimpleNamespace, buffers: BackwardBuffers, slot: Int32) -> None:
        """Zeroes a share of the sums of a head that other CTAs add to later. Runs in one warp.

        Those of the first heads, and of all packed sequences, are zeroed by `StatisticsKernel`; the others here, where
        nothing waits for memory.
        """
        if self.spec.packed:
            return
        nbytes = 512
        target = work.head_index + work.ahead
        warps = self._zeroing_warps(work)
        index = work.tile * SLOTS + slot
        count = work.queries.padded_rows(ROW_ALIGNMENT) // ROW_ALIGNMENT
        count = count * (ROW_ALIGNMENT * 4 * self.spec.group * self.memory.head_dim // nbytes)
        first = Int64(target) * count * nbytes + index * nbytes + ptx.thread_index() % 32 * 16

        def clear(i: Int32) -> None:
            address = buffers.dq_sum.toint() + first + Int64(warps) * nbytes * i
            ptx.store_global_chunk(address, [Int32(0)] * 4)

        def run() -> None:
            wgmma.loop((count - index + (warps - 1)) // warps, clear)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ptx.fetch_add_global(self._zeroed(work, buffers.arrivals, target), Int32(1), "release")

        cutlass.if_generate(target < work.all_heads, run)

    # The last CTA that adds to a tile.

    def count(
        self, shared: FusedShared, work: SimpleNamespace, arrivals: cute.Pointer, slot: Int32, at: wgmma.Uniform
    ) -> None:
        """Counts the tiles of one slot. Runs in one warp.

        `at` is the slot of the first tile of these keys, and the parity of what this warp has counted.
        """
        visited = work.visit.end - work.visit.begin
        first = (slot - at[0] + SLOTS) % SLOTS

        def step(lap: Int32) -> None:
            i = first + SLOTS * lap
            head = work.queries.head(work.num_heads, work.first_head) + i // visited
            tile = work.visit.end - 1 - i % visited
            self._count(shared, work, self._counter(work, arrivals, head, tile), tile, slot, added)

        def added() -> None:
            wgmma.wait(shared.added + slot, at[1])
            at[1] = at[1] ^ 1

        wgmma.loop((work.steps - first + (SLOTS - 1)) // SLOTS, step)
        at[0] = (at[0] + work.steps) % SLOTS

    def _count(
        self,
        shared: FusedShared,
        work: SimpleNamespace,
        counter: Int64,
        tile: Int32,
        slot: Int32,
        added: Callable[[], None],
    ) -> None:
        """Counts a tile, and tells the third warpgroup what the counter was.

        The third warpgroup has arrived since it added; the fence makes what it did visible before the count.

        Args:
            shared: tiles and barriers.
            work: the tile of keys.
            counter: address of the tile's counter.
            tile: of dq.
            slot: its slot.
            added: waits until the third warpgroup has added to it.
        """
        del work, tile
        added()
        with cute.arch.elect_one():
            left = ptx.fetch_add_global(counter, Int32(-1), "acq_rel")
            ptx.store_shared(self._flag(shared, slot), left)
            cute.arch.mbarrier_arrive(shared.counted + slot)

    def _flag(self, shared: FusedShared, slot: Int32) -> Int32:
        """Where a slot's counter is put."""
        return shared.address + self.memory.flag_start + slot * 4

    def _finish(self, state: SimpleNamespace) -> None:
        """Empties the longest filled slot: stores dq of its tile, if no other CTA has still to add there."""
        work, slot = state.work, state.done[0]
        wgmma.wait(state.shared.counted + slot, state.done[1])
        left = cute.arch.make_warp_uniform(ptx.load_shared(self._flag(state.shared, slot)))
        cutlass.if_generate(left == 1, lambda: self._store(state))
        self._advance(work, state.counted)
        wgmma.advance(state.done, SLOTS)

    def _store(self, state: SimpleNamespace) -> None:
        """Stores dq of the tile that has been counted, from its sums."""
        rows = self._rows(state, state.counted)
        for index, chunk in enumerate(self._chunks()):
            address = self._sums(state, state.counted, index) + state.thread % 32 * 16
            self._load(state, [address + 512 * n for n in range(self.memory.dq_columns // 8)])
            self._store_part(state, rows, chunk)

    def _load(self, state: SimpleNamespace, places: list[Int64]) -> None:
        """Loads sums of a part of a tile into the accumulator."""
        for n, place in enumerate(places):
            for k, x in enumerate(ptx.load_global_ordered(place)):
                state.dq[4 * n + k] = x

    def _rows(self, state: SimpleNamespace, at: wgmma.Uniform) -> TileRows:
        """Where the rows of a tile of dq are."""
        work, row = state.work, at[1] * self.config.queries
        return TileRows(row, work.queries.row_head(row, work.num_heads, at[0]))

    def _store_part(self, state: SimpleNamespace, rows: TileRows, chunk: Chunk) -> None:
        """Stores dq of a part of a tile, whose `_rows` these are, from the accumulator."""
        work, spec = state.work, self.spec
        gradient.store_rows(
            state.dq,
            min(self.memory.dq_columns, spec.head_dim - chunk.column),
            state.dq_address + rows.place * (2 * spec.head_dim) + 2 * chunk.column,
            Int64(work.num_heads) * (2 * spec.head_dim),
            row=state.row + chunk.row_block * BLOCK,
            quad_lane=state.thread % 4,
            live=copies.Rows(None, work.bounds["query_end"] - rows.first),
            stored_rows=work.queries.length - rows.first,
            mma_dtype=ptx.MMA_DTYPE[spec.dtype],
            factor=state.scale,
        )
