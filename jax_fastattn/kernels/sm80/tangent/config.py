# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the portable kernel of tangents. Pure Python, no import of the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.device.layout import SharedTile, padded
from jax_fastattn.kernels.device.regions import Region, SharedTable
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.forward.config import first_fit
from jax_fastattn.kernels.tiles.lists import PrepassConfig


@dataclass(frozen=True)
class TangentConfig:
    """Tiling of the kernel: each warp has 16 query rows.

    Attributes:
        warps: warps of a CTA.
        keys: keys of a tile, a multiple of 16.
        blocks: CTAs that must fit on an SM together; bounds the registers of a thread.
    """

    warps: int
    keys: int
    blocks: int = 1

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return 16 * self.warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def slot_rows(self) -> tuple[int, int]:
        """Queries and keys of the slots of packed sequences, see `tiles/records.py`."""
        return self.rows, self.keys

    @property
    def prepass(self) -> PrepassConfig:
        """The tiles of the prepass for its lists."""
        return PrepassConfig(self.rows, self.keys)

    @property
    def tiles(self) -> str:
        """Query rows x keys of its tiles, in words."""
        return f"tangent {self.rows}x{self.keys}"

    def shared_memory(self, columns: int, v_columns: int) -> int:
        """Returns the bytes of shared memory, see `table`."""
        return self.table(columns, v_columns).nbytes

    def table(self, columns: int, v_columns: int) -> SharedTable:
        """Returns the regions of shared memory. Each operand has room for its tangent, whether it moves or not."""
        return SharedTable(
            (
                Region("query", SharedTile(self.rows, columns).nbytes, 2),
                Region("key", SharedTile(self.keys, columns).nbytes, 2),
                Region("value", SharedTile(self.keys, v_columns).nbytes, 2),
            )
        )


def tangent_config(spec: KernelSpec) -> TangentConfig:
    """Returns the tiling for a compile key."""
    if max(padded(spec.head_dim), padded(spec.v_head_dim)) <= 64:
        return first_fit((TangentConfig(8, 64),), spec)
    return first_fit((TangentConfig(8, 64), TangentConfig(4, 48), TangentConfig(4, 32)), spec)
