# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The warp of a key-stationary kernel that loads: K and V of a tile of keys, and all tiles of Q and dO that see it."""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.tma import TmaOperand
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import BITS, ROW_ALIGNMENT, BackwardMemory, stats_row_nbytes
from jax_fastattn.kernels.sm90.backward.key_schedule import Call, KeyTile
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.visit import Phase


@dataclass(frozen=True, eq=False)
class BackwardProducer:
    """Emits the warp's code.

    Attributes:
        group: query heads of a key/value head.
        call: what the kernel computes with.
        score: what features load.
        queries: the warp's position in the ring of Q.
        douts: its position in the ring of dO.
        begin: called before a tile of keys is loaded, with the tile and the phase of its barriers; None if its K and V
            may be loaded at once.
    """

    group: int
    call: Call
    shared: BackwardShared
    score: Score
    queries: wgmma.Ring
    douts: wgmma.Ring
    begin: Callable[[KeyTile, Int32], None] | None

    @classmethod
    def start(
        cls,
        group: int,
        call: Call,
        shared: BackwardShared,
        score: Score,
        begin: Callable[[KeyTile, Int32], None] | None,
    ) -> "BackwardProducer":
        """Returns the role with its registers."""
        ring_stages = shared.memory.config.stages
        queries = wgmma.Ring(shared.query_full, shared.query_empty, ring_stages)
        douts = wgmma.Ring(shared.dout_full, shared.dout_empty, ring_stages)
        return cls(group, call, shared, score, queries, douts, begin)

    @property
    def memory(self) -> BackwardMemory:
        """Returns the shared memory of the kernel, with its config."""
        return self.shared.memory

    @property
    def loaded_nbytes(self) -> int:
        """Returns how many bytes features load for a tile of scores."""
        config = self.memory.config
        return self.score.loaded_nbytes(config.queries, config.keys)

    def load(self, work: KeyTile, phase: Int32) -> None:
        """Loads everything for a tile of keys, given the phase of its barriers."""
        if self.begin is not None:
            self.begin(work, phase)
        tma, shared, memory = self.call.tma, self.shared, self.memory
        self._load_keys(work, tma.key, shared.key, shared.key_full, memory.table["key"].pitch)
        self._load_keys(work, tma.value, shared.value, shared.value_full, memory.table["value"].pitch)
        whole = work.visit.whole(memory.config.order)

        def load_tile(i: Int32) -> None:
            wgmma.loop(Int32(self.group), lambda member: _HeadTiles.of(self, work, member, whole).load(i))

        def load_head(member: Int32) -> None:
            wgmma.loop(whole.steps, _HeadTiles.of(self, work, member, whole).load)

        if memory.config.interleaves_heads:
            wgmma.loop(whole.steps, load_tile)
        else:
            wgmma.loop(Int32(self.group), load_head)

    def _load_keys(
        self, work: KeyTile, operand: TmaOperand, tiles: list[cute.Tensor], barrier: cute.Pointer, nbytes: int
    ) -> None:
        """Loads K or V, whose tiles of 64 keys have `nbytes`."""
        groups = self.memory.config.keys // WARPGROUP_ROWS
        copy = operand.copy_terms(tiles, work.kv_head, work.keys)
        wgmma.expect(barrier, groups * nbytes)
        for group in range(groups):
            copy(groups * work.tile + group, group, barrier)


@dataclass(frozen=True, eq=False)
class _HeadTiles:
    """Loads the tiles of Q and dO of a query head that see a tile of keys.

    Attributes:
        producer: what loads them.
        member: which head of the group it is.
        whole: their positions.
        copy_query, copy_dout: see `TmaOperand.copy`.
        head_row: the first padded row of the head.
        bits: the bits of a list's edge tiles; None if the kernel has no stages for them.
    """

    producer: BackwardProducer
    work: KeyTile
    member: Int32
    whole: Phase
    copy_query: Callable[[Int32, Int32, cute.Pointer], None]
    copy_dout: Callable[[Int32, Int32, cute.Pointer], None]
    head_row: Int64
    bits: TileBits | None

    @classmethod
    def of(cls, producer: BackwardProducer, work: KeyTile, member: Int32, whole: Phase) -> "_HeadTiles":
        """Returns the tiles of a head of the group."""
        tma, shared = producer.call.tma, producer.shared
        head = work.first_head + member
        copy_query = tma.query.copy_terms(shared.query, head, work.queries)
        copy_dout = tma.dout.copy_terms(shared.dout, head, work.queries)
        head_row = work.queries.padded_row(work.queries.head(work.num_heads, head), ROW_ALIGNMENT)
        bits = None if BITS not in shared.memory.table else work.head_bits(member)
        return cls(producer, work, member, whole, copy_query, copy_dout, head_row, bits)

    def load(self, i: Int32) -> None:
        """Loads the tile that comes after `i` others."""
        queries, douts, memory = self.producer.queries, self.producer.douts, self.producer.memory
        nbytes = memory.table["query"].pitch + 2 * memory.stats_nbytes + self.producer.loaded_nbytes
        position = self.whole.position(i)
        tile = self.work.visit.tile(position)
        if self.bits is None:
            queries.producer_load(self._copy_query, tile, nbytes)
        else:
            self._load_listed(self.bits, tile, Boolean(self.work.visit.is_edge(position)), nbytes)
        douts.producer_load(self.copy_dout, tile, memory.table["dout"].pitch)

    def _load_listed(self, bits: TileBits, tile: Int32, is_edge: Boolean, nbytes: int) -> None:
        """Loads Q; with Q of an edge tile come its bits, and which of its queries are live."""
        tile_nbytes = bits.config.tile_nbytes

        def copy(tile: Int32, stage: Int32, barrier: cute.Pointer) -> None:
            self._copy_query(tile, stage, barrier)

            def copy_bits() -> None:
                with cute.arch.elect_one():
                    target = self.producer.shared.regions.stage(BITS, stage)
                    ptx.copy_bulk(target, bits.tile(tile), tile_nbytes, barrier.toint())

            cutlass.if_generate(is_edge, copy_bits)

        expected = ptx.where(is_edge, Int32(nbytes + tile_nbytes), Int32(nbytes))
        self.producer.queries.producer_load(copy, tile, expected)

    def _copy_query(self, tile: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        """Copies Q, its statistics, see `gradient.py`, and what features load, to a stage."""
        producer, work = self.producer, self.work
        shared, config, pitch = producer.shared, producer.memory.config, producer.memory.table["stats"].pitch
        self.copy_query(tile, stage, barrier)
        rows, nbytes = work.queries.padded_rows(ROW_ALIGNMENT), producer.memory.stats_nbytes
        row_nbytes = stats_row_nbytes(config.adds_dq)
        row = work.queries.padded(tile * config.queries, ROW_ALIGNMENT)
        source = producer.call.buffers.stats.toint() + (2 * self.head_row + row) * row_nbytes
        target = shared.address + producer.memory.table.offset("stats") + stage * (2 * pitch)
        if producer.loaded_nbytes:
            address = shared.regions.stage(stages.NAME, stage)
            producer.score.copy(work.scores(self.member, tile, config), address, barrier)
        with cute.arch.elect_one():
            ptx.copy_bulk(target, source, nbytes, barrier.toint())
            ptx.copy_bulk(target + pitch, source + Int64(rows) * row_nbytes, nbytes, barrier.toint())
