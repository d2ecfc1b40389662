# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`DqReduce` in semaphore order: sums have one order, and dq has the same bits in every run.

The counter of a tile of dq says how many tiles of keys have added to it. The first one that the tile sees stores sums,
others add to them, and the last one loads them into the product's accumulator, and stores dq from there. So there are
no zeros, nor any sums of query tiles that see one tile of keys. Warps that do nothing else wait for their CTA's turns,
ahead of the third warpgroup, and count its additions once they are visible.

A turn always comes, for any length and any number of heads: it waits for earlier tiles of keys of the same head
alone, see `KeySchedule.each`.

The key tiles of a head begin one after the other, with one tile of each other head of the section between two of them
(`EntryKeyTiles.order`), and all of them begin with the same tile of dq. If heads are short, a CTA then hardly ever
waits. A section of long heads is one head: its CTAs begin together, each waits until the one before it has had the
first tile of dq, and then they stay one tile apart.
"""

from dataclasses import dataclass
from typing import final

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.sm90.backward.config import DQ_TILES_IN_FLIGHT, ROW_ALIGNMENT
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_reduce import DqCounters
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_state import CountingWarp, DqWarpgroup
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.row_schedule import first_slot
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.visit import Turn


@final
@dataclass(frozen=True)
class DqSemaphore:
    """Adds to a tile of dq in the order of the key tiles; see `DqReduce` for what each method answers.

    Attributes:
        counters: how many CTAs have added to a tile.
        keys: keys of a tile.
    """

    counters: DqCounters
    keys: int

    def prepare(self, work: KeyTile, buffers: Buffers, stage: Int32) -> None:
        """Does nothing: the first CTA to add to a tile stores its sums."""
        del work, buffers, stage

    def wait(self, work: KeyTile, head_ready: cute.Pointer) -> None:
        """Waits for the statistics of a head, or of all slots of a packed sequence."""
        if not self.counters.spec.packed:
            self.counters.wait_for_head(work, head_ready, zeroing_warps=0)
            return
        slots = copies.count(work.queries.length, ROW_ALIGNMENT)
        left = copies.clamp(work.queries.padded(slots, 1) - work.order.prologue, 0, slots)
        counter = head_ready.toint() + Int64(first_slot(work.queries)) * 4

        def wait() -> None:
            ptx.wait_global(counter, left)
            # The fence is for bulk copies, which load statistics.
            cute.arch.fence_proxy("async.global")

        cutlass.if_generate(left > 0, wait)

    def accumulate(self, state: DqWarpgroup, work: KeyTile, phase: Int32) -> None:
        """Adds dQ of all query tiles, each in the CTA's turn."""
        state.added.move_to_first(work)
        # K is waited for before it is given back, as in `DqAtomic.accumulate`.
        wgmma.wait(state.shared.key_full, phase)
        for uniform in (state.added.position, state.stage, state.turn):
            uniform.make_uniform()
        wgmma.loop(work.steps, lambda _: self._add(state, work))
        wgmma.release(state.shared.keys_empty, state.thread % 32 == 31)

    def _add(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Adds dQ of the next tile to its sums in the CTA's turn; the last CTA stores dq instead.

        The product comes before the turn, except in the last CTA, whose accumulator begins with the sums.
        """
        shared, turn, at = state.shared, state.turn[0], state.added.place(work)
        buffer, chunks, own = turn % 2, state.chunks(), self._turn(work, at.entry)
        is_first, is_last = Boolean(own.is_first), Boolean(own.is_last)

        def wait() -> None:
            wgmma.wait(shared.counted + state.stage[0], state.stage[1])

        for index, chunk in enumerate(chunks):
            places = state.places(state.lane_address(work, at, index))
            state.dq.fill(0.0)

            def load(index: int = index, places: list[Int64] = places) -> None:
                if index == 0:
                    wait()
                state.load(places)

            cutlass.if_generate(Boolean(is_last & own.has_earlier), load)
            if index == 0:
                wgmma.wait(shared.dscore_full + buffer, turn // 2 % 2)
            state.multiply(buffer, chunk, accumulate=True)
            warpgroup.wait_group(0)
            if index == len(chunks) - 1:
                wgmma.release(shared.dscore_empty + buffer)
            if index == 0:
                wait()

            cutlass.if_generate(
                is_last,
                lambda chunk=chunk: state.store(work, state.rows(work, at), chunk),
                lambda places=places: self._keep(state, places, is_first),
            )
        wgmma.release(shared.added + state.stage[0], state.thread % 32 == 31)
        wgmma.advance(state.stage, DQ_TILES_IN_FLIGHT)
        state.added.advance(work)
        state.turn[0] = turn + 1

    def _keep(self, state: DqWarpgroup, places: list[Int64], is_first: Boolean) -> None:
        """Stores the accumulator as sums of a part of a tile, or adds it to them."""

        def store() -> None:
            for n, place in enumerate(places):
                ptx.store_global_chunk(place, [ptx.bits(state.dq[4 * n + k]) for k in range(4)])

        def add() -> None:
            for n, place in enumerate(places):
                ptx.add_global_chunk(place, [state.dq[4 * n + k] for k in range(4)])

        cutlass.if_generate(is_first, store, add)

    def count(self, shared: BackwardShared, work: KeyTile, dq_semaphore: cute.Pointer, warp: CountingWarp) -> None:
        """Waits for each of the CTA's turns in one stage, tells the third warpgroup, and counts its additions."""

        def visit(entry: Int32, counter: Int64) -> None:
            turn = self._turn(work, entry)
            before = turn.before
            cutlass.if_generate(before > 0, lambda: ptx.wait_global(counter, before))
            wgmma.release(shared.counted + warp.stage)
            warp.wait_for_additions(shared)

            def add() -> None:
                with cute.arch.elect_one():
                    ptx.fetch_add_global(counter, Int32(1), "release")

            cutlass.if_generate(turn.has_later, add)

        self.counters.each_of_stage(work, dq_semaphore, warp, visit)

    def finish(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Does nothing: `accumulate` has stored dq."""
        del state, work

    def _turn(self, work: KeyTile, entry: Int32) -> Turn:
        """Returns the turn of a tile of keys at a query tile, given what the visit knows of that one."""
        queries = self.counters.queries

        def seen(tile: Int32) -> plan.TileRange:
            return work.bounds.key_tiles(tile * queries, queries, self.keys)

        return work.visit.turn(entry, work.tile, seen)
