# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias of keys: sums of dS over the queries of one head after the other, in the registers of a lane.

The order of the sums is the same in every run. XLA adds up the heads and batch entries that share a bias.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.row_store import ResultRow
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.mask import Lane


@dataclass(frozen=True, eq=False)
class KeySums:
    """The sums of a lane's two keys, before they are rounded.

    Attributes:
        sums: registers.
    """

    sums: cute.Tensor

    @classmethod
    def of(cls, spec: KernelSpec) -> "KeySums | None":
        """Returns the registers; None if no such gradient is asked for."""
        return cls(cute.make_rmem_tensor((2,), Float32)) if spec.dkey_bias else None

    def clear(self) -> None:
        """Begins with a query head."""
        self.sums.fill(0.0)

    def add(self, pair: int, values: list[Float32]) -> None:
        """Adds a pair of an accumulator `[keys, queries]`, given its index."""
        self.sums[pair % 2] = self.sums[pair % 2] + (values[0] + values[1])

    def store(self, target: cute.Pointer, work: KeyTile, member: Int32, lane: Lane, live: list[Boolean] | None) -> None:
        """Stores the sums of a query head.

        Args:
            target: `[B, N, S]`.
            work: the tile of keys.
            member: which head of the group it is.
            lane: where the thread is.
            live: whether each key has a sum; otherwise it is 0, whatever the register holds. None if all have.
        """
        for i in range(2):
            total = self.sums[i]
            # The quad has the other queries of the keys.
            for offset in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            if live is not None:
                total = ResultRow(live[i]).value(total)
            key = work.row + lane.row + 8 * i
            head = work.queries.head(work.num_heads, work.first_head + member)
            address = target.toint() + (head * work.keys.length + key) * 4

            def store(address=address, total=total) -> None:  # type: ignore[no-untyped-def]
                ptx.store_global(address, total)

            cutlass.if_generate(Boolean((lane.column == 0) & (key < work.keys.length)), store)
