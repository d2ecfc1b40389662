# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Forward attention with mma.sync and cp.async: one CTA per (query tile, query head, batch entry).

A warp owns 16 or 32 query rows through the whole kernel: S = Q K^T, the online softmax and O += P V stay in its
registers, only K and V pass through shared memory. Key tiles are visited from the right edge to the left:

    [full_end, end)           masked: diagonal, right window edge, end of the keys
    [full_begin, full_end)    no mask code at all
    [begin, full_begin)       masked: left window edge

Keys and values that no query of the batch entry sees may hold anything. A tile that holds some of them at its end is
the first one visited, whose copies are predicated. If such keys may come first, every copy is predicated.

In a list (`tiles/lists.py`), any edge tile may hold such keys. Copies of edge tiles are predicated by the end of the
array, and threads zero what they have copied of values that no query of the tile sees.

The maximum that shifts the exponentials may be below the true one by a factor of up to 2^8: the accumulator is
rescaled only when a row outgrows that, which after the first tiles is almost never.
"""

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies, mma, ptx, softmax
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.device.layout import SharedTile, accumulator_lane, crossed_lane, plain_lane
from jax_fastattn.kernels.device.products import Factor, product_words, result_words
from jax_fastattn.kernels.device.row_store import ResultRow
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.forward.config import ForwardConfig
from jax_fastattn.kernels.sm80.forward.state import (
    ForwardPlace,
    ForwardRows,
    ForwardState,
    Operand,
    QueryTile,
    RowState,
)
from jax_fastattn.kernels.sm80.schedule import Work, schedule
from jax_fastattn.kernels.sums.log_sum_exp import LogSumExps
from jax_fastattn.kernels.sums.plane_means import RowMeans, row_moments
from jax_fastattn.kernels.tiles.plan import Bounds, Limits, Order
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.query_tile_list import QueryTileList
from jax_fastattn.kernels.visits.visit import Edges, Visit
from jax_fastattn.kernels.weights import Weights


class ForwardKernel:
    """The forward kernel of one compile key."""

    def __init__(self, spec: KernelSpec):
        stages.refuse(spec.features, "the portable forward kernel")
        self.spec = spec
        self.config: ForwardConfig = spec.config
        self.schedule = schedule(spec, self.config.rows)
        self.words = product_words(spec)
        columns, v_columns = spec.row_columns
        self.query_tile = SharedTile(self.config.rows, columns)
        self.key_tile = SharedTile(self.config.keys, columns)
        self.value_tile = SharedTile(self.config.keys, v_columns)
        self.out_tile = SharedTile(self.config.rows, v_columns)
        self.table = self.config.table(columns, v_columns)
        self.key_start, self.value_start = self.table.offset("key"), self.table.offset("value")
        self.m_blocks = self.config.rows_per_warp // 16
        self.score_blocks = self.config.keys // 8
        self.out_blocks = self.out_tile.padded_columns // (8 * spec.terms)
        self.head_steps = self.key_tile.padded_columns // (16 * spec.terms)

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernel."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: Buffers, scalars: Scalars) -> list[Launch]:
        """Returns what is launched."""
        launch = Launch(
            self.kernel,
            (buffers, scalars),
            grid=self.schedule.blocks(scalars.query_length, scalars.batch, scalars.num_heads),
            block=self.config.threads,
            shared_bytes=self.table.nbytes,
            min_blocks=self.config.blocks,
        )
        return [launch]

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars):
        tile = self._tile(buffers, scalars)
        visit, last = tile.visit, tile.visit.end - 1
        rows = RowState.empty(self.m_blocks, self.out_blocks, has_means=self.spec.has_row_means)
        query = self._start(tile, last)
        state = ForwardState(tile, rows, query, last)
        for phase in visit.phases(Order.DOWN):
            for step in cutlass.range(phase.steps, unroll=1):
                self._visit(state, phase.position(step), masked=phase.masked)
        results = self._store_lse(state, buffers, scalars)
        self._store(state, buffers, scalars, results)

    # Set-up.

    def _tile(self, buffers: Buffers, scalars: Scalars) -> QueryTile:
        """Returns the CTA's queries and what they see."""
        spec, config = self.spec, self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        work = self.schedule.longest_first(block, buffers, scalars)
        at = ForwardPlace.of(work, config.rows, thread)
        bounds = at.sequence.bounds()
        visit, bits = self._listed(work, buffers, scalars) if spec.listed else (self._visit_range(at, bounds), None)
        bias = at.warp_bias(spec, self.table, buffers, scalars)
        score = Score.forward(spec, buffers, scalars, bias).start(at.score_head)
        operands = ForwardRows.of(spec, at, buffers, scalars)
        row, column = accumulator_lane(at.lane)
        first_row = at.row + at.warp * config.rows_per_warp + row
        return QueryTile(
            at=at,
            operands=operands,
            visit=visit,
            query_end=bounds.query_end,
            score=score,
            first_row=first_row,
            column=column,
            limits=[] if spec.listed else [bounds.key_limits(first_row + 8 * i) for i in range(2 * self.m_blocks)],
            live_keys=bounds.live_keys(),
            bits=bits,
            bias=bias,
            keys=config.keys,
        )

    def _visit_range(self, at: ForwardPlace, bounds: Bounds) -> Visit:
        """Returns the key tiles that the CTA's queries see by their bounds."""
        tiles = bounds.key_tiles(at.row, self.config.rows, self.config.keys)
        return Visit.of_range(tiles, Edges(bounds.kind.left, True))

    def _listed(self, work: Work, buffers: Buffers, scalars: Scalars) -> tuple[Visit, TileBits]:
        """Returns the key tiles that the CTA's queries visit by their list, and its bits."""
        listed = QueryTileList.of(self.spec.tiles_of(self.config), work, buffers, scalars)
        return listed.visit, listed.bits

    # Copies.

    def _load_key(self, tile: QueryTile, index: Int32, stage: Any, *, partial: bool) -> None:
        """Starts the copy of a tile of K; `partial` says whether keys of it may be hidden from all queries."""
        self._load_kv(tile, tile.operands.key, self.key_tile, self.key_start, index, stage, partial=partial)

    def _load_value(self, tile: QueryTile, index: Int32, stage: Any, *, partial: bool) -> None:
        """Starts the copy of a tile of V, as `_load_key` does."""
        self._load_kv(tile, tile.operands.value, self.value_tile, self.value_start, index, stage, partial=partial)

    def _load_kv(
        self,
        tile: QueryTile,
        source: Operand,
        shape: SharedTile,
        start: int,
        index: Int32,
        stage: Any,
        *,
        partial: bool,
    ) -> None:
        first = tile.visit.tile(index) * self.config.keys
        live = copies.Rows.live(tile.live_keys, first)
        copies.load_tile(
            shape,
            self.config.threads,
            tile.at.thread,
            tile.at.shared + start + stage * shape.nbytes,
            source.address + Int64(first) * source.stride,
            source.stride,
            live if partial or tile.live_keys.hides_first else None,
        )

    def _start(self, tile: QueryTile, last: Int32) -> list[list[Factor]] | None:
        """Loads Q and the first key tile (with two stages its values too); returns Q if it stays in registers."""
        at, query = tile.at, tile.operands.query
        over_query = self.config.bias_over_query(self.query_tile.columns)

        def load() -> None:
            threads = self.config.threads
            rows = copies.Rows(None, tile.query_end - at.row)
            copies.load_tile(self.query_tile, threads, at.thread, at.shared, query.address, query.stride, rows)
            self._load_key(tile, last, 0, partial=True)
            if not over_query:
                tile.load_bias(last)
            if self.config.stages == 2:
                self._load_value(tile, last, 0, partial=True)

        def negate() -> None:
            cute.arch.cp_async_wait_group(0)
            copies.negate_tile(self.query_tile, self.config.threads, at.thread, at.shared)

        cutlass.if_generate(tile.visit.begin < tile.visit.end, load)
        cute.arch.cp_async_commit_group()
        if tile.score.negative is not None:
            cutlass.if_generate(tile.score.negative, negate)
        if not self.config.q_in_regs:
            return None
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        load_a = self._query_loader(at)
        found = [[load_a(m, k) for k in range(self.head_steps)] for m in range(self.m_blocks)]
        if tile.bias is not None and over_query:
            cute.arch.sync_warp()
            cutlass.if_generate(tile.visit.begin < tile.visit.end, lambda: tile.load_bias(last))
            cute.arch.cp_async_commit_group()
        return found

    def _query_loader(self, at: ForwardPlace) -> Callable[[int, int], Factor]:
        """Returns the loader of a warp's rows of Q from shared memory."""
        rows = at.shared + at.warp * (self.config.rows_per_warp * self.query_tile.pitch)
        load_a = mma.load_a(self.query_tile, rows + self.query_tile.offset(*plain_lane(at.lane)))
        return self.words.factor(load_a, steps=self.head_steps)

    # One key tile.

    def _visit(self, state: ForwardState, index: Int32, *, masked: bool) -> None:
        """Adds one key tile to the registers of the rows, with the copies of the next one in flight."""
        tile, stages = state.tile, self.config.stages
        # Only the first edge tile of a range holds the end of the keys; any edge tile of a list may.
        partial = masked and tile.bits is not None
        seen = self._seen(tile, index) if masked else None
        cute.arch.cp_async_wait_group(0)
        stage: Any = 0
        if stages == 2 and partial:
            self._zero_dead_values(tile, index, (state.last - index) % 2)
        cute.arch.sync_threads()

        def load_next() -> None:
            self._load_key(tile, index - 1, 0 if stages == 1 else 1 - stage, partial=partial)
            if stages == 2:
                self._load_value(tile, index - 1, 1 - stage, partial=partial)

        if stages == 2:
            stage = (state.last - index) % 2
            cutlass.if_generate(index > tile.visit.begin, load_next)
            cute.arch.cp_async_commit_group()
            weights = self._weights(state, index, stage)
            self._softmax(state, weights, seen)
            tile.load_next_bias(index)
        else:
            # Pieces of a matrix on their way would have to wait for a K that is on its way.
            late = tile.bias is not None and tile.bias.ring.refills
            self._load_value(tile, index, 0, partial=masked)
            cute.arch.cp_async_commit_group()
            weights = self._weights(state, index, stage)
            cute.arch.sync_threads()
            if not late:
                cutlass.if_generate(index > tile.visit.begin, load_next)
                cute.arch.cp_async_commit_group()
            self._softmax(state, weights, seen)
            tile.load_next_bias(index, load_next if late else None)
            cute.arch.cp_async_wait_group(1 if tile.bias is None or late else 2)
            if partial:
                self._zero_dead_values(tile, index, stage)
            cute.arch.sync_threads()
        self._add_values(state, weights, stage)

    def _seen(self, tile: QueryTile, index: Int32) -> list[Limits] | Bits:
        """Returns what the lane's rows see of an edge tile; bits are on their way when its product is issued."""
        if tile.bits is None:
            return tile.limits
        key_tile, first = tile.visit.tile(index), tile.at.warp * self.m_blocks
        return Bits([tile.bits.fragment(key_tile, first + m, tile.at.lane) for m in range(self.m_blocks)])

    def _zero_dead_values(self, tile: QueryTile, index: Int32, stage: Any) -> None:
        """Zeroes what the thread has copied of values of an edge tile that no query of the CTA sees."""
        bits, entry = tile.bits, tile.visit.entry(index)
        assert bits is not None

        def zero() -> None:
            shared = tile.at.shared + self.value_start + stage * self.value_tile.nbytes
            live = bits.live_rows(tile.visit.tile_of(entry))
            copies.zero_dead_rows(self.value_tile, self.config.threads, tile.at.thread, shared, live)

        cutlass.if_generate(Boolean(tile.visit.has_dead_rows(entry)), zero)

    def _weights(self, state: ForwardState, index: Int32, stage: Any) -> Weights:
        """Returns the weights of one key tile, which are still Q K^T."""
        tile, at, query = state.tile, state.tile.at, state.query
        lane_offset = self.key_tile.offset(*crossed_lane(at.lane))
        keys = at.shared + (self.key_start + lane_offset) + stage * self.key_tile.nbytes
        scores = mma.zeros(self.m_blocks, self.score_blocks)
        shape = (self.m_blocks, self.score_blocks, self.head_steps)
        load_a = self._query_loader(at) if query is None else lambda m, k: query[m][k]
        load_b = self.words.factor(mma.load_b(self.key_tile, keys), steps=self.head_steps)
        self.words.gemm(scores, shape, load_a, load_b)
        place = ScoreTile(tile.first_row, tile.visit.tile(index), self.config.keys, tile.column, self.score_blocks)
        return Weights(tile.score, place, scores)

    def _softmax(self, state: ForwardState, weights: Weights, seen: list[Limits] | Bits | None) -> None:
        """Turns scores into probabilities relative to the running maxima, in place; a full tile has no `seen`."""
        tile, rows, score, scores = state.tile, state.rows, weights.score, weights.acc
        blocks = (self.m_blocks, self.score_blocks)
        if seen is not None:
            weights.edge(seen, check_low=tile.visit.edges.low)
        else:
            weights.full()
        self._raise_maxima(rows, softmax.row_maxima(scores, *blocks), score.unit)
        maxima = [rows.maxima[i] for i in range(2 * self.m_blocks)]
        if seen is not None or score.hides_in_full:
            # A row may have seen no key yet: 2^(-inf - 0) is 0, while -inf minus -inf is not a number.
            maxima = [ptx.where(x == Float32(softmax.NEVER), Float32(0.0), x) for x in maxima]
        shifts = [score.shift(x) for x in maxima]
        sums = softmax.exponentials(scores, *blocks, score.unit, shifts, score.rounds)
        for i, total in enumerate(sums):
            rows.sums[i] = rows.sums[i] + total
        if rows.moments is not None:
            for i, moment in enumerate(row_moments(weights.tile, scores, sums)):
                rows.moments[i] = rows.moments[i] + moment

    def _raise_maxima(self, rows: RowState, maxima: list[Float32], factor: Float32) -> None:
        """Rescales output and sums if a maximum of the warp's rows has grown by more than the allowed lag."""
        grown = None
        for i, x in enumerate(maxima):
            outgrown = (x - rows.maxima[i]) * factor > rows.lag(i, self.spec)
            grown = outgrown if grown is None else cutlass.Boolean(grown | outgrown)

        def rescale() -> None:
            for i, x in enumerate(maxima):
                old = rows.maxima[i]
                new = ptx.maximum(old, x)
                # If both are -inf, no key was seen so far: there is nothing to rescale, and any finite factor will do.
                shift = ptx.where(new == Float32(softmax.NEVER), Float32(0.0), new)
                alpha = ptx.exp2((old - shift) * factor)
                rows.maxima[i] = new
                rows.sums[i] = rows.sums[i] * alpha
                if rows.moments is not None:
                    rows.moments[i] = rows.moments[i] * alpha
                for n in range(self.out_blocks):
                    for half in range(2):
                        index = (i // 2 * self.out_blocks + n) * 4 + i % 2 * 2 + half
                        rows.out[index] = rows.out[index] * alpha

        cutlass.if_generate(cute.arch.vote_any_sync(grown), rescale)

    def _add_values(self, state: ForwardState, weights: Weights, stage: Any) -> None:
        """Adds P V of one key tile to O."""
        at = state.tile.at
        lane_offset = self.value_tile.offset(*plain_lane(at.lane))
        values = at.shared + (self.value_start + lane_offset) + stage * self.value_tile.nbytes

        def probabilities(m: int, k: int) -> Factor:
            return weights.fragment(self.words, m, k)

        shape = (self.m_blocks, self.out_blocks, self.config.keys // 16)
        load_b = self.words.factor(mma.load_b_transposed(self.value_tile, values), blocks=self.out_blocks)
        self.words.gemm(state.rows.out, shape, probabilities, load_b)

    # Results.

    def _store_lse(self, state: ForwardState, buffers: Buffers, scalars: Scalars) -> list[ResultRow]:
        """Stores log-sum-exps and mean keys; returns what the output of each row of the lane is stored as."""
        tile, rows = state.tile, state.rows
        score = tile.score.finish(tile.at.score_head)
        sums = LogSumExps(score, tile.at.sequence.queries, tile.query_end, tile.at.head, tile.column)
        lane_rows = range(2 * self.m_blocks)
        if rows.moments is not None:
            means = RowMeans(sums.queries, tile.at.head, tile.column)
            means.store(buffers, scalars, tile.first_row, ((rows.moments[i], rows.sums[i]) for i in lane_rows))
        return sums.store(buffers, scalars, tile.first_row, ((rows.maxima[i], rows.sums[i]) for i in lane_rows))

    def _store(self, state: ForwardState, buffers: Buffers, scalars: Scalars, results: list[ResultRow]) -> None:
        """Stores the output tile, through shared memory so that global stores are 16 bytes wide."""
        at, shape, rows, words = state.tile.at, self.out_tile, self.config.rows_per_warp, result_words(self.spec)
        if words.columns(self.spec.v_head_dim) > shape.columns:  # the tile has no room for them
            return state.tile.number_store(self.spec, buffers, scalars, self.out_blocks).store(state.rows.out, results)
        if buffers.out_rests is not None:
            state.tile.rest_store(self.spec, buffers, scalars, self.out_blocks).store_rests(state.rows.out, results)
        warp_row = at.warp * rows
        shared = at.shared + warp_row * shape.pitch
        lane_row, lane_column = accumulator_lane(at.lane)
        lane_address = shared + shape.offset(lane_row, words.columns(lane_column))
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for i, result in enumerate(results):
            for n in range(self.out_blocks):
                index = (i // 2 * self.out_blocks + n) * 4 + i % 2 * 2
                pair = result.pair(state.rows.out[index], state.rows.out[index + 1], words)
                words.store(lane_address + shape.offset(8 * i, words.columns(8 * n)), pair)
        cute.arch.sync_warp()
        stride = Int64(scalars.num_heads) * (2 * shape.columns)
        first, queries = at.row + warp_row, at.sequence.queries
        target = buffers.out.toint() + queries.row(first) * stride + Int64(at.head) * (2 * shape.columns)
        copies.store_rows(shape, rows, at.lane, shared, target, stride, queries.length - first)
