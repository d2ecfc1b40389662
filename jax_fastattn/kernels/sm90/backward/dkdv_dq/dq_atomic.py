# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`DqReduce` by atomic additions in any order: dQ is added to float32 sums, and the last CTA to add stores dq.

The two consumers hand dS to the third warpgroup through shared memory, in two buffers by turns, and go on: neither the
product nor the additions stall them. The sums lie in the order of wgmma's accumulators (`DqWarpgroup`). Each query tile
has a counter of the CTAs that have still to add to it; `PreprocessKernel` sets it. Warps that do nothing else count a
tile once its additions are visible, which takes as long as a product. The last CTA to add reads the sums back, scales
and rounds them, and stores dq: no other kernel passes over them. The same warps zero sums of heads that are added to
later. CTAs fetch tiles of keys in order, so a CTA that waits for zeros waits for CTAs that run, as the CTAs of
`PreprocessKernel.background` do.

The last bits of these sums depend on the order of the additions, which varies; `dq_semaphore.py` has one order.
"""

from dataclasses import dataclass
from typing import final

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.sm90.backward.config import DQ_TILES_IN_FLIGHT, ROW_ALIGNMENT, BackwardMemory
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_reduce import DqCounters
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_state import CountingWarp, DqWarpgroup
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared


@final
@dataclass(frozen=True)
class DqAtomic:
    """Adds to sums that start at zero; see `DqReduce` for what each method answers.

    Attributes:
        counters: how many CTAs have still to add to a tile, and how many warps have zeroed sums of a head.
        memory: the kernel's shared memory, with its config.
    """

    counters: DqCounters
    memory: BackwardMemory

    def prepare(self, work: KeyTile, buffers: Buffers, stage: Int32) -> None:
        """Zeroes a share of the sums of a head that other CTAs add to later. Runs in one warp.

        `PreprocessKernel` zeroes the sums of the first heads, and of all packed sequences; the others are zeroed here,
        where nothing waits for memory.
        """
        spec = self.counters.spec
        if spec.packed:
            return
        nbytes = 512
        target = work.place + work.order.prefetch_distance
        warps = work.key_tiles * DQ_TILES_IN_FLIGHT
        index = work.tile * DQ_TILES_IN_FLIGHT + stage
        count = work.queries.padded_rows(ROW_ALIGNMENT) // ROW_ALIGNMENT
        count = count * (ROW_ALIGNMENT * 4 * spec.group * self.memory.head_dim // nbytes)
        first = Int64(work.order.head_at(target)) * count * nbytes + index * nbytes + ptx.thread_index() % 32 * 16

        def clear(i: Int32) -> None:
            address = buffers.dq_accum.toint() + first + Int64(warps) * nbytes * i
            ptx.store_global_chunk(address, [Int32(0)] * 4)

        def run() -> None:
            wgmma.loop((count - index + (warps - 1)) // warps, clear)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ptx.fetch_add_global(self.counters.of_head(buffers.head_ready, target), Int32(1), "release")

        cutlass.if_generate(target < work.order.heads, run)

    def wait(self, work: KeyTile, head_ready: cute.Pointer) -> None:
        """Waits for a head's zeros and statistics, before the loader loads a tile of its keys. Runs in one warp.

        For packed sequences they are written before the kernel begins, see `PreprocessKernel.order`.
        """
        if not self.counters.spec.packed:
            self.counters.wait_for_head(work, head_ready, zeroing_warps=DQ_TILES_IN_FLIGHT)

    def accumulate(self, state: DqWarpgroup, work: KeyTile, phase: Int32) -> None:
        """Adds dQ of all query tiles, and finishes each when its stage is needed again."""
        for cursor in (state.added, state.counted):
            cursor.move_to_first(work)
        # A warp gives back K that it has seen; else K of a tile that no query sees would be given back too early.
        wgmma.wait(state.shared.key_full, phase)
        for uniform in (state.added.position, state.counted.position, state.stage, state.done, state.turn):
            uniform.make_uniform()

        def step(i: Int32) -> None:
            cutlass.if_generate(i >= DQ_TILES_IN_FLIGHT, lambda: self._finish_tile(state, work))
            self._add(state, work)
            wgmma.advance(state.stage, DQ_TILES_IN_FLIGHT)

        wgmma.loop(work.steps, step)
        wgmma.release(state.shared.keys_empty, state.thread % 32 == 31)

    def _add(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Adds dQ of the next tile to its sums."""
        shared, turn, at = state.shared, state.turn[0], state.added.place(work)
        buffer = turn % 2
        wgmma.wait(shared.dscore_full + buffer, turn // 2 % 2)
        chunks = state.chunks()
        for index, chunk in enumerate(chunks):
            state.multiply(buffer, chunk)
            warpgroup.wait_group(0)
            if index == len(chunks) - 1:
                wgmma.release(shared.dscore_empty + buffer)
            address = state.lane_address(work, at, index)
            for n in range(self.memory.dq_columns // 8):
                ptx.add_global_chunk(address + 512 * n, [state.dq[4 * n + k] for k in range(4)])
        wgmma.release(shared.added + state.stage[0], state.thread % 32 == 31)
        state.added.advance(work)
        state.turn[0] = turn + 1

    def count(self, shared: BackwardShared, work: KeyTile, dq_semaphore: cute.Pointer, warp: CountingWarp) -> None:
        """Counts the tiles of one stage, and tells the third warpgroup what each counter was. Runs in one warp.

        The third warpgroup has arrived since it added; the fence makes what it did visible before the count.
        """

        def visit(_: Int32, counter: Int64) -> None:
            warp.wait_for_additions(shared)
            with cute.arch.elect_one():
                left = ptx.fetch_add_global(counter, Int32(-1), "acq_rel")
                ptx.store_shared(self._flag(shared, warp.stage), left)
                cute.arch.mbarrier_arrive(shared.counted + warp.stage)

        self.counters.each_of_stage(work, dq_semaphore, warp, visit)

    def finish(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Finishes the tiles that are still in flight."""
        wgmma.loop(Int32(cutlass.min(work.steps, DQ_TILES_IN_FLIGHT)), lambda _: self._finish_tile(state, work))

    def _finish_tile(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Empties the longest filled stage: stores dq of its tile, if no other CTA has still to add there."""
        stage = state.done[0]
        wgmma.wait(state.shared.counted + stage, state.done[1])
        left = cute.arch.make_warp_uniform(ptx.load_shared(self._flag(state.shared, stage)))
        cutlass.if_generate(left == 1, lambda: self._store(state, work))
        state.counted.advance(work)
        wgmma.advance(state.done, DQ_TILES_IN_FLIGHT)

    def _store(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Stores dq of the tile that has been counted, from its sums."""
        at = state.counted.place(work)
        rows = state.rows(work, at)
        for index, chunk in enumerate(state.chunks()):
            state.load(state.places(state.lane_address(work, at, index)))
            state.store(work, rows, chunk)

    def _flag(self, shared: BackwardShared, stage: Int32) -> Int32:
        """Returns the address of the word in which the third warpgroup finds a stage's counter."""
        return shared.regions.stage("left", stage)
