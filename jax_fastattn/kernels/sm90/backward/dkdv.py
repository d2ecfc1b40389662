# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The key-stationary Hopper backward kernel for head dims over 128: dk and dv. `dq.py` computes dq.

As `dkdv_dq.py`, but both warpgroups share 64 keys, of which dk and dv fill the registers of one warpgroup each:

    scores warpgroup:   S^T = K Q^T    P    dV += P^T dO
    weights warpgroup:  dP^T = V dO^T    dS = P (dP - delta)    dK += dS^T Q

P passes from one to the other in 16 bits through shared memory, in the order of the registers; with a soft cap it is P
times the slope. It is the only thing that one waits for: the scores warpgroup may be as many tiles ahead as there are
stages. With three stages each warpgroup issues the second product of a tile behind the first one of the next, under
whose latency and exponentials it runs. With two, that would leave no stage to load into: the products of a tile follow
each other, and those of the other warpgroup fill the gaps.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments import BackwardBuffers
from jax_fastattn.kernels.device import copies, ptx, softmax, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.sm90.backward import gradient
from jax_fastattn.kernels.sm90.backward.dkdv_dq import FusedKernel
from jax_fastattn.kernels.sm90.backward.hidden_rows import SharedRows
from jax_fastattn.kernels.sm90.backward.mask import Edges, QueryMask
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS

# Named barrier of the first stage's weights; those of the others follow. 1 and 2 are the warpgroups' own.
_WEIGHTS_READY = 3


class _Stages(NamedTuple):
    """Tiles in shared memory, `[rows, columns, stage]`, and the barriers on which their stages are given back."""

    tiles: cute.Tensor
    empty: cute.Pointer


class _Result(NamedTuple):
    """Where a sum goes, its head dim, and the factor on it."""

    target: cute.Pointer
    head_dim: int
    factor: Float32 | None


class WideKernel(FusedKernel):
    """Writes dk and dv."""

    def _consumer(
        self, shared: SimpleNamespace, transform: softmax.Transform, thread: Int32, warp_index: Int32
    ) -> SimpleNamespace:
        """What a consumer warpgroup has for its tile of keys."""
        lane_row, lane_column = accumulator_lane(thread % 32)
        row = warp_index % 4 * 16 + lane_row
        mma = wgmma.product(self.dtype, self.config.queries, a_in_registers=False, b_transposed=False)
        return SimpleNamespace(
            shared=shared,
            transform=transform,
            thread=thread,
            group=warp_index // 4,
            row=row,
            lane_column=lane_column,
            mask=QueryMask(self.spec, self.config, row, lane_column),
            rows=SharedRows(self.spec, self.memory, shared),
            stage=wgmma.Uniform(Int32(0), Int32(0)),
            mma=mma,
            product=wgmma.accumulator(mma, (WARPGROUP_ROWS, self.config.queries)),
        )

    def _consume(
        self, state: SimpleNamespace, work: SimpleNamespace, phase: Int32, buffers: BackwardBuffers, scale: Float32
    ) -> None:
        """Everything a consumer warpgroup does."""
        shared, state.work = state.shared, work
        wgmma.wait(shared.key_full, phase)
        wgmma.wait(shared.value_full, phase)

        queries, douts = _Stages(shared.query, shared.query_empty), _Stages(shared.dout, shared.dout_empty)
        dk = _Result(buffers.dk, self.spec.head_dim, scale)
        dv = _Result(buffers.dv, self.spec.v_head_dim, None)

        def compute_dv() -> None:
            self._run(state, shared.key, queries, douts, self._give_weights, dv)

        def compute_dk() -> None:
            self._run(state, shared.value, douts, queries, self._take_weights, dk)

        cutlass.if_generate(state.group == 0, compute_dv, compute_dk)

    def _run(
        self,
        state: SimpleNamespace,
        left: cute.Tensor,
        right: _Stages,
        added: _Stages,
        differentiate: Callable[..., list[Int32]],
        result: _Result,
    ) -> None:
        """All tiles of one warpgroup: its product `left right^T`, and `sum += fragment^T added`.

        Args:
            state: what both warpgroups have.
            left: factor of the product, of the keys.
            right: the other one.
            added: right factor of the sum.
            differentiate: from the product to the fragment, in 16 bits.
            result: where the sum goes.
        """
        spec, visit = self.spec, state.work.visit
        columns = cute.size(added.tiles, mode=[1])
        shape = (WARPGROUP_ROWS, self.config.queries)
        state.differentiate, state.right_empty, state.added_empty = differentiate, right.empty, added.empty
        held_mma = wgmma.product(self.dtype, self.config.queries, a_in_registers=True, b_transposed=False)
        steps = cute.size(left, mode=[1]) // 16
        count = min(self.config.held, steps)
        held = wgmma.load_a(held_mma, left, 0, count, state.thread % 128)
        rest = wgmma.operand_a(state.mma, left)[None, None, None, 0]
        state.left = [(held_mma, held, k) if k < count else (state.mma, rest, k) for k in range(steps)]
        state.right = wgmma.operand_b(state.mma, right.tiles)
        state.sum_mma = wgmma.product(self.dtype, columns, a_in_registers=True, b_transposed=True)
        state.added = wgmma.operand_b(state.sum_mma, wgmma.transposed(added.tiles))
        state.fragment = wgmma.fragment_a(state.sum_mma, shape, self.dtype)
        state.sum = wgmma.accumulator(state.sum_mma, (WARPGROUP_ROWS, columns))
        state.sum.fill(0.0)
        state.previous = wgmma.Uniform(Int32(0))
        # As in `dkdv_consumer.py`. In the last tile of a packed sequence, rows past the end are zeroed, so that P is 0
        # there too.
        checks_high = spec.window_left or spec.query_seq_lengths
        edges = Edges(spec.window_right, checks_high)
        has_end = checks_high or spec.packed
        full_begin = Int32(cutlass.max(visit.full_begin, visit.begin + 1))
        full_end = Int32(cutlass.max(visit.full_end, full_begin)) if has_end else visit.end

        def visit_tiles(begin: Int32, end: Int32, edges: Edges | None) -> None:
            state.stage.settle()
            state.previous.settle()
            wgmma.loop(end - begin, lambda i: self._step(state, begin + i, edges))

        def visit_head(_: Int32) -> None:
            self._step(state, visit.begin, edges, first=True)
            if spec.window_right:
                visit_tiles(visit.begin + 1, full_begin, edges)
            visit_tiles(full_begin, full_end, None)
            if has_end:
                visit_tiles(full_end, visit.end, edges)
            if self.config.overlap:
                self._start_sum(state)
                self._finish_sum(state)

        wgmma.loop(ptx.where(visit.begin < visit.end, Int32(spec.group), Int32(0)), visit_head)
        self._store_sum(state, result)

    def _step(self, state: SimpleNamespace, tile: Int32, edges: Edges | None, first: bool = False) -> None:
        """The product of one tile and its sum, or with overlap that of the one before."""
        shared, stage, phase = state.shared, state.stage[0], state.stage[1]
        wgmma.wait(shared.query_full + stage, phase)
        wgmma.wait(shared.dout_full + stage, phase)
        if edges is not None and (self.spec.hides_first_queries or self.spec.hides_last_queries):
            state.rows.zero_hidden_queries(state.work, tile, stage)
        right = state.right[None, None, None, stage]
        steps = ((mma, left[None, None, k], right[None, None, k]) for mma, left, k in state.left)
        wgmma.gemm_steps(state.product, steps, accumulate=False)
        adds_previous = self.config.overlap and not first
        if adds_previous:
            self._start_sum(state)
        pairs = state.differentiate(state, tile, edges, 1 if adds_previous else 0)
        wgmma.release(state.right_empty + stage)
        if adds_previous:
            self._finish_sum(state)
        fragment = cute.recast_tensor(state.fragment, Int32)
        for i, pair in enumerate(pairs):
            fragment[i] = ptx.move(pair)
        state.previous[0] = stage
        wgmma.advance(state.stage, self.config.stages)
        if not self.config.overlap:
            self._start_sum(state)
            self._finish_sum(state)

    def _start_sum(self, state: SimpleNamespace) -> None:
        """Starts the sum of the last tile whose fragment is there."""
        added = state.added[None, None, None, state.previous[0]]
        wgmma.gemm(state.sum_mma, state.sum, state.fragment, added, accumulate=True)

    def _finish_sum(self, state: SimpleNamespace) -> None:
        """Waits for all products and gives the stage back."""
        warpgroup.wait_group(0)
        wgmma.release(state.added_empty + state.previous[0])

    def _give_weights(self, state: SimpleNamespace, tile: Int32, edges: Edges | None, flying: int) -> list[Int32]:
        """P of S, when no more than `flying` products are in flight; the other warpgroup gets the factors of dS."""
        stage, blocks = state.stage[0], self.config.queries // 8
        lse2 = self._stats(state, stage, 0, range(blocks))
        warpgroup.wait_group(flying)
        visibilities = state.mask.visibilities(state.work, tile, edges) if edges is not None else [None, None]
        pairs, weights = gradient.weigh_pairs(state.product, lse2, [], state.transform, visibilities, self.mma_dtype)
        for i in range(0, len(weights), 4):
            ptx.store_shared_chunk(self._weights(state, stage, i), weights[i : i + 4])
        cute.arch.barrier_arrive(barrier_id=_WEIGHTS_READY + stage, number_of_threads=self.config.consumer_threads)
        return pairs

    def _take_weights(self, state: SimpleNamespace, tile: Int32, edges: Edges | None, flying: int) -> list[Int32]:
        """dS of dP, when no more than `flying` products are in flight. Hidden weights are 0."""
        stage, blocks = state.stage[0], self.config.queries // 8
        delta = self._stats(state, stage, 1, range(blocks))
        warpgroup.wait_group(flying)
        cute.arch.barrier(barrier_id=_WEIGHTS_READY + stage, number_of_threads=self.config.consumer_threads)
        pairs = []
        for i in range(0, 2 * blocks, 4):
            for j, chunk in enumerate(ptx.load_shared_chunk(self._weights(state, stage, i)), i):
                weights = ptx.unpack(chunk, dtype=self.mma_dtype)
                values = [weights[e] * (state.product[2 * j + e] - delta[j // 2 * 2 + e]) for e in range(2)]
                pairs.append(ptx.pack(*values, dtype=self.mma_dtype))
        return pairs

    def _stats(self, state: SimpleNamespace, stage: Int32, which: int, blocks: range) -> list[Float32]:
        """The log-sum-exps (0) or delta (1) of the queries of the lane's columns, in blocks of 8 queries."""
        memory = self.memory
        address = state.shared.address + memory.stats_start + (2 * stage + which) * memory.stats_pitch
        address = address + state.lane_column * 4
        return [x for block in blocks for x in ptx.load_shared_pair(address + 32 * block)]

    def _weights(self, state: SimpleNamespace, stage: Int32, pair: int) -> Int32:
        """Address of four of the lane's pairs of weights; those of the threads follow each other."""
        start = state.shared.address + self.memory.weights_start + stage * self.memory.weights_nbytes
        return start + state.thread % 128 * 16 + pair // 4 * 2048

    def _store_sum(self, state: SimpleNamespace, result: _Result) -> None:
        """Stores dk or dv from registers. Rows of keys that no query sees may hold NaN there, of their K or V."""
        work, spec = state.work, self.spec
        live = copies.Rows(None, work.bounds["key_end"] - work.row)
        if spec.hides_first_keys or spec.hides_last_keys:
            live = copies.live_keys(**copies.moved(work.bounds))
            live = copies.Rows.live(live, work.row, hides_first=spec.hides_first_keys)
        first = work.keys.row_head(work.row, work.kv_heads, work.kv_head)
        gradient.store_rows(
            state.sum,
            result.head_dim,
            result.target.toint() + first * (2 * result.head_dim),
            Int64(work.kv_heads) * (2 * result.head_dim),
            row=state.row,
            quad_lane=state.thread % 4,
            live=live,
            stored_rows=work.keys.length - work.row,
            mma_dtype=self.mma_dtype,
            factor=result.factor,
        )
