# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the dq kernel in shared memory.

Tiles of V and K pass through one ring of stages. A stage has a barrier that TMA completes ("full") and one on which
every consumer warp arrives ("empty"). Q and dO are loaded once, for each warpgroup by itself.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.shared_regions import SharedRegions
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.backward.dq_config import DqMemory
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


@dataclass(frozen=True, eq=False)
class DqShared:
    """Holds the tiles and barriers in shared memory.

    Attributes:
        memory: the table, with the config.
        regions: the rows of the table.
        query: Q, `[64, columns, warpgroup]`.
        dout: dO, `[64, columns, warpgroup]`.
        key: the ring as tiles of K, `[keys, columns, stage]`.
        value: the ring as tiles of V, `[keys, columns, stage]`.
        full: barriers of the stages that TMA completes.
        empty: barriers of the stages on which every consumer warp arrives.
        query_full: barriers of the Q of each warpgroup.
        dout_full: barriers of the dO of each warpgroup.
    """

    memory: DqMemory
    regions: SharedRegions
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
        regions = SharedRegions.of(memory.table, wgmma.shared_memory())
        return cls(
            memory=memory,
            regions=regions,
            query=regions.tiles("query", dtype, (WARPGROUP_ROWS, memory.head_dim)),
            dout=regions.tiles("dout", dtype, (WARPGROUP_ROWS, memory.v_head_dim)),
            key=regions.tiles("ring", dtype, (config.keys, memory.head_dim)),
            value=regions.tiles("ring", dtype, (config.keys, memory.v_head_dim)),
            full=regions.barriers["ring_full"],
            empty=regions.barriers["ring_empty"],
            query_full=regions.barriers["query_full"],
            dout_full=regions.barriers["dout_full"],
        )

    def initialize(self, warp_index: Int32, tma: Tma) -> None:
        """Initializes the barriers, see `SharedRegions.initialize`."""
        self.regions.initialize(warp_index, tma)

    def stage_address(self, stage: Int32) -> Int32:
        """Returns the address of a stage of the ring."""
        return self.regions.stage("ring", stage)
