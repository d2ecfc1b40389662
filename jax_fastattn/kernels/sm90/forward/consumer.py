# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of the forward kernel: its loops over the key tiles.

A consumer warpgroup owns 64 query rows. S = Q K^T and the online softmax stay in its registers, and P feeds O += P V
from registers (`products.py`, `softmax.py`). It takes K and V from the ring of `shared.py`.

Key tiles are visited from the right edge to the left:

    [full_end, end)           masked: diagonal, right window edge, end of the keys
    [full_begin, full_end)    no mask code at all
    [begin, full_begin)       masked: left window edge
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.sm90.forward.edges import Edge, KeyEdges, ListedEdges, RangeEdges
from jax_fastattn.kernels.sm90.forward.epilogue import ForwardOutput
from jax_fastattn.kernels.sm90.forward.feature_ring import FeatureRing
from jax_fastattn.kernels.sm90.forward.hidden_rows import SharedOperands
from jax_fastattn.kernels.sm90.forward.ping_pong import PingPong
from jax_fastattn.kernels.sm90.forward.products import ForwardProducts
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.softmax import OnlineSoftmax, ScoreRows
from jax_fastattn.kernels.sm90.forward.state import Call, Lane, QueryTile
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.tiles.plan import Order
from jax_fastattn.kernels.visits.visit import Phase, Visit


@dataclass(frozen=True, eq=False)
class _OwnTile:
    """Describes a tile of queries as one warpgroup sees it.

    Attributes:
        tile: the CTA's tile of queries.
        visit: the key tiles that the warpgroup's rows see.
        edges: what is known of these tiles before their scores.
        query_fragments: the fragments of Q in registers.
    """

    tile: QueryTile
    visit: Visit
    edges: KeyEdges
    query_fragments: cute.Tensor


@dataclass(frozen=True, eq=False)
class ForwardConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        ring: the warpgroup's position in the ring.
        features: its position in the ring of what features load.
        query_phase: phase of the barrier that says that Q is there.
        ping_pong: says when the warpgroup may issue products.
        operands: what it changes in shared memory.
        products: S and O.
        softmax: turns S into P.
        output: what it stores.
    """

    call: Call
    shared: ForwardShared
    lane: Lane
    ring: wgmma.Ring
    features: FeatureRing
    query_phase: wgmma.Uniform
    ping_pong: PingPong
    operands: SharedOperands
    products: ForwardProducts
    softmax: OnlineSoftmax
    output: ForwardOutput

    @classmethod
    def start(cls, call: Call, shared: ForwardShared, thread: Int32, warp_index: Int32) -> "ForwardConsumer":
        """Returns the role with its registers."""
        lane = Lane.of(call.config, thread, warp_index)
        ring = wgmma.Ring(shared.full, shared.empty, call.config.stages)
        query_phase = wgmma.Uniform(Int32(0))
        products = ForwardProducts.start(call, shared, lane)
        online = OnlineSoftmax.start(call, shared, lane, ring, products)
        return cls(
            call=call,
            shared=shared,
            lane=lane,
            ring=ring,
            features=FeatureRing.start(shared, lane.group),
            query_phase=query_phase,
            ping_pong=PingPong(call.config, lane.group),
            operands=SharedOperands(call, shared, lane),
            products=products,
            softmax=online,
            output=ForwardOutput(call, lane, online, products.out),
        )

    def run(self) -> None:
        """Computes all tiles of queries of the CTA."""
        self.ping_pong.start()
        self.call.each_tile(self.attend)

    def attend(self, tile: QueryTile) -> None:
        """Computes one tile of queries, from Q to the stored output."""
        spec, score, group = self.call.spec, self.call.score.start(tile.score_head), self.lane.group
        visit = tile.visit
        if self.call.config.warpgroups > 1:
            own_row = tile.row + group * WARPGROUP_ROWS
            visit = visit.own(tile.bounds, own_row, WARPGROUP_ROWS, self.call.config.keys)
        first_row = tile.row + self.lane.row
        limits = [] if spec.listed else [tile.bounds.key_limits(first_row + 8 * i) for i in range(2)]
        rows = ScoreRows(score.hold_queries(first_row), first_row, limits, tile.visit.edges.low)
        self.products.out.fill(0.0)
        self.softmax.clear()
        wgmma.wait(self.shared.query_full + group, self.query_phase[0])
        self.query_phase[0] = self.query_phase[0] ^ 1
        if tile.bounds.kind.query_end or tile.bounds.kind.packed:
            self.operands.zero_padding(tile)
        if score.negative is not None:
            cutlass.if_generate(score.negative, self.operands.negate_query)
        own = _OwnTile(tile, visit, self._edges(tile, visit, rows), self.products.load_query_fragments())

        def pass_by() -> None:
            self._release_query()
            count = tile.visit.end - tile.visit.begin
            self._skip(count, stages=2 * count, turns=count - 1)

        cutlass.if_generate(visit.begin < visit.end, lambda: self._visit(own), pass_by)
        if spec.listed:
            # The row is computed anew: the loops have no register for it.
            thread = ptx.thread_index()
            first_row = tile.row + Lane.of(self.call.config, thread, thread // 32).row
        self.output.store(tile, first_row)

    def _edges(self, tile: QueryTile, visit: Visit, rows: ScoreRows) -> KeyEdges:
        """Returns the edges of the key tiles that the warpgroup visits."""
        if tile.bits is None:
            return RangeEdges(rows)
        return ListedEdges.start(rows, tile, visit, tile.bits, self.operands, self.ring)

    def _visit(self, own: _OwnTile) -> None:
        """Visits the warpgroup's key tiles, from the last to the first, between the tiles that only others see."""
        visit, union, overlap = own.visit, own.tile.visit, self.call.config.overlap_qk_pv
        last = visit.end - 1
        step = self._overlapped_tile if overlap else self._tile
        ahead, behind = union.end - visit.end, visit.begin - union.begin
        # With overlap, V of a tile comes after K of the next one.
        self._skip(ahead, stages=2 * ahead - int(overlap), turns=ahead)
        self._first_tile(own, last, ahead)

        def run(phase: Phase) -> None:
            self.ring.make_uniform()
            self.features.make_uniform()
            wgmma.loop(phase.steps, lambda i: step(own, phase.position(i), masked=phase.masked))

        for phase in visit.rest(Order.DOWN).phases(Order.DOWN):
            run(phase if phase.masked or not self.call.score.hides_in_full else self._visit_blind(own, phase, step))
        self._release_query()
        if overlap:
            self._skip_stage(behind)
            self._last_values(own, visit.begin)
        self._skip(behind, stages=2 * behind - int(overlap), turns=behind)

    def _visit_blind(self, own: _OwnTile, phase: Phase, step: Callable[..., None]) -> Phase:
        """Visits full tiles until no row is blind, and returns the others. No row becomes blind again."""
        end = wgmma.Uniform(phase.end)
        self.ring.make_uniform()
        self.features.make_uniform()

        def blind() -> Int32:
            return cute.arch.make_warp_uniform(ptx.where(self.softmax.is_blind(), Int32(1), Int32(0)))

        def goes_on(is_blind: Any) -> Boolean:
            return Boolean((is_blind != 0) & (end[0] > phase.begin))

        # All warps vote after a tile, even if none is left.
        with while_generate([blind()], goes_on) as _:
            end[0] = end[0] - 1
            step(own, end[0], masked=False, blind=True)
            yield_out([blind()])
        end.make_uniform()
        return phase._replace(end=end[0])

    def _release_query(self) -> None:
        """Lets the producer load this warpgroup's next Q."""
        if self.call.config.persistent:
            wgmma.release(self.shared.query_empty + self.lane.group)

    # The methods below let key tiles go by that only other warpgroups see.

    def _skip(self, tiles: Int32, *, stages: Any, turns: Any) -> None:
        """Lets tiles go by: `stages` stages and `turns` turns, two and one for a tile.

        A turn is passed on before its tile is waited for: the others free the stages that the tile needs.
        """
        if self.call.config.warpgroups == 1:
            return

        def release(_: Any) -> None:
            self.ring.consumer_release(self.ring.consumer_wait())

        def take_turn() -> None:
            self.ping_pong.wait()
            self.ping_pong.pass_on()

        def skip(i: Int32) -> None:
            if self.call.config.ping_pong:
                cutlass.if_generate(i < turns, take_turn)
            wgmma.loop(Int32(cutlass.min(stages - 2 * i, 2)), release)
            self.features.pass_by()

        wgmma.loop(Int32(tiles), skip)

    def _skip_stage(self, tiles: Int32) -> None:
        """Lets the one stage go by that lies out of order where `tiles` are skipped; for 0 there is none."""
        if self.call.config.warpgroups > 1:
            cutlass.if_generate(tiles > 0, lambda: self.ring.consumer_release(self.ring.consumer_wait()))

    # The methods below compute key tiles that the warpgroup sees.

    def _first_tile(self, own: _OwnTile, index: Int32, ahead: Int32) -> None:
        """Computes P of the first tile, after `ahead` tiles that only others see; without overlap adds its values."""
        config = self.call.config
        edge = own.edges.first(index)
        stage = self.ring.consumer_wait()
        self.products.start_scores(own.query_fragments, stage)
        own.edges.load_ahead(index, edge)
        if config.overlap_qk_pv:
            self._skip_stage(ahead)
        warpgroup.wait_group(0)
        self.ring.consumer_release(stage)
        loaded = self.features.consumer_wait(edge.rows, own.tile, own.visit.tile(index))
        # With a right bound the first tile is on the diagonal, and lists begin with their edge tiles.
        always = own.tile.bounds.kind.right or self.call.spec.listed
        is_edge = None if always else Boolean(own.visit.is_edge(index))
        self.softmax.first_tile(own.visit.tile(index), loaded.rows, is_edge)
        self.features.consumer_release(loaded)
        own.edges.zero_dead(index, edge)
        if own.tile.bounds.kind.hides_last_keys:
            # With overlap V of this tile follows K of the next one, which exists unless this tile is the only one.
            next_keys = (
                ptx.where(index > own.tile.visit.begin, Int32(1), Int32(0)) if config.overlap_qk_pv else Int32(0)
            )
            self.operands.zero_values(own.tile, index, lambda: self.ring.peek(next_keys))
        if not config.overlap_qk_pv:
            self._last_values(own, index)

    def _overlapped_tile(self, own: _OwnTile, index: Int32, *, masked: bool, blind: bool = False) -> None:
        """Computes P of this tile, with P V of the previous one in flight during the softmax."""
        edge = own.edges.next(masked=masked, blind=blind)
        key_stage = self.ring.consumer_wait()
        self.ping_pong.wait()
        self.products.start_scores(own.query_fragments, key_stage)
        value_stage = self.ring.consumer_wait()
        self.products.start_values(value_stage)
        self.ping_pong.pass_on()
        own.edges.load_ahead(index, edge)
        warpgroup.wait_group(1)
        self._probabilities(own, index, key_stage, edge)
        self.ring.consumer_release(value_stage)
        own.edges.zero_dead(index, edge)

    def _tile(self, own: _OwnTile, index: Int32, *, masked: bool, blind: bool = False) -> None:
        """Computes one tile after the other; other warpgroups fill the gaps."""
        edge = own.edges.next(masked=masked, blind=blind)
        stage = self.ring.consumer_wait()
        self.ping_pong.wait()
        self.products.start_scores(own.query_fragments, stage)
        self.ping_pong.pass_on()
        own.edges.load_ahead(index, edge)
        warpgroup.wait_group(0)
        self._probabilities(own, index, stage, edge)
        own.edges.zero_dead(index, edge)
        self._last_values(own, index)

    def _probabilities(self, own: _OwnTile, index: Int32, stage: Int32, edge: Edge) -> None:
        """Computes P of a tile with K in a stage, which is released; awaits products in flight, and rescales O."""
        tile = own.visit.tile(index)
        loaded = self.features.consumer_wait(edge.rows, own.tile, tile)
        # A tile with a key past the diagonal has some for each warpgroup, unless the CTA has more queries than keys.
        if edge.masked and self.call.spec.listed and self.call.config.rows > self.call.config.keys:
            self.softmax.listed_tile(tile, stage, loaded.rows)
        elif edge.masked:
            self.softmax.masked_tile(tile, stage, loaded.rows)
        elif edge.blind:
            self.softmax.blind_tile(tile, stage, loaded.rows)
        else:
            self.softmax.full_tile(tile, stage, loaded.rows)
        self.features.consumer_release(loaded)

    def _last_values(self, own: _OwnTile, index: Int32) -> None:
        """Adds the values of a tile with nothing else to do meanwhile."""
        stage = self.ring.consumer_wait()
        if own.tile.bounds.kind.hides_first_keys:
            self.operands.zero_values(own.tile, index, lambda: stage)
        self.products.add_values(stage)
        self.ring.consumer_release(stage)
