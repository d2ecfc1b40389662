# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias of keys: sums of dS over the queries of one head after the other, in the registers of a lane.

The order of the sums is the same in every run. XLA adds up the heads and batch entries that share a bias.
"""

from dataclasses import dataclass
from typing import final

import cutlass
from cutlass import Boolean, Float32, cute

from jax_fastattn.kernels.device import ptx, softmax
from jax_fastattn.kernels.device.row_store import ResultRow
from jax_fastattn.kernels.sums.sums import DscorePair, LaneKeys, SummedTile


@final
@dataclass(frozen=True, eq=False)
class KeySums:
    """The sums of a lane's keys, before they are rounded.

    Attributes:
        n_blocks: blocks of 8 queries of the accumulator of dS.
        sums: registers, one for each key.
    """

    n_blocks: int
    sums: cute.Tensor

    @classmethod
    def start(cls, m_blocks: int, n_blocks: int) -> "KeySums":
        """Returns the registers for the keys of an accumulator of dS."""
        return cls(n_blocks, cute.make_rmem_tensor((2 * m_blocks,), Float32))

    def clear(self) -> None:
        """Clears the sums for the next query head."""
        self.sums.fill(0.0)

    def at_tile(self, tile: SummedTile) -> "KeySums":
        """Returns the sums, which do not depend on where scores lie."""
        del tile
        return self

    def add(self, part: DscorePair) -> None:
        """Adds a pair."""
        block, half = divmod(part.pair, 2)
        row = block // self.n_blocks * 2 + half
        self.sums[row] = self.sums[row] + (part.values[0] + part.values[1])

    def store(self, place: LaneKeys) -> None:
        """Stores the sums of a query head to `dkey_bias`."""
        for i in range(cute.size(self.sums)):
            # The other lanes of the quad hold the sums over other queries.
            total = softmax.quad_sum(self.sums[i])
            if place.live is not None:
                total = ResultRow(place.live[i]).value(total)
            if place.factor is not None:
                total = total * place.factor
            key = place.first + 8 * i
            address = place.buffers.dkey_bias.toint() + (place.head * place.length + key) * 4

            def store(address=address, total=total) -> None:  # type: ignore[no-untyped-def]
                ptx.store_global(address, total)

            cutlass.if_generate(Boolean((place.column == 0) & (key < place.length)), store)
