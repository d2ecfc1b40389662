# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper backward kernels: one frozen config each, checked against shared memory.

Pure Python, no import of the DSL: tests and the support table read it on any machine. What each row compiles to is in
docs/kernels/sm90.md, and how fast it was measured in docs/benchmarks.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax_fastattn.kernels.device.regions import Barriers, NamedBarrier, Region, Row, disjoint
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.dq_config import DqConfig, dq_config
from jax_fastattn.kernels.sm90.geometry import TILE_ALIGNMENT, WARPGROUP_ROWS, Registers, padded_head_dim
from jax_fastattn.kernels.sm90.operand_memory import OperandMemory
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.tiles.plan import BoundsKind, Order
from jax_fastattn.kernels.tiles.records import slot_count

# The query rows of statistics and of sums of dq are padded to a multiple of this.
ROW_ALIGNMENT = 128

# At most this many tiles of dq are added to and not yet counted. Each has a stage, and each stage a warp that counts
# its tiles.
DQ_TILES_IN_FLIGHT = 3

# Over this S gradients in one order may have another order of tiles, see `BackwardConfig.mirrors`.
LONG_LENGTH = 1024

# Up to this head dim one kernel computes all three gradients, unless operands have two terms.
DKDV_DQ_HEAD_DIM = 128


def padded_rows(rows: Any) -> Any:
    """Returns the rows of a head in the statistics and in the sums of dq; for Python and device integers."""
    return (rows + (ROW_ALIGNMENT - 1)) // ROW_ALIGNMENT * ROW_ALIGNMENT


def stats_row_nbytes(adds_dq: bool) -> int:
    """Returns the bytes of a statistic of a row: a float32, or where dq is added eight bfloat16 for a product."""
    return 16 if adds_dq else 4


@dataclass(frozen=True)
class BackwardConfig:
    """Describes a variant of the key-stationary kernels: two consumer warpgroups, one that loads, one that computes dq.

    Attributes:
        queries: query rows of a tile: 128 up to head dim 64 without a soft cap, else 64; 32 if operands have two terms,
            at head dim 128 with a bias of pairs.
        stages: tiles of Q and of dO in shared memory.
        dq_registers: registers of a thread of the warpgroup that computes dq. It is 0 over head dim 128, and if
            operands have two terms, where `dq/` computes dq: both consumer warpgroups of `dkdv/` work on the same 64
            keys, the ones of `dkdv_dq/` on 64 keys each.
        kv_in_regs: how many fragments of 16 columns of K, or of V, a warpgroup of `dkdv/` keeps in registers. For the
            others its product reads both factors from shared memory, whose bytes are the limit there.
        shared_ones: whether the factor of ones that adds statistics to products lies in shared memory, for want of
            registers. Else these products read one factor less from there.
        interleaves_heads: whether the query heads of a group visit a tile of queries one after the other, and then all
            of them the next one; else a head visits all its tiles before the next head does. Only the kernel that
            computes dq does so. CTAs that add in one order then have one pace: one that visits few tiles of each head
            does not wait until others have visited the rest.
        mirrors: whether tiles are visited in the other order, see `EntryKeyTiles`.
        holds_offset: whether a lane's offset in a loaded tile of a bias stays in a register.
        float16_weights: whether the weights in dS are float16, which has three bits more than bfloat16. Else they share
            registers with P as a factor of dV, for want of more.
    """

    queries: int
    stages: int
    dq_registers: int = 0
    kv_in_regs: int = 0
    shared_ones: bool = False
    interleaves_heads: bool = False
    mirrors: bool = False
    holds_offset: bool = False
    float16_weights: bool = True

    @property
    def adds_dq(self) -> bool:
        """Returns whether the kernel computes dq too."""
        return self.dq_registers > 0

    def together(self, group: int) -> int:
        """Returns how many heads of a group visit a tile of queries before the next one is visited."""
        return group if self.interleaves_heads else 1

    @property
    def overlap(self) -> bool:
        """Returns whether `dkdv/` issues a tile's sum after the product of the next one; it takes a third stage."""
        return self.stages > 2

    @property
    def keys(self) -> int:
        """Returns how many keys a CTA has."""
        return 2 * WARPGROUP_ROWS if self.adds_dq else WARPGROUP_ROWS

    @property
    def prepass(self) -> PrepassConfig:
        """Returns the tiles of the prepass for the lists of the kernel."""
        return PrepassConfig(self.queries, self.keys, transposed=True, splits_edges=self.adds_dq)

    @property
    def consumer_threads(self) -> int:
        """Returns how many threads compute; the producer's warpgroup follows them."""
        return 256

    @property
    def threads(self) -> int:
        """Returns how many threads a CTA has; the last warpgroup has the producer, the one before it may compute dq."""
        return self.consumer_threads + (256 if self.adds_dq else 128)

    @property
    def order(self) -> Order:
        """Returns in which direction query tiles are visited.

        If the last one comes first, all CTAs of a head begin at the same tile under a causal mask, and meet there in
        L2.
        """
        return Order.DOWN if self.adds_dq else Order.UP

    @property
    def registers(self) -> Registers:
        """Returns the registers of a thread."""
        return Registers(244 - self.dq_registers // 2 if self.adds_dq else 240, 24, self.dq_registers)


# Names the region of bits; a stage of it comes with a stage of Q where edge tiles of lists have bits.
BITS = "bits"

# A tile of dS has this many rows and columns: it is a whole 128-byte swizzle atom wide.
BLOCK = 64


@disjoint
class DkdvDqBarrier(NamedBarrier):
    """Names the barriers of `dkdv_dq/`: one for both consumer warpgroups, and one for each by itself."""

    BOTH = 1, 1
    WARPGROUP = 2, 2


@disjoint
class DkdvBarrier(NamedBarrier):
    """Names the barriers of `dkdv/`: of both consumer warpgroups, of each stage's weights, of each warpgroup."""

    BOTH = 1, 1
    WEIGHTS = 3, 3
    WARPGROUP = 6, 2


@dataclass(frozen=True)
class BackwardMemory(OperandMemory[BackwardConfig]):
    """Lays out the shared memory of a CTA: K, V, the rings of Q, dO, dS or P, statistics, ones, mbarriers."""

    @classmethod
    def of(cls, spec: KernelSpec, config: BackwardConfig) -> BackwardMemory:
        """Returns the layout of a compile key."""
        rows = stages.stage_rows(spec.codes, config.queries, config.keys, config.stages)
        if spec.reads_edges:
            rows = (*rows, Region(BITS, spec.tiles_of(config).tile_nbytes, config.stages))
        return cls(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim), rows, spec.terms)

    @property
    def both_barrier(self) -> NamedBarrier:
        """Returns the named barrier of both consumer warpgroups."""
        return DkdvDqBarrier.BOTH if self.config.adds_dq else DkdvBarrier.BOTH

    @property
    def warpgroup_barrier(self) -> NamedBarrier:
        """Returns the named barriers of each consumer warpgroup."""
        return DkdvDqBarrier.WARPGROUP if self.config.adds_dq else DkdvBarrier.WARPGROUP

    @property
    def dq_columns(self) -> int:
        """Returns how many columns of dq are computed at a time: as many as the third warpgroup has registers for."""
        return self.head_dim if self.head_dim <= 96 else BLOCK

    @property
    def stats_nbytes(self) -> int:
        """Returns how many bytes a statistic of a tile has in global memory."""
        return self.config.queries * stats_row_nbytes(self.config.adds_dq)

    @property
    def box_rows(self) -> tuple[int, int]:
        """Returns the rows of a TMA box of Q and of dO, and of a box of K and of V."""
        return self.config.queries, WARPGROUP_ROWS

    @property
    def bias_box(self) -> tuple[int, int]:
        """Returns the queries and keys of a box of a bias of pairs."""
        return self.config.queries, self.config.keys

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the regions and barriers that both kernels have, with the ones of a single kernel in their places."""
        config = self.config
        keys, warps = config.keys // WARPGROUP_ROWS, config.consumer_threads // 32
        regions, last = self._dkdv_regions, []
        if config.adds_dq:
            regions, last = self._dq_regions, self._dq_barriers
        return (
            Region("key", self.tile_nbytes(WARPGROUP_ROWS, self.head_dim), keys, TILE_ALIGNMENT),
            Region("value", self.tile_nbytes(WARPGROUP_ROWS, self.v_head_dim), keys, TILE_ALIGNMENT),
            Region("query", self.tile_nbytes(config.queries, self.head_dim), config.stages, TILE_ALIGNMENT),
            Region("dout", self.tile_nbytes(config.queries, self.v_head_dim), config.stages, TILE_ALIGNMENT),
            *regions,
            Barriers("key_full", 1, arrive_count=1),
            Barriers("value_full", 1, arrive_count=1),
            Barriers("query_full", config.stages, arrive_count=1),
            Barriers("query_empty", config.stages, arrive_count=warps),
            Barriers("dout_full", config.stages, arrive_count=1),
            Barriers("dout_empty", config.stages, arrive_count=warps),
            *last,
        )

    @property
    def _dq_regions(self) -> list[Row]:
        """Returns two buffers of dS, statistics as factors, each followed by as many zeros, and maybe ones."""
        config = self.config
        # dS has tiles [64, 64]: query halves vary fastest, then blocks of 64 keys. Ones are [64 keys, 16].
        regions: list[Row] = [
            Region("dscore", config.keys * config.queries * 2, 2, TILE_ALIGNMENT),
            Region("stats", 2 * self.stats_nbytes, 2 * config.stages, TILE_ALIGNMENT),
        ]
        return [*regions, Region("ones", WARPGROUP_ROWS * 32, align=TILE_ALIGNMENT)] if config.shared_ones else regions

    @property
    def _dq_barriers(self) -> list[Row]:
        """Returns barriers of dS, of dq tiles in flight and of the next key tile; counters of dq tiles; its index."""
        config, warps = self.config, self.config.consumer_threads // 32
        return [
            Barriers("dscore_full", 2, arrive_count=warps),
            Barriers("dscore_empty", 2, arrive_count=4),
            Barriers("added", DQ_TILES_IN_FLIGHT, arrive_count=4),
            Barriers("counted", DQ_TILES_IN_FLIGHT, arrive_count=1),
            Barriers("keys_empty", 1, arrive_count=warps + 4),
            Barriers("next_tile_full", 1, arrive_count=1),
            Barriers("next_tile_empty", 1, arrive_count=config.threads // 32),
            Region("left", 4, DQ_TILES_IN_FLIGHT, align=4),
            Region("next_tile", 4, align=4),
        ]

    @property
    def _dkdv_regions(self) -> list[Row]:
        """Returns regions for what one warpgroup hands to the other for a tile, and for statistics."""
        config = self.config
        return [
            Region("weights", self.tile_nbytes(config.queries, WARPGROUP_ROWS), config.stages, TILE_ALIGNMENT),
            Region("stats", self.stats_nbytes, 2 * config.stages),
        ]


@dataclass(frozen=True)
class BackwardConfigs:
    """Holds the variants of the kernels of a backward pass.

    Attributes:
        main: the variant of the key-stationary kernel.
        dq: the variant of the dq kernel; None if the other one computes dq too.
    """

    main: BackwardConfig
    dq: DqConfig | None = None

    def __post_init__(self) -> None:
        if self.main.adds_dq == (self.dq is not None):
            raise ValueError(f"{self}: exactly one kernel has to compute dq")

    @property
    def adds_dq(self) -> bool:
        """Returns whether one kernel computes all gradients, and adds up dq in a buffer; else dq has its own kernel."""
        return self.dq is None

    @property
    def prepass(self) -> PrepassConfig:
        """Returns the tiles of the prepass for the lists of the key-stationary kernel; the dq kernel has its own."""
        return self.main.prepass

    @property
    def slot_rows(self) -> tuple[int, int]:
        """Returns the queries and keys of the slots of packed sequences, see `tiles/records.py`."""
        return ROW_ALIGNMENT, self.main.keys

    @property
    def tiles(self) -> str:
        """Returns the query rows x keys of the kernels' tiles, in words."""
        main = f"{self.main.queries}x{self.main.keys}"
        return f"dq {self.dq.rows}x{self.dq.keys}, dkdv {main}" if self.dq else f"backward {main}"


def backward_configs(spec: KernelSpec, *, long: bool = False) -> BackwardConfigs:
    """Returns the variants for a compile key; see `choose.configured` for `long`."""
    main = backward_config(spec, long=long)
    return BackwardConfigs(main, None if main.adds_dq else dq_config(spec))


def backward_config(spec: KernelSpec, *, long: bool = False) -> BackwardConfig:
    """Returns the variant of the key-stationary kernel for a compile key; see `choose.configured` for `long`."""
    largest, float16_weights = max(spec.head_dim, spec.v_head_dim), _has_float16_weights(spec)
    if spec.terms > 1:
        # Where a bias is loaded, 64 queries would leave room for one stage.
        queries = 32 if largest > 96 and spec.cost.score_nbytes else 64
        return _with_most_stages(spec, BackwardConfig(queries, 3, kv_in_regs=8, float16_weights=False))
    if largest > DKDV_DQ_HEAD_DIM:
        return _with_most_stages(spec, BackwardConfig(64, 3, kv_in_regs=6, float16_weights=float16_weights))
    dq_registers = 104 if padded_head_dim(spec.head_dim) == 96 else 72
    waits = spec.ordered and spec.bounds_kind.later_keys_have_fewer_queries and not spec.listed
    # The gradient of a bias of keys is a sum over the tiles of one head after the other.
    interleaves_heads = spec.group > 1 and (spec.listed or waits) and not spec.dkey_bias
    config = BackwardConfig(64, 3, dq_registers, interleaves_heads=interleaves_heads, float16_weights=float16_weights)
    # Masks of 128 queries, which wait for the exponentials, would spill 208 bytes.
    if largest <= 64 and spec.folds_lse and not spec.cost.score_nbytes and not spec.drops:
        return replace(config, queries=128, mirrors=long and waits and spec.group == 1)
    # Slopes of a function of logits wait in registers, as do sums with means of rows; over head dim 96, with the
    # registers of ones, some would spill.
    config = replace(config, shared_ones=(not spec.folds_lse or spec.has_row_means) and largest > 96)
    if not spec.cost.score_nbytes:
        return config
    return _with_most_stages(spec, replace(config, holds_offset=_has_register(spec)))


def _has_float16_weights(spec: KernelSpec) -> bool:
    """Returns whether the weights in dS are float16, see `BackwardConfig.float16_weights`."""
    # The factor of dropout is one of weights, too. Products of float32 in float16 have units of their own.
    if not spec.fits_float16 or spec.drops or spec.products != "native":
        return False
    largest = max(spec.head_dim, spec.v_head_dim)
    if largest > DKDV_DQ_HEAD_DIM:
        return True
    # Sums for a bias of keys and, over head dim 96, slopes or a bias of pairs with its gradient take the registers.
    return not spec.dkey_bias and (largest <= 96 or (spec.folds_lse and not spec.dmatrix_bias))


def _has_register(spec: KernelSpec) -> bool:
    """Returns whether a register for `BackwardConfig.holds_offset` would not spill.

    At head dim 128 bounds, groups and second terms take it. A function of logits takes it from head dim 96 on.
    """
    largest = max(spec.head_dim, spec.v_head_dim)
    is_plain = spec.bounds_kind == BoundsKind() and spec.group == 1 and spec.cost.score_nbytes == 2
    return largest <= 64 or (spec.folds_lse and largest <= (128 if is_plain else 96))


def _with_most_stages(spec: KernelSpec, config: BackwardConfig) -> BackwardConfig:
    """Returns a variant with as many stages as fit, up to the number that it has."""
    configs = [replace(config, stages=stages) for stages in range(config.stages, 0, -1)]
    return next((x for x in configs if BackwardMemory.of(spec, x).fits), configs[-1])


def backward_scratch(spec: KernelSpec, batch: int, query_length: int, num_heads: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the scratch arrays by name: statistics and, if dq is added up, its sums and counters.

    Where dq is added up a statistic has eight bfloat16, in the place of four float32. Each of the packed sequences,
    whose number is the batch, has whole slots of rows.
    """
    heads, rows = (batch, num_heads), padded_rows(query_length)
    if spec.packed:
        heads, rows = (1, num_heads), slot_count(query_length, ROW_ALIGNMENT, batch) * ROW_ALIGNMENT
    scratch: dict[str, tuple[int, ...]] = {"stats": (*heads, 2, rows * stats_row_nbytes(spec.config.adds_dq) // 4)}
    if spec.config.adds_dq:
        scratch["dq_accum"] = (*heads, rows, padded_head_dim(spec.head_dim))
        scratch["tile_counter"] = (1,)
        scratch["head_ready"] = (rows // ROW_ALIGNMENT,) if spec.packed else (batch, num_heads // spec.group)
        scratch["dq_semaphore"] = (*heads, rows // spec.config.main.queries)
    return scratch
