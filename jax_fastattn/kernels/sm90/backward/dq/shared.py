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
        query: Q, `[64, columns, warpgroup]` of each term.
        dout: dO, `[64, columns, warpgroup]` of each term.
        key: the ring as tiles of K, `[keys, columns, stage]` of each term.
        value: the ring as tiles of V, `[keys, columns, stage]` of each term.
        full: barriers of the stages that TMA completes.
        empty: barriers of the stages on which every consumer warp arrives.
        query_full: barriers of the Q of each warpgroup.
        dout_full: barriers of the dO of each warpgroup.
    """

    memory: DqMemory
    regions: SharedRegions
    query: list[cute.Tensor]
    dout: list[cute.Tensor]
    key: list[cute.Tensor]
    value: list[cute.Tensor]
    full: cute.Pointer
    empty: cute.Pointer
    query_full: cute.Pointer
    dout_full: cute.Pointer

    @classmethod
    def of(cls, memory: DqMemory, dtype: Any) -> "DqShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        config, terms = memory.config, memory.terms
        regions = SharedRegions.of(memory.table, wgmma.shared_memory())
        return cls(
            memory=memory,
            regions=regions,
            query=regions.operand("query", dtype, (WARPGROUP_ROWS, memory.head_dim), terms),
            dout=regions.operand("dout", dtype, (WARPGROUP_ROWS, memory.v_head_dim), terms),
            key=regions.operand("ring", dtype, (config.keys, memory.head_dim), terms),
            value=regions.operand("ring", dtype, (config.keys, memory.v_head_dim), terms),
            full=regions.barriers["ring_full"],
            empty=regions.barriers["ring_empty"],
            query_full=regions.barriers["query_full"],
            dout_full=regions.barriers["dout_full"],
        )

    def initialize(self, warp_index: Int32, tma: Tma) -> None:
        """Initializes the barriers, see `SharedRegions.initialize`."""
        self.regions.initialize(warp_index, tma)

    def key_terms(self, stage: Int32) -> list[tuple[Int32, int]]:
        """Returns the address and the columns of each term of K in a stage of the ring."""
        memory = self.memory
        return self.regions.terms("ring", stage, (memory.config.keys, memory.head_dim), memory.terms)
