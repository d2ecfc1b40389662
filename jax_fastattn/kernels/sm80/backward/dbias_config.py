# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and shared memory of the portable kernel that computes the gradient of a bias of pairs, see `dbias.py`.

Pure Python, no import of the DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jax_fastattn.kernels.architectures import shared_memory_limit
from jax_fastattn.kernels.device.layout import SharedTile, padded
from jax_fastattn.kernels.device.regions import Region, Row, SharedTable
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums import tiles as dbias_tiles
from jax_fastattn.kernels.sums.tiles import KEYS, ROWS

# These numbers of warps lie side by side along the queries, and along the keys.
ROW_WARPS, COLUMN_WARPS = 4, dbias_tiles.COLUMN_WARPS["sm80"]
THREADS = 32 * ROW_WARPS * COLUMN_WARPS

# A warp has these rows and columns; its sum, S and dP take 64 registers of a lane each.
WARP_ROWS, WARP_COLUMNS = ROWS // ROW_WARPS, KEYS // COLUMN_WARPS

# There are at most this many stages: one that is read, and two for the two chunks that small head dims have.
_STAGES = 3


class Chunk(NamedTuple):
    """Some columns of Q and K, or of dO and V.

    Attributes:
        tile: the layout of the queries, and of the keys.
        first: the first column.
    """

    tile: SharedTile
    first: int


def chunks(head_dim: int, columns: int) -> list[Chunk]:
    """Returns the columns of operands in chunks of one pitch, as even as they can be, at most `columns` in each."""
    width = padded(-(-head_dim // -(-head_dim // columns)))
    return [Chunk(SharedTile(ROWS, min(width, head_dim - at), width), at) for at in range(0, head_dim, width)]


@dataclass(frozen=True)
class DbiasConfig:
    """One variant.

    Attributes:
        columns: most columns of a chunk.
        stages: stages of the ring, each with a chunk of queries and keys.
        copies_bias: whether the bias of a tile is copied to shared memory, else lanes load their pairs for each item.
    """

    columns: int
    stages: int
    copies_bias: bool


@dataclass(frozen=True)
class DbiasMemory:
    """Shared memory of a CTA: a ring of chunks, and the tile of each term of the bias.

    Attributes:
        query_chunks: chunks of Q and K.
        dout_chunks: chunks of dO and V.
        bias_terms: tiles of the bias.
        terms: tiles of each chunk, one for each term of the operands.
    """

    config: DbiasConfig
    query_chunks: tuple[Chunk, ...]
    dout_chunks: tuple[Chunk, ...]
    bias_terms: int
    terms: int

    @classmethod
    def of(cls, spec: KernelSpec) -> DbiasMemory:
        """Returns the layout for a compile key: the first one that fits."""
        limit = shared_memory_limit(spec.arch)
        memories = (cls._with(spec, config) for config in _candidates(copies_bias=spec.cost.score_nbytes > 0))
        return next(memory for memory in memories if memory.nbytes <= limit)

    @classmethod
    def _with(cls, spec: KernelSpec, config: DbiasConfig) -> DbiasMemory:
        query, dout = (tuple(chunks(dim, config.columns)) for dim in (spec.head_dim, spec.v_head_dim))
        return cls(config, query, dout, spec.bias_terms if config.copies_bias else 0, spec.terms)

    @property
    def bias(self) -> SharedTile:
        """The tile of a term of the bias."""
        return SharedTile(ROWS, KEYS)

    @property
    def table(self) -> SharedTable:
        """Regions: the ring, whose stages have a chunk of queries, then of keys; and the bias."""
        stage = 2 * self.terms * max(chunk.tile.nbytes for chunk in (*self.query_chunks, *self.dout_chunks))
        rows: list[Row] = [Region("ring", stage, self.config.stages)]
        if self.bias_terms:
            rows.append(Region("bias", self.bias.nbytes, self.bias_terms))
        return SharedTable(tuple(rows))

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return self.table.nbytes


def _candidates(*, copies_bias: bool) -> Iterator[DbiasConfig]:
    """Yields the variants, best first.

    Without a place for the bias, two stages of 64 columns fit any GPU, or of 32 columns in two terms.
    """
    for columns in (64, 32):
        for stages in range(_STAGES, 1, -1):
            yield DbiasConfig(columns, stages, copies_bias)
    yield DbiasConfig(64, 2, copies_bias=False)
    yield DbiasConfig(32, 2, copies_bias=False)
