# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What runs before the other backward kernels: statistics of the rows; for sums of dq, zeros and counters.

Memory is its limit if enough is on its way, and little is computed: lanes that share rows load all of them, 16 bytes at
a time, and each does for one row what there is to do once for a row. The fused kernel does not wait for all rows:
`kernel` prepares the first heads; `later` runs beside the fused kernel, on a few SMs, and counts each of the other
heads, for which who works on it waits.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import BackwardConfig, head_counters, padded_rows, stats_row_nbytes
from jax_fastattn.kernels.sm90.config import padded_head_dim
from jax_fastattn.kernels.spec import KernelSpec

THREADS = 256

# Rows that lanes share.
_ROWS = 8
# CTAs of `later`, each with an SM of its own, and their threads; 8 or 24 are as fast at length 1024.
_LATER_CTAS, LATER_THREADS = 16, 512
# Where a query sees fewer keys, the fused kernel might wait: by arithmetic it takes statistics from 7 of those SMs.
_FEW_KEYS = 512


class _Problem(NamedTuple):
    """What rows are computed by: T and S; the operands and the window of `tiles.load_bounds`; N; the scale."""

    sizes: tuple[Int32, Int32]
    operands: tuple[cute.Pointer | None, cute.Pointer | None, cute.Pointer | None]
    window: tuple[Int32, Int32]
    num_heads: Int32
    scale: Float32

    @property
    def padded(self) -> Int32:
        """Rows of a head in the statistics."""
        return padded_rows(self.sizes[0])


class _Arrays(NamedTuple):
    """What is read and written row by row, see `BackwardKernel`."""

    out: cute.Pointer
    lse: cute.Pointer
    dout: cute.Pointer
    dlse: cute.Pointer | None
    dq: cute.Pointer | None
    stats: cute.Pointer


class StatisticsKernel:
    """Writes the statistics of every row, padding included. Where dq is added up, prepares that.

    Args:
        spec: the compile key.
        config: of the key-stationary kernel.
    """

    def __init__(self, spec: KernelSpec, config: BackwardConfig):
        self.spec, self.config = spec, config
        # Lanes that share a row.
        self.lanes = 8 if spec.v_head_dim <= 8 * CHUNK else 16

    @property
    def leaves(self) -> bool:
        """Whether heads are left to `later`."""
        return self.spec.fused

    def prepared(
        self, key_length: Int32, window_left: Int32, window_right: Int32, ahead: Int32, kv_heads: Int32
    ) -> Int32:
        """Key/value heads, of `kv_heads`, whose statistics are not left to `later`: the first `ahead` ones, or all."""
        if not self.leaves:
            return kv_heads
        few = cutlass.min(key_length, window_left + window_right + 1) < _FEW_KEYS
        return ptx.where(few, kv_heads, Int32(cutlass.min(ahead, kv_heads)))

    def blocks(self, batch: Int32, query_length: Int32, num_heads: Int32, prepared: Int32) -> Int32:
        """CTAs of `kernel`: if dq is added up, the first ones set counters."""
        lanes = prepared * self.spec.group * self._units(query_length) * self.lanes
        rows = (lanes + (THREADS - 1)) // THREADS
        if not self.spec.fused:
            return rows
        return rows + self._counter_blocks(batch * num_heads, query_length)

    def later_blocks(self, kv_heads: Int32, prepared: Int32) -> Int32:
        """CTAs of `later`; one that has nothing to do where there is nothing."""
        return Int32(cutlass.max(cutlass.min(kv_heads - prepared, _LATER_CTAS), 1))

    def _units(self, query_length: Int32) -> Int32:
        """Of `_ROWS` rows, in a query head."""
        return padded_rows(query_length) // _ROWS

    def _counters(self, query_length: Int32) -> Int32:
        """Counters of a query head."""
        return head_counters(query_length, self.config.queries)

    def _counter_blocks(self, all_heads: Int32, query_length: Int32) -> Int32:
        """CTAs that set counters."""
        return (all_heads * self._counters(query_length) + (THREADS - 1)) // THREADS

    @cute.kernel
    def kernel(
        self,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        out: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        dlse: cute.Pointer | None,
        dq: cute.Pointer | None,
        stats: cute.Pointer,
        dq_sum: cute.Pointer | None,
        arrivals: cute.Pointer | None,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        ahead: Int32,
        prepared: Int32,
        scale: Float32,
    ):
        """Statistics and zeros of the first heads; all counters. See `BackwardKernel` for the arguments."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        lengths = (query_seq_lengths, key_value_seq_lengths, query_offset)
        problem = _Problem((query_length, key_length), lengths, (window_left, window_right), num_heads, scale)
        arrays = _Arrays(out, lse, dout, dlse, dq, stats)
        all_heads, group = batch * num_heads, self.spec.group

        def write_rows(block: Int32) -> None:
            units = self._units(query_length)
            unit = Int32(cutlass.min((block * THREADS + thread) // self.lanes, prepared * group * units - 1))
            head_index, first, lane = unit // units, unit % units * _ROWS, thread % self.lanes
            self._write_rows(arrays, problem, (head_index, first), lane)
            self._zero_sums(dq_sum, Int64(head_index) * problem.padded + first, lane, head_index < ahead * group)

        def write_counter(block: Int32) -> None:
            index = block * THREADS + thread
            place = (index // self._counters(query_length), index % self._counters(query_length))

            def write() -> None:
                self._write_counter(arrivals, index, place, problem, prepared)

            cutlass.if_generate(place[0] < all_heads, write)

        if cutlass.const_expr(not self.spec.fused):
            write_rows(block)
        else:
            counters = self._counter_blocks(all_heads, query_length)
            cutlass.if_generate(block < counters, lambda: write_counter(block), lambda: write_rows(block - counters))

    @cute.kernel
    def later(
        self,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        out: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        dlse: cute.Pointer | None,
        dq: cute.Pointer,
        stats: cute.Pointer,
        arrivals: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        prepared: Int32,
        scale: Float32,
    ):
        """Statistics of the other heads, in the order in which they are worked on; counts each of them."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        # The fused kernel, which this lets begin, relies on what `kernel` has written.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        lengths = (query_seq_lengths, key_value_seq_lengths, query_offset)
        problem = _Problem((query_length, key_length), lengths, (window_left, window_right), num_heads, scale)
        arrays = _Arrays(out, lse, dout, dlse, dq, stats)
        group, units, step = self.spec.group, self._units(query_length), LATER_THREADS // self.lanes
        kv_heads = batch * num_heads // group

        def write_head(i: Int32) -> None:
            first = (prepared + block + i * blocks) * group

            def write_member(member: Int32) -> None:
                def write_rows(j: Int32) -> None:
                    unit = Int32(cutlass.min(j * step + thread // self.lanes, units - 1))
                    self._write_rows(arrays, problem, (first + member, unit * _ROWS), thread % self.lanes)

                wgmma.loop((units + (step - 1)) // step, write_rows)

            wgmma.loop(Int32(group), write_member)
            cute.arch.sync_threads()
            counter = arrivals.toint() + Int64(first) * self._counters(query_length) * 4

            def count() -> None:
                ptx.fetch_add_global(counter, Int32(1), "release")

            cutlass.if_generate(thread == 0, count)

        wgmma.loop((kv_heads - prepared - block + (blocks - 1)) // blocks, write_head)

    def _write_rows(self, arrays: _Arrays, problem: _Problem, place: tuple[Int32, Int32], lane: Int32) -> None:
        """Statistics of `_ROWS` rows; `place` has the query head, counted over all batch entries, and the first row.

        Where no key sees the rows nobody adds to their dq: it is zeroed here.
        """
        (head_index, first), (query_length, _) = place, problem.sizes
        entry, head = head_index // problem.num_heads, head_index % problem.num_heads
        bounds = tiles.load_bounds(self.spec, entry, problem.sizes, problem.operands, problem.window)
        # Past the end the last row is read once more, or the first one, which always exists, and dropped.
        last = Int32(cutlass.max(bounds["query_end"] - 1, 0))
        before = Int64(entry) * query_length * problem.num_heads + head
        delta = self._row_delta(arrays, problem, (before, first, last), lane)
        row = first + lane % _ROWS
        live = self._live(bounds, row)
        source = before + Int64(cutlass.min(row, last)) * problem.num_heads
        row_lse, delta = self._statistics(arrays, source * 4, delta, live, problem.scale)

        def write() -> None:
            nbytes, first_row = stats_row_nbytes(self.spec.fused), Int64(head_index) * problem.padded
            address = arrays.stats.toint() + (2 * first_row + row) * nbytes
            for which, value in enumerate((row_lse, delta)):
                target = address + Int64(problem.padded) * (which * nbytes)
                if self.spec.fused:
                    ptx.store_global_chunk(target, gradient.thirds(-value))
                else:
                    ptx.store_global(target, value)

        cutlass.if_generate(lane < _ROWS, write)
        dq = arrays.dq
        if dq is None:
            return
        queries, nbytes = self.config.queries, 2 * self.spec.head_dim
        visit = tiles.key_tiles(first // queries * queries, queries, self.config.keys, **bounds)

        def clear(i: Int32) -> None:
            target = dq.toint() + (before + Int64(first + i) * problem.num_heads) * nbytes
            self._zero(target, lane, nbytes)

        hidden = ptx.where(Boolean(visit.end == visit.begin), query_length - first, Int32(0))
        wgmma.loop(tiles.clamp(hidden, 0, _ROWS), clear)

    def _live(self, bounds: dict[str, Int32], row: Int32) -> Boolean:
        """Returns whether a row sees some key. If a sink makes its log-sum-exp finite, only this tells."""
        spec = self.spec
        if not (spec.hides_first_queries or spec.hides_last_queries or spec.key_value_seq_lengths):
            return Boolean(row < bounds["query_end"])
        rows = tiles.live_queries(**bounds)
        live = row < rows.end
        return Boolean(live & (row >= rows.begin)) if spec.hides_first_queries else Boolean(live)

    def _factor(self, scale: Float32) -> Float32:
        """On log-sum-exps, see `gradient.py`."""
        return Float32(1.0) / gradient.nonzero(scale) if self.spec.divides_lse else Float32(LOG2_E)

    def _statistics(
        self,
        arrays: _Arrays,
        offset: Int64,
        delta: Float32,
        live: Boolean,
        scale: Float32,
    ) -> tuple[Float32, Float32]:
        """Returns (lse times a factor, delta - dlse), given `_row_delta` and the byte offset of a float32."""
        row_lse = ptx.load_global(arrays.lse.toint() + offset)
        row_dlse = None if arrays.dlse is None else ptx.load_global(arrays.dlse.toint() + offset)
        live = Boolean(live & (row_lse != Float32(float("-inf"))))
        if row_dlse is not None:
            delta = delta - row_dlse
        # Rows without keys: +inf, or where that has the sign of the scale, an infinity of this sign.
        row_lse = ptx.where(live, row_lse, Float32(float("inf"))) * self._factor(scale)
        return row_lse, ptx.where(live, delta, Float32(0.0))

    def _row_delta(self, arrays: _Arrays, problem: _Problem, place: tuple[Int64, Int32, Int32], lane: Int32) -> Float32:
        """Returns rowsum(out * dout) of the lane's own row.

        `place` has the index of the head's first row among all rows, the first row, and the last one that is read.
        """
        (before, first, last), columns = place, self.spec.v_head_dim
        deltas = [Float32(0.0)] * _ROWS
        for column in range(0, columns // CHUNK, self.lanes):
            # Lanes past the end read the last chunk once more.
            valid = Boolean(lane + column < columns // CHUNK)
            start = before * (2 * columns) + Int32(cutlass.min(lane + column, columns // CHUNK - 1)) * (2 * CHUNK)
            loaded = []
            for i in range(_ROWS):
                offset = start + Int64(cutlass.min(first + i, last)) * (problem.num_heads * (2 * columns))
                operands = (arrays.out, arrays.dout)
                loaded.append([ptx.load_global_chunk(operand.toint() + offset) for operand in operands])
            for i, (outs, douts) in enumerate(loaded):
                if column + self.lanes > columns // CHUNK:
                    douts = [ptx.where(valid, pair, Int32(0)) for pair in douts]
                for pairs in zip(outs, douts, strict=True):
                    left, right = (ptx.unpack(pair, dtype=ptx.MMA_DTYPE[self.spec.dtype]) for pair in pairs)
                    for x, y in zip(left, right, strict=True):
                        deltas[i] = ptx.fma(x, y, deltas[i])
        return self._own(deltas, lane)

    def _own(self, values: list[Float32], lane: Int32) -> Float32:
        """Adds up, over the lanes that share `_ROWS` rows, their values of the lane's own row, `lane % _ROWS`."""
        for offset in range(_ROWS, self.lanes, _ROWS):
            values = [x + cute.arch.shuffle_sync_bfly(x, offset=offset) for x in values]
        while len(values) > 1:
            offset = len(values) // 2
            upper, pairs = Boolean(lane & offset != 0), list(zip(values[:offset], values[offset:], strict=True))
            given = [cute.arch.shuffle_sync_bfly(ptx.where(upper, x, y), offset=offset) for x, y in pairs]
            values = [ptx.where(upper, y, x) + z for (x, y), z in zip(pairs, given, strict=True)]
        return values[0]

    def _write_counter(
        self,
        arrivals: cute.Pointer,
        index: Int32,
        place: tuple[Int32, Int32],
        problem: _Problem,
        prepared: Int32,
    ) -> None:
        """Sets counter `index`, which `place` has by query head and number.

        A query tile's counter starts at the number of key tiles that will add to it; in semaphore order it starts at 0
        and counts those that have. The counter before a head's tiles is that of its zeros, none as yet, and of its
        statistics.
        """
        head_index, number = place
        bounds = tiles.load_bounds(
            self.spec, head_index // problem.num_heads, problem.sizes, problem.operands, problem.window
        )
        rows = self.config.queries
        visit = tiles.key_tiles((number - 1) * rows, rows, self.config.keys, **bounds)
        # The first head's is that of the tiles of keys that have been taken.
        written = Boolean((head_index > 0) & (head_index < prepared * self.spec.group))
        count = Int32(0) if self.spec.ordered else visit.end - visit.begin
        value = ptx.where(number > 0, count, ptx.where(written, Int32(1), Int32(0)))
        ptx.store_global_int(arrivals.toint() + Int64(index) * 4, value)

    def _zero_sums(self, dq_sum: cute.Pointer | None, first_row: Int64, lane: Int32, zeroes: Boolean) -> None:
        """Zeroes `_ROWS` rows of the sums, if there are any."""
        if dq_sum is not None:
            nbytes = 4 * padded_head_dim(self.spec.head_dim)
            address = dq_sum.toint() + first_row * nbytes
            cutlass.if_generate(zeroes, lambda: self._zero(address, lane, _ROWS * nbytes))

    def _zero(self, address: Int64, lane: Int32, nbytes: int) -> None:
        """Zeroes `nbytes`, a multiple of 16."""
        for i in range(0, nbytes, 16 * self.lanes):

            def clear(target: Int64 = address + (lane * 16 + i)) -> None:
                ptx.store_global_chunk(target, [Int32(0)] * 4)

            if i + 16 * self.lanes <= nbytes:
                clear()
            else:
                cutlass.if_generate(lane * 16 < nbytes - i, clear)
