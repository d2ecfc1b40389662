# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the portable kernels: one table per operation, checked against shared memory and registers.

Pure Python, no import of the DSL: tests and the support table read it on any machine. Measured and predicted speeds of
the rows, and the registers they compile to, are in docs/kernels/sm80.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fastattn.kernels.device.layout import SharedTile, padded
from jax_fastattn.kernels.spec import KernelSpec

# Dynamic shared memory that one CTA may ask for, in KB (CUDA programming guide, table of compute capabilities); names
# with a suffix are those of `support.BORROWED`.
_SHARED_MEMORY = {
    **{"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90a": 227, "sm_120a": 99},
    **{"sm_90": 227, "sm_90-a100": 163, "sm_90-rtx": 99},
}


def shared_memory_limit(arch: str) -> int:
    """Bytes of shared memory that one CTA may use; unknown architectures get the smallest limit."""
    return 1024 * _SHARED_MEMORY.get(arch, 99)


@dataclass(frozen=True)
class ForwardConfig:
    """Tiling of the forward kernel.

    Attributes:
        rows_per_warp: query rows of a warp, 16 or 32. With 32 each K and V fragment read from shared memory feeds twice
            the math (4096 FLOP per clock and SM instead of 2048, before shared memory is the limit), for twice the
            registers.
        warps: warps of a CTA; the query tile has `rows_per_warp * warps` rows.
        keys: keys of a tile, a multiple of 16.
        stages: 1: K and V have one buffer each and three barriers per tile; 2: two buffers each and one barrier.
        query_in_registers: whether Q fragments stay in registers, else ldmatrix fetches them for each key tile.
        blocks: CTAs that must fit on an SM together; bounds the registers of a thread.
    """

    rows_per_warp: int
    warps: int
    keys: int
    stages: int = 1
    query_in_registers: bool = False
    blocks: int = 1

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return self.rows_per_warp * self.warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    def shared_memory(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of shared memory: Q, then the stages of K, then those of V; the output tile reuses all of it."""
        query = SharedTile(self.rows, head_dim).nbytes
        key = SharedTile(self.keys, head_dim).nbytes
        value = SharedTile(self.keys, v_head_dim).nbytes
        return max(query + self.stages * (key + value), SharedTile(self.rows, v_head_dim).nbytes)


def forward_config(spec: KernelSpec) -> ForwardConfig:
    """The tiling for a compile key."""
    return first_fit(_forward_candidates(spec), spec)


def first_fit(candidates: tuple[Any, ...], spec: KernelSpec) -> Any:
    """Returns the first candidate of which `blocks` CTAs fit the shared memory of an SM together."""
    # An SM has 1 KB more than its largest CTA may ask for, and every CTA takes 1 KB for the system.
    available = shared_memory_limit(spec.arch) + 1024
    for config in candidates:
        if config.blocks * (config.shared_memory(spec.head_dim, spec.v_head_dim) + 1024) <= available:
            return config
    raise AssertionError(f"no tiling fits {spec}")


def _forward_candidates(spec: KernelSpec) -> tuple[ForwardConfig, ...]:
    """Best first. Output accumulators take `rows_per_warp * D / 32` registers: 32 rows go up to 128 columns."""
    wide = (ForwardConfig(16, 8, 64), ForwardConfig(16, 8, 48), ForwardConfig(16, 8, 32))
    if padded(spec.v_head_dim) > 128:
        return wide
    resident = padded(spec.head_dim) <= 64 and padded(spec.v_head_dim) <= 64
    return (ForwardConfig(32, 4, 64, query_in_registers=resident, blocks=2), *wide)


@dataclass(frozen=True)
class DqConfig:
    """Tiling of the query-stationary backward kernel.

    Attributes:
        rows_per_warp: query rows of a warp, 16 or 32.
        warps: warps of a CTA; the query tile has `rows_per_warp * warps` rows.
        keys: keys of a tile, a multiple of 16.
        stages: buffers for K and V, 1 or 2; 2 load the next tile under the math of this one.
        rows_in_registers: whether Q and dO fragments stay in registers; K and V then take their shared memory.
        blocks: CTAs that must fit on an SM together; bounds the registers of a thread.
    """

    rows_per_warp: int
    warps: int
    keys: int
    stages: int = 2
    rows_in_registers: bool = False
    blocks: int = 1

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return self.rows_per_warp * self.warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    def rows_nbytes(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of the Q and dO tiles."""
        return SharedTile(self.rows, head_dim).nbytes + SharedTile(self.rows, v_head_dim).nbytes

    def stage_nbytes(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of one K and V tile."""
        return SharedTile(self.keys, head_dim).nbytes + SharedTile(self.keys, v_head_dim).nbytes

    def shared_memory(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of shared memory. Row statistics (8 bytes each) pass through a stage that is still empty."""
        rows, ring = self.rows_nbytes(head_dim, v_head_dim), self.stages * self.stage_nbytes(head_dim, v_head_dim)
        return max(ring, rows + 8 * self.rows) if self.rows_in_registers else rows + max(ring, 8 * self.rows)


@dataclass(frozen=True)
class DkdvConfig:
    """Tiling of the key-stationary backward kernel.

    Attributes:
        keys_per_warp: key rows of a warp, 16 or 32.
        key_warps: warps side by side along the keys; the key tile has `keys_per_warp * key_warps` rows.
        column_warps: warps that share the same key rows. 1: P and dS stay in registers. More: each computes its part
            of the queries, hands P and dS on through shared memory, and sums its part of the columns of dk and dv.
        queries: query rows of a tile, a multiple of `16 * column_warps`.
        stages: buffers for Q, dO and the row statistics, 1 or 2.
        blocks: CTAs that must fit on an SM together; bounds the registers of a thread.
    """

    keys_per_warp: int
    key_warps: int
    column_warps: int
    queries: int
    stages: int = 2
    blocks: int = 1

    @property
    def keys(self) -> int:
        """Key rows of a CTA."""
        return self.keys_per_warp * self.key_warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.key_warps * self.column_warps

    def tiles(
        self, head_dim: int, v_head_dim: int
    ) -> tuple[SharedTile, SharedTile, SharedTile, SharedTile, SharedTile]:
        """Shared tiles of K, V, Q, dO and of P or dS; columns split evenly between the warps that share rows."""
        align = 16 * self.column_warps
        return (
            SharedTile(self.keys, head_dim, align),
            SharedTile(self.keys, v_head_dim, align),
            SharedTile(self.queries, head_dim, align),
            SharedTile(self.queries, v_head_dim, align),
            SharedTile(self.keys, self.queries),
        )

    def stage_nbytes(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of one Q and dO tile and its row statistics."""
        _, _, query, dout, _ = self.tiles(head_dim, v_head_dim)
        return query.nbytes + dout.nbytes + 8 * self.queries

    def shared_memory(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of shared memory: K, V, the stages, and P and dS where they are exchanged."""
        key, value, _, _, exchange = self.tiles(head_dim, v_head_dim)
        exchanged = 2 * exchange.nbytes if self.column_warps > 1 else 0
        return key.nbytes + value.nbytes + self.stages * self.stage_nbytes(head_dim, v_head_dim) + exchanged


@dataclass(frozen=True)
class SplitConfig:
    """Tilings of the two backward kernels."""

    dq: DqConfig
    dkdv: DkdvConfig


def split_config(spec: KernelSpec) -> SplitConfig:
    """The tilings of both kernels for a compile key."""
    return SplitConfig(first_fit(_dq_candidates(spec), spec), first_fit(_dkdv_candidates(spec), spec))


def _dq_candidates(spec: KernelSpec) -> tuple[DqConfig, ...]:
    width = padded(max(spec.head_dim, spec.v_head_dim))
    if width <= 64:
        # The slope of a soft cap is one more value per score: 64 keys then spill.
        return (DqConfig(32, 4, 32 if spec.logits_soft_cap else 64, blocks=2), DqConfig(16, 8, 64))
    if width <= 128:
        return (DqConfig(32, 4, 32, blocks=2), DqConfig(16, 8, 64), DqConfig(16, 8, 32, rows_in_registers=True))
    return (DqConfig(16, 8, 32), DqConfig(16, 4, 32), DqConfig(16, 4, 16))


def _dkdv_candidates(spec: KernelSpec) -> tuple[DkdvConfig, ...]:
    width = padded(max(spec.head_dim, spec.v_head_dim))
    if width <= 64:
        return (DkdvConfig(32, 4, 1, 32, blocks=2), DkdvConfig(16, 8, 1, 64))
    if width <= 128:
        return (DkdvConfig(32, 4, 2, 64), DkdvConfig(32, 4, 2, 32), DkdvConfig(16, 8, 1, 16))
    return (
        DkdvConfig(32, 2, 4, 64),
        DkdvConfig(16, 4, 2, 32),
        DkdvConfig(16, 3, 2, 32, stages=1),
    )
