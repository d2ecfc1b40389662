# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the dq kernel in shared memory.

Tiles of V and K pass through one ring of slots. A slot has a barrier that TMA completes ("full") and one on which every
consumer warp arrives ("empty"). Q and dO are loaded once, for each warpgroup by itself.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.backward.config import DqMemory
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


@dataclass(frozen=True, eq=False)
class DqShared:
    """Tiles and barriers in shared memory.

    Attributes:
        memory: the offsets, with the config.
        address: of the first byte.
        query: Q, `[64, columns, warpgroup]`.
        dout: dO, `[64, columns, warpgroup]`.
        key: the ring as tiles of K, `[keys, columns, slot]`.
        value: the ring as tiles of V, `[keys, columns, slot]`.
        full: barriers of the slots that TMA completes.
        empty: barriers of the slots on which every consumer warp arrives.
        query_full: barriers of the Q of each warpgroup.
        dout_full: barriers of the dO of each warpgroup.
    """

    memory: DqMemory
    address: Int32
    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    query_full: cute.Pointer
    dout_full: cute.Pointer

    @classmethod
    def of(cls, memory: DqMemory, dtype: Any) -> "DqShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        config = memory.config
        base = wgmma.shared_memory()

        def staged(start: int, rows: int, columns: int, count: int, pitch: int) -> cute.Tensor:
            return wgmma.staged_tile(base + start, dtype, (rows, columns), count, pitch // 2)

        ring = (config.slots, memory.slot_nbytes)
        barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
        return cls(
            memory=memory,
            address=base.toint(),
            query=staged(0, WARPGROUP_ROWS, memory.head_dim, 2, memory.query_nbytes),
            dout=staged(memory.dout_start, WARPGROUP_ROWS, memory.v_head_dim, 2, memory.dout_nbytes),
            key=staged(memory.ring_start, config.keys, memory.head_dim, *ring),
            value=staged(memory.ring_start, config.keys, memory.v_head_dim, *ring),
            full=barriers,
            empty=barriers + config.slots,
            query_full=barriers + 2 * config.slots,
            dout_full=barriers + (2 * config.slots + 2),
        )

    def initialize(self, warp_index: Int32, tma: Tma) -> None:
        """Initializes the barriers, and makes them visible to all threads and to TMA. All warps call it."""
        config = self.memory.config

        def initialize() -> None:
            tma.prefetch_descriptors()
            with cute.arch.elect_one():
                for slot in range(config.slots):
                    cute.arch.mbarrier_init(self.full + slot, 1)
                    cute.arch.mbarrier_init(self.empty + slot, config.consumer_threads // 32)
                for group in range(2):
                    cute.arch.mbarrier_init(self.query_full + group, 1)
                    cute.arch.mbarrier_init(self.dout_full + group, 1)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    def slot_address(self, slot: Int32) -> Int32:
        """Returns the address of a slot of the ring."""
        return self.address + self.memory.ring_start + slot * self.memory.slot_nbytes
