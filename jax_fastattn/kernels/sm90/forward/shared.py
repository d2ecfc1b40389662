# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the forward kernel in shared memory.

K and V tiles pass through one ring of slots, in the order in which they are consumed. A slot has a barrier that TMA
completes ("full") and one on which every consumer warp arrives ("empty"). So has the Q of each warpgroup.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.tile_counter import TakenTile
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.forward.config import TAKEN_WORDS, SharedMemory
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


@dataclass(frozen=True, eq=False)
class ForwardShared:
    """Tiles and barriers in shared memory.

    Attributes:
        memory: the offsets.
        address: of the first byte.
        query: `[rows, columns, warpgroup]`.
        key: the ring as tiles of K, `[keys, columns, slot]`.
        value: the ring as tiles of V, `[keys, columns, slot]`.
        full: barriers of the slots.
        empty: barriers of the slots.
        query_full: barriers of the warpgroups.
        query_empty: barriers of the warpgroups.
        taken: the tile that is taken by a counter; None if the CTA knows its tiles.
    """

    memory: SharedMemory
    address: Int32
    query: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    query_full: cute.Pointer
    query_empty: cute.Pointer
    taken: TakenTile | None

    @classmethod
    def of(cls, memory: SharedMemory, dtype: Any) -> "ForwardShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        config = memory.config
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)

        def stages(start: int, rows: int, columns: int, count: int, pitch: int) -> cute.Tensor:
            return wgmma.staged_tile(base + start, dtype, (rows, columns), count, pitch // 2)

        ring = (config.slots, memory.slot_nbytes)
        barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
        taken = None
        if memory.takes_tiles:
            after = barriers + 2 * (config.slots + config.warpgroups)
            taken = TakenTile(base.toint(), memory.taken_start, TAKEN_WORDS, full=after, empty=after + 1)
        return cls(
            memory=memory,
            address=base.toint(),
            query=stages(0, WARPGROUP_ROWS, memory.head_dim, config.warpgroups, memory.query_nbytes),
            key=stages(memory.ring_start, config.keys, memory.head_dim, *ring),
            value=stages(memory.ring_start, config.keys, memory.v_head_dim, *ring),
            full=barriers,
            empty=barriers + config.slots,
            query_full=barriers + 2 * config.slots,
            query_empty=barriers + (2 * config.slots + config.warpgroups),
            taken=taken,
        )

    def initialize(self, warp_index: Int32, tma: Tma) -> None:
        """Initializes the barriers, and makes them visible to all threads and to TMA. All warps call it."""
        config = self.memory.config

        def initialize() -> None:
            tma.prefetch_descriptors()
            with cute.arch.elect_one():
                for slot in range(config.slots):
                    cute.arch.mbarrier_init(self.full + slot, 1)
                    cute.arch.mbarrier_init(self.empty + slot, 4 * config.warpgroups)
                for group in range(config.warpgroups):
                    cute.arch.mbarrier_init(self.query_full + group, 1)
                    cute.arch.mbarrier_init(self.query_empty + group, 4)
                if self.taken is not None:
                    self.taken.initialize(4 * config.warpgroups + 1)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    def query_address(self, group: Int32) -> Int32:
        """Returns the address of a warpgroup's Q."""
        return self.address + group * self.memory.query_nbytes

    def slot_address(self, slot: Int32) -> Int32:
        """Returns the address of a slot of the ring."""
        return self.address + self.memory.ring_start + slot * self.memory.slot_nbytes
