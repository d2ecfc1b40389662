# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper forward kernel: one frozen config each, checked against shared memory and registers.

Pure Python, no import of the DSL: tests and the support table read it on any machine. What each row compiles to is in
docs/kernels/sm90.md, and how fast it was measured in docs/benchmarks.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.device.regions import Barriers, NamedBarrier, Region, Row, SharedTable, disjoint
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.geometry import (
    SHARED_MEMORY,
    SM_SHARED_MEMORY,
    TILE_ALIGNMENT,
    WARPGROUP_ROWS,
    Registers,
    padded_head_dim,
)
from jax_fastattn.kernels.tiles import records as tile_records
from jax_fastattn.kernels.tiles.lists import PrepassConfig

# Maps the number of consumer warpgroups to the registers of their threads; an SM has 64 K registers.
_REGISTERS = {2: Registers(240, 24), 3: Registers(160, 32)}

# Names the region of a bias of keys; each of its stages comes with a stage of K.
KEY_BIAS = "key_bias"

# The tile counter gives the record of a tile and its head, see `schedule.py`.
NEXT_TILE_WORDS = tile_records.WORDS + 1


@disjoint
class ForwardBarrier(NamedBarrier):
    """Names the barriers on which a warpgroup meets by itself, and the barriers of its turn to issue products."""

    WARPGROUP = 1, 3
    PING_PONG = 5, 3


@dataclass(frozen=True)
class ForwardConfig:
    """Describes one variant of the forward kernel.

    Attributes:
        warpgroups: consumer warpgroups of 64 query rows each, 1 to 3.
        keys: keys of a tile, a multiple of 16.
        stages: tiles of K or V in the ring, at least 2 (3 with overlap).
        overlap_qk_pv: whether Q K^T of the next tile is issued before P V of this one. Costs a second score
            accumulator. Three products of bfloat16 take so long that other warpgroups fill the gaps.
        ping_pong: whether named barriers make the warpgroups issue their products in turns.
        blocks: CTAs that must fit on an SM together. Above 1 there is a single producer warp, and no setmaxnreg.
        persistent: whether the grid is as many CTAs as the GPU holds and each works on tile after tile, else one CTA
            per tile.
        q_in_regs: how many of Q's fragments of 16 columns a warpgroup keeps in registers; the rest of Q is read from
            shared memory for every tile.
        pv_wait_after_exp: whether P V of the previous tile is awaited after all exponentials of a full tile. Else
            ptxas puts the wait in their middle, and the rounding of the first between the others.
        shares_bias: whether heads that share a large bias of pairs visit it together. It costs a short tile more
            divisions than it saves.
    """

    warpgroups: int
    keys: int
    stages: int
    overlap_qk_pv: bool = True
    ping_pong: bool = False
    blocks: int = 1
    persistent: bool = False
    q_in_regs: int = 0
    pv_wait_after_exp: bool = False
    shares_bias: bool = False

    @property
    def rows(self) -> int:
        """Returns how many query rows a CTA has."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def consumer_threads(self) -> int:
        """Returns how many threads compute; the producer's threads follow them."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """Returns how many threads a CTA has."""
        return self.consumer_threads + (128 if self.moves_registers else 32)

    @property
    def slot_rows(self) -> tuple[int, int]:
        """Returns the queries and keys of the slots of packed sequences, see `tiles/records.py`."""
        return self.rows, self.keys

    @property
    def prepass(self) -> PrepassConfig:
        """Returns the tiles of the prepass for the lists of the kernel."""
        return PrepassConfig(self.rows, self.keys)

    @property
    def tiles(self) -> str:
        """Returns the query rows x keys of the kernel's tiles, in words."""
        return f"forward {self.rows}x{self.keys}"

    @property
    def moves_registers(self) -> bool:
        """Returns whether producer warps give registers to consumers; it takes whole warpgroups."""
        return self.blocks == 1 and self.warpgroups > 1

    @property
    def registers(self) -> Registers:
        """Returns the registers of a thread where `moves_registers` holds."""
        return _REGISTERS[self.warpgroups]


@dataclass(frozen=True)
class SharedMemory:
    """Lays out the shared memory of a CTA: Q of each warpgroup, the ring of K and V, mbarriers, the next tile.

    Attributes:
        head_dim: columns of a term of Q and K in shared memory, padded.
        v_head_dim: columns of a term of V in shared memory, padded.
        terms: how many terms an operand has; each has a tile of its own, and those of a stage follow each other.
        has_tile_counter: whether CTAs get their tiles by the tile counter.
        feature_rows: rows that features add to the rows of the kernel.
    """

    config: ForwardConfig
    head_dim: int
    v_head_dim: int
    terms: int
    has_tile_counter: bool
    feature_rows: tuple[Row, ...] = ()

    @classmethod
    def of(cls, spec: KernelSpec, config: ForwardConfig) -> SharedMemory:
        """Returns the layout of a compile key with that config, which may be a candidate."""
        has_tile_counter = spec.packed and config.persistent
        rows = stages.ring_rows(spec.codes, WARPGROUP_ROWS, config.keys, config.warpgroups)
        if key_nbytes := spec.cost.key_nbytes:
            rows = (*rows, Region(KEY_BIAS, config.keys * key_nbytes, config.stages, align=128))
        columns = padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim)
        return cls(config, *columns, spec.terms, has_tile_counter, rows)

    def tile_nbytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a tile of an operand, with all of its terms."""
        return self.terms * rows * columns * 2

    @property
    def box_rows(self) -> tuple[int, int]:
        """Returns the rows of a TMA box of Q, and of a box of K and of V."""
        return WARPGROUP_ROWS, self.config.keys

    @property
    def bias_box(self) -> tuple[int, int]:
        """Returns the queries and keys of a box of a bias of pairs."""
        return WARPGROUP_ROWS, self.config.keys

    @cached_property
    def table(self) -> SharedTable:
        """Returns the regions and barriers; a stage of the ring holds a tile of K or of V."""
        config, warps, columns = self.config, 4 * self.config.warpgroups, max(self.head_dim, self.v_head_dim)
        rows: list[Row] = [
            Region("query", self.tile_nbytes(WARPGROUP_ROWS, self.head_dim), config.warpgroups, TILE_ALIGNMENT),
            Region("ring", self.tile_nbytes(config.keys, columns), config.stages, TILE_ALIGNMENT),
            Barriers("ring_full", config.stages, arrive_count=1),
            Barriers("ring_empty", config.stages, arrive_count=warps),
            Barriers("query_full", config.warpgroups, arrive_count=1),
            Barriers("query_empty", config.warpgroups, arrive_count=4),
        ]
        if self.has_tile_counter:
            rows += [
                Barriers("next_tile_full", 1, arrive_count=1),
                Barriers("next_tile_empty", 1, arrive_count=warps + 1),
                Region("next_tile", 4 * NEXT_TILE_WORDS, align=4),
            ]
        return SharedTable(tuple(rows)).with_rows(*self.feature_rows)

    @property
    def nbytes(self) -> int:
        """Returns how many bytes to ask for at launch."""
        return self.table.nbytes

    @property
    def fits(self) -> bool:
        """Returns whether `blocks` CTAs fit an SM together."""
        return self.nbytes <= SHARED_MEMORY and self.config.blocks * (self.nbytes + 1024) <= SM_SHARED_MEMORY


def forward_config(spec: KernelSpec, *, short: bool) -> ForwardConfig:
    """Returns the variant for a compile key; see `choose.configured` for `short`."""
    for config in _candidates(spec, short):
        if SharedMemory.of(spec, config).fits:
            return config
    # What is loaded for keys takes the place of a stage.
    for config in _candidates(spec, short):
        fewer = replace(config, stages=config.stages - 1)
        if spec.cost.key_nbytes and SharedMemory.of(spec, fewer).fits:
            return fewer
    raise AssertionError(f"no forward variant fits {spec}")


def _split_candidates(spec: KernelSpec, columns: int) -> tuple[ForwardConfig, ...]:
    """Returns the variants for operands in two terms, with fewer and fewer stages.

    The first term of Q, which has two of the three products, stays in registers.
    """
    keys, stages = next(row for limit, row in {64: (128, 6), 96: (96, 4), 128: (64, 5)}.items() if columns <= limit)
    if spec.cost.score_nbytes:
        keys, stages = (64 if columns <= 64 else 32), 8
    config = ForwardConfig(2, keys, stages, overlap_qk_pv=False, ping_pong=True, persistent=True)
    config = replace(config, q_in_regs=columns // 16, shares_bias=spec.matrix_bias)
    return tuple(replace(config, stages=count) for count in range(stages, 2, -1))


def _candidates(spec: KernelSpec, short: bool) -> tuple[ForwardConfig, ...]:
    """Returns the variants that may fit, best first; notebook/sm90.md has the sweeps that they come from."""
    columns, cost = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim)), spec.cost
    if spec.terms > 1:
        return _split_candidates(spec, columns)
    if cost.score_nbytes:
        config = _with_stages(columns, cost.score_nbytes, short)
        return (replace(config, shares_bias=config.shares_bias and spec.matrix_bias),)
    if columns <= 64:
        if short:
            # Loads for keys and means of rows take registers in a step of the product. Draws take all that Q may have.
            q_in_regs = 0 if spec.drops else 2 if spec.has_row_means else 3 if cost.key_nbytes else 4
            return (ForwardConfig(1, 64, 6, blocks=3, q_in_regs=q_in_regs),)
        if cost.registers >= codes.TERM_REGISTERS and not spec.drops:
            return (ForwardConfig(2, 128, 8, ping_pong=True, persistent=True),)
        if spec.drops:
            # With 128 keys the draws spill registers; two warpgroups with 128 keys take 1.06 times as long.
            return (ForwardConfig(3, 96, 12, ping_pong=True),)
        if spec.compared:
            # Edge tiles that compare ids would spill 16 bytes.
            return (ForwardConfig(2, 128, 8, ping_pong=True, persistent=True),)
        # A list is known late: a CTA that goes on to the next tile hides that.
        return (ForwardConfig(3, 128, 10, ping_pong=True, persistent=spec.listed),)
    if columns <= 96:
        if short or spec.drops:
            return (ForwardConfig(2, 128, 7, ping_pong=True, persistent=True, q_in_regs=6, pv_wait_after_exp=True),)
        return (ForwardConfig(3, 96, 8, ping_pong=True, persistent=True),)
    if columns <= 128:
        # What changes a logit takes registers, as does what is loaded for keys, and more if it holds numbers.
        q_in_regs, late = 8 if spec.is_affine and not cost.key_nbytes else 6, not cost.key_nbytes
        if spec.drops and cost.registers == codes.DROPOUT.registers:
            q_in_regs = min(q_in_regs, 7)
        elif cost.registers >= codes.TERM_REGISTERS:
            # Means of rows take registers, too.
            fewer = 5 if spec.has_row_means else 6
            q_in_regs, late = (0 if cost.registers >= codes.READING_REGISTERS else fewer), False
        elif cost.registers:
            q_in_regs -= 1
        return (ForwardConfig(2, 128, 6, ping_pong=True, persistent=True, q_in_regs=q_in_regs, pv_wait_after_exp=late),)
    if columns <= 192:
        return (ForwardConfig(2, 80, 5, ping_pong=True, persistent=True, q_in_regs=8, pv_wait_after_exp=True),)
    return (ForwardConfig(2, 64, 5, persistent=True, pv_wait_after_exp=True),)


def _with_stages(columns: int, score_nbytes: int, short: bool) -> ForwardConfig:
    """Returns the variant with features that load bytes for each score, of which each warpgroup has two stages."""
    if score_nbytes > 2:
        configs = {
            64: ForwardConfig(3, 64, 12, ping_pong=True),
            96: ForwardConfig(2, 64, 10, ping_pong=True),
            128: ForwardConfig(2, 64, 8, ping_pong=True, q_in_regs=4),
            192: ForwardConfig(2, 64, 4, ping_pong=True, q_in_regs=4),
            256: ForwardConfig(2, 64, 3),
        }
    else:
        configs = {
            64: ForwardConfig(2, 128, 8, ping_pong=True, persistent=True),
            96: ForwardConfig(3, 96, 6, ping_pong=True),
            128: ForwardConfig(2, 128, 4, ping_pong=True, persistent=True, q_in_regs=4),
            192: ForwardConfig(2, 64, 6, ping_pong=True, q_in_regs=4),
            256: ForwardConfig(2, 64, 4),
        }
        if short and columns <= 64:
            return ForwardConfig(1, 64, 5, blocks=3, persistent=True)
    return replace(configs[next(limit for limit in configs if columns <= limit)], shares_bias=True)


def forward_scratch(spec: KernelSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the scratch buffers of a launch, by name."""
    return {"tile_counter": (1,)} if spec.has_tile_counter else {}
