# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The warp of a key-stationary kernel that loads: K and V of a tile of keys, and all tiles of Q and dO that see it."""

from collections.abc import Callable

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.tma import Tma, TmaOperand
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import BITS, ROW_ALIGNMENT, BackwardMemory, stats_row_nbytes
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.visit import Phase


class Producer:
    """Emits the warp's code.

    Args:
        group: query heads of a key/value head.
        memory: of the kernel, with its config.
    """

    def __init__(self, group: int, memory: BackwardMemory):
        self.group, self.memory, self.config = group, memory, memory.config

    def start(
        self,
        shared: BackwardShared,
        tma: Tma,
        stats: cute.Pointer,
        score: Score,
        begin: Callable[[KeyTile, Int32], None] | None,
    ) -> Callable[[KeyTile, Int32], None]:
        """Returns a function that loads everything for a tile of keys.

        Args:
            shared: tiles and barriers.
            tma: Q, K, V, dO.
            stats: see `gradient.py`.
            score: what features load.
            begin: called before a tile of keys is loaded, with the tile and the phase of its barriers; None if its K
                and V may be loaded at once.
        """
        config, memory, table = self.config, self.memory, self.memory.table
        loaded_nbytes = score.loaded_nbytes(config.queries, config.keys)
        queries = wgmma.Ring(shared.query_full, shared.query_empty, config.stages)
        douts = wgmma.Ring(shared.dout_full, shared.dout_empty, config.stages)
        groups = config.keys // WARPGROUP_ROWS

        def load_keys(
            work: KeyTile, operand: TmaOperand, tile: cute.Tensor, barrier: cute.Pointer, columns: int
        ) -> None:
            copy = operand.copy(tile, work.kv_head, work.keys)
            wgmma.expect(barrier, config.keys * columns * 2)
            for group in range(groups):
                copy(groups * work.tile + group, group, barrier)

        def head_loader(work: KeyTile, member: Int32, whole: Phase) -> Callable[[Int32], None]:
            head = work.first_head + member
            copy_query = tma.query.copy(shared.query, head, work.queries)
            copy_dout = tma.dout.copy(shared.dout, head, work.queries)
            head_row = work.queries.padded_row(work.queries.head(work.num_heads, head), ROW_ALIGNMENT)

            def copy_both(tile: Int32, stage: Int32, barrier: cute.Pointer) -> None:
                copy_query(tile, stage, barrier)
                rows, nbytes = work.queries.padded_rows(ROW_ALIGNMENT), memory.stats_nbytes
                row_nbytes = stats_row_nbytes(config.adds_dq)
                row = work.queries.padded(tile * config.queries, ROW_ALIGNMENT)
                source = stats.toint() + (2 * head_row + row) * row_nbytes
                target = shared.address + table.offset("stats") + stage * (2 * table["stats"].pitch)
                if loaded_nbytes:
                    score.copy(work.scores(member, tile, config), shared.regions.stage(stages.NAME, stage), barrier)
                with cute.arch.elect_one():
                    ptx.copy_bulk(target, source, nbytes, barrier.toint())
                    ptx.copy_bulk(
                        target + table["stats"].pitch, source + Int64(rows) * row_nbytes, nbytes, barrier.toint()
                    )

            query_nbytes = table["query"].pitch + 2 * memory.stats_nbytes + loaded_nbytes
            bits = None if BITS not in table else work.head_bits(member)

            def load(i: Int32) -> None:
                position = whole.position(i)
                tile = work.visit.tile(position)
                if bits is None:
                    queries.producer_load(copy_both, tile, query_nbytes)
                else:
                    load_listed(bits, tile, Boolean(work.visit.is_edge(position)))
                douts.producer_load(copy_dout, tile, table["dout"].pitch)

            def load_listed(bits: TileBits, tile: Int32, is_edge: Boolean) -> None:
                # Bits of an edge tile, and which of its queries are live, come with its Q.
                tile_nbytes = bits.config.tile_nbytes

                def copy_all(tile: Int32, stage: Int32, barrier: cute.Pointer) -> None:
                    copy_both(tile, stage, barrier)

                    def copy_bits() -> None:
                        with cute.arch.elect_one():
                            ptx.copy_bulk(
                                shared.regions.stage(BITS, stage), bits.tile(tile), tile_nbytes, barrier.toint()
                            )

                    cutlass.if_generate(is_edge, copy_bits)

                nbytes = ptx.where(is_edge, Int32(query_nbytes + tile_nbytes), Int32(query_nbytes))
                queries.producer_load(copy_all, tile, nbytes)

            return load

        def load_queries(work: KeyTile) -> None:
            whole = work.visit.whole(config.order)

            def load_tile(i: Int32) -> None:
                wgmma.loop(Int32(self.group), lambda member: head_loader(work, member, whole)(i))

            def load_head(member: Int32) -> None:
                wgmma.loop(whole.steps, head_loader(work, member, whole))

            if config.interleaves_heads:
                wgmma.loop(whole.steps, load_tile)
            else:
                wgmma.loop(Int32(self.group), load_head)

        def load_all(work: KeyTile, phase: Int32) -> None:
            if begin is not None:
                begin(work, phase)
            load_keys(work, tma.key, shared.key, shared.key_full, memory.head_dim)
            load_keys(work, tma.value, shared.value, shared.value_full, memory.v_head_dim)
            load_queries(work)

        return load_all
