# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants and shared memory of the kernel of tangents. Pure Python, no import of the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.device.regions import NamedBarrier, Region, Row, disjoint
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import TILE_ALIGNMENT, WARPGROUP_ROWS, padded_head_dim
from jax_fastattn.kernels.sm90.operand_memory import QueryConfig, QueryMemory


@dataclass(frozen=True)
class TangentConfig(QueryConfig):
    """Describes one variant. It has at least 4 stages.

    Attributes:
        q_in_regs: how many fragments of Q, of 16 columns each, stay in registers: two products read them.
    """

    q_in_regs: int

    @property
    def slot_rows(self) -> tuple[int, int]:
        """Returns queries and keys of the slots of packed sequences, see `tiles/records.py`."""
        return self.rows, self.keys

    @property
    def tiles(self) -> str:
        """Returns query rows x keys of its tiles, in words."""
        return f"tangent {self.rows}x{self.keys}"


@disjoint
class TangentBarrier(NamedBarrier):
    """Names the barriers of the kernel, one for each consumer warpgroup by itself."""

    WARPGROUP = 1, 2


@dataclass(frozen=True)
class TangentMemory(QueryMemory[TangentConfig]):
    """Lays out the shared memory of a CTA: Q of each warpgroup and then its tangents, the ring, mbarriers."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the regions and barriers. There is room for a tangent of Q, whether it moves or not."""
        return (
            Region("query", WARPGROUP_ROWS * self.head_dim * 2, 4, TILE_ALIGNMENT),
            *self.ring_rows,
        )


def tangent_config(spec: KernelSpec) -> TangentConfig:
    """Returns the variant for a compile key: as many keys, then fragments, as registers allow, and stages as fit."""
    columns = padded_head_dim(spec.head_dim)
    is_narrow = max(columns, padded_head_dim(spec.v_head_dim)) <= 64
    keys, fragments = (96, 2) if is_narrow and not spec.listed else (64, min(columns // 16, 6))
    configs = (TangentConfig(keys, stages, fragments) for stages in range(12, 3, -1))
    return next(config for config in configs if TangentMemory.of(spec, config).fits)
