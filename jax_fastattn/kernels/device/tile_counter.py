# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Persistent CTAs fetch tiles by a counter in global memory, so that one with long tiles gets fewer of them.

one warp                                    all warps that work on tiles
wait for `empty`
fetch and add, write words
arrive on `full` ---------------------->    wait for `full`, read words
                 <----------------------    arrive on `empty`
                                            work on the tile
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.shared_regions import SharedRegions


@dataclass(frozen=True)
class NextTile:
    """Where the warps of a CTA find the tile that one of them has fetched.

    Attributes:
        start: offset of the words in it.
        words: how many there are.
        full: barrier on which the warp that fetches arrives.
        empty: barrier on which every warp arrives that gets the words.
    """

    shared: Int32
    start: int
    words: int
    full: cute.Pointer
    empty: cute.Pointer

    @classmethod
    def of(cls, regions: SharedRegions) -> "NextTile":
        """Returns the tile of a table that has the rows `next_tile`, `next_tile_full` and `next_tile_empty`."""
        full, empty = (regions.barriers[name] for name in ("next_tile_full", "next_tile_empty"))
        words = regions.table["next_tile"].pitch // 4
        return cls(regions.address, regions.table.offset("next_tile"), words, full, empty)

    def put(self, *words: Int32) -> None:
        """Writes the words of the next tile; one lane calls it, after it has waited for `empty`."""
        for i, word in enumerate(words):
            ptx.store_shared(self._address(i), word)
        cute.arch.mbarrier_arrive(self.full)

    def get(self, phase: Int32) -> list[Int32]:
        """Returns the words of the next tile; `phase` is 0 for the first one, then 1, 0 and so on."""
        wgmma.wait(self.full, phase)
        words = [cute.arch.make_warp_uniform(ptx.load_shared(self._address(i))) for i in range(self.words)]
        wgmma.release(self.empty, ptx.thread_index() % 32 == 31)
        return words

    def _address(self, word: int) -> Int32:
        return self.shared + (self.start + 4 * word)


class ResetKernel:
    """Sets the counter of the forward kernel, which is launched next, to no tile."""

    def launch(self, buffers: Buffers) -> Launch:
        """Returns the launch."""
        return Launch(self.kernel, (buffers,), grid=1, block=32, min_blocks=0)

    @cute.kernel
    def kernel(self, buffers: Buffers):
        """Writes the counter."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cutlass.if_generate(thread == 0, lambda: ptx.store_global_int(buffers.tile_counter.toint(), Int32(0)))


def fetch_next(counter: Any) -> Int32:
    """Returns the index of the next tile, given the address of the counter."""
    return ptx.fetch_add_global(counter, Int32(1), "relaxed")
