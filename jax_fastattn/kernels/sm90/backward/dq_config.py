# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants and shared memory of the kernel that computes dq alone, `dq/`. Pure Python, no import of the DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax_fastattn.kernels.device.regions import Barriers, NamedBarrier, Region, Row, disjoint
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import TILE_ALIGNMENT, WARPGROUP_ROWS, padded_head_dim
from jax_fastattn.kernels.sm90.operand_memory import QueryConfig, QueryMemory
from jax_fastattn.kernels.tiles.plan import BoundsKind


@dataclass(frozen=True)
class DqConfig(QueryConfig):
    """Describes one variant of the dq kernel. It has at least 3 stages, or 5 with overlap, lest loads come late.

    Attributes:
        overlap: whether dS K of a tile is issued after Q K^T of the next one, so that it runs under its exponentials.
            The accumulators of scores and of dS are then live at the same time.
        q_in_regs: how many fragments of 16 columns of the first term of Q a warpgroup keeps in registers.
    """

    overlap: bool
    q_in_regs: int = 0


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
    overlap = columns <= (192 if spec.terms == 1 else 128)
    q_in_regs = 0 if spec.terms == 1 else _split_q_in_regs(spec, columns // 2)
    configs = (DqConfig(64, stages, overlap, q_in_regs) for stages in range(8, 2, -1))
    return next(config for config in configs if DqMemory.of(spec, config).fits)


def _split_q_in_regs(spec: KernelSpec, columns: int) -> int:
    """Returns `DqConfig.q_in_regs` where operands have two terms: the first one has two of the three products.

    At head dim 128 bounds, lists and features take registers of half of them.
    """
    is_plain = replace(spec.bounds_kind, left=False, right=False) == BoundsKind() and not spec.codes
    return columns // 16 if columns <= 96 or is_plain else 4
