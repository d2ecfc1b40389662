# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of `kernel.py`: dK and dV of 64 keys, and dS for the warpgroup that computes dQ.

The warpgroups never wait for each other. Query tiles are visited from the last one down: masked ones (left window edge,
end of the queries), full ones without mask code, masked ones (right window edge).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import copies, ptx, warp_scores, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import result_words
from jax_fastattn.kernels.device.row_store import RowStore, strided
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import BLOCK, BackwardConfig
from jax_fastattn.kernels.sm90.backward.dkdv_dq.products import DkdvDqProducts
from jax_fastattn.kernels.sm90.backward.hidden_rows import SharedRows
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile, QueryHead
from jax_fastattn.kernels.sm90.backward.mask import QueryMask, read_lane
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sums.head_sums import head_sums
from jax_fastattn.kernels.sums.sums import HeadSums, LaneKeys, SummedTile
from jax_fastattn.kernels.sums.units import over_ds
from jax_fastattn.kernels.visits.visit import Edges, Phase


@dataclass(frozen=True, eq=False)
class DkdvDqConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        thread: index of this thread in the CTA.
        group: index of the warpgroup.
        warp: index of this warp in the warpgroup.
        score: turns products into probabilities.
        stage: stage and phase of the rings of Q and dO, which move alike.
        buffer: buffer and phase of dS.
        rows: what it zeroes in shared memory.
        mask: what the lane's rows see.
        products: S, dP, dV and dK.
        sums: gradients that are sums of dS over the queries of a head.
    """

    spec: KernelSpec
    shared: BackwardShared
    thread: Int32
    group: Int32
    warp: Int32
    score: Score
    stage: wgmma.Uniform
    buffer: wgmma.Uniform
    rows: SharedRows
    mask: QueryMask
    products: DkdvDqProducts
    sums: tuple[HeadSums, ...]

    @classmethod
    def start(
        cls, spec: KernelSpec, shared: BackwardShared, score: Score, thread: Int32, warp_index: Int32
    ) -> "DkdvDqConsumer":
        """Returns the role with its registers."""
        group = warp_index // 4
        row, column = accumulator_lane(thread % 32)
        return cls(
            spec=spec,
            shared=shared,
            thread=thread,
            group=group,
            warp=warp_index % 4,
            score=score,
            mask=QueryMask(spec, shared, warp_index * 16 + row, column),
            stage=wgmma.Uniform(Int32(0), Int32(0)),
            buffer=wgmma.Uniform(Int32(0), Int32(0)),
            rows=SharedRows(spec, shared.memory, shared),
            products=DkdvDqProducts.start(spec, shared, thread, group),
            sums=head_sums(spec, 1, shared.memory.config.queries // 8),
        )

    @property
    def config(self) -> BackwardConfig:
        """Returns the variant."""
        return self.shared.memory.config

    def run(self, work: KeyTile, phase: Int32, buffers: Buffers, scale: Float32) -> None:
        """Computes dk, dv and dS of a tile of keys, see `key_stationary.Consumer`."""
        config, spec, visit = self.config, self.spec, work.visit
        self.products.clear()
        wgmma.wait(self.shared.key_full, phase)
        wgmma.wait(self.shared.value_full, phase)
        self.rows.scale_values(self.group, work.units(self.spec, buffers))
        if work.bounds.kind.hides_keys:
            self.rows.zero_keys(work, self.group)
        self.rows.zero_dead_keys(work)

        def visit_tiles(tile: Callable[[Int32, Int32, Edges | None], None], together: int = 1) -> None:
            if visit.masks_high:
                # One loop serves both ends, after the loop of full tiles: full tiles need fewer uniform instructions in
                # the first loop.
                wgmma.loop(Int32(2), lambda i: self._run(visit.half(i), tile, together))
            else:
                self._run(visit.phases(config.order), tile, together)

        def visit_head(member: Int32) -> None:
            head = QueryHead.start(work, member, self.score, self.mask.row)
            if spec.packed:
                self.rows.zero_last_queries(work, self.stage)
            for kind in self.sums:
                kind.clear()
            visit_tiles(lambda _, index, edges: self._tile(head, index, edges))
            for kind in self.sums:
                lane, plane = read_lane(config), work.queries.head(work.num_heads, work.first_head + member)
                units, first = work.units(self.spec, buffers), work.row + lane.row
                kind.store(LaneKeys(buffers, plane, work.keys.length, first, lane.column, factor=units.over_ds))

        def visit_tile(member: Int32, index: Int32, edges: Edges | None) -> None:
            self._tile(QueryHead.start(work, member, self.score, self.mask.row), index, edges)

        if config.interleaves_heads:
            visit_tiles(visit_tile, spec.group)
        else:
            wgmma.loop(Int32(spec.group), visit_head)
        wgmma.release(self.shared.keys_empty)
        self._store(work, buffers, scale)

    def _run(self, phases: Iterable[Phase], visit: Callable[[Int32, Int32, Edges | None], None], together: int) -> None:
        """Visits the query tiles of phases, one after the other.

        Args:
            phases: loops over positions.
            visit: visits a tile, given which of the heads visits it, its position, and what it may hold.
            together: heads that visit a tile before the next one is visited.
        """

        def run(phase: Phase) -> None:
            self.stage.make_uniform()
            self.buffer.make_uniform()
            if together == 1:
                wgmma.loop(phase.steps, lambda i: visit(Int32(0), phase.position(i), phase.edges))
            else:
                steps = phase.steps * together
                wgmma.loop(steps, lambda i: visit(i % together, phase.position(i // together), phase.edges))

        for phase in phases:
            run(phase)

    # The methods below compute one tile of queries.

    def _tile(self, head: QueryHead, index: Int32, edges: Edges | None) -> None:
        """Computes what a tile of queries adds to dV and dK, and its dS."""
        products, stage, phase = self.products, self.stage[0], self.stage[1]
        wgmma.wait(self.shared.query_full + stage, phase)
        head, at = head.load(self.shared, index, stage), self.mask.tile(head.work, index)
        score, slopes, keep = products.compute_scores(head.score, stage, at)
        edge = self._edge(head, index, stage, edges)
        if edges is not None and self.spec.reads_edges:
            # After the exponentials this branch would keep ptxas from issuing dP between them.
            wgmma.wait(self.shared.dout_full + stage, phase)
            self.rows.zero_dead_queries(stage)
        weights, marked = products.probabilities(score, slopes, keep, at, edge)
        if edges is None or not self.spec.reads_edges:
            wgmma.wait(self.shared.dout_full + stage, phase)
        if edges is not None and not self.spec.listed:
            self.rows.zero_queries(head.work, index, stage)
        if keep is None:
            products.start_dp(stage)
        else:
            products.start_dropped_dp(stage, marked)
        products.add_dv(stage)
        sums = self._sums_of(at, stage)
        warpgroup.wait_group(1)
        dscores = products.dscores(weights, sums, marked=score.marks)
        products.add_dk(stage)
        self._wait_for_room()
        self._give_dscores(dscores)
        self._leave(stage)

    def _sums_of(self, at: ScoreTile, stage: Int32) -> tuple[HeadSums, ...]:
        """Returns the sums for the scores of a tile of queries."""
        if not self.spec.has_row_means:
            return self.sums
        means = self.shared.means(stage) + 16 * self.mask.column
        return tuple(kind.at_tile(SummedTile(at, means)) for kind in self.sums)

    def _edge(self, head: QueryHead, index: Int32, stage: Int32, edges: Edges | None) -> Edge | None:
        """Returns what is hidden in a tile of queries; None if it is full."""
        if edges is None:
            return None
        return self.mask.listed_edge(head, index, stage) if self.spec.listed else self.mask.edge(head, index, edges)

    def _leave(self, stage: Int32) -> None:
        """Gives dO back when dv has it, Q when dk has it; both rings move alike."""
        warpgroup.wait_group(1)
        wgmma.release(self.shared.dout_empty + stage)
        wgmma.advance(self.stage, self.config.stages)
        warpgroup.wait_group(0)
        wgmma.release(self.shared.query_empty + stage)

    # The methods below hand over what dQ needs.

    def _wait_for_room(self) -> None:
        """Waits until the next buffer of dS is free."""
        wgmma.wait(self.shared.dscore_empty + self.buffer[0], self.buffer[1] ^ 1)

    def _give_dscores(self, pairs: list[Int32]) -> None:
        """Puts dS^T, transposed, into this warpgroup's part of the next buffer of dS."""
        queries, lane = self.config.queries, self.thread % 32
        buffer, phase = self.buffer[0], self.buffer[1]
        # An A fragment has four matrices: keys 0 and 8 of queries 0, and the same of queries 8.
        corner = warp_scores.swizzled_offset(lane // 16 * 8 + lane % 8, self.warp, lane // 8 % 2, BLOCK, BLOCK)
        part, start = 2 * buffer + self.group, self.shared.memory.table.offset("dscore")
        address = self.shared.address + start + part * (queries * BLOCK * 2) + corner
        for step in range(queries // 16):
            # Rows have 128 bytes; a tile of 64 queries ends where the next begins.
            ptx.store_matrices_transposed(address + step * (16 * BLOCK * 2), pairs[4 * step : 4 * step + 4])
        cute.arch.fence_proxy("async.shared", space="cta")
        wgmma.release(self.shared.dscore_full + buffer)
        self.buffer[1] = phase ^ buffer
        self.buffer[0] = buffer ^ 1

    # The method below stores the results.

    def _store(self, work: KeyTile, buffers: Buffers, scale: Float32) -> None:
        """Stores dk and dv from registers."""
        lane, nbytes = read_lane(self.config), self.spec.result_nbytes
        first, units = work.keys.row_head(work.row, work.kv_heads, work.kv_head), work.units(self.spec, buffers)
        for acc, target, head_dim, factor in (
            (self.products.dk, buffers.dk, self.spec.head_dim, over_ds(units, scale)),
            (self.products.dv, buffers.dv, self.spec.v_head_dim, units.over_p),
        ):
            RowStore(
                address=strided(
                    target.toint() + first * (nbytes * head_dim), Int64(work.kv_heads) * (nbytes * head_dim)
                ),
                columns=head_dim,
                row=lane.row,
                end=work.keys.length - work.row,
                quad_lane=lane.thread % 4,
                words=result_words(self.spec),
            ).store_live(acc, copies.Rows(None, work.bounds.key_end - work.row), factor)
