# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants and shared memory of the kernel that computes dq alone, `dq/`. Pure Python, no import of the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.device.regions import Barriers, NamedBarrier, Region, Row, disjoint
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import TILE_ALIGNMENT, WARPGROUP_ROWS, TwoConsumers, padded_head_dim
from jax_fastattn.kernels.sm90.operand_memory import OperandMemory
from jax_fastattn.kernels.tiles.lists import PrepassConfig


@dataclass(frozen=True)
class DqConfig(TwoConsumers):
    """Describes one variant of the dq kernel: 128 query rows of a CTA, two consumer warpgroups of 64 rows each.

    Attributes:
        keys: keys of a tile, a multiple of 16.
        stages: tiles of V or K in the ring, at least 3 (5 with overlap, lest loads come late).
        overlap: whether dS K of a tile is issued after Q K^T of the next one, so that it runs under its exponentials.
            The accumulators of scores and of dS are then live at the same time.
    """

    keys: int
    stages: int
    overlap: bool

    @property
    def rows(self) -> int:
        """Returns how many query rows a CTA has."""
        return 2 * WARPGROUP_ROWS

    @property
    def prepass(self) -> PrepassConfig:
        """Returns the tiles of the prepass for the lists of the kernel."""
        return PrepassConfig(self.rows, self.keys)


@disjoint
class DqBarrier(NamedBarrier):
    """Names the barriers of `dq/`, one for each consumer warpgroup by itself."""

    WARPGROUP = 1, 2


@dataclass(frozen=True)
class DqMemory(OperandMemory[DqConfig]):
    """Lays out the shared memory of a CTA: Q and dO of each warpgroup, the ring of K and V, mbarriers."""

    @classmethod
    def of(cls, spec: KernelSpec, config: DqConfig) -> DqMemory:
        """Returns the layout of a compile key."""
        return cls(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))

    @property
    def box_rows(self) -> tuple[int, int]:
        """Returns the rows of a TMA box of Q and of dO, and of a box of K and of V."""
        return WARPGROUP_ROWS, self.config.keys

    @property
    def bias_box(self) -> None:
        """Returns None: there are no stages for a bias of pairs."""
        return None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the regions and barriers; a stage of the ring holds a tile of K or of V."""
        config, columns = self.config, max(self.head_dim, self.v_head_dim)
        return (
            Region("query", WARPGROUP_ROWS * self.head_dim * 2, 2, TILE_ALIGNMENT),
            Region("dout", WARPGROUP_ROWS * self.v_head_dim * 2, 2, TILE_ALIGNMENT),
            Region("ring", config.keys * columns * 2, config.stages, TILE_ALIGNMENT),
            Barriers("ring_full", config.stages, arrive_count=1),
            Barriers("ring_empty", config.stages, arrive_count=config.consumer_threads // 32),
            Barriers("query_full", 2, arrive_count=1),
            Barriers("dout_full", 2, arrive_count=1),
        )


def dq_config(spec: KernelSpec) -> DqConfig:
    """Returns the variant of the dq kernel for a compile key: as many stages as fit, up to eight."""
    columns = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))
    configs = (DqConfig(64, stages, overlap=columns <= 192) for stages in range(8, 2, -1))
    return next(config for config in configs if DqMemory.of(spec, config).fits)
