# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias of keys: sums of dS over the queries of one head after the other, in the registers of a lane.

The order of the sums is the same in every run. XLA adds up the heads and batch entries that share a bias.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.row_store import ResultRow
from jax_fastattn.kernels.key import KernelSpec


class LaneKeys(NamedTuple):
    """The keys of a lane, which are accumulator rows 8 apart.

    Attributes:
        head: index of their plane in the result.
        length: keys of a plane.
        first: the first one of them.
        column: first accumulator column of the lane.
    """

    head: Int64
    length: Int32
    first: Int32
    column: Int32


@dataclass(frozen=True, eq=False)
class KeySums:
    """The sums of a lane's keys, before they are rounded.

    Attributes:
        sums: registers, one for each key.
    """

    sums: cute.Tensor

    @classmethod
    def of(cls, spec: KernelSpec, count: int = 2) -> "KeySums | None":
        """Returns the registers for so many keys; None if no such gradient is asked for."""
        return cls(cute.make_rmem_tensor((count,), Float32)) if spec.dkey_bias else None

    def clear(self) -> None:
        """Begins with a query head."""
        self.sums.fill(0.0)

    def add(self, row: int, values: list[Float32]) -> None:
        """Adds a pair of an accumulator `[keys, queries]`, given which of the lane's rows it belongs to."""
        self.sums[row] = self.sums[row] + (values[0] + values[1])

    def store(
        self, target: cute.Pointer, keys: LaneKeys, live: list[Boolean] | None, factor: float | None = None
    ) -> None:
        """Stores the sums of a query head.

        Args:
            target: the result, see `BackwardBuffers.dkey_bias`.
            keys: those of the lane.
            live: whether each key has a sum; otherwise it is 0, whatever the register holds. None if all have.
            factor: what the sums are multiplied by; None for 1.
        """
        for i in range(cute.size(self.sums)):
            total = self.sums[i]
            # The quad has the other queries of the keys.
            for offset in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            if live is not None:
                total = ResultRow(live[i]).value(total)
            if factor is not None:
                total = total * factor
            key = keys.first + 8 * i
            address = target.toint() + (keys.head * keys.length + key) * 4

            def store(address=address, total=total) -> None:  # type: ignore[no-untyped-def]
                ptx.store_global(address, total)

            cutlass.if_generate(Boolean((keys.column == 0) & (key < keys.length)), store)
