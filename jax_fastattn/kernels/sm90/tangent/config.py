# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants and shared memory of the kernel of tangents. Pure Python, no import of the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.device.regions import Barriers, NamedBarrier, Region, Row, disjoint
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import TILE_ALIGNMENT, WARPGROUP_ROWS, TwoConsumers, padded_head_dim
from jax_fastattn.kernels.sm90.operand_memory import OperandMemory
from jax_fastattn.kernels.tiles.lists import PrepassConfig


@dataclass(frozen=True)
class TangentConfig(TwoConsumers):
    """Describes one variant: 128 query rows of a CTA, two consumer warpgroups of 64 rows each.

    Attributes:
        keys: keys of a tile, a multiple of 16.
        stages: tiles of K, V or a tangent of them in the ring, at least 4.
        q_in_regs: how many fragments of Q, of 16 columns each, stay in registers: two products read them.
    """

    keys: int
    stages: int
    q_in_regs: int

    @property
    def rows(self) -> int:
        """Returns how many query rows a CTA has."""
        return 2 * WARPGROUP_ROWS

    @property
    def slot_rows(self) -> tuple[int, int]:
        """Returns queries and keys of the slots of packed sequences, see `tiles/records.py`."""
        return self.rows, self.keys

    @property
    def prepass(self) -> PrepassConfig:
        """Returns the tiles of the prepass for the lists of the kernel."""
        return PrepassConfig(self.rows, self.keys)

    @property
    def tiles(self) -> str:
        """Returns query rows x keys of its tiles, in words."""
        return f"tangent {self.rows}x{self.keys}"


@disjoint
class TangentBarrier(NamedBarrier):
    """Names the barriers of the kernel, one for each consumer warpgroup by itself."""

    WARPGROUP = 1, 2


@dataclass(frozen=True)
class TangentMemory(OperandMemory[TangentConfig]):
    """Lays out the shared memory of a CTA: Q of each warpgroup and then its tangents, the ring, mbarriers."""

    @classmethod
    def of(cls, spec: KernelSpec, config: TangentConfig) -> TangentMemory:
        """Returns the layout of a compile key."""
        return cls(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))

    @property
    def box_rows(self) -> tuple[int, int]:
        """Returns the rows of a TMA box of Q, and of a box of K and of V."""
        return WARPGROUP_ROWS, self.config.keys

    @property
    def bias_box(self) -> None:
        """Returns None: there are no stages for a bias of pairs."""
        return None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the regions and barriers. There is room for a tangent of Q, whether it moves or not."""
        config, columns = self.config, max(self.head_dim, self.v_head_dim)
        return (
            Region("query", WARPGROUP_ROWS * self.head_dim * 2, 4, TILE_ALIGNMENT),
            Region("ring", config.keys * columns * 2, config.stages, TILE_ALIGNMENT),
            Barriers("ring_full", config.stages, arrive_count=1),
            Barriers("ring_empty", config.stages, arrive_count=config.consumer_threads // 32),
            Barriers("query_full", 2, arrive_count=1),
        )


def tangent_config(spec: KernelSpec) -> TangentConfig:
    """Returns the variant for a compile key: as many keys, then fragments, as registers allow, and stages as fit."""
    columns = padded_head_dim(spec.head_dim)
    is_narrow = max(columns, padded_head_dim(spec.v_head_dim)) <= 64
    keys, fragments = (96, 2) if is_narrow and not spec.listed else (64, min(columns // 16, 6))
    configs = (TangentConfig(keys, stages, fragments) for stages in range(12, 3, -1))
    return next(config for config in configs if TangentMemory.of(spec, config).fits)
