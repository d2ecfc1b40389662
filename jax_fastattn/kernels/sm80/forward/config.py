# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the portable forward kernel; `backward/config.py` has the backward kernel's.

Pure Python, no import of the DSL: tests and the support table read it on any machine. Measured and predicted speeds of
the rows, and the registers they compile to, are in docs/kernels/sm80.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jax_fastattn.kernels.architectures import shared_memory_limit
from jax_fastattn.kernels.device.layout import PieceRing, SharedTile, WarpPiece, padded
from jax_fastattn.kernels.device.regions import Region, SharedTable
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.lists import PrepassConfig


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
        q_in_regs: whether Q fragments stay in registers, else ldmatrix fetches them for each key tile.
        blocks: CTAs that must fit on an SM together; bounds the registers of a thread.
        bias_pieces: pieces of a matrix that a warp keeps in shared memory, see `bias_ring`; 0 if there is no matrix, or
            no room for enough of them.
        bias_terms: terms of such a piece.
    """

    rows_per_warp: int
    warps: int
    keys: int
    stages: int = 1
    q_in_regs: bool = False
    blocks: int = 1
    bias_pieces: int = 0
    bias_terms: int = 1

    # Each CTA takes one tile, see `sm90/forward/config.py`.
    persistent: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return self.rows_per_warp * self.warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def bias_ring(self) -> PieceRing:
        """The pieces of a matrix that a warp copies for itself: 16 of its queries and 16 keys each."""
        piece, across = WarpPiece(16), self.keys // 16
        return PieceRing(piece, self.bias_terms, self.bias_pieces, self.rows_per_warp // 16 * across, across)

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
        return f"forward {self.rows}x{self.keys}"

    def shared_memory(self, columns: int, v_columns: int) -> int:
        """Returns the bytes of shared memory, see `table`."""
        return self.table(columns, v_columns).nbytes

    def table(self, columns: int, v_columns: int) -> SharedTable:
        """Returns the regions of shared memory: Q, the stages of K and V, pieces of a bias; O uses them all again.

        A warp that has its rows of Q in registers keeps its pieces where they were, if they fit. See
        `KernelSpec.row_columns` for the columns.
        """
        query = SharedTile(self.rows, columns)
        table = SharedTable(
            (
                Region("query", query.nbytes),
                Region("key", SharedTile(self.keys, columns).nbytes, self.stages),
                Region("value", SharedTile(self.keys, v_columns).nbytes, self.stages),
                Region("out", SharedTile(self.rows, v_columns).nbytes, over="query"),
            )
        )
        if not self.bias_pieces:
            return table
        if self.bias_over_query(columns):
            return table.with_rows(Region("bias", self.rows_per_warp * query.pitch, self.warps, over="query"))
        return table.with_rows(Region("bias", self.bias_ring.nbytes, self.warps))

    def bias_over_query(self, columns: int) -> bool:
        """Returns whether a warp's pieces of a bias lie where its rows of Q were."""
        return self.q_in_regs and self.bias_ring.nbytes <= SharedTile(self.rows_per_warp, columns).nbytes


def forward_config(spec: KernelSpec) -> ForwardConfig:
    """Returns the tiling for a compile key. What features load does not change it: pieces of it take what is left."""
    config = first_fit(_forward_candidates(spec), spec)
    if not spec.cost.score_nbytes:
        return config
    count = config.bias_ring.count
    # With fewer pieces, most of a tile would be copied while it is read.
    return with_bias(config, spec, range(count, max(count // 2, 2) - 1, -1))


def with_bias(config: Any, spec: KernelSpec, pieces: Iterable[int]) -> Any:
    """Returns a tiling with the first number of pieces of a matrix that fits, or with none."""
    candidates = (replace(config, bias_pieces=x, bias_terms=spec.bias_terms) for x in pieces)
    return next((x for x in candidates if fits(x, spec)), config)


def first_fit(candidates: tuple[Any, ...], spec: KernelSpec) -> Any:
    """Returns the first candidate of which `blocks` CTAs fit the shared memory of an SM together."""
    for config in candidates:
        if fits(config, spec):
            return config
    raise AssertionError(f"no tiling fits {spec}")


def fits(config: Any, spec: KernelSpec) -> bool:
    """Returns whether `blocks` CTAs of a tiling fit the shared memory of an SM together."""
    # An SM has 1 KB more than its largest CTA may ask for, and every CTA takes 1 KB for the system.
    nbytes = config.shared_memory(*spec.row_columns) + 1024
    return config.blocks * nbytes <= shared_memory_limit(spec.arch) + 1024


def _forward_candidates(spec: KernelSpec) -> tuple[ForwardConfig, ...]:
    """Returns tilings, the best one first.

    Output accumulators take `rows_per_warp * D / 32` registers: 32 rows go up to 128 columns.
    """
    if spec.products == "bf16x3":
        return _split_candidates(max(spec.head_dim, spec.v_head_dim))
    base = (ForwardConfig(16, 8, 64), ForwardConfig(16, 8, 48), ForwardConfig(16, 8, 32))
    if min(padded(spec.head_dim), padded(spec.v_head_dim)) > 192:
        # If Q were fetched for each key tile, it would be 16 of the 144 ldmatrix that a warp issues.
        return (ForwardConfig(16, 8, 64, q_in_regs=True), *base[1:])
    if padded(spec.v_head_dim) > 128:
        return base
    resident = padded(spec.head_dim) <= 64 and padded(spec.v_head_dim) <= 64
    return (ForwardConfig(32, 4, 64, q_in_regs=resident, blocks=2), *base)


def _split_candidates(width: int) -> tuple[ForwardConfig, ...]:
    """Returns tilings for operands in two terms and the wider one of both head dims, the best one first."""
    if width <= 64:
        return (ForwardConfig(32, 4, 64, blocks=2), ForwardConfig(32, 4, 64), ForwardConfig(16, 4, 64))
    if width <= 128:
        return (ForwardConfig(32, 8, 64), ForwardConfig(16, 8, 64), ForwardConfig(16, 4, 64), ForwardConfig(16, 4, 32))
    return (
        ForwardConfig(16, 8, 64),
        ForwardConfig(16, 8, 32),
        ForwardConfig(16, 4, 64),
        ForwardConfig(16, 4, 32),
        ForwardConfig(16, 2, 32),
    )
