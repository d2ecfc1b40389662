# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper backward kernels: one frozen config each, checked against shared memory.

Pure Python, no import of the DSL: tests and the support table read it on any machine. What each row compiles to and how
fast it was measured is in docs/kernels/sm90.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax_fastattn.kernels.device.layout import padded
from jax_fastattn.kernels.sm90.config import SHARED_MEMORY, WARPGROUP_ROWS, padded_head_dim
from jax_fastattn.kernels.spec import FUSED_HEAD_DIM, KernelSpec

# Query rows to a multiple of which statistics and sums of dq are padded.
ROW_ALIGNMENT = 128


def padded_rows(rows: Any) -> Any:
    """Rows of a head in the statistics and in the sums of dq; for Python and device integers."""
    return (rows + (ROW_ALIGNMENT - 1)) // ROW_ALIGNMENT * ROW_ALIGNMENT


@dataclass(frozen=True)
class BackwardConfig:
    """One variant of the key-stationary kernels, which have two consumer warpgroups.

    Attributes:
        queries: query rows of a tile: 128 for padded head dims of 64, else 64.
        stages: tiles of Q, of dO and of dS in shared memory.
        adds_dq: whether the kernel adds dq to its sums, with 128 queries alone; else `dq.py` computes it.
        wide: for head dims over 128, without dq: both warpgroups work on the same 64 keys, see `wide.py`. Else on 64
            keys each.
        held: how many fragments of 16 columns of K, or of V, a warpgroup of the wide kernel holds in registers. Of
            the others its product reads both factors from shared memory, whose bytes are the limit there.
    """

    queries: int
    stages: int
    adds_dq: bool = False
    wide: bool = False
    held: int = 0

    def __post_init__(self) -> None:
        if self.adds_dq and (self.queries != 128 or self.wide):
            raise ValueError(f"{self}: dq is added up in tiles of 128 queries and 128 keys alone")

    @property
    def overlap(self) -> bool:
        """Whether the wide kernel issues the sum of a tile behind the product of the next one; takes a third stage."""
        return self.stages > 2

    @property
    def keys(self) -> int:
        """Keys of a CTA."""
        return WARPGROUP_ROWS if self.wide else 2 * WARPGROUP_ROWS

    @property
    def rounds_late(self) -> bool:
        """Whether P is rounded together with dS, so that no product of the warpgroup runs under dS.

        Saves the registers that 128 queries need; not with a soft cap, whose factor of dS takes the place of P.
        """
        return self.queries == 128

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
class BackwardMemory:
    """Byte offsets in dynamic shared memory: K, V, the rings of Q, dO, dS or P, statistics, mbarriers.

    Attributes:
        config: the variant.
        head_dim: columns of Q and K in shared memory, padded.
        v_head_dim: columns of V and dO in shared memory, padded.
    """

    config: BackwardConfig
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, spec: KernelSpec, config: BackwardConfig) -> BackwardMemory:
        """The layout of a compile key."""
        # Of a tile's dq each warpgroup computes [64, 64].
        head_dim = FUSED_HEAD_DIM if config.adds_dq else padded_head_dim(spec.head_dim)
        return cls(config, head_dim, padded_head_dim(spec.v_head_dim))

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
        """Offset of a buffer of dS for each stage, of [64, 64] tiles: query halves fastest, then key halves."""
        return self.dout_start + self.config.stages * self.dout_nbytes

    @property
    def weights_nbytes(self) -> int:
        """Bytes of what one warpgroup of the wide kernel hands to the other for a tile."""
        return self.config.queries * WARPGROUP_ROWS * 2 if self.config.wide else 0

    @property
    def weights_start(self) -> int:
        """Offset of a buffer of them for each stage."""
        dscore_nbytes = self.config.stages * self.config.queries * self.config.keys * 2
        return self.dscore_start + (dscore_nbytes if self.config.adds_dq else 0)

    @property
    def stats_start(self) -> int:
        """Offset of the ring of statistics."""
        return self.weights_start + self.config.stages * self.weights_nbytes

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


@dataclass(frozen=True)
class DqConfig:
    """One variant of the dq kernel: 128 query rows of a CTA, two consumer warpgroups of 64 rows each.

    Attributes:
        keys: keys of a tile, a multiple of 16.
        slots: tiles of V or K in the ring, at least 3 (5 with overlap, lest loads come late).
        overlap: whether dS K of a tile is issued behind Q K^T of the next one, so that it runs under its exponentials.
            Both accumulators of scores and dS then live at a time.
    """

    keys: int
    slots: int
    overlap: bool

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
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
class DqMemory:
    """Byte offsets in dynamic shared memory: Q and dO of each warpgroup, the ring, mbarriers.

    Attributes:
        config: the variant.
        head_dim: columns of Q and K in shared memory, padded.
        v_head_dim: columns of V and dO in shared memory, padded.
    """

    config: DqConfig
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, spec: KernelSpec, config: DqConfig) -> DqMemory:
        """The layout of a compile key."""
        return cls(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))

    @property
    def query_nbytes(self) -> int:
        """Bytes of the Q of a warpgroup; that of the second follows."""
        return WARPGROUP_ROWS * self.head_dim * 2

    @property
    def dout_nbytes(self) -> int:
        """Bytes of the dO of a warpgroup."""
        return WARPGROUP_ROWS * self.v_head_dim * 2

    @property
    def slot_nbytes(self) -> int:
        """Bytes from one slot of the ring to the next: whole repetitions of the swizzle."""
        return padded(self.config.keys * max(self.head_dim, self.v_head_dim) * 2, 1024)

    @property
    def dout_start(self) -> int:
        """Offset of dO; Q comes first."""
        return 2 * self.query_nbytes

    @property
    def ring_start(self) -> int:
        """Offset of the ring."""
        return self.dout_start + 2 * self.dout_nbytes

    @property
    def barrier_start(self) -> int:
        """Offset of the mbarriers: full and empty ones of the slots, then of each warpgroup's Q, and of its dO."""
        return self.ring_start + self.config.slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return self.barrier_start + 8 * (2 * self.config.slots + 4)

    @property
    def fits(self) -> bool:
        """Whether a CTA fits an SM."""
        return self.nbytes <= SHARED_MEMORY


def backward_config(spec: KernelSpec) -> BackwardConfig:
    """The variant for a compile key."""
    largest = max(spec.head_dim, spec.v_head_dim)
    if largest > 128:
        held = 2 if spec.logits_soft_cap else 6  # the cap takes registers
        config = BackwardConfig(64, 3, wide=True, held=held)
        return config if BackwardMemory.of(spec, config).fits else replace(config, stages=2)
    if largest <= 64 and not spec.logits_soft_cap:
        return BackwardConfig(128, 2, adds_dq=spec.fused)
    return BackwardConfig(64, 3)


def dq_config(spec: KernelSpec) -> DqConfig:
    """The variant of the dq kernel for a compile key: as many slots as fit, but for more than are of use."""
    columns = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))
    # The cap takes registers here too.
    keys = 64 if columns > 64 else 96 if spec.logits_soft_cap else 128
    configs = (DqConfig(keys, slots, overlap=columns <= 192) for slots in range(8, 2, -1))
    return next(config for config in configs if DqMemory.of(spec, config).fits)
