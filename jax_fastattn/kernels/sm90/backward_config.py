# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper backward kernels: one frozen config for each kernel, checked against shared memory.

Pure Python, no import of the DSL: tests and the support table read it on any machine. What each row compiles to and how
fast it was measured is in docs/kernels/sm90.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.sm90.config import SHARED_MEMORY, WARPGROUP_ROWS, padded_head_dim
from jax_fastattn.kernels.spec import KernelSpec


@dataclass(frozen=True)
class DkdvConfig:
    """One variant of the key-stationary kernel for padded head dims up to 128: 128 keys, two consumer warpgroups.

    Attributes:
        queries: query rows of a tile, 64 or 128.
        stages: tiles of Q and of dO in their rings, at least 2.
        adds_dq: whether it also adds up dq, in float32. Needs both padded head dims 64 with 128 queries, or padded head
            dim 128 with 64 queries.
        rotated: whether S of the next tile is issued before this one has ended. Needs the registers of 64 queries.
        rounds_late: whether P is rounded together with dS, so that no product of the warpgroup runs under dS: saves the
            registers that 128 queries need. Not with a soft cap.
    """

    queries: int
    stages: int
    adds_dq: bool = False
    rotated: bool = False
    rounds_late: bool = False

    @property
    def keys(self) -> int:
        """Keys of a CTA."""
        return 2 * WARPGROUP_ROWS

    @property
    def consumer_threads(self) -> int:
        """Threads that compute; those of the producer's warpgroup follow them."""
        return 256

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.consumer_threads + 128

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer and of a producer thread."""
        return 240, 24


@dataclass(frozen=True)
class DkdvMemory:
    """Byte offsets in dynamic shared memory: K, V, the rings of Q and dO, dS, statistics, mbarriers.

    Attributes:
        config: the variant.
        head_dim: columns of Q and K in shared memory, padded.
        v_head_dim: columns of V and dO in shared memory, padded.
    """

    config: DkdvConfig
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, spec: KernelSpec, config: DkdvConfig) -> DkdvMemory:
        """The layout of a compile key."""
        return cls(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))

    @property
    def query_nbytes(self) -> int:
        """Bytes of a tile of Q."""
        return self.config.queries * self.head_dim * 2

    @property
    def dout_nbytes(self) -> int:
        """Bytes of a tile of dO."""
        return self.config.queries * self.v_head_dim * 2

    @property
    def stats_nbytes(self) -> int:
        """Bytes of the statistics of a tile: two float32 for a row."""
        return self.config.queries * 8

    @property
    def value_start(self) -> int:
        """Offset of V; K comes first."""
        return self.config.keys * self.head_dim * 2

    @property
    def query_start(self) -> int:
        """Offset of the ring of Q."""
        return self.value_start + self.config.keys * self.v_head_dim * 2

    @property
    def dout_start(self) -> int:
        """Offset of the ring of dO."""
        return self.query_start + self.config.stages * self.query_nbytes

    @property
    def dscore_start(self) -> int:
        """Offset of two buffers of dS, each of [64, 64] tiles: query halves fastest, then key halves."""
        return self.dout_start + self.config.stages * self.dout_nbytes

    @property
    def stats_start(self) -> int:
        """Offset of the ring of statistics."""
        dscore_nbytes = 2 * self.config.queries * self.config.keys * 2 if self.config.adds_dq else 0
        return self.dscore_start + dscore_nbytes

    @property
    def barrier_start(self) -> int:
        """Offset of the mbarriers: of K and V, then full and empty ones of the rings of Q and of dO."""
        return self.stats_start + self.config.stages * self.stats_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return self.barrier_start + 8 * (2 + 4 * self.config.stages)

    @property
    def fits(self) -> bool:
        """Whether a CTA fits an SM."""
        return self.nbytes <= SHARED_MEMORY


def dkdv_config(spec: KernelSpec, *, adds_dq: bool = False) -> DkdvConfig:
    """The key-stationary variant for padded head dims up to 128."""
    head_dim, v_head_dim = padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim)
    if max(head_dim, v_head_dim) <= 64 and not spec.logits_soft_cap:
        return DkdvConfig(128, 3, adds_dq, rounds_late=True)
    return DkdvConfig(64, 3, adds_dq, rotated=adds_dq)
