# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the forward kernel in shared memory.

K and V tiles pass through one ring of stages, in the order in which they are consumed. A stage has a barrier that TMA
completes ("full") and one on which every consumer warp arrives ("empty"). So has the Q of each warpgroup.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.shared_regions import SharedRegions
from jax_fastattn.kernels.device.tile_counter import NextTile
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.forward.config import KEY_BIAS, SharedMemory
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


@dataclass(frozen=True, eq=False)
class ForwardShared:
    """Holds the tiles and barriers in shared memory.

    Attributes:
        memory: the table, with the config.
        regions: the rows of the table.
        query: `[rows, columns, warpgroup]` of each term.
        key: the ring as tiles of K, `[keys, columns, stage]` of each term.
        value: the ring as tiles of V, `[keys, columns, stage]` of each term.
        full: barriers of the stages that TMA completes.
        empty: barriers of the stages on which every consumer warp arrives.
        query_full: barriers of the Q of each warpgroup that TMA completes.
        query_empty: barriers of the Q of each warpgroup on which its warps arrive.
        next_tile: the next tile, by the tile counter; None if the CTA knows its tiles.
    """

    memory: SharedMemory
    regions: SharedRegions
    query: list[cute.Tensor]
    key: list[cute.Tensor]
    value: list[cute.Tensor]
    full: cute.Pointer
    empty: cute.Pointer
    query_full: cute.Pointer
    query_empty: cute.Pointer
    next_tile: NextTile | None

    @classmethod
    def of(cls, memory: SharedMemory, dtype: Any) -> "ForwardShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        config = memory.config
        regions = SharedRegions.of(memory.table, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024))
        return cls(
            memory=memory,
            regions=regions,
            query=regions.operand("query", dtype, (WARPGROUP_ROWS, memory.head_dim), memory.terms),
            key=regions.operand("ring", dtype, (config.keys, memory.head_dim), memory.terms),
            value=regions.operand("ring", dtype, (config.keys, memory.v_head_dim), memory.terms),
            full=regions.barriers["ring_full"],
            empty=regions.barriers["ring_empty"],
            query_full=regions.barriers["query_full"],
            query_empty=regions.barriers["query_empty"],
            next_tile=NextTile.of(regions) if memory.has_tile_counter else None,
        )

    def initialize(self, warp_index: Int32, tma: Tma) -> None:
        """Initializes the barriers, see `SharedRegions.initialize`."""
        if KEY_BIAS in self.regions.table:
            self._zero_key_bias()
        self.regions.initialize(warp_index, tma)

    def _zero_key_bias(self) -> None:
        """Zeroes the second half of the columns of each tile of a bias of keys, which copies leave as it is."""
        region = self.regions.table[KEY_BIAS]
        half, thread = region.pitch // 2, ptx.thread_index()
        threads = self.memory.config.threads
        for stage in range(region.count):
            first = self.regions.stage(KEY_BIAS, Int32(stage)) + half
            for start in range(0, half, 16 * threads):
                at = thread * 16 + start
                cutlass.if_generate(
                    Boolean(at < half), lambda at=first + at: ptx.store_shared_chunk(at, [Int32(0)] * 4)
                )
        cute.arch.fence_proxy("async.shared", space="cta")

    def query_addresses(self, group: Int32) -> list[Int32]:
        """Returns the address of each term of a warpgroup's Q."""
        return self._addresses("query", group, WARPGROUP_ROWS * self.memory.head_dim * 2)

    def stage_addresses(self, stage: Int32, columns: int) -> list[Int32]:
        """Returns the address of each term of a stage of the ring, given the columns of a term."""
        return self._addresses("ring", stage, self.memory.config.keys * columns * 2)

    def _addresses(self, name: str, index: Int32, pitch: int) -> list[Int32]:
        first = self.regions.stage(name, index)
        return [first, *(first + term * pitch for term in range(1, self.memory.terms))]
