# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants and shared memory of the kernel that computes dq alone, `dq/`. Pure Python, no import of the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.device.regions import Barriers, NamedBarrier, Region, Row, disjoint
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import TILE_ALIGNMENT, WARPGROUP_ROWS, padded_head_dim
from jax_fastattn.kernels.sm90.operand_memory import QueryConfig, QueryMemory


@dataclass(frozen=True)
class DqConfig(QueryConfig):
    """Describes one variant of the dq kernel. It has at least 3 stages, or 5 with overlap, lest loads come late.

    Attributes:
        overlap: whether dS K of a tile is issued after Q K^T of the next one, so that it runs under its exponentials.
            The accumulators of scores and of dS are then live at the same time.
    """

    overlap: bool


@disjoint
class DqBarrier(NamedBarrier):
    """Names the barriers of `dq/`, one for each consumer warpgroup by itself."""

    WARPGROUP = 1, 2


@dataclass(frozen=True)
class DqMemory(QueryMemory[DqConfig]):
    """Lays out the shared memory of a CTA: Q and dO of each warpgroup, the ring of K and V, mbarriers."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the regions and barriers; a stage of the ring holds a tile of K or of V."""
        return (
            Region("query", self.tile_nbytes(WARPGROUP_ROWS, self.head_dim), 2, TILE_ALIGNMENT),
            Region("dout", self.tile_nbytes(WARPGROUP_ROWS, self.v_head_dim), 2, TILE_ALIGNMENT),
            *self.ring_rows,
            Barriers("dout_full", 2, arrive_count=1),
        )


def dq_config(spec: KernelSpec) -> DqConfig:
    """Returns the variant of the dq kernel for a compile key: as many stages as fit, up to eight."""
    columns = spec.terms * max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))
    configs = (DqConfig(64, stages, overlap=columns <= 192) for stages in range(8, 2, -1))
    return next(config for config in configs if DqMemory.of(spec, config).fits)
