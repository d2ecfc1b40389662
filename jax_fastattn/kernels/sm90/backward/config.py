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
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.plan import Order
from jax_fastattn.kernels.sm90.geometry import SHARED_MEMORY, WARPGROUP_ROWS, Registers, padded_head_dim
from jax_fastattn.kernels.tile_records import slot_count

# Query rows to a multiple of which statistics and sums of dq are padded.
ROW_ALIGNMENT = 128

# Tiles of dq that are added to and not yet counted; each has a warp of its own, beside the one that loads, to count it.
SLOTS = 3


# Up to which head dims one kernel computes all three gradients.
FUSED_HEAD_DIM = 128


def padded_rows(rows: Any) -> Any:
    """Rows of a head in the statistics and in the sums of dq; for Python and device integers."""
    return (rows + (ROW_ALIGNMENT - 1)) // ROW_ALIGNMENT * ROW_ALIGNMENT


def head_counters(rows: Any, queries: int) -> Any:
    """Counters of a query head of so many padded rows: the first one of its zeros, the others of its tiles."""
    return rows // queries + 1


def stats_row_nbytes(fused: bool) -> int:
    """Bytes of a statistic of a row: a float32, or where dq is added eight bfloat16 for a product."""
    return 16 if fused else 4


@dataclass(frozen=True)
class BackwardConfig:
    """One variant of the key-stationary kernels: two consumer warpgroups, one that loads, and one that computes dq.

    Attributes:
        queries: query rows of a tile: 128 up to head dim 64 without a soft cap, else 64.
        stages: tiles of Q and of dO in shared memory.
        dq_registers: registers of a thread of the warpgroup that computes dq; 0 where the kernel is wide.
        wide: for head dims over 128, without dq, which `dq.py` computes: both warpgroups work on the same 64 keys, see
            `dkdv.py`. Else on 64 keys each.
        held: how many fragments of 16 columns of K, or of V, a warpgroup of the wide kernel holds in registers. Of
            the others its product reads both factors from shared memory, whose bytes are the limit there.
        shared_ones: whether the factor of ones that adds statistics to products lies in shared memory, for want of
            registers. Else those products read one factor less from there.
    """

    queries: int
    stages: int
    dq_registers: int = 0
    wide: bool = False
    held: int = 0
    shared_ones: bool = False

    def __post_init__(self) -> None:
        if self.adds_dq and self.wide:
            raise ValueError(f"{self}: beside a wide kernel dq has a kernel of its own")

    @property
    def adds_dq(self) -> bool:
        """Whether the kernel computes dq too."""
        return self.dq_registers > 0

    @property
    def overlap(self) -> bool:
        """Whether the wide kernel issues the sum of a tile behind the product of the next one; takes a third stage."""
        return self.stages > 2

    @property
    def keys(self) -> int:
        """Keys of a CTA."""
        return WARPGROUP_ROWS if self.wide else 2 * WARPGROUP_ROWS

    @property
    def consumer_threads(self) -> int:
        """Threads that compute; those of the producer's warpgroup follow them."""
        return 256

    @property
    def threads(self) -> int:
        """Threads of a CTA: the producer is in the last warpgroup; before it may be the one that computes dq."""
        return self.consumer_threads + (256 if self.adds_dq else 128)

    @property
    def order(self) -> Order:
        """In which direction query tiles are visited.

        If the last one comes first, all CTAs of a head begin at the same tile under a causal mask, and meet there in
        L2.
        """
        return Order.UP if self.wide else Order.DOWN

    @property
    def registers(self) -> Registers:
        """Registers of a thread."""
        return Registers(244 - self.dq_registers // 2 if self.adds_dq else 240, 24, self.dq_registers)


# Rows and columns of a tile of dS: a whole 128-byte swizzle atom wide.
BLOCK = 64


@dataclass(frozen=True)
class BackwardMemory:
    """Byte offsets in dynamic shared memory: K, V, the rings of Q, dO, dS or P, statistics, ones, mbarriers.

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
        return cls(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))

    @property
    def dq_columns(self) -> int:
        """Columns of dq that are computed at a time: as many as the third warpgroup has registers for."""
        return self.head_dim if self.head_dim <= 96 else BLOCK

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
        """Bytes of a statistic of a tile in global memory."""
        return self.config.queries * stats_row_nbytes(self.config.adds_dq)

    @property
    def stats_pitch(self) -> int:
        """Bytes from one statistic to the next: as a factor of a product it is followed by as many zeros."""
        return self.stats_nbytes * (2 if self.config.adds_dq else 1)

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
        """Offset of two buffers of dS that take turns, of [64, 64] tiles: query halves fastest, then 64 keys each."""
        return self.dout_start + self.config.stages * self.dout_nbytes

    @property
    def weights_nbytes(self) -> int:
        """Bytes of what one warpgroup of the wide kernel hands to the other for a tile."""
        return self.config.queries * WARPGROUP_ROWS * 2 if self.config.wide else 0

    @property
    def weights_start(self) -> int:
        """Offset of a buffer of them for each stage."""
        dscore_nbytes = 2 * self.config.keys * self.config.queries * 2
        return self.dscore_start + (dscore_nbytes if self.config.adds_dq else 0)

    @property
    def stats_start(self) -> int:
        """Offset of the ring of statistics, two for each stage."""
        return self.weights_start + self.config.stages * self.weights_nbytes

    @property
    def ones_start(self) -> int:
        """Offset of the factor that adds a statistic to a product, `[64 keys, 16]`, with `shared_ones`."""
        return self.stats_start + self.config.stages * 2 * self.stats_pitch

    @property
    def barrier_start(self) -> int:
        """Offset of the mbarriers: of K and V, both of each stage of Q, dO, dS and of each slot, of the next tile."""
        return self.ones_start + (WARPGROUP_ROWS * 32 if self.config.shared_ones else 0)

    @property
    def flag_start(self) -> int:
        """Offset of the counters of tiles of dq, four bytes for each slot of `dq_atomic.py`."""
        return self.barrier_start + 8 * (2 + 4 * self.config.stages + 4 + 2 * SLOTS + 3)

    @property
    def index_start(self) -> int:
        """Offset of the index of the CTA's next tile of keys."""
        return self.flag_start + 4 * SLOTS

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return self.index_start + 4

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
    def registers(self) -> Registers:
        """Registers of a thread."""
        return Registers(240, 24)


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


@dataclass(frozen=True)
class BackwardConfigs:
    """The variants of the kernels of a backward pass.

    Attributes:
        main: that of the key-stationary kernel.
        dq: that of the dq kernel; None if the other one computes dq too.
    """

    main: BackwardConfig
    dq: DqConfig | None = None

    def __post_init__(self) -> None:
        if self.main.adds_dq == (self.dq is not None):
            raise ValueError(f"{self}: exactly one kernel has to compute dq")

    @property
    def adds_dq(self) -> bool:
        """Whether one kernel computes all gradients, and adds dq up in a buffer; else dq has a kernel of its own."""
        return self.dq is None

    @property
    def slot_rows(self) -> tuple[int, int]:
        """Queries and keys of the slots of packed sequences, see `tile_records.py`."""
        return ROW_ALIGNMENT, self.main.keys

    @property
    def tiles(self) -> str:
        """Query rows x keys of their tiles, in words."""
        main = f"{self.main.queries}x{self.main.keys}"
        return f"dq {self.dq.rows}x{self.dq.keys}, dkdv {main}" if self.dq else f"backward {main}"


def backward_configs(spec: KernelSpec) -> BackwardConfigs:
    """Returns the variants for a compile key."""
    main = backward_config(spec)
    return BackwardConfigs(main, None if main.adds_dq else dq_config(spec))


def backward_config(spec: KernelSpec) -> BackwardConfig:
    """Returns the variant of the key-stationary kernel for a compile key."""
    largest = max(spec.head_dim, spec.v_head_dim)
    if largest > FUSED_HEAD_DIM:
        config = BackwardConfig(64, 3, wide=True, held=6)
        return config if BackwardMemory.of(spec, config).fits else replace(config, stages=2)
    dq_registers = 104 if padded_head_dim(spec.head_dim) == 96 else 72
    if largest <= 64 and not spec.logits_soft_cap:
        return BackwardConfig(128, 3, dq_registers)
    # A soft cap's slopes wait in registers; with those of ones over head dim 96 some would spill.
    return BackwardConfig(64, 3, dq_registers, shared_ones=spec.logits_soft_cap and largest > 96)


def dq_config(spec: KernelSpec) -> DqConfig:
    """Returns the variant of the dq kernel for a compile key: as many slots as fit, but for more than are of use."""
    columns = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))
    configs = (DqConfig(64, slots, overlap=columns <= 192) for slots in range(8, 2, -1))
    return next(config for config in configs if DqMemory.of(spec, config).fits)


def backward_scratch(spec: KernelSpec, batch: int, query_length: int, num_heads: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the scratch arrays of a launch by name: statistics and, if dq is added up, its sums and counters.

    Where dq is added up a statistic has eight bfloat16, in the place of four float32. Of packed sequences, whose number
    is the batch, each has whole slots of rows.
    """
    heads, rows = (batch, num_heads), padded_rows(query_length)
    if spec.packed:
        heads, rows = (1, num_heads), slot_count(query_length, ROW_ALIGNMENT, batch) * ROW_ALIGNMENT
    scratch: dict[str, tuple[int, ...]] = {"stats": (*heads, 2, rows * stats_row_nbytes(spec.config.adds_dq) // 4)}
    if spec.config.adds_dq:
        scratch["dq_sum"] = (*heads, rows, padded_head_dim(spec.head_dim))
        counted = (1, num_heads + 1) if spec.packed else heads
        scratch["arrivals"] = (*counted, head_counters(rows, spec.config.main.queries))
    return scratch
