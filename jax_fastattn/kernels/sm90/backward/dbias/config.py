# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and shared memory of the kernel that computes the gradient of a bias, see `kernel.py`.

Pure Python, no import of the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.device.regions import Barriers, Region, Row
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import stats_row_nbytes
from jax_fastattn.kernels.sm90.geometry import TILE_ALIGNMENT, WARPGROUP_ROWS, TwoConsumers, padded_head_dim
from jax_fastattn.kernels.sm90.operand_memory import OperandMemory
from jax_fastattn.kernels.sums.tiles import KEYS, ROWS
from jax_fastattn.kernels.tiles.lists import LIVE_WORDS

# The statistics of this many items may be in flight.
_ITEMS = 2


@dataclass(frozen=True)
class DbiasConfig(TwoConsumers):
    """Describes one variant: two consumer warpgroups of 64 queries each, and one warp that loads.

    Attributes:
        stages: stages of the ring, each with some columns of Q and K, or of dO and V.
    """

    stages: int


def chunk_columns(*head_dims: int) -> int:
    """Returns how many columns of operands a stage of the ring has: as many as a swizzle atom.

    They are the same for all operands, so that the ring has room for all columns of each.
    """
    return 64 if all(padded_head_dim(head_dim) % 64 == 0 for head_dim in head_dims) else 32


@dataclass(frozen=True)
class DbiasMemory(OperandMemory[DbiasConfig]):
    """Lays out the shared memory of a CTA: the ring, statistics and words of items, mbarriers, a region for the bias.

    `head_dim` and `v_head_dim` are the columns of a stage of the ring.

    Attributes:
        stats_row_nbytes: bytes of a statistic of a row.
        names: words that tell an item from the others of its tile, see `sums.schedule.DbiasTile`.
        told: words that tell its hidden pairs, see `sums.schedule.DbiasSchedule.look`.
    """

    stats_row_nbytes: int = 4
    names: int = 2
    told: int = 1

    @classmethod
    def of(cls, spec: KernelSpec) -> DbiasMemory:
        """Returns the layout of a compile key: as many stages as fit, up to eight. They hold all columns of Q."""
        columns = (chunk_columns(spec.head_dim, spec.v_head_dim),) * 2
        nbytes = stats_row_nbytes(spec.config.adds_dq)
        bias = stages.stage_rows(spec.codes, ROWS, KEYS, 1)
        words = {
            "names": 1 if spec.sums_rows else 3 if spec.sums_diagonals else 2,
            "told": LIVE_WORDS if spec.alike else 1,
        }
        memories = (
            cls(DbiasConfig(count), *columns, bias, stats_row_nbytes=nbytes, **words) for count in range(8, 0, -1)
        )
        return next(memory for memory in memories if memory.fits)

    @property
    def box_rows(self) -> tuple[int, int]:
        """Returns the rows of a TMA box of Q and of dO, and of a box of K and of V."""
        return WARPGROUP_ROWS, KEYS

    @property
    def bias_box(self) -> tuple[int, int]:
        """Returns the queries and keys of a TMA box of the bias."""
        return ROWS, KEYS

    @property
    def unit(self) -> int:
        """Returns how many bytes 64 rows of a stage have."""
        return WARPGROUP_ROWS * self.head_dim * 2

    @property
    def stats_nbytes(self) -> int:
        """Returns how many bytes a statistic of a tile has."""
        return ROWS * self.stats_row_nbytes

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the regions and barriers. A stage of the ring has the queries of each warpgroup, then the keys."""
        count, warps = self.config.stages, self.config.consumer_threads // 32
        return (
            Region("ring", (ROWS + KEYS) // WARPGROUP_ROWS * self.unit, count, TILE_ALIGNMENT),
            Region("stats", self.stats_nbytes, 2 * _ITEMS),
            Region("item", 4 * (1 + self.names + self.told), _ITEMS),
            Barriers("ring_full", count, arrive_count=1),
            Barriers("ring_empty", count, arrive_count=warps),
            Barriers("item_full", _ITEMS, arrive_count=1),
            Barriers("item_empty", _ITEMS, arrive_count=warps),
            Barriers("bias_full", 1, arrive_count=1),
            Barriers("bias_empty", 1, arrive_count=warps),
        )
