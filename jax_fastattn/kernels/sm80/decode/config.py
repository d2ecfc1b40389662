# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the portable decoding kernel, and their shared memory.

Pure Python, no import of the DSL: tests and the support table read it on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jax_fastattn.kernels.architectures import shared_memory_limit
from jax_fastattn.kernels.decode.config import DecodeConfig, row_blocks
from jax_fastattn.kernels.device.layout import SharedTile, padded
from jax_fastattn.kernels.device.regions import Region, SharedTable
from jax_fastattn.kernels.key import KernelSpec

# An SM has this many bytes of K and V in flight.
_BYTES_IN_FLIGHT = 96 * 1024

# More warps would have fewer registers than they need.
_MAX_WARPS = 8


@dataclass(frozen=True)
class DecodeMemory:
    """Shared memory of a CTA: a ring for each strip of keys, and results of the warps.

    Attributes:
        key: a strip of K.
        value: a strip of V.
    """

    config: DecodeConfig
    key: SharedTile
    value: SharedTile

    @classmethod
    def of(cls, spec: KernelSpec, config: DecodeConfig) -> DecodeMemory:
        """Returns the layout of a compile key with that config, which may be a candidate."""
        return cls(config, SharedTile(config.strip, spec.head_dim), SharedTile(config.strip, spec.v_head_dim))

    @property
    def stage_nbytes(self) -> int:
        """Bytes of a stage of a strip, which has K first."""
        return self.key.nbytes + self.value.nbytes

    @cached_property
    def table(self) -> SharedTable:
        """Regions: the stages of each strip; the merge uses them again, since they are empty then."""
        config = self.config
        return SharedTable(
            (
                Region("ring", self.stage_nbytes, config.parts * config.stages),
                config.merge_region(self.value.padded_columns, over="ring"),
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return self.table.nbytes


def decode_config(spec: KernelSpec, rows: int) -> DecodeConfig:
    """Returns the variant for a compile key and a number of rows (queries times query heads of a group)."""
    for config in _candidates(spec, row_blocks(rows)):
        if DecodeMemory.of(spec, config).nbytes <= shared_memory_limit(spec.arch):
            return config
    raise AssertionError(f"no variant fits {spec}")


def _candidates(spec: KernelSpec, blocks: int) -> Iterator[DecodeConfig]:
    """Yields the variants that may fit, the best one first."""
    columns = max(padded(spec.head_dim), padded(spec.v_head_dim))
    # A strip of keys lies in one page.
    strip = 32 if columns <= 64 and spec.page % 32 == 0 else 16
    for parts in (4, 2, 1):
        if parts * blocks <= _MAX_WARPS:
            stage_nbytes = 2 * parts * strip * (padded(spec.head_dim) + padded(spec.v_head_dim))
            for stages in range(max(_BYTES_IN_FLIGHT // stage_nbytes, 2), 1, -1):
                yield DecodeConfig(blocks, parts, parts * strip, stages, loader_warps=0)
