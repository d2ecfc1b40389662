# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tilings of the portable kernel that computes dk, dv and dq together: one table by head dim and shared memory.

Pure Python, no import of the DSL: tests and the support table read it on any machine. docs/kernels/sm80.md has the
registers and speeds of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from jax_fastattn.kernels.device.layout import PieceRing, SharedTile, WarpPiece, padded
from jax_fastattn.kernels.device.regions import NamedBarrier, Region, Row, SharedTable, disjoint
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.forward.config import first_fit, with_bias
from jax_fastattn.kernels.sums.row_means import MEAN_NBYTES
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.tiles.records import slot_count

# If CTAs add in semaphore order, the heads that are visited together have this many bytes of Q, dO and dq_accum. With
# more bytes L2 keeps less of them; with fewer, more CTAs of one head run at a time and wait for each other.
ORDERED_NBYTES = 64 << 20


@dataclass(frozen=True)
class DkdvDqConfig:
    """Tiling of the kernel.

    With two roles, the first half of the warps computes S^T, P^T and dV and the second half dP^T, dS^T and dK. With one
    role, every warp computes everything.

    Attributes:
        key_warps: warps of a role side by side along the keys.
        column_warps: warps of a role that share key rows. Each computes its part of the queries of S^T or dP^T and sums
            its part of the columns of dV or dK. 1 if there is one role.
        queries: query rows of a tile of dQ.
        keys_per_warp: key rows of a warp, 16 or 32.
        roles: 1 or 2.
        parts: 1, or with one role 2. S^T is computed for `queries / parts` at a time, and a stage holds as many rows.
        stages: buffers for Q, dO and the row statistics, 1 or 2; 2 if there are two parts.
        dq_row_warps: warps side by side along the queries in the product dQ = dS K.
        dq_roles: 2 if all warps compute dQ, 1 if only the warps of the last role do.
        blocks: CTAs that must fit on an SM together; bounds the registers of a thread.
        bias_pieces: pieces of a matrix that warps which compute S^T keep in shared memory, see `bias_ring`; 0 if there
            is no matrix, or no room for enough of them.
        bias_terms: terms of such a piece.
        terms: terms of operands and of dS, see `KernelSpec.terms`.
        has_means: whether rows have a mean key, see `sums/plane_products.py`.
    """

    key_warps: int
    column_warps: int
    queries: int
    keys_per_warp: int = 32
    roles: int = 2
    parts: int = 1
    stages: int = 2
    dq_row_warps: int = 2
    dq_roles: int = 2
    blocks: int = 1
    bias_pieces: int = 0
    bias_terms: int = 1
    terms: int = 1
    has_means: bool = False

    # One kernel computes all gradients, and adds dq up in a buffer. No kernel computes dq alone.
    adds_dq: ClassVar[bool] = True
    dq: ClassVar[None] = None

    @property
    def keys(self) -> int:
        """Key rows of a CTA."""
        return self.keys_per_warp * self.key_warps

    @property
    def part(self) -> int:
        """Query rows of a stage."""
        return self.queries // self.parts

    @property
    def role_warps(self) -> int:
        """Warps of a role."""
        return self.key_warps * self.column_warps

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.role_warps * self.roles

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def dq_warps(self) -> int:
        """Warps that compute dQ."""
        return self.role_warps * min(self.roles, self.dq_roles)

    @property
    def dq_column_warps(self) -> int:
        """Warps side by side along the columns of dQ."""
        return self.dq_warps // self.dq_row_warps

    @property
    def stats_pitch(self) -> int:
        """Bytes from one row of the statistics in global memory to the next; the last 16 have the mean key."""
        return 32 if self.has_means else 8

    @property
    def lagged(self) -> bool:
        """Whether the second role may run half a tile after the first; both then copy what they alone may overwrite."""
        return self.roles == 2 and self.stages == 2

    @property
    def exchanges(self) -> bool:
        """Whether warps hand on P and dS to those that share their key rows."""
        return self.column_warps > 1

    @property
    def bias_ring(self) -> PieceRing:
        """The pieces of a matrix that a warp copies for itself: 8 of its queries and all of its keys each."""
        piece = WarpPiece(8)
        return PieceRing(piece, self.bias_terms, self.bias_pieces, self.part // self.column_warps // piece.rows)

    @property
    def slot_rows(self) -> tuple[int, int]:
        """Queries and keys of the slots of packed sequences, see `tiles/records.py`."""
        return self.queries, self.keys

    @property
    def prepass(self) -> PrepassConfig:
        """The tiles of the prepass for its lists."""
        return PrepassConfig(self.queries, self.keys, transposed=True)

    @property
    def tiles(self) -> str:
        """Query rows x keys of its tiles, in words."""
        return f"backward {self.queries}x{self.keys}"

    def memory(self, columns: int, v_columns: int) -> DkdvDqMemory:
        """Returns where the tiles lie in shared memory; see `KernelSpec.row_columns` for the columns."""
        return DkdvDqMemory(self, columns, v_columns)

    def shared_memory(self, columns: int, v_columns: int) -> int:
        """Returns the bytes of shared memory."""
        return self.memory(columns, v_columns).nbytes


@disjoint
class RoleBarrier(NamedBarrier):
    """Named barriers of two roles, see `roles.py`: PAIR of each warp of a role, the exchanges of each two warps."""

    FIRST = 1, 1
    SECOND = 2, 1
    READY = 3, 1
    DONE = 4, 1
    PAIR = 5, 4
    EXCHANGE_P = 9, 2
    EXCHANGE_DS = 11, 2


@dataclass(frozen=True)
class DkdvDqMemory:
    """Shared memory of a CTA: K, V, stages of Q and dO, dS (or P on its way), P if exchanged, and numbers of rows.

    Columns split evenly between the warps that share rows, so tiles are padded with zeros to their multiples.

    Attributes:
        columns: columns of Q and K.
        v_columns: columns of V and dO.
        feature_rows: rows of features, which join the kernel's own rows.
    """

    config: DkdvDqConfig
    columns: int
    v_columns: int
    feature_rows: tuple[Row, ...] = ()

    @property
    def key(self) -> SharedTile:
        """K `[keys, columns]`, and dK in the end."""
        return SharedTile(self.config.keys, self.columns, 16 * max(self.config.dq_column_warps, self._column_warps))

    @property
    def value(self) -> SharedTile:
        """V `[keys, v_columns]`, and dV in the end."""
        return SharedTile(self.config.keys, self.v_columns, 16 * self._column_warps)

    @property
    def query(self) -> SharedTile:
        """Q `[part, columns]` of a stage."""
        return SharedTile(self.config.part, self.columns, 16 * self._column_warps)

    @property
    def dout(self) -> SharedTile:
        """The cotangent dO `[part, v_columns]` of a stage."""
        return SharedTile(self.config.part, self.v_columns, 16 * self._column_warps)

    @property
    def score(self) -> SharedTile:
        """The score gradient dS `[keys, queries]`, its terms side by side."""
        return SharedTile(self.config.keys, self.config.terms * self.config.queries)

    @property
    def dq(self) -> SharedTile:
        """Layout of dQ `[queries, columns]`, with the columns that the product pads."""
        return SharedTile(self.config.queries, self.columns, 16 * max(self.config.dq_column_warps, self._column_warps))

    @property
    def _column_warps(self) -> int:
        return self.config.column_warps

    @property
    def stats_nbytes(self) -> int:
        """Bytes of a role's statistics of a stage."""
        return 8 * self.config.part

    @cached_property
    def table(self) -> SharedTable:
        """Regions: K, V, stages of Q and dO, dS, P if exchanged, statistics by stage and role, mean keys, a bias."""
        config = self.config
        rows: list[Row] = [
            Region("key", self.key.nbytes),
            Region("value", self.value.nbytes),
            Region("stages", self.query.nbytes + self.dout.nbytes, config.stages),
            Region("dscore", self.score.nbytes),
        ]
        if config.exchanges:
            rows.append(Region("exchange", self.score.nbytes))
        rows.append(Region("stats", self.stats_nbytes, config.stages * config.roles))
        if config.has_means:
            rows.append(Region("means", MEAN_NBYTES * config.part, config.stages))
        if config.bias_pieces:
            rows.append(Region("bias", config.bias_ring.nbytes, config.role_warps))
        return SharedTable(tuple(rows)).with_rows(*self.feature_rows)

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return self.table.nbytes


def dkdv_dq_config(spec: KernelSpec) -> DkdvDqConfig:
    """Returns the tiling for a compile key. A matrix does not change it: pieces of one take what it leaves."""
    width = padded(max(spec.head_dim, spec.v_head_dim))
    candidates = _candidates(width) if spec.products == "native" else _split_candidates(width)
    config = first_fit(tuple(replace(x, has_means=spec.has_row_means) for x in candidates), spec)
    return with_bias(config, spec, _bias_pieces(config)) if spec.cost.score_nbytes else config


def _bias_pieces(config: DkdvDqConfig) -> tuple[int, ...]:
    """Returns how many pieces of a matrix a warp may keep, best first: all of a tile, or some on their way.

    With one role, copies of Q and dO are on their way while the matrix is read, and pieces would wait for them.
    """
    if config.keys_per_warp != config.bias_ring.piece.columns:
        return ()
    return (config.bias_ring.count, *((4, 3, 2) if config.roles == 2 else ()))


def _candidates(width: int) -> tuple[DkdvDqConfig, ...]:
    """Returns the tilings for the wider one of both head dims, best first; the first that fits shared memory is taken.

    A warp of 32 keys keeps its sums in one register for each column. With 160 columns, the other registers hold S^T or
    dP^T of 64 queries, and with 192 columns of 32 queries. For wider heads, warps share key rows or have 16 keys
    each. Warps that share key rows exchange tiles, which costs more than it saves if the tiles are small.
    """
    if width <= 64:
        return (DkdvDqConfig(4, 1, 64, roles=1, parts=2, blocks=2), DkdvDqConfig(4, 1, 64, dq_roles=1))
    if width <= 128:
        # Four warps side by side split 128 columns; two of them split any multiple of 32.
        dq_row_warps = 1 if width > 96 else 2
        return (
            DkdvDqConfig(4, 1, 64, dq_row_warps=dq_row_warps, dq_roles=1),
            DkdvDqConfig(4, 1, 32),
            DkdvDqConfig(4, 1, 32, stages=1),
        )
    if width <= 160:
        return (DkdvDqConfig(4, 1, 64, stages=1, dq_row_warps=4), DkdvDqConfig(2, 1, 32))
    if width <= 192:
        return (DkdvDqConfig(4, 1, 32, stages=1), DkdvDqConfig(2, 1, 32), DkdvDqConfig(2, 1, 32, stages=1))
    return (
        DkdvDqConfig(2, 2, 64),
        DkdvDqConfig(2, 2, 64, stages=1),
        DkdvDqConfig(2, 2, 32, stages=1),
        DkdvDqConfig(3, 1, 32, keys_per_warp=16, stages=1, dq_row_warps=1),
    )


def _split_candidates(width: int) -> tuple[DkdvDqConfig, ...]:
    """Returns what `_candidates` does for operands in two terms.

    Most warps have 16 keys, as the terms of a fragment take twice the registers. Two warps at most share columns of dQ.
    """
    if width <= 64:
        found = (
            DkdvDqConfig(8, 1, 64, keys_per_warp=16, roles=1, parts=2, dq_row_warps=4),
            DkdvDqConfig(4, 1, 64, keys_per_warp=16, roles=1, parts=2),
        )
    elif width <= 128:
        found = (
            DkdvDqConfig(4, 1, 32, stages=1, dq_roles=1),
            DkdvDqConfig(4, 1, 64, keys_per_warp=16, stages=1, dq_roles=1),
            DkdvDqConfig(2, 1, 32, keys_per_warp=16, stages=1),
        )
    else:
        found = (
            DkdvDqConfig(4, 1, 32, keys_per_warp=16, stages=1, dq_roles=1),
            DkdvDqConfig(2, 1, 32, keys_per_warp=16, stages=1),
        )
    return tuple(replace(x, terms=2) for x in found)


def backward_scratch(spec: KernelSpec, batch: int, query_length: int, num_heads: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the scratch arrays by name: row statistics, dq_accum and, in order, both counters.

    dq_semaphore has one count for each warp that adds to a tile; tile_counter says how many tiles of keys CTAs have
    fetched. Of packed sequences `batch` is how many there are.
    """
    config: DkdvDqConfig = spec.config
    heads = batch, num_heads
    tile_count = -(-query_length // config.queries)
    if spec.packed:
        heads, tile_count = (1, num_heads), slot_count(query_length, config.queries, batch)
    columns = config.memory(*spec.row_columns).dq.padded_columns // spec.terms
    scratch: dict[str, tuple[int, ...]] = {
        "stats": (*heads, query_length, config.stats_pitch // 4),
        "dq_accum": (*heads, tile_count * config.queries, columns),
    }
    if spec.ordered:
        scratch["tile_counter"] = (1,)
        scratch["dq_semaphore"] = (*heads, tile_count, config.dq_warps)
    return scratch
