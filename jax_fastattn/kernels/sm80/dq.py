# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The query-stationary backward kernel: dq, and per query row the statistics that dkdv reads.

One CTA owns a tile of query rows of one head; a warp owns whole rows, so that dS goes from accumulator to A operand
inside the warp. Per key tile: S = Q K^T, dP = dO V^T, dQ += dS K. The prologue computes
delta = rowsum(out * dout) - dlse. Launched by `backward.py` alone.
"""

from types import SimpleNamespace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import mma, ptx, softmax, tiles
from jax_fastattn.kernels.device.layout import CHUNK, CopyShape, SharedTile, accumulator_lane, crossed_lane, plain_lane
from jax_fastattn.kernels.sm80 import gradient
from jax_fastattn.kernels.sm80.config import DqConfig
from jax_fastattn.kernels.spec import KernelSpec


class DqKernel:
    """Writes dq and stats.

    Args:
        spec: the compile key.
        config: the tiling.
    """

    def __init__(self, spec: KernelSpec, config: DqConfig):
        self.spec, self.config = spec, config
        self.mma_dtype = ptx.MMA_DTYPE[spec.dtype]
        self.query_tile = SharedTile(config.rows, spec.head_dim)
        self.dout_tile = SharedTile(config.rows, spec.v_head_dim)
        self.key_tile = SharedTile(config.keys, spec.head_dim)
        self.value_tile = SharedTile(config.keys, spec.v_head_dim)
        self.row_blocks = config.rows_per_warp // 16
        self.score_blocks = (self.row_blocks, config.keys // 8)
        self.dq_blocks = (self.row_blocks, self.query_tile.padded_columns // 8)
        self.rows_nbytes = config.rows_nbytes(spec.head_dim, spec.v_head_dim)
        self.stage_nbytes = config.stage_nbytes(spec.head_dim, spec.v_head_dim)
        self.ring_start = 0 if config.rows_in_registers else self.rows_nbytes
        self.shared_nbytes = config.shared_memory(spec.head_dim, spec.v_head_dim)

    @cute.kernel
    def kernel(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        out: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        dlse: cute.Pointer | None,
        dq: cute.Pointer,
        stats: cute.Pointer,
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
        at = self._locate(batch, query_length, num_heads)
        bounds = tiles.load_bounds(
            spec,
            at.batch,
            (query_length, key_length),
            (query_seq_lengths, key_value_seq_lengths, query_offset),
            (window_left, window_right),
        )
        visit = tiles.key_tiles(at.row, config.rows, config.keys, **bounds)
        kv_heads = num_heads // spec.group
        row_head = (Int64(at.batch) * query_length + at.row) * num_heads + at.head
        key_head = Int64(at.batch) * key_length * kv_heads + at.head // spec.group
        state = SimpleNamespace(
            at=at,
            bounds=bounds,
            visit=visit,
            query=query.toint() + row_head * (2 * spec.head_dim),
            out=out.toint() + row_head * (2 * spec.v_head_dim),
            dout=dout.toint() + row_head * (2 * spec.v_head_dim),
            lse=lse.toint() + row_head * 4,
            dlse=None if dlse is None else dlse.toint() + row_head * 4,
            dq=dq.toint() + row_head * (2 * spec.head_dim),
            stats=stats.toint() + ((Int64(at.batch) * num_heads + at.head) * query_length + at.row) * 8,
            key=key.toint() + key_head * (2 * spec.head_dim),
            value=value.toint() + key_head * (2 * spec.v_head_dim),
            heads=num_heads,
            kv_heads=kv_heads,
            valid_rows=bounds["query_end"] - at.row,
            live_rows=tiles.Rows.live(tiles.live_queries(**bounds), at.row, hides_first=spec.hides_first_queries),
            live_keys=tiles.live_keys(**bounds),
            stored_rows=query_length - at.row,
            transform=softmax.Transform.of(spec, scale, logits_soft_cap),
            acc=cute.make_rmem_tensor((self.dq_blocks[0] * self.dq_blocks[1] * 4,), Float32),
        )
        state.acc.fill(0.0)
        self._start(state)

        if cutlass.const_expr(spec.window_left):
            for tile in cutlass.range(visit.begin, visit.full_begin, unroll=1):
                self._visit(state, tile, masked=True)
        for tile in cutlass.range(visit.full_begin, visit.full_end, unroll=1):
            self._visit(state, tile, masked=False)
        for tile in cutlass.range(visit.full_end, visit.end, unroll=1):
            self._visit(state, tile, masked=True)

        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self._store(state, scale)

    # Set-up.

    def _locate(self, batch: Int32, query_length: Int32, num_heads: Int32) -> SimpleNamespace:
        """Who this thread is. Block index, fastest first: head, batch entry, query tile.

        Query tiles run from the last to the first: under a causal mask the longest start first.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tile_count = (query_length + (self.config.rows - 1)) // self.config.rows
        tile = tile_count - 1 - block // num_heads // batch
        warp = cute.arch.make_warp_uniform(thread // 32)
        return SimpleNamespace(
            thread=thread,
            lane=thread % 32,
            warp_row=warp * self.config.rows_per_warp,
            shared=cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint(),
            row=tile * self.config.rows,
            batch=block // num_heads % batch,
            head=block % num_heads,
        )

    def _start(self, state: SimpleNamespace) -> None:
        """Loads Q, dO and the first key tile, computes the row statistics meanwhile, and fills the state with both."""
        at, in_registers = state.at, self.config.rows_in_registers
        for tile, start, source in (
            (self.query_tile, 0, state.query),
            (self.dout_tile, self.query_tile.nbytes, state.dout),
        ):
            stride = gradient.row_stride(state.heads, tile.columns)
            shared = at.shared + start
            rows = tiles.Rows(None, state.valid_rows)
            tiles.load_tile(tile, self.config.threads, at.thread, shared, source, stride, rows)
        cute.arch.cp_async_commit_group()
        if not in_registers:
            self._prefetch_first(state)
        # Statistics pass through bytes that no copy in flight writes.
        stats = at.shared + self.rows_nbytes
        if not in_registers and self.config.stages == 2:
            stats = stats + (state.visit.begin + 1) % 2 * self.stage_nbytes
        self._write_statistics(state, stats)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        state.load_q, state.load_do = self._row_loaders(state)
        first = stats + (at.warp_row + accumulator_lane(at.lane)[0]) * 8
        state.stats = [ptx.load_shared_pair(first + 64 * i) for i in range(2 * self.row_blocks)]
        if in_registers:
            cute.arch.sync_threads()
            self._prefetch_first(state)

    def _prefetch_first(self, state: SimpleNamespace) -> None:
        if self.config.stages == 2:
            first = state.visit.begin
            cutlass.if_generate(first < state.visit.end, lambda: self._load_keys(state, first))
            cute.arch.cp_async_commit_group()

    def _row_loaders(self, state: SimpleNamespace) -> list[Any]:
        """Loaders of the warp's Q and dO fragments."""
        loaders = []
        for tile, start in ((self.query_tile, 0), (self.dout_tile, self.query_tile.nbytes)):
            row, column = plain_lane(state.at.lane)
            load = mma.load_a(tile, state.at.shared + start + tile.offset(state.at.warp_row + row, column))
            if self.config.rows_in_registers:
                steps = range(tile.padded_columns // 16)
                load = mma.held([[load(m, k) for k in steps] for m in range(self.row_blocks)])
            loaders.append(load)
        return loaders

    def _load_keys(self, state: SimpleNamespace, index: Int32) -> None:
        """Starts the copy of key tile `index`, K and V, into its stage."""
        at, first = state.at, index * self.config.keys
        stage = at.shared + self.ring_start + index % self.config.stages * self.stage_nbytes
        for tile, start, source in (
            (self.key_tile, 0, state.key),
            (self.value_tile, self.key_tile.nbytes, state.value),
        ):
            stride = gradient.row_stride(state.kv_heads, tile.columns)
            rows = tiles.Rows.live(state.live_keys, first, hides_first=self.spec.hides_first_keys)
            first_row = source + Int64(first) * stride
            tiles.load_tile(tile, self.config.threads, at.thread, stage + start, first_row, stride, rows)

    # Row statistics.

    def _write_statistics(self, state: SimpleNamespace, shared: Int32) -> None:
        """(lse2, delta) of the CTA's rows, to shared memory and to `stats`."""
        shape = CopyShape(self.dout_tile, self.config.threads)
        row, chunk = shape.thread_chunk(state.at.thread)
        for first in range(0, self.config.rows, shape.rows_per_pass):
            index = row + first
            inside = index < self.config.rows
            live = Boolean(inside & state.live_rows.contain(index))
            lse2, delta = self._row_statistics(state, shape, index, chunk, live)
            writes = Boolean(inside & (chunk == 0))
            for condition, store, address in (
                (writes, ptx.store_shared_pair, shared + index * 8),
                (Boolean(writes & (index < state.stored_rows)), ptx.store_global_pair, state.stats + Int64(index) * 8),
            ):
                cutlass.if_generate(condition, lambda s=store, a=address, x=lse2, y=delta: s(a, x, y))

    def _row_statistics(
        self, state: SimpleNamespace, shape: CopyShape, index: Int32, chunk: Int32, live: Boolean
    ) -> tuple[Float32, Float32]:
        """(lse2, delta) of one row, whose chunks `shape.lanes` neighbouring lanes share."""
        row = Int64(index) * gradient.row_stride(state.heads, self.spec.v_head_dim)
        delta = Float32(0.0)
        for first_chunk in range(0, self.dout_tile.chunks, shape.lanes):
            column = chunk + first_chunk
            valid = Boolean(live & (column < self.spec.v_head_dim // CHUNK))
            # Elsewhere the CTA's first chunk is read, which always exists, and dropped.
            offset = ptx.where(valid, row + Int64(column * (2 * CHUNK)), Int64(0))
            out, dout = (
                [ptx.where(valid, x, Int32(0)) for x in ptx.load_global_chunk(source + offset)]
                for source in (state.out, state.dout)
            )
            for x, y in zip(out, dout, strict=True):
                pair = zip(ptx.unpack(x, dtype=self.mma_dtype), ptx.unpack(y, dtype=self.mma_dtype), strict=True)
                for left, right in pair:
                    delta = ptx.fma(left, right, delta)
        distance = shape.lanes // 2
        while distance > 0:
            delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=distance)
            distance //= 2
        offset = ptx.where(live, Int64(index) * (Int64(state.heads) * 4), Int64(0))
        lse = ptx.load_global(state.lse + offset)
        if state.dlse is not None:
            delta = delta - ptx.load_global(state.dlse + offset)
        live = Boolean(live & (lse != Float32(float("-inf"))))
        lse2 = ptx.where(live, lse * softmax.LOG2_E, Float32(float("inf")))
        return lse2, ptx.where(live, delta, Float32(0.0))

    # One key tile.

    def _visit(self, state: SimpleNamespace, index: Int32, *, masked: bool) -> None:
        """dQ += dS K of one key tile, with the copies of the next one in flight."""
        if self.config.stages == 1:
            cute.arch.sync_threads()
            self._load_keys(state, index)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if self.config.stages == 2:
            cutlass.if_generate(index + 1 < state.visit.end, lambda: self._load_keys(state, index + 1))
            cute.arch.cp_async_commit_group()
        lane, keys, values = state.at.lane, self.key_tile, self.value_tile
        stage = state.at.shared + self.ring_start + index % self.config.stages * self.stage_nbytes
        score, dscore = mma.zeros(*self.score_blocks), mma.zeros(*self.score_blocks)
        load_k = mma.load_b(keys, stage + keys.offset(*crossed_lane(lane)))
        load_v = mma.load_b(values, stage + keys.nbytes + values.offset(*crossed_lane(lane)))
        load_k_transposed = mma.load_b_transposed(keys, stage + keys.offset(*plain_lane(lane)))
        mma.gemm(score, (*self.score_blocks, keys.padded_columns // 16), state.load_q, load_k, self.mma_dtype)
        mma.gemm(dscore, (*self.score_blocks, values.padded_columns // 16), state.load_do, load_v, self.mma_dtype)
        for i in range(len(score)):
            stats = state.stats[mma.accumulator_row(i // (4 * self.score_blocks[1]), i % 4)]
            _, dscore[i] = gradient.differentiate(score[i], dscore[i], stats, state.transform)
        if masked:
            self._mask(state, dscore, index)

        def gradients(m: int, k: int) -> mma.Fragment:
            return mma.pack_fragment(dscore, self.score_blocks[1], m, k, self.mma_dtype)

        mma.gemm(state.acc, (*self.dq_blocks, self.config.keys // 16), gradients, load_k_transposed, self.mma_dtype)

    def _mask(self, state: SimpleNamespace, dscore: mma.Accumulator, index: Int32) -> None:
        """Zeroes dS of the keys that a query does not see."""
        lane_row, lane_column = accumulator_lane(state.at.lane)
        first_row = state.at.row + state.at.warp_row + lane_row
        bounds = {name: x for name, x in state.bounds.items() if name != "query_end"}
        limits = [softmax.key_limits(first_row + 8 * i, **bounds) for i in range(2 * self.row_blocks)]
        column = index * self.config.keys + lane_column
        low = self.spec.window_left
        softmax.mask_columns(dscore, *self.score_blocks, column, limits, check_low=low, hidden=0.0)

    def _store(self, state: SimpleNamespace, scale: Float32) -> None:
        """Stores dq through shared memory, where each warp writes and reads only its own rows."""
        at, tile = state.at, self.query_tile
        first_row = at.warp_row + accumulator_lane(at.lane)[0]
        gradient.finish_rows(state.acc, self.dq_blocks, first_row, state.valid_rows, scale)
        shared = at.shared + at.warp_row * tile.pitch
        gradient.scatter(state.acc, self.dq_blocks, tile, shared, at.lane, self.mma_dtype)
        cute.arch.sync_warp()
        stride = gradient.row_stride(state.heads, tile.columns)
        target = state.dq + Int64(at.warp_row) * stride
        rows = state.stored_rows - at.warp_row
        tiles.store_rows(tile, self.config.rows_per_warp, at.lane, shared, target, stride, rows)
