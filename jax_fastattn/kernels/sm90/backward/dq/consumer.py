# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of the dq kernel: dQ of 64 queries.

The warpgroups never wait for each other: the exponentials of one run concurrently with the products of the other. Key
tiles are visited as in `forward/consumer.py`: from the right edge to the left, full ones without mask code.
"""

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import copies, ptx, scaling, wgmma, zeroing
from jax_fastattn.kernels.device.kept import keep_number, mark_number, number_masks, unmark_number
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import result_words, warpgroup_words
from jax_fastattn.kernels.device.row_store import ResultRow, RowStore, strided
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.bounds import Visibility
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import ROW_ALIGNMENT
from jax_fastattn.kernels.sm90.backward.dq.products import DqProducts
from jax_fastattn.kernels.sm90.backward.dq.shared import DqShared
from jax_fastattn.kernels.sm90.backward.dq_config import DqBarrier, DqConfig
from jax_fastattn.kernels.sm90.backward.gradient import load_units
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sm90.query_tile import ListedEdge, RowTile
from jax_fastattn.kernels.sums.units import Units, over_ds
from jax_fastattn.kernels.tiles.plan import Order
from jax_fastattn.kernels.visits.visit import Phase, Visit


@dataclass(frozen=True)
class RowStatistics:
    """Holds the statistics of a query row, see `gradient.py`.

    Attributes:
        lse2: the log-sum-exp, in base 2.
        delta: what dS subtracts from dP.
    """

    lse2: Float32
    delta: Float32


@dataclass(frozen=True, eq=False)
class DqConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        work: the CTA's tile of queries.
        score: turns products into probabilities.
        ring: the warpgroup's position in the ring.
        key_stage: register `[1]` with the stage of K whose dS is the left factor of dQ.
        group: index of the warpgroup.
        thread: index of this thread in the warpgroup.
        row: the lane's first row, counted from the CTA's first row; the other one is 8 rows below.
        lane_column: the lane's first column of an accumulator.
        products: S, dP and dQ.
        stats: statistics of the lane's two rows.
        buffers: the arrays of the launch.
    """

    spec: KernelSpec
    shared: DqShared
    work: RowTile
    score: Score
    ring: wgmma.Ring
    key_stage: cute.Tensor
    group: Int32
    thread: Int32
    row: Int32
    lane_column: Int32
    products: DqProducts
    stats: list[RowStatistics]
    buffers: Buffers

    @classmethod
    def start(
        cls,
        spec: KernelSpec,
        shared: DqShared,
        work: RowTile,
        score: Score,
        buffers: Buffers,
        thread: Int32,
        warp_index: Int32,
    ) -> "DqConsumer":
        """Returns the role with its registers.

        Args:
            work: the CTA's tile of queries.
            score: turns products into probabilities.
            buffers: statistics of all rows, units of heads, and dq.
            thread: index of this thread in the CTA.
            warp_index: index of its warp in the CTA.
        """
        group = warp_index // 4
        lane_row, lane_column = accumulator_lane(thread % 32)
        row = warp_index * 16 + lane_row
        return cls(
            spec=spec,
            shared=shared,
            work=work,
            score=score,
            ring=wgmma.Ring(shared.full, shared.empty, shared.memory.config.stages),
            key_stage=cute.make_rmem_tensor((1,), Int32),
            group=group,
            thread=thread % 128,
            row=row,
            lane_column=lane_column,
            products=DqProducts.start(warpgroup_words(spec), shared, group),
            stats=_load_statistics(buffers.stats, work, work.row + row),
            buffers=buffers,
        )

    @property
    def config(self) -> DqConfig:
        """Returns the variant."""
        return self.shared.memory.config

    def run(self) -> None:
        """Computes dQ of the warpgroup, in its accumulator."""
        work, group = self.work, self.group
        self.products.dq.fill(0.0)
        self.key_stage.fill(0)
        visit = work.visit.own(work.bounds, work.row + group * WARPGROUP_ROWS, WARPGROUP_ROWS, self.config.keys)
        wgmma.wait(self.shared.query_full + group, Int32(0))
        self._pass_by(work.visit.end - visit.end)
        products = self.products.with_query(self.shared, group, self.thread)
        visitor = replace(self, products=products)
        cutlass.if_generate(visit.begin < visit.end, lambda: visitor._visit(visit), self._await_dout)
        self._pass_by(visit.begin - work.visit.begin)

    def _pass_by(self, count: Int32) -> None:
        """Lets tiles go by that only the other warpgroup sees."""
        wgmma.loop(2 * count, lambda _: self.ring.consumer_release(self.ring.consumer_wait()))

    def _visit(self, visit: Visit) -> None:
        """Visits all key tiles of this warpgroup, from the last to the first."""
        rest = visit.rest(Order.DOWN)

        def run(phase: Phase) -> None:
            self.ring.make_uniform()
            self.key_stage[0] = cute.arch.make_warp_uniform(self.key_stage[0])
            wgmma.loop(phase.steps, lambda i: self._tile(phase.position(i), masked=phase.masked))

        self._tile(rest.end, masked=True, first=True)
        for phase in rest.phases(Order.DOWN):
            run(phase)
        if self.config.overlap:
            self._start_dq()
            self._finish_dq()

    # The methods below compute one tile of keys.

    def _tile(self, index: Int32, *, masked: bool, first: bool = False) -> None:
        """Computes dS of one tile, and its dQ, or with overlap dQ of the tile before."""
        products, overlap = self.products, self.config.overlap
        listed = self._load_bits(index, first=first) if masked else None
        adds_previous = overlap and not first
        value_stage = self.ring.consumer_wait()
        key_stage = self.ring.consumer_wait()
        products.start_scores(key_stage)
        if adds_previous:
            self._start_dq()
        if first:
            self._await_dout()
            self._scale_dout()
        products.start_dp(value_stage)
        warpgroup.wait_group(2 if adds_previous else 1)
        at = self._score_tile(self.work.visit.tile(index))
        self._probabilities(at)
        if adds_previous:
            self._finish_dq()
        else:
            warpgroup.wait_group(0)
        self.ring.consumer_release(value_stage)
        self._dscores(at, self._edge(at, listed) if masked else None)
        self.key_stage[0] = key_stage
        kind = self.work.bounds.kind
        if (first and kind.hides_last_keys) or (masked and kind.hides_first_keys):
            self._zero_keys(index, key_stage)
        if listed is not None:
            self._zero_dead_keys(listed, key_stage)
        if not overlap:
            self._start_dq()
            self._finish_dq()

    def _await_dout(self) -> None:
        """Waits for this warpgroup's dO, once: no copy may outlive its CTA."""
        wgmma.wait(self.shared.dout_full + self.group, Int32(0))

    def _units(self) -> Units:
        """Loads the units of the head, where they are needed: nothing keeps them in registers."""
        work = self.work
        return load_units(self.spec, self.buffers, work.queries, work.num_heads // work.group, work.kv_head)

    def _scale_dout(self) -> None:
        """Multiplies this warpgroup's dO, which stays, by the unit of dP."""
        units, table = self._units(), self.shared.memory.table
        if self.spec.has_gradient_units:
            address = self.shared.regions.stage("dout", self.group)
            scaling.scale_tile(address, table["dout"].pitch, self.products.words, units.dp, DqBarrier.WARPGROUP)

    def _score_tile(self, tile: Int32) -> ScoreTile:
        """Returns where the lane's scores of a tile of keys lie."""
        keys = self.config.keys
        return ScoreTile(self.work.row + self.row, tile, keys, self.lane_column, n_blocks=keys // 8)

    def _probabilities(self, tile: ScoreTile) -> None:
        """Turns S into weights, see `score.py`; their signs may say which are dropped, see `Score.marks`."""
        weights, reading = self.products.score, self.score.read(tile)
        keep = self.score.keep(tile) if self.score.marks else None
        for i in range(cute.size(weights)):
            at = tile.at(i)
            _, weights[i] = reading.gradient(weights[i], self.stats[at.i].lse2, at)
            if keep is not None:
                weights[i] = mark_number(weights[i], number_masks(keep(i // 2))[i % 2])

    def _dscores(self, tile: ScoreTile, edge: Edge | None) -> None:
        """Turns dP into dS, the left factor of dQ, 0 where a query does not see the key: it may be no number there."""
        products, score, dscore = self.products, self.products.score, self.products.dscore
        keep = self.score.keep(tile) if self.score.draws_again else None
        for pair in range(cute.size(score) // 2):
            values, masks = [], [None, None] if keep is None else number_masks(keep(pair))
            for i in (2 * pair, 2 * pair + 1):
                at = tile.at(i)
                weight, dprobability, mask = score[i], dscore[i], masks[i % 2]
                if self.score.marks:
                    weight, mask = unmark_number(weight)
                if mask is not None:
                    dprobability = keep_number(dprobability, mask)
                value = weight * (dprobability - self.stats[at.i].delta)
                values.append(value if edge is None else edge.select(value, at))
            products.factor.put(pair, products.words.pair(*values))

    def _load_bits(self, index: Int32, *, first: bool) -> ListedEdge | None:
        """Loads the bits of an edge tile of a list, see `RowTile.load_bits`."""
        fragment, lane = self.group * 4 + self.thread // 32, self.thread % 32
        return self.work.load_bits(index, fragment, lane, first=first)

    def _edge(self, tile: ScoreTile, listed: ListedEdge | None) -> Edge:
        """Returns what is hidden in a tile."""
        if listed is not None:
            return self.score.edges(listed.bits.rows())
        column = tile.column
        limits = [self.work.bounds.key_limits(tile.row + 8 * i) for i in range(2)]
        return self.score.edges([Visibility.of(limit, column, self.work.visit.edges.low) for limit in limits])

    def _start_dq(self) -> None:
        """Starts dQ += dS K of the last tile whose dS is there."""
        self.products.start_dq(self.key_stage[0])

    def _finish_dq(self) -> None:
        """Waits for all products and gives the stage back."""
        warpgroup.wait_group(0)
        self.ring.consumer_release(self.key_stage[0])
        self.products.finish_dq()

    def _zero_keys(self, index: Int32, stage: Int32) -> None:
        """Zeroes the rows of K that no query sees. Each warpgroup does so for itself."""
        config, spec, work = self.config, self.spec, self.work
        live, first = work.bounds.live_keys(), work.visit.tile(index) * config.keys
        zeroing.zero_hidden_rows(
            config.keys,
            lambda: self.shared.key_terms(stage),
            copies.Rows.live(live, first, length=work.keys.zeros_from()),
            threads=128,
            barrier=DqBarrier.WARPGROUP,
        )

    def _zero_dead_keys(self, edge: ListedEdge, stage: Int32) -> None:
        """Zeroes the rows of K of an edge tile that no query of the CTA sees. Each warpgroup does so for itself."""
        work, listed, keys = self.work, self.work.listed, self.config.keys
        assert listed is not None

        def zero() -> None:
            live = listed.bits.live_rows(work.visit.tile_of(edge.entry))
            zeroing.zero_dead_rows(keys, self.shared.key_terms(stage), live)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=DqBarrier.WARPGROUP.at(self.group), number_of_threads=128)

        cutlass.if_generate(Boolean(work.visit.has_dead_rows(edge.entry)), zero)

    # The method below stores the results.

    def store(self, scale: Float32) -> None:
        """Stores dq from registers, times a factor."""
        work, nbytes = self.work, self.spec.result_nbytes * self.spec.head_dim
        factor = over_ds(self._units(), scale)
        first = work.queries.row_head(work.row, work.num_heads, work.head)
        rows = RowStore(
            address=strided(self.buffers.dq.toint() + first * nbytes, Int64(work.num_heads) * nbytes),
            columns=self.spec.head_dim,
            row=self.row,
            end=work.queries.length - work.row,
            quad_lane=self.thread % 4,
            words=result_words(self.spec),
        )
        if work.listed is not None:
            # Padding is dead in lists, and may be part of a full tile.
            live = work.listed.entries.are_live(self.row)
            rows.store(self.products.dq, [ResultRow(x, factor) for x in live])
        else:
            rows.store_live(self.products.dq, copies.Rows(None, work.bounds.query_end - work.row), factor)


def _load_statistics(stats: cute.Pointer, work: RowTile, row: Int32) -> list[RowStatistics]:
    """Returns the statistics of a lane's two rows, the first of which is `row` of the sequence."""
    rows = work.queries.padded_rows(ROW_ALIGNMENT)
    head_row = work.queries.padded_row(Int64(work.head_index), ROW_ALIGNMENT)
    first = stats.toint() + (head_row * 2 + work.queries.padded(row, ROW_ALIGNMENT)) * 4
    addresses = [first + 32 * i for i in range(2)]
    return [RowStatistics(ptx.load_global(at), ptx.load_global(at + Int64(rows) * 4)) for at in addresses]
