# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the key-stationary kernels in shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.device import ptx, wgmma, zeroing
from jax_fastattn.kernels.device.shared_regions import SharedRegions
from jax_fastattn.kernels.device.tile_counter import NextTile
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import BITS, BLOCK, BackwardMemory
from jax_fastattn.kernels.sm90.backward.listed_tiles import StageBits
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS

# A step of a product has this many columns.
STEP = 16
# This is 1 in bfloat16.
ONE = wgmma.ONE


@dataclass(frozen=True, eq=False)
class BackwardShared:
    """Holds the tiles and barriers of a CTA. The ones for dq exist only in the kernel that computes dq.

    Attributes:
        memory: the table, with the config.
        regions: the rows of the table.
        key: each term of K, `[64, columns, tile of 64 keys]`.
        value: each term of V, likewise.
        query: the ring of each term of Q, `[queries, columns, stage]`.
        dout: the ring of each term of dO, likewise.
        dq_tiles: tiles for dq by name: `dscore`, `stats`, `ones` and `key_columns`.
    """

    memory: BackwardMemory
    regions: SharedRegions
    key: list[cute.Tensor]
    value: list[cute.Tensor]
    query: list[cute.Tensor]
    dout: list[cute.Tensor]
    dq_tiles: dict[str, cute.Tensor]

    @classmethod
    def of(cls, memory: BackwardMemory, dtype: Any) -> "BackwardShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        regions = SharedRegions.of(memory.table, wgmma.shared_memory())
        queries, terms = memory.config.queries, memory.terms
        return cls(
            memory=memory,
            regions=regions,
            key=regions.operand("key", dtype, (WARPGROUP_ROWS, memory.head_dim), terms),
            value=regions.operand("value", dtype, (WARPGROUP_ROWS, memory.v_head_dim), terms),
            query=regions.operand("query", dtype, (queries, memory.head_dim), terms),
            dout=regions.operand("dout", dtype, (queries, memory.v_head_dim), terms),
            dq_tiles=_dq_tiles(memory, regions, dtype) if memory.config.adds_dq else {},
        )

    def initialize(self, thread: Int32, warp_index: Int32, tma: Tma) -> None:
        """Writes constants, initializes the barriers, and makes both visible to all threads and to TMA.

        Args:
            thread: index of this thread in the CTA; all of them call it.
            warp_index: index of its warp in the CTA.
            tma: the operands that TMA loads.
        """
        if self.memory.config.adds_dq:
            _write_constants(self.memory, self.regions, thread)
        self.regions.initialize(warp_index, tma)

    def key_terms(self, index: Any) -> list[tuple[Int32, int]]:
        """Returns the address and the columns of each tile of a tile of 64 keys: of K and of V."""
        return self._terms((("key", self.memory.head_dim), ("value", self.memory.v_head_dim)), index, WARPGROUP_ROWS)

    def query_terms(self, stage: Int32) -> list[tuple[Int32, int]]:
        """Returns the address and the columns of each tile of a stage: of Q and of dO."""
        names = ("query", self.memory.head_dim), ("dout", self.memory.v_head_dim)
        return self._terms(names, stage, self.memory.config.queries)

    def _terms(self, names: tuple[tuple[str, int], ...], index: Any, rows: int) -> list[tuple[Int32, int]]:
        terms = self.memory.terms
        return [x for name, columns in names for x in self.regions.terms(name, index, (rows, columns), terms)]

    def bits(self, spec: KernelSpec, stage: Int32) -> StageBits:
        """Returns what came with a stage of Q if tiles are visited by lists."""
        return StageBits(spec.tiles_of(self.memory.config), self.regions.stage(BITS, stage))

    @property
    def address(self) -> Int32:
        """Address of the first byte."""
        return self.regions.address

    # Both kernels have the barriers below.

    @property
    def key_full(self) -> cute.Pointer:
        """Returns the barrier of K."""
        return self.regions.barriers["key_full"]

    @property
    def value_full(self) -> cute.Pointer:
        """Returns the barrier of V."""
        return self.regions.barriers["value_full"]

    @property
    def query_full(self) -> cute.Pointer:
        """Returns the barriers of the stages of Q that TMA completes."""
        return self.regions.barriers["query_full"]

    @property
    def query_empty(self) -> cute.Pointer:
        """Returns the barriers of the stages of Q on which every consumer warp arrives."""
        return self.regions.barriers["query_empty"]

    @property
    def dout_full(self) -> cute.Pointer:
        """Returns the barriers of the stages of dO that TMA completes."""
        return self.regions.barriers["dout_full"]

    @property
    def dout_empty(self) -> cute.Pointer:
        """Returns the barriers of the stages of dO on which every consumer warp arrives."""
        return self.regions.barriers["dout_empty"]

    # The tiles and barriers below are for dq.

    @property
    def dscore(self) -> cute.Tensor:
        """Returns two buffers of dS, `[64, 64, tile]`."""
        return self.dq_tiles["dscore"]

    @property
    def stats(self) -> cute.Tensor:
        """Returns the ring of statistics as factors: bfloat16 for all operands, `[queries, 16, 2 stage + which]`."""
        return self.dq_tiles["stats"]

    def means(self, stage: Int32) -> Int32:
        """Returns the address of the mean of a stage's first query, see `gradient.split_bf16x3`."""
        table = self.memory.table
        return self.address + (table.offset("stats") + table["stats"].pitch + 8) + stage * (2 * table["stats"].pitch)

    @property
    def ones(self) -> cute.Tensor | None:
        """Returns the left factor of statistics; None if it is in registers."""
        return self.dq_tiles.get("ones")

    @property
    def key_columns(self) -> cute.Tensor:
        """Returns K, with as many columns as dq is computed of at a time: atoms of 64 columns follow each other."""
        return self.dq_tiles["key_columns"]

    @property
    def dscore_full(self) -> cute.Pointer:
        """Returns the barriers of the buffers of dS on which the consumers arrive."""
        return self.regions.barriers["dscore_full"]

    @property
    def dscore_empty(self) -> cute.Pointer:
        """Returns the barriers of the buffers of dS on which the third warpgroup arrives."""
        return self.regions.barriers["dscore_empty"]

    @property
    def added(self) -> cute.Pointer:
        """Returns barriers of dq tiles in flight to which the third warpgroup has added, see `dkdv_dq/dq_atomic.py`."""
        return self.regions.barriers["added"]

    @property
    def counted(self) -> cute.Pointer:
        """Returns the barriers of tiles of dq in flight that have been counted, see `dkdv_dq/dq_atomic.py`."""
        return self.regions.barriers["counted"]

    @property
    def keys_empty(self) -> cute.Pointer:
        """Returns the barrier on which every warp arrives that uses K."""
        return self.regions.barriers["keys_empty"]

    @property
    def next_tile(self) -> NextTile:
        """Returns the next tile of keys, by the tile counter."""
        return NextTile.of(self.regions)


def _dq_tiles(memory: BackwardMemory, regions: SharedRegions, dtype: Any) -> dict[str, cute.Tensor]:
    """Returns the tiles for dq; `ones` only if they are in shared memory."""
    config, columns = memory.config, memory.dq_columns
    dscores = 2 * config.keys * config.queries // (BLOCK * BLOCK)
    tiles = {
        "dscore": regions.tiles("dscore", dtype, (BLOCK, BLOCK), dscores),
        "stats": regions.tiles("stats", cutlass.BFloat16, (config.queries, STEP)),
    }
    if config.shared_ones:
        tiles["ones"] = regions.tiles("ones", cutlass.BFloat16, (WARPGROUP_ROWS, STEP))
    tiles["key_columns"] = regions.tiles("key", dtype, (WARPGROUP_ROWS, columns), 2 * memory.head_dim // columns)
    return tiles


def _write_constants(memory: BackwardMemory, regions: SharedRegions, thread: Int32) -> None:
    """Writes the zeros that follow statistics as factors of products, and, if it is shared, the factor of ones."""
    config, table = memory.config, memory.table
    if config.shared_ones:
        chunk = ptx.where(thread < WARPGROUP_ROWS, Int32(ONE), Int32(0))
        target = regions.address + table.offset("ones") + thread * 16
        values = [chunk << 16 | chunk, chunk, Int32(0), Int32(0)]
        cutlass.if_generate(thread < 2 * WARPGROUP_ROWS, lambda: ptx.store_shared_chunk(target, values))
    for i in range(table["stats"].count):
        zeros = regions.address + table.offset("stats") + i * table["stats"].pitch + memory.stats_nbytes
        all_rows = Int32(0), Int32(config.queries)
        zeroing.zero_rows(zeros, (config.queries, 8), all_rows, thread=thread, threads=config.threads)
    cute.arch.fence_proxy("async.shared", space="cta")
