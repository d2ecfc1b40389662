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
    """Describes the tiling of the kernel: each warp has 16 query rows.

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
        """Returns how many query rows a CTA has."""
        return 16 * self.warps

    @property
    def threads(self) -> int:
        """Returns how many threads a CTA has."""
        return 32 * self.warps

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
    """Returns the tiling for a compile key, the first one that fits."""
    candidates = _split_sizes(spec) if spec.products == "bf16x3" else ((8, 64), (4, 48), (4, 32))
    return first_fit(tuple(TangentConfig(*sizes) for sizes in candidates), spec)


def _split_sizes(spec: KernelSpec) -> tuple[tuple[int, int], ...]:
    """Returns warps and keys for operands in two terms, the best ones first: with more keys ptxas for Hopper spills.

    Lists have tiles of 32 keys at least.
    """
    width = padded(max(spec.head_dim, spec.v_head_dim))
    if width <= 64:
        return (8, 48), (4, 48)
    return (8, 32 if spec.listed or width <= 96 else 16), (4, 32)
