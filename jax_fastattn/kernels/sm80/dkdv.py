# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The key-stationary backward kernel: dk and dv, summed over the query heads of a group in a fixed order.

One CTA owns a tile of keys of one key/value head. Per query tile, everything transposed so that keys are rows:
S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q. With one column warp P^T and dS^T go from accumulator to A
operand inside the warp; with more, through shared memory, and each warp sums its share of the columns of dV and dK.
Reads the row statistics that `dq.py` wrote. Launched by `backward.py` alone.
"""

from types import SimpleNamespace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels import plan
from jax_fastattn.kernels.device import mma, ptx, softmax, tiles
from jax_fastattn.kernels.device.layout import SharedTile, accumulator_lane, crossed_lane, plain_lane
from jax_fastattn.kernels.sm80 import gradient
from jax_fastattn.kernels.sm80.config import DkdvConfig
from jax_fastattn.kernels.spec import KernelSpec


class DkdvKernel:
    """Writes dk and dv.

    Args:
        spec: the compile key.
        config: the tiling.
    """

    def __init__(self, spec: KernelSpec, config: DkdvConfig):
        self.spec, self.config = spec, config
        self.mma_dtype = ptx.MMA_DTYPE[spec.dtype]
        dims = spec.head_dim, spec.v_head_dim
        self.key_tile, self.value_tile, self.query_tile, self.dout_tile, self.exchange_tile = config.tiles(*dims)
        self.row_blocks = config.keys_per_warp // 16
        self.score_blocks = (self.row_blocks, config.queries // (8 * config.column_warps))
        self.dk_blocks = (self.row_blocks, self.key_tile.padded_columns // (8 * config.column_warps))
        self.dv_blocks = (self.row_blocks, self.value_tile.padded_columns // (8 * config.column_warps))
        self.ring_start = self.key_tile.nbytes + self.value_tile.nbytes
        self.stage_nbytes = config.stage_nbytes(*dims)
        self.exchange_start = self.ring_start + config.stages * self.stage_nbytes
        self.shared_nbytes = config.shared_memory(*dims)

    @cute.kernel
    def kernel(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        dout: cute.Pointer,
        stats: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        scale: Float32,
        logits_soft_cap: Float32,
    ):
        spec, config = self.spec, self.config
        kv_heads = num_heads // spec.group
        at = self._locate(batch, kv_heads)
        bounds = tiles.load_bounds(
            spec,
            at.batch,
            (query_length, key_length),
            (query_seq_lengths, key_value_seq_lengths, query_offset),
            (window_left, window_right),
        )
        visit = tiles.query_tiles(at.row, config.keys, config.queries, **bounds)
        key_row = (Int64(at.batch) * key_length + at.row) * kv_heads + at.kv_head
        query_head = Int64(at.batch) * query_length * num_heads + at.kv_head * spec.group
        hides = spec.hides_first_queries or spec.hides_last_queries
        state = SimpleNamespace(
            at=at,
            bounds=bounds,
            live_queries=tiles.live_queries(**bounds) if hides else plan.LiveRange(Int32(0), bounds["query_end"]),
            visit=visit,
            key=key.toint() + key_row * (2 * spec.head_dim),
            value=value.toint() + key_row * (2 * spec.v_head_dim),
            dk=dk.toint() + key_row * (2 * spec.head_dim),
            dv=dv.toint() + key_row * (2 * spec.v_head_dim),
            query=query.toint() + query_head * (2 * spec.head_dim),
            dout=dout.toint() + query_head * (2 * spec.v_head_dim),
            stats=stats.toint() + (Int64(at.batch) * num_heads + at.kv_head * spec.group) * query_length * 8,
            query_length=query_length,
            heads=num_heads,
            kv_heads=kv_heads,
            valid_rows=bounds["key_end"] - at.row,
            stored_rows=key_length - at.row,
            transform=softmax.Transform.of(spec, scale, logits_soft_cap),
            dk_acc=cute.make_rmem_tensor((self.dk_blocks[0] * self.dk_blocks[1] * 4,), Float32),
            dv_acc=cute.make_rmem_tensor((self.dv_blocks[0] * self.dv_blocks[1] * 4,), Float32),
        )
        state.dk_acc.fill(0.0)
        state.dv_acc.fill(0.0)

        self._start(state)
        step = Int32(0)
        for member in cutlass.range(spec.group, unroll=1):
            if cutlass.const_expr(spec.window_right):
                for tile in cutlass.range(visit.begin, visit.full_begin, unroll=1):
                    self._visit(state, step, member, tile, masked=True)
                    step = step + 1
            for tile in cutlass.range(visit.full_begin, visit.full_end, unroll=1):
                self._visit(state, step, member, tile, masked=False)
                step = step + 1
            for tile in cutlass.range(visit.full_end, visit.end, unroll=1):
                self._visit(state, step, member, tile, masked=True)
                step = step + 1

        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self._store(state, scale)

    # Set-up.

    def _locate(self, batch: Int32, kv_heads: Int32) -> SimpleNamespace:
        """Who this thread is. Block index, fastest first: key/value head, batch entry, key tile.

        Key tiles run from the first to the last: under a causal mask the longest start first.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        # Warps w and w + 4 share a scheduler: those that wait for each other must not, hence columns fastest.
        key_warp = warp // self.config.column_warps
        return SimpleNamespace(
            thread=thread,
            lane=thread % 32,
            warp=warp,
            key_warp=key_warp,
            column_warp=warp % self.config.column_warps,
            warp_row=key_warp * self.config.keys_per_warp,
            shared=cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint(),
            row=block // kv_heads // batch * self.config.keys,
            batch=block // kv_heads % batch,
            kv_head=block % kv_heads,
        )

    def _start(self, state: SimpleNamespace) -> None:
        """Loads K, V and the first query tile."""
        self._load_keys(state)
        if self.config.stages == 2:
            first = Int32(0)
            begin = state.visit.begin
            cutlass.if_generate(begin < state.visit.end, lambda: self._load_queries(state, first, begin, first))
        cute.arch.cp_async_commit_group()

    def _load_keys(self, state: SimpleNamespace) -> None:
        """Starts the copy of K and V of the CTA's keys."""
        at = state.at
        for tile, start, source in (
            (self.key_tile, 0, state.key),
            (self.value_tile, self.key_tile.nbytes, state.value),
        ):
            stride = gradient.row_stride(state.kv_heads, tile.columns)
            shared = at.shared + start
            rows = tiles.Rows(None, state.valid_rows)
            tiles.load_tile(tile, self.config.threads, at.thread, shared, source, stride, rows)

    def _load_queries(self, state: SimpleNamespace, member: Int32, index: Int32, stage: Int32) -> None:
        """Starts the copy of query tile `index` of a head, Q, dO and row statistics, into a stage."""
        at, first = state.at, index * self.config.queries
        shared = at.shared + self.ring_start + stage * self.stage_nbytes
        rows = tiles.Rows.live(state.live_queries, first, hides_first=self.spec.hides_first_queries)
        for tile, start, source in (
            (self.query_tile, 0, state.query),
            (self.dout_tile, self.query_tile.nbytes, state.dout),
        ):
            stride = gradient.row_stride(state.heads, tile.columns)
            first_row = source + Int64(member) * (2 * tile.columns) + Int64(first) * stride
            tiles.load_tile(tile, self.config.threads, at.thread, shared + start, first_row, stride, rows)

        def load_statistics() -> None:
            target = shared + self.query_tile.nbytes + self.dout_tile.nbytes + at.thread * 8
            row = Int64(member) * state.query_length + first
            valid = rows.contain(at.thread)
            address = state.stats + (row + ptx.where(valid, at.thread, Int32(0))) * 8
            ptx.copy_async_pair_or_zero(target, address, ptx.where(valid, Int32(8), Int32(0)))

        cutlass.if_generate(at.thread < self.config.queries, load_statistics)

    def _load_next(self, state: SimpleNamespace, member: Int32, index: Int32, stage: Int32) -> None:
        """Starts the copy of the tile after this one, which may belong to the next head of the group."""
        wraps = index + 1 == state.visit.end
        index = ptx.where(wraps, state.visit.begin, index + 1)
        member = ptx.where(wraps, member + 1, member)
        cutlass.if_generate(member < self.spec.group, lambda: self._load_queries(state, member, index, stage))

    # One query tile.

    def _visit(self, state: SimpleNamespace, step: Int32, member: Int32, index: Int32, *, masked: bool) -> None:
        """dV += P^T dO and dK += dS^T Q of one query tile, with the copies of the next one in flight.

        Args:
            state: the state of the kernel.
            step: how many tiles were visited before.
            member: query head of the group.
            index: the query tile.
            masked: whether some of its queries do not see some of the keys.
        """
        at, queries, douts = state.at, self.query_tile, self.dout_tile
        stage = step % self.config.stages
        if self.config.stages == 1:
            cute.arch.sync_threads()
            self._load_queries(state, member, index, stage)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if self.config.stages == 2:
            self._load_next(state, member, index, 1 - stage)
            cute.arch.cp_async_commit_group()
        shared = at.shared + self.ring_start + stage * self.stage_nbytes
        dout_shared = shared + queries.nbytes
        stats = dout_shared + douts.nbytes
        first_query = at.column_warp * (8 * self.score_blocks[1])  # of this warp's part of the tile
        score = self._scores(state, self.key_tile, 0, queries, shared, first_query)
        dscore = self._scores(state, self.value_tile, self.key_tile.nbytes, douts, dout_shared, first_query)
        self._differentiate(state, score, dscore, stats + first_query * 8)
        if masked:
            self._mask(state, score, dscore, index * self.config.queries + first_query)

        load_p, load_ds = self._score_loaders(state, score, dscore, first_query)
        steps = self.config.queries // 16
        for acc, blocks, load_a, tile, start in (
            (state.dv_acc, self.dv_blocks, load_p, douts, dout_shared),
            (state.dk_acc, self.dk_blocks, load_ds, queries, shared),
        ):
            first_column = at.column_warp * (8 * blocks[1])
            row, lane_column = plain_lane(at.lane)
            load_b = mma.load_b_transposed(tile, start + tile.offset(row, lane_column + first_column))
            mma.gemm(acc, (*blocks, steps), load_a, load_b, self.mma_dtype)

    def _scores(
        self, state: SimpleNamespace, rows: SharedTile, start: int, columns: SharedTile, shared: Int32, first: Int32
    ) -> mma.Accumulator:
        """K Q^T or V dO^T: the warp's keys against its part of the queries, from row `first` of the tile on."""
        at = state.at
        row, column = plain_lane(at.lane)
        load_a = mma.load_a(rows, at.shared + start + rows.offset(at.warp_row + row, column))
        row, column = crossed_lane(at.lane)
        load_b = mma.load_b(columns, shared + columns.offset(first + row, column))
        acc = mma.zeros(*self.score_blocks)
        # Zero-filled columns past the last whole k-step add nothing.
        steps = (rows.columns + 15) // 16
        mma.gemm(acc, (*self.score_blocks, steps), load_a, load_b, self.mma_dtype)
        return acc

    def _differentiate(
        self, state: SimpleNamespace, score: mma.Accumulator, dscore: mma.Accumulator, stats: Int32
    ) -> None:
        """Turns S into P and dP into dS, in place; `stats` is the address of the warp's first query's statistics."""
        m_blocks, n_blocks = self.score_blocks
        _, lane_column = accumulator_lane(state.at.lane)
        for n in range(n_blocks):
            pairs = ptx.load_shared_pairs(stats + lane_column * 8 + 64 * n)
            for m in range(m_blocks):
                for element in range(4):
                    i = (m * n_blocks + n) * 4 + element
                    pair = pairs[:2] if element % 2 == 0 else pairs[2:]
                    score[i], dscore[i] = gradient.differentiate(score[i], dscore[i], pair, state.transform)

    def _mask(self, state: SimpleNamespace, score: mma.Accumulator, dscore: mma.Accumulator, column: Int32) -> None:
        """Zeroes P and dS of the queries that do not see a key; `column` is the warp's first query."""
        lane_row, lane_column = accumulator_lane(state.at.lane)
        first_row = state.at.row + state.at.warp_row + lane_row
        bounds = {name: x for name, x in state.bounds.items() if name != "key_end"}
        limits = [softmax.query_limits(first_row + 8 * i, **bounds) for i in range(2 * self.row_blocks)]
        low = self.spec.window_right
        for acc in (score, dscore):
            at = column + lane_column
            softmax.mask_columns(acc, *self.score_blocks, at, limits, check_low=low, hidden=0.0)

    def _score_loaders(
        self, state: SimpleNamespace, score: mma.Accumulator, dscore: mma.Accumulator, first_query: Int32
    ) -> list[Any]:
        """Loaders of the fragments of P^T and dS^T, after the exchange between the warps that share key rows."""
        at, tile, loaders = state.at, self.exchange_tile, []
        if self.config.column_warps == 1:
            n_blocks = self.score_blocks[1]
            return [
                lambda m, k, acc=acc: mma.pack_fragment(acc, n_blocks, m, k, self.mma_dtype) for acc in (score, dscore)
            ]
        row, column = plain_lane(at.lane)
        for acc, start in ((score, self.exchange_start), (dscore, self.exchange_start + tile.nbytes)):
            shared = at.shared + start + at.warp_row * tile.pitch
            gradient.scatter(acc, self.score_blocks, tile, shared + first_query * 2, at.lane, self.mma_dtype)
            loaders.append(mma.load_a(tile, shared + tile.offset(row, column)))
        # Barrier 0 is that of the whole CTA.
        cute.arch.barrier(barrier_id=1 + at.key_warp, number_of_threads=32 * self.config.column_warps)
        return loaders

    # Results.

    def _store(self, state: SimpleNamespace, scale: Float32) -> None:
        """Stores dk and dv through the shared memory of K and V."""
        at = state.at
        outputs = (
            (state.dk_acc, self.dk_blocks, self.key_tile, 0, state.dk, scale),
            (state.dv_acc, self.dv_blocks, self.value_tile, self.key_tile.nbytes, state.dv, None),
        )
        for acc, blocks, tile, start, _, factor in outputs:
            gradient.finish_rows(acc, blocks, at.warp_row + accumulator_lane(at.lane)[0], state.valid_rows, factor)
            corner = tile.offset(at.warp_row, at.column_warp * (8 * blocks[1]))
            gradient.scatter(acc, blocks, tile, at.shared + start + corner, at.lane, self.mma_dtype)
        cute.arch.sync_threads()
        # Row blocks of 16 go round the warps.
        warps = self.config.threads // 32
        for block in range(0, self.config.keys // 16, warps):
            row = (at.warp + block) * 16

            def store(row: Int32 = row) -> None:
                for _, _, tile, start, target, _ in outputs:
                    stride = gradient.row_stride(state.kv_heads, tile.columns)
                    shared = at.shared + start + row * tile.pitch
                    first = target + Int64(row) * stride
                    tiles.store_rows(tile, 16, at.lane, shared, first, stride, state.stored_rows - row)

            cutlass.if_generate(row < self.config.keys, store)
