# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper decoding kernel, and their shared memory.

Pure Python, no import of the DSL: tests and the support table read it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax_fastattn.kernels.decode.config import DecodeConfig, row_blocks
from jax_fastattn.kernels.device.regions import Barriers, Region, SharedTable
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import SHARED_MEMORY, TILE_ALIGNMENT, Registers, padded_head_dim

# An SM has this many bytes of K and V in flight. Twice as many were not faster on an H100.
_BYTES_IN_FLIGHT = 96 * 1024

# After setmaxnreg, threads have these registers in two warpgroups that compute, and in one of which a warp loads.
REGISTERS = Registers(208, 88)


@dataclass(frozen=True)
class DecodeMemory:
    """Lays out the shared memory of a CTA: the ring of K and V, results of the warps, mbarriers.

    Attributes:
        head_dim: columns of K in shared memory, padded.
        v_head_dim: columns of V in shared memory, padded.
        box_rows: rows of a box. The boxes of a tile follow each other, each with a layout of its own; a tile is one box
            unless keys are in pages.
    """

    config: DecodeConfig
    head_dim: int
    v_head_dim: int
    box_rows: int

    @classmethod
    def of(cls, spec: KernelSpec, config: DecodeConfig) -> DecodeMemory:
        """Returns the layout of a compile key with that config, which may be a candidate."""
        dims = padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim)
        return cls(config, *dims, config.box_rows(spec.page))

    @property
    def boxes(self) -> int:
        """Returns how many boxes a tile has."""
        return self.config.keys // self.box_rows

    def row_offset(self, row: Any, row_nbytes: int, columns: int) -> Any:
        """Returns the bytes from the first row of a tile to another one, whose number is a multiple of 8.

        Args:
            row: its number, a Python or a device integer.
            row_nbytes: bytes of a row of a swizzle atom.
            columns: columns of the tile.
        """
        if self.boxes == 1:
            return row * row_nbytes
        return row // self.box_rows * (self.box_rows * columns * 2) + row % self.box_rows * row_nbytes

    @property
    def key_nbytes(self) -> int:
        """Returns how many bytes a tile of K has."""
        return self.config.keys * self.head_dim * 2

    @property
    def value_nbytes(self) -> int:
        """Returns how many bytes a tile of V has."""
        return self.config.keys * self.v_head_dim * 2

    @cached_property
    def table(self) -> SharedTable:
        """Returns the regions and barriers; a tile of K and one of V share the barriers of their stage."""
        config = self.config
        return SharedTable(
            (
                Region("key", self.key_nbytes, config.stages, TILE_ALIGNMENT),
                Region("value", self.value_nbytes, config.stages, TILE_ALIGNMENT),
                config.merge_region(self.v_head_dim),
                Barriers("full", config.stages, arrive_count=1),
                Barriers("empty", config.stages, arrive_count=config.consumer_warps),
            )
        )

    @property
    def moves_registers(self) -> bool:
        """Returns whether threads have `REGISTERS`; else all threads have equally many."""
        return self.config.loader_warps > 1

    @property
    def nbytes(self) -> int:
        """Returns how many bytes to ask for at launch."""
        return self.table.nbytes

    @property
    def fits(self) -> bool:
        """Returns whether a CTA fits an SM."""
        return self.nbytes <= SHARED_MEMORY


def decode_config(spec: KernelSpec, rows: int) -> DecodeConfig:
    """Returns the variant for a compile key and a number of rows (queries times query heads of a group)."""
    config = _candidate(spec, row_blocks(rows))
    while not DecodeMemory.of(spec, config).fits:
        config = replace(config, stages=config.stages - 1)
        assert config.stages > 0, spec
    return config


def _candidate(spec: KernelSpec, blocks: int) -> DecodeConfig:
    """Returns the variant for `blocks` blocks of rows, which may have too many stages."""
    dims = padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim)
    columns = max(dims)
    if columns <= 128:
        # For four blocks, eight warps with strips of 32 keys take fewer registers than sixteen with strips of 16.
        keys, parts = 128 if columns <= 64 else 64, 4 if blocks <= 2 else max(8 // blocks, 1)
    else:
        # More than four warps that compute would have 168 registers each.
        keys, parts = 32, 2 if blocks <= 2 else 1
    stages = max(_BYTES_IN_FLIGHT // (keys * 2 * sum(dims)), 2)
    # Registers are moved between whole warpgroups.
    return DecodeConfig(blocks, parts, keys, stages, loader_warps=4 if blocks * parts == 8 else 1)
