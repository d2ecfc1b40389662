# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the warps of a CTA have found in their rows of a tile, which they exchange through shared memory."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.prepass.lists import ALL, SOME
from jax_fastattn.kernels.prepass.predicate import Evaluated
from jax_fastattn.kernels.tiles.lists import LIVE_WORDS

# A warp's words are its live keys, then `SOME` and `ALL`, then its live queries, then padding.
WARP_NBYTES = 32
_FLAGS, _QUERIES = LIVE_WORDS, LIVE_WORDS + 1


@dataclass(frozen=True, eq=False)
class Summary:
    """The words of all warps. Between `put` and the rest there is a barrier of the CTA.

    Attributes:
        address: the address of the words of the first warp.
        warps: how many there are.
        warp: index of the warp.
        lane: index of the lane in the warp.
    """

    address: Int32
    warps: int
    warp: Int32
    lane: Int32

    def _word(self, warp: Int32 | int, word: Int32 | int) -> Int32:
        return self.address + warp * WARP_NBYTES + word * 4

    def put(self, found: Evaluated) -> None:
        """Stores what the warp has found."""
        some, everything = ptx.where(found.some, Int32(SOME), Int32(0)), ptx.where(found.all, Int32(ALL), Int32(0))
        word = ptx.where(self.lane < LIVE_WORDS, found.keys, some | everything)
        word = ptx.where(self.lane == _QUERIES, found.queries, word)
        target = self._word(self.warp, self.lane)
        cutlass.if_generate(self.lane <= _QUERIES, lambda: ptx.store_shared(target, word))

    def flags(self) -> tuple[Int32, Int32]:
        """Returns `SOME` or 0, and `ALL` or 0, of the tile."""
        words = [ptx.load_shared(self._word(warp, _FLAGS)) for warp in range(self.warps)]
        some, everything = Int32(0), Int32(ALL)
        for word in words:
            some, everything = some | (word & SOME), everything & word
        return some, everything

    def live(self, *, of_keys: bool) -> Int32:
        """Returns live rows of a side of the tile: lane i has rows 32 i to 32 i + 31, for i below `LIVE_WORDS`."""
        if not of_keys:
            return ptx.load_shared(self._word(Int32(cutlass.min(self.lane, self.warps - 1)), _QUERIES))
        found = Int32(0)
        for warp in range(self.warps):
            found = found | ptx.load_shared(self._word(warp, Int32(cutlass.min(self.lane, LIVE_WORDS - 1))))
        return found
