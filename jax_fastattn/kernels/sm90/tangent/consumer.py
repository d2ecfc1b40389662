# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of the kernel of tangents: both tangents of 64 queries.

The warpgroups never wait for each other. In a tile, products run concurrently with the arithmetic of threads:

    threads             P of S                     W of S'
    products    S  |  S' = Q' K^T + Q K'^T  |  O' += P V'  |  O' += W V

Key tiles are visited as in `forward/consumer.py`: from the right edge to the left, full ones without mask code.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import copies, wgmma, zeroing
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import warpgroup_words
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.bounds import Visibility
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sm90.query_tile import ListedEdge, RowTile
from jax_fastattn.kernels.sm90.tangent.config import TangentBarrier, TangentConfig
from jax_fastattn.kernels.sm90.tangent.products import LoadedQuery, TangentProducts
from jax_fastattn.kernels.sm90.tangent.shared import TangentShared
from jax_fastattn.kernels.sums.tangent_rows import RowPlace, TangentRows
from jax_fastattn.kernels.tiles.plan import Order
from jax_fastattn.kernels.visits.visit import Phase, Visit


@dataclass(frozen=True, eq=False)
class TangentConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        work: the CTA's tile of queries.
        score: maps products to probabilities.
        scale: the factor on products.
        ring: the warpgroup's position in the ring.
        group: index of the warpgroup.
        fragment: index of this warp in the CTA.
        lane: index of this thread in the warp.
        products: the products.
        rows: sums of the lane's rows.
    """

    spec: KernelSpec
    shared: TangentShared
    work: RowTile
    score: Score
    scale: Float32
    ring: wgmma.Ring
    group: Int32
    fragment: Int32
    lane: Int32
    products: TangentProducts
    rows: TangentRows

    @classmethod
    def start(
        cls,
        spec: KernelSpec,
        shared: TangentShared,
        work: RowTile,
        score: Score,
        buffers: Buffers,
        scale: Float32,
        thread: Int32,
        warp_index: Int32,
    ) -> "TangentConsumer":
        """Returns the role with its registers.

        Args:
            work: the CTA's tile of queries.
            score: maps products to probabilities.
            scale: the factor on products.
            thread: index of this thread in the CTA.
            warp_index: index of its warp in the CTA.
        """
        group, lane = warp_index // 4, thread % 32
        place = RowPlace(
            queries=work.queries,
            query_end=work.bounds.query_end,
            head=work.head,
            heads=work.num_heads,
            row=work.row + warp_index * 16 + accumulator_lane(lane)[0],
            quad_lane=lane % 4,
        )
        return cls(
            spec=spec,
            shared=shared,
            work=work,
            score=score,
            scale=scale,
            ring=shared.ring(),
            group=group,
            fragment=warp_index,
            lane=lane,
            products=TangentProducts.start(warpgroup_words(spec), shared, group),
            rows=TangentRows.start(spec, buffers, place),
        )

    @property
    def config(self) -> TangentConfig:
        """Returns the variant."""
        return self.shared.memory.config

    def run(self) -> None:
        """Computes and stores the tangents of the warpgroup's queries."""
        work, group = self.work, self.group
        self.products.out.fill(0.0)
        visit = work.visit.own(work.bounds, work.row + group * WARPGROUP_ROWS, WARPGROUP_ROWS, self.config.keys)
        wgmma.wait(self.shared.query_full + group, Int32(0))
        self._pass_by(work.visit.end - visit.end)
        query = self.products.load_query(self.config.q_in_regs, group, self.fragment % 4 * 32 + self.lane)
        cutlass.if_generate(visit.begin < visit.end, lambda: self._visit(visit, query))
        self._pass_by(visit.begin - work.visit.begin)
        self.rows.store(self.score, work.score_head, self.products.out)

    def _pass_by(self, count: Int32) -> None:
        """Releases tiles that only the other warpgroup sees."""
        loads = len(tile_loads(self.spec))
        wgmma.loop(loads * count, lambda _: self.ring.consumer_release(self.ring.consumer_wait()))

    def _visit(self, visit: Visit, query: LoadedQuery) -> None:
        """Visits all key tiles of this warpgroup, from the last to the first."""
        rest = visit.rest(Order.DOWN)

        def run(phase: Phase) -> None:
            self.ring.make_uniform()
            wgmma.loop(phase.steps, lambda i: self._tile(query, phase.position(i), masked=phase.masked))

        self._tile(query, rest.end, masked=True, first=True)
        for phase in rest.phases(Order.DOWN):
            run(phase)

    # The methods below compute one tile of keys.

    def _tile(self, query: LoadedQuery, index: Int32, *, masked: bool, first: bool = False) -> None:
        """Adds one tile of keys to the rows."""
        spec, products = self.spec, self.products
        listed = self.work.load_bits(index, self.fragment, self.lane, first=first) if masked else None
        stages = {"key": self.ring.consumer_wait()}
        products.start_scores(query, stages["key"])
        if first:
            # Registers of S' hold nothing yet: without a mask ptxas would wait here, and say so.
            warpgroup.wait_group(0)
        if spec.moves_query:
            products.start_moves_of_query(stages["key"])
        if spec.moves_key:
            stages["key_tangent"] = self.ring.consumer_wait()
            products.start_moves_of_key(query, stages["key_tangent"], accumulate=spec.moves_query)
        warpgroup.wait_group(int(spec.moves_query) + int(spec.moves_key))
        tile = self._score_tile(index)
        edge = self._edge(tile, listed) if masked else None
        weights = self.rows.weigh(self.score, tile, products.scores, edge)
        values: list[Int32] = []
        if spec.moves_value:
            values.append(self._wait_for_values(index, listed, masked=masked, first=first))
            products.start_out(products.weights, products.scores, values[0])
        if spec.moves_scores:
            warpgroup.wait_group(len(values))
        for stage in stages.values():
            self.ring.consumer_release(stage)
        if spec.moves_scores:
            self.rows.move(tile, (products.scores, products.moves), weights, self.scale, edge)
            values.append(self._wait_for_values(index, listed, masked=masked, first=first))
            products.start_out(products.moved, products.moves, values[-1])
        warpgroup.wait_group(0)
        for stage in values:
            self.ring.consumer_release(stage)

    def _score_tile(self, index: Int32) -> ScoreTile:
        """Returns where the lane's scores of a tile of keys lie."""
        keys, column = self.config.keys, accumulator_lane(self.lane)[1]
        return ScoreTile(self.rows.place.row, self.work.visit.tile(index), keys, column, n_blocks=keys // 8)

    def _edge(self, tile: ScoreTile, listed: ListedEdge | None) -> Edge:
        """Returns what is hidden in a tile."""
        if listed is not None:
            return self.score.edges(listed.bits.rows())
        limits = [self.work.bounds.key_limits(tile.row + 8 * i) for i in range(2)]
        return self.score.edges([Visibility.of(limit, tile.column, self.work.visit.edges.low) for limit in limits])

    def _wait_for_values(self, index: Int32, listed: ListedEdge | None, *, masked: bool, first: bool) -> Int32:
        """Waits for V or its tangent, zeroes what no query sees, and returns the stage."""
        stage, kind = self.ring.consumer_wait(), self.work.bounds.kind
        if (first and kind.hides_last_keys) or (masked and kind.hides_first_keys):
            self._zero_values(index, stage)
        if listed is not None:
            self._zero_dead_values(listed, stage)
        return stage

    def _zero_values(self, index: Int32, stage: Int32) -> None:
        """Zeroes the rows of a stage that no query sees. Each warpgroup does so for itself."""
        keys, work = self.config.keys, self.work
        live, first = work.bounds.live_keys(), work.visit.tile(index) * keys
        zeroing.zero_hidden_rows(
            keys,
            lambda: [(self.shared.stage_address(stage), self.shared.memory.v_head_dim)],
            copies.Rows.live(live, first, length=work.keys.zeros_from()),
            threads=128,
            barrier=TangentBarrier.WARPGROUP,
        )

    def _zero_dead_values(self, edge: ListedEdge, stage: Int32) -> None:
        """Zeroes the rows of an edge tile that no query of the CTA sees. Each warpgroup does so for itself."""
        work, listed, keys = self.work, self.work.listed, self.config.keys
        assert listed is not None

        def zero() -> None:
            live = listed.bits.live_rows(work.visit.tile_of(edge.entry))
            zeroing.zero_dead_rows(keys, [(self.shared.stage_address(stage), self.shared.memory.v_head_dim)], live)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=TangentBarrier.WARPGROUP.at(self.group), number_of_threads=128)

        cutlass.if_generate(Boolean(work.visit.has_dead_rows(edge.entry)), zero)


def tile_loads(spec: KernelSpec) -> list[str]:
    """Returns what is loaded of a tile of keys, in the order in which it is used."""
    loads = {
        "key": True,
        "key_tangent": spec.moves_key,
        "value_tangent": spec.moves_value,
        "value": spec.moves_scores,
    }
    return [name for name, is_loaded in loads.items() if is_loaded]
