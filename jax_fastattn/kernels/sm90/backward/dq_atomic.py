# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The third warpgroup of a fused backward kernel: dQ = dS K, added to float32 sums, and their conversion to dq.

The two consumers hand it dS through shared memory, in two buffers by turns, and go on: neither the product nor the
additions hold them up. The sums lie in the order of wgmma's accumulators (`_sums`), so that every lane adds 16 bytes at
a time next to those of its neighbors. Each query tile has a counter of the CTAs that have still to add to it;
`StatisticsKernel` sets it. Warps that do nothing else count a tile once its additions are visible, which takes as long
as a product. The last CTA to add reads the sums back, scales and rounds them, and stores dq: no other kernel passes
over them. The same warps zero sums of heads that are added to later. CTAs take tiles of keys in order, so a CTA that
waits for zeros waits for CTAs that run, as those of `StatisticsKernel.later` do.

The last bits of these sums depend on the order of the additions, which varies; `dq_semaphore.py` has one order.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments import BackwardBuffers
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward import gradient
from jax_fastattn.kernels.sm90.backward.config import BLOCK, ROW_ALIGNMENT, SLOTS, BackwardMemory
from jax_fastattn.kernels.sm90.backward.dq_state import Chunk, CountingWarp, DqWarpgroup, TileCursor, TileRows
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.row_schedule import tile_counter
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


class DqSum:
    """Emits the warpgroup's code.

    Args:
        spec: the compile key.
        memory: of the kernel, with its config.
        dtype: of the operands.
    """

    def __init__(self, spec: KernelSpec, memory: BackwardMemory, dtype: type):
        self.spec, self.memory, self.config, self.dtype = spec, memory, memory.config, dtype

    def start(self, shared: BackwardShared, buffers: BackwardBuffers, thread: Int32, scale: Float32) -> DqWarpgroup:
        """Returns what the third warpgroup keeps from one tile of keys to the next.

        Args:
            shared: tiles and barriers.
            buffers: of the launch: dq, its sums, and the counters.
            thread: index in the warpgroup.
            scale: factor on the sums.
        """
        mma = wgmma.product(self.dtype, self.memory.dq_columns, a_in_registers=False, b_transposed=True)
        lane_row, _ = accumulator_lane(thread % 32)
        warp = cute.arch.make_warp_uniform(thread // 32)
        return DqWarpgroup(
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
            scale=scale,
            added=TileCursor.start(),
            counted=TileCursor.start(),
            slot=wgmma.Uniform(Int32(0), Int32(0)),
            done=wgmma.Uniform(Int32(0), Int32(0)),
            turn=wgmma.Uniform(Int32(0)),
        )

    def prepare(self, work: KeyTile, arrivals: cute.Pointer) -> None:
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

    def run(self, state: DqWarpgroup, work: KeyTile, phase: Int32) -> None:
        """Does everything that the third warpgroup does for a tile of keys."""
        for cursor in (state.added, state.counted):
            cursor.move_to_first(work)
        # A warp gives back K that it has seen; else K of a tile that no query sees would be given back too early.
        wgmma.wait(state.shared.key_full, phase)
        for uniform in (state.added.position, state.counted.position, state.slot, state.done, state.turn):
            uniform.settle()

        def step(i: Int32) -> None:
            cutlass.if_generate(i >= SLOTS, lambda: self._finish(state, work))
            self._add(state, work)
            wgmma.advance(state.slot, SLOTS)

        wgmma.loop(work.steps, step)
        wgmma.release(state.shared.keys_empty, state.thread % 32 == 31)
        wgmma.loop(Int32(cutlass.min(work.steps, SLOTS)), lambda _: self._finish(state, work))

    def _add(self, state: DqWarpgroup, work: KeyTile) -> None:
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
            address = self._sums(state, work, state.added, index) + state.thread % 32 * 16
            for n in range(self.memory.dq_columns // 8):
                ptx.add_global_chunk(address + 512 * n, [state.dq[4 * n + k] for k in range(4)])
        wgmma.release(shared.added + state.slot[0], state.thread % 32 == 31)
        state.added.advance(work)
        state.turn[0] = turn + 1

    def _counter(self, work: KeyTile, arrivals: cute.Pointer, head: Int64, tile: Int32) -> Int64:
        """Returns the address of the counter of a tile of a query head; of tile -1 that of `_zeroed`."""
        return arrivals.toint() + tile_counter(work.queries, head, tile, self.config.queries) * 4

    def _chunks(self) -> list[Chunk]:
        """Returns the parts of a tile that are computed one after the other."""
        rows, columns = self.config.queries // BLOCK, self.memory.head_dim
        return [Chunk(row, column) for row in range(rows) for column in range(0, columns, self.memory.dq_columns)]

    def _start(self, state: DqWarpgroup, buffer: Int32, chunk: Chunk, accumulate: bool = False) -> None:
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

    def _sums(self, state: DqWarpgroup, work: KeyTile, at: TileCursor, index: int) -> Int64:
        """Returns the address of the warp's first sums of a part of a tile."""
        columns = self.memory.head_dim
        rows = work.queries.padded_row(work.queries.head(work.num_heads, at.head), ROW_ALIGNMENT)
        rows = rows + work.queries.padded(at.tile(work) * self.config.queries, ROW_ALIGNMENT)
        part_nbytes = 4 * BLOCK * self.memory.dq_columns
        return state.sums + rows * (4 * columns) + (index * part_nbytes + state.warp * (part_nbytes // 4))

    # Zeros, some heads ahead.

    def _zeroing_warps(self, work: KeyTile) -> Int32:
        """Returns how many warps zero the sums of a key/value head."""
        return work.key_tiles * SLOTS

    def _zeroed(self, work: KeyTile, arrivals: cute.Pointer, head_index: Int32) -> Int64:
        """Returns the address of the counter of the warps that have zeroed the sums of a key/value head.

        It is that of its first query head. `StatisticsKernel.later` counts there too, once it has written statistics.
        """
        return self._counter(work, arrivals, Int64(head_index) * self.spec.group, Int32(-1))

    def zero(self, work: KeyTile, buffers: BackwardBuffers, slot: Int32) -> None:
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

    def count(self, shared: BackwardShared, work: KeyTile, arrivals: cute.Pointer, warp: CountingWarp) -> None:
        """Counts the tiles of one slot. Runs in one warp."""
        visited, at = work.visit.end - work.visit.begin, warp.position
        first = (warp.slot - at[0] + SLOTS) % SLOTS

        def step(lap: Int32) -> None:
            i = first + SLOTS * lap
            head = work.queries.head(work.num_heads, work.first_head) + i // visited
            tile = work.visit.tile(work.visit.end - 1 - i % visited)
            self._count(shared, work, self._counter(work, arrivals, head, tile), tile, warp)

        wgmma.loop((work.steps - first + (SLOTS - 1)) // SLOTS, step)
        at[0] = (at[0] + work.steps) % SLOTS

    def _count(self, shared: BackwardShared, work: KeyTile, counter: Int64, tile: Int32, warp: CountingWarp) -> None:
        """Counts a tile, and tells the third warpgroup what the counter was.

        The third warpgroup has arrived since it added; the fence makes what it did visible before the count.

        Args:
            shared: tiles and barriers.
            work: the tile of keys.
            counter: address of the tile's counter.
            tile: of dq.
            warp: the one that counts.
        """
        del work, tile
        warp.wait_for_sums(shared)
        with cute.arch.elect_one():
            left = ptx.fetch_add_global(counter, Int32(-1), "acq_rel")
            ptx.store_shared(self._flag(shared, warp.slot), left)
            cute.arch.mbarrier_arrive(shared.counted + warp.slot)

    def _flag(self, shared: BackwardShared, slot: Int32) -> Int32:
        """Returns the address of the word in which the third warpgroup finds a slot's counter."""
        return shared.regions.stage("left", slot)

    def _finish(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Empties the longest filled slot: stores dq of its tile, if no other CTA has still to add there."""
        slot = state.done[0]
        wgmma.wait(state.shared.counted + slot, state.done[1])
        left = cute.arch.make_warp_uniform(ptx.load_shared(self._flag(state.shared, slot)))
        cutlass.if_generate(left == 1, lambda: self._store(state, work))
        state.counted.advance(work)
        wgmma.advance(state.done, SLOTS)

    def _store(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Stores dq of the tile that has been counted, from its sums."""
        rows = self._rows(work, state.counted)
        for index, chunk in enumerate(self._chunks()):
            address = self._sums(state, work, state.counted, index) + state.thread % 32 * 16
            self._load(state, [address + 512 * n for n in range(self.memory.dq_columns // 8)])
            self._store_part(state, work, rows, chunk)

    def _load(self, state: DqWarpgroup, places: list[Int64]) -> None:
        """Loads sums of a part of a tile into the accumulator."""
        for n, place in enumerate(places):
            for k, x in enumerate(ptx.load_global_ordered(place)):
                state.dq[4 * n + k] = x

    def _rows(self, work: KeyTile, at: TileCursor) -> TileRows:
        """Returns where the rows of a tile of dq are."""
        row = at.tile(work) * self.config.queries
        return TileRows(row, work.queries.row_head(row, work.num_heads, at.head))

    def _store_part(self, state: DqWarpgroup, work: KeyTile, rows: TileRows, chunk: Chunk) -> None:
        """Stores dq of a part of a tile, whose `_rows` these are, from the accumulator."""
        spec = self.spec
        gradient.store_rows(
            state.dq,
            min(self.memory.dq_columns, spec.head_dim - chunk.column),
            state.dq_address + rows.place * (2 * spec.head_dim) + 2 * chunk.column,
            Int64(work.num_heads) * (2 * spec.head_dim),
            row=state.row + chunk.row_block * BLOCK,
            quad_lane=state.thread % 4,
            live=copies.Rows(None, work.bounds.query_end - rows.first),
            stored_rows=work.queries.length - rows.first,
            mma_dtype=ptx.MMA_DTYPE[spec.dtype],
            factor=state.scale,
        )
