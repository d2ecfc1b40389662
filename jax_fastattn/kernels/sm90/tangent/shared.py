# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the kernel of tangents in shared memory.

Tiles of K, V and their tangents pass through one ring of stages. A stage has a barrier that TMA completes ("full") and
one on which every consumer warp arrives ("empty"). Q and its tangent are loaded once, for each warpgroup by itself.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.shared_regions import SharedRegions
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sm90.tangent.config import TangentMemory


@dataclass(frozen=True, eq=False)
class TangentShared:
    """Holds the tiles and barriers in shared memory.

    Attributes:
        memory: the table, with the config.
        regions: the rows of the table.
        query: Q of both warpgroups, then its tangents, `[64, columns, 2 which + warpgroup]`.
        key: the ring as tiles of K, `[keys, columns, stage]`.
        value: the ring as tiles of V, `[keys, columns, stage]`.
    """

    memory: TangentMemory
    regions: SharedRegions
    query: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor

    @classmethod
    def of(cls, memory: TangentMemory, dtype: Any) -> "TangentShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        regions, keys = SharedRegions.of(memory.table, wgmma.shared_memory()), memory.config.keys
        return cls(
            memory=memory,
            regions=regions,
            query=regions.tiles("query", dtype, (WARPGROUP_ROWS, memory.head_dim)),
            key=regions.tiles("ring", dtype, (keys, memory.head_dim)),
            value=regions.tiles("ring", dtype, (keys, memory.v_head_dim)),
        )

    def ring(self) -> wgmma.Ring:
        """Returns a role's position in the ring."""
        barriers = self.regions.barriers
        return wgmma.Ring(barriers["ring_full"], barriers["ring_empty"], self.memory.config.stages)

    @property
    def query_full(self) -> cute.Pointer:
        """Returns the barriers of the Q of each warpgroup, and of its tangent."""
        return self.regions.barriers["query_full"]

    def stage_address(self, stage: Int32) -> Int32:
        """Returns the address of a stage of the ring."""
        return self.regions.stage("ring", stage)
