# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""How dQ of many CTAs becomes one sum, and the sum dq: the protocol, and the counters that both of its classes use.

`dq_atomic.py` adds in any order, `dq_semaphore.py` in the order of the key tiles. `sm80/backward/dq_reduce.py` has the
same words for the portable family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import DQ_TILES_IN_FLIGHT
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_state import CountingWarp, DqWarpgroup
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.row_schedule import dq_tile_index
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared


class DqReduce(Protocol):
    """Emits what the warps of a CTA do for dq, for one tile of keys after the other.

    For a tile of keys the loader waits, the third warpgroup accumulates and finishes, and the counting warps prepare
    and count. All of them run at the same time.
    """

    def prepare(self, work: KeyTile, buffers: Buffers, stage: Int32) -> None:
        """Makes a share of the sums of a later head, never of this tile's head, ready to be added to.

        Runs in the counting warp of `stage`. The portable family prepares all sums in its preprocess kernel.
        """
        ...

    def wait(self, work: KeyTile, head_ready: cute.Pointer) -> None:
        """Waits until the sums of the tile's head are prepared and its statistics written. Runs in the loader."""
        ...

    def accumulate(self, state: DqWarpgroup, work: KeyTile, phase: Int32) -> None:
        """Adds dQ of all query tiles that see the tile of keys, and gives K back. Runs in the third warpgroup.

        Args:
            state: what the warpgroup keeps.
            phase: phase of the barrier of K.
        """
        ...

    def count(self, shared: BackwardShared, work: KeyTile, dq_semaphore: cute.Pointer, warp: CountingWarp) -> None:
        """Counts the tiles of dq of one stage, each once its additions are visible. Runs in a counting warp."""
        ...

    def finish(self, state: DqWarpgroup, work: KeyTile) -> None:
        """Stores dq where this CTA was the last one to add, unless `accumulate` has. Runs in the third warpgroup."""
        ...


@dataclass(frozen=True)
class DqCounters:
    """Finds the counters of a launch, one for each tile of dq and one for each head; loops over the tiles of a stage.

    Attributes:
        queries: rows of a tile of dq.
    """

    spec: KernelSpec
    queries: int

    def of_tile(self, work: KeyTile, dq_semaphore: cute.Pointer, head: Int64, tile: Int32) -> Int64:
        """Returns the address of the semaphore of a tile of a query head."""
        return dq_semaphore.toint() + dq_tile_index(work.queries, head, tile, self.queries) * 4

    def of_head(self, head_ready: cute.Pointer, place: Int32) -> Int64:
        """Returns the address of the counter of what is prepared for a key/value head, given its place in the order.

        `PreprocessKernel.background` adds 1 once it has written statistics; each warp that zeroes sums adds 1.
        """
        return head_ready.toint() + Int64(place) * 4

    def wait_for_head(self, work: KeyTile, head_ready: cute.Pointer, zeroing_warps: int) -> None:
        """Waits for the statistics of a head, and for `zeroing_warps` warps of each tile of keys. Runs in one warp."""
        counter = self.of_head(head_ready, work.place)

        def wait() -> None:
            ptx.wait_global(counter, work.key_tiles * zeroing_warps + 1)
            # The fence is for bulk copies, which load statistics.
            cute.arch.fence_proxy("async.global")

        cutlass.if_generate(work.place >= work.order.prefetch_distance, wait)

    def each_of_stage(
        self, work: KeyTile, dq_semaphore: cute.Pointer, warp: CountingWarp, visit: Callable[[Int32, Int64], None]
    ) -> None:
        """Calls `visit(entry, counter)` for the tiles of dq of a warp's stage; see `Visit.entry`."""
        visited, at = work.visit.end - work.visit.begin, warp.position
        together = self.spec.config.main.together(self.spec.group)
        first = (warp.stage - at[0] + DQ_TILES_IN_FLIGHT) % DQ_TILES_IN_FLIGHT

        def step(lap: Int32) -> None:
            i = first + DQ_TILES_IN_FLIGHT * lap
            member, passed = (i % together, i // together) if together > 1 else (i // visited, i % visited)
            head = work.queries.head(work.num_heads, work.first_head) + member
            entry = work.visit.entry(work.visit.end - 1 - passed)
            if work.listed is not None:
                entry = cute.arch.make_warp_uniform(entry)
            visit(entry, self.of_tile(work, dq_semaphore, head, work.visit.tile_of(entry)))

        wgmma.loop((work.steps - first + (DQ_TILES_IN_FLIGHT - 1)) // DQ_TILES_IN_FLIGHT, step)
        at[0] = (at[0] + work.steps) % DQ_TILES_IN_FLIGHT
