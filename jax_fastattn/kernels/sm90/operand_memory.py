# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the shared memories of kernels with resident operands have in common. Pure Python, no import of the DSL.

`QueryConfig` and `QueryMemory` describe the kernels of dq alone and of tangents: a CTA holds 128 query rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

from jax_fastattn.kernels.device.regions import Barriers, Region, Row, SharedTable
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import (
    SHARED_MEMORY,
    TILE_ALIGNMENT,
    WARPGROUP_ROWS,
    TwoConsumers,
    padded_head_dim,
)
from jax_fastattn.kernels.tiles.lists import PrepassConfig

Config = TypeVar("Config")
QueryConfigT = TypeVar("QueryConfigT", bound="QueryConfig")


@dataclass(frozen=True)
class OperandMemory(Generic[Config]):
    """Lays out shared memory of a CTA that holds tiles of Q, K, V and dO.

    Attributes:
        head_dim: columns of a term of Q and K in shared memory, padded.
        v_head_dim: columns of a term of V and dO in shared memory, padded.
        feature_rows: rows that features add to the rows of the kernel.
        terms: how many terms an operand has; each has a tile of its own, and those of a stage follow each other.
    """

    config: Config
    head_dim: int
    v_head_dim: int
    feature_rows: tuple[Row, ...] = ()
    terms: int = 1

    @property
    def columns(self) -> tuple[int, int]:
        """Returns the columns of a term of Q and K, and of a term of V and dO."""
        return self.head_dim, self.v_head_dim

    def tile_nbytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a tile of an operand, with all of its terms."""
        return self.terms * rows * columns * 2

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the kernel's own regions and barriers."""
        raise NotImplementedError

    @cached_property
    def table(self) -> SharedTable:
        """Returns all regions and barriers."""
        return SharedTable(self.rows).with_rows(*self.feature_rows)

    @property
    def bias_box(self) -> tuple[int, int] | None:
        """Returns the queries and keys of a box of a bias of pairs; None if there are no stages for it."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Returns how many bytes to ask for at launch."""
        return self.table.nbytes

    @property
    def fits(self) -> bool:
        """Returns whether a CTA fits an SM."""
        return self.nbytes <= SHARED_MEMORY


@dataclass(frozen=True)
class QueryConfig(TwoConsumers):
    """Describes a variant of a kernel with 128 query rows a CTA: two consumer warpgroups of 64 rows each.

    Attributes:
        keys: keys of a tile, a multiple of 16.
        stages: tiles in the ring.
    """

    keys: int
    stages: int

    @property
    def rows(self) -> int:
        """Returns how many query rows a CTA has."""
        return 2 * WARPGROUP_ROWS

    @property
    def prepass(self) -> PrepassConfig:
        """Returns the tiles of the prepass for the lists of the kernel."""
        return PrepassConfig(self.rows, self.keys)


@dataclass(frozen=True)
class QueryMemory(OperandMemory[QueryConfigT], Generic[QueryConfigT]):
    """Lays out shared memory of a CTA that holds its queries and a ring of tiles of keys."""

    @classmethod
    def of(cls, spec: KernelSpec, config: QueryConfigT) -> Self:
        """Returns the layout of a compile key."""
        columns = padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim)
        return cls(config, *columns, terms=spec.terms)

    @property
    def box_rows(self) -> tuple[int, int]:
        """Returns the rows of a TMA box of queries, and of a box of keys."""
        return WARPGROUP_ROWS, self.config.keys

    @property
    def bias_box(self) -> None:
        """Returns None: there are no stages for a bias of pairs."""
        return None

    @property
    def ring_rows(self) -> tuple[Row, ...]:
        """Returns the ring, a stage of which holds a tile of any operand of keys, and barriers of it and of Q."""
        config, columns = self.config, max(self.head_dim, self.v_head_dim)
        return (
            Region("ring", self.tile_nbytes(config.keys, columns), config.stages, TILE_ALIGNMENT),
            Barriers("ring_full", config.stages, arrive_count=1),
            Barriers("ring_empty", config.stages, arrive_count=config.consumer_threads // 32),
            Barriers("query_full", 2, arrive_count=1),
        )
