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

from jax_fastattn.kernels.arguments import BackwardBuffers, Scalars
from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import BackwardConfig, head_counters, padded_rows, stats_row_nbytes
from jax_fastattn.kernels.sm90.config import padded_head_dim
from jax_fastattn.kernels.sm90.schedule import HeadOrder
from jax_fastattn.kernels.spec import KernelSpec

THREADS = 256

# Rows that lanes share.
_ROWS = 8
# CTAs of `later`, each with an SM of its own, and their threads; 8 or 24 are as fast at length 1024.
_LATER_CTAS, LATER_THREADS = 16, 512
# Where a query sees fewer keys, the fused kernel might wait: by arithmetic it takes statistics from 7 of those SMs.
_FEW_KEYS = 512


class _Counter(NamedTuple):
    """A counter's place among all of them; its query head, counted over all batch entries; its number there."""

    place: Int32
    head_index: Int32
    number: Int32


class _Rows(NamedTuple):
    """`_ROWS` rows of a query head.

    Attributes:
        before: index of the head's first row among all rows of all heads.
        num_heads: rows of all heads are so many apart from the next ones.
        first: the first one of the rows.
        last: the last one of the head that is read.
    """

    before: Int64
    num_heads: Int32
    first: Int32
    last: Int32


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

    def order(self, scalars: Scalars, order: HeadOrder) -> HeadOrder:
        """That of a launch, with the heads that are not left to `later`: the first `ahead` ones, or all."""
        if not self.leaves:
            return order._replace(prepared=order.heads)
        few = cutlass.min(scalars.key_length, scalars.window_left + scalars.window_right + 1) < _FEW_KEYS
        return order._replace(prepared=ptx.where(few, order.heads, Int32(cutlass.min(order.ahead, order.heads))))

    def launches(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder) -> list[Launch]:
        """What is launched: `kernel`, and `later` if heads are left to that.

        The first CTAs of `kernel` set counters, if dq is added up. Where nothing is left a CTA of `later` does nothing.
        """
        arguments = (buffers, scalars, order)
        lanes = order.prepared * self.spec.group * self._units(scalars.query_length) * self.lanes
        blocks = (lanes + (THREADS - 1)) // THREADS
        if self.spec.fused:
            blocks = blocks + self._counter_blocks(scalars.batch * scalars.num_heads, scalars.query_length)
        # Asked for one CTA on an SM, ptxas gives all loads of a lane registers of their own.
        launches = [Launch(self.kernel, arguments, grid=blocks, block=THREADS, min_blocks=1)]
        if self.leaves:
            later_blocks = Int32(cutlass.max(cutlass.min(order.heads - order.prepared, _LATER_CTAS), 1))
            launches.append(Launch(self.later, arguments, grid=later_blocks, block=LATER_THREADS, begins_early=True))
        return launches

    def _units(self, query_length: Int32) -> Int32:
        """Of `_ROWS` rows, in a query head."""
        return padded_rows(query_length) // _ROWS

    def _counters(self, query_length: Int32) -> Int32:
        """Counters of a query head."""
        return head_counters(padded_rows(query_length), self.config.queries)

    def _counter_blocks(self, all_heads: Int32, query_length: Int32) -> Int32:
        """CTAs that set counters."""
        return (all_heads * self._counters(query_length) + (THREADS - 1)) // THREADS

    @cute.kernel
    def kernel(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder):
        """Statistics and zeros of the first heads; all counters."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        all_heads, group = scalars.batch * scalars.num_heads, self.spec.group

        def write_rows(block: Int32) -> None:
            units = self._units(scalars.query_length)
            unit = Int32(cutlass.min((block * THREADS + thread) // self.lanes, order.prepared * group * units - 1))
            head_index, first, lane = unit // units, unit % units * _ROWS, thread % self.lanes
            self._write_rows(buffers, scalars, head_index, first, lane)
            first_row = Int64(head_index) * padded_rows(scalars.query_length) + first
            self._zero_sums(buffers, first_row, lane, head_index < order.ahead * group)

        def write_counter(block: Int32) -> None:
            index = block * THREADS + thread
            counters = self._counters(scalars.query_length)
            counter = _Counter(index, index // counters, index % counters)

            def write() -> None:
                self._write_counter(buffers, scalars, order, counter)

            cutlass.if_generate(counter.head_index < all_heads, write)

        if cutlass.const_expr(not self.spec.fused):
            write_rows(block)
        else:
            counters = self._counter_blocks(all_heads, scalars.query_length)
            cutlass.if_generate(block < counters, lambda: write_counter(block), lambda: write_rows(block - counters))

    @cute.kernel
    def later(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder):
        """Statistics of the other heads, in the order in which they are worked on; counts each of them."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        # The fused kernel, which this lets begin, relies on what `kernel` has written.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        group, units, step = self.spec.group, self._units(scalars.query_length), LATER_THREADS // self.lanes
        kv_heads = scalars.batch * scalars.num_heads // group

        def write_head(i: Int32) -> None:
            first = (order.prepared + block + i * blocks) * group

            def write_member(member: Int32) -> None:
                def write_rows(j: Int32) -> None:
                    unit = Int32(cutlass.min(j * step + thread // self.lanes, units - 1))
                    self._write_rows(buffers, scalars, first + member, unit * _ROWS, thread % self.lanes)

                wgmma.loop((units + (step - 1)) // step, write_rows)

            wgmma.loop(Int32(group), write_member)
            cute.arch.sync_threads()
            counter = buffers.arrivals.toint() + Int64(first) * self._counters(scalars.query_length) * 4

            def count() -> None:
                ptx.fetch_add_global(counter, Int32(1), "release")

            cutlass.if_generate(thread == 0, count)

        wgmma.loop((kv_heads - order.prepared - block + (blocks - 1)) // blocks, write_head)

    def _write_rows(
        self, buffers: BackwardBuffers, scalars: Scalars, head_index: Int32, first: Int32, lane: Int32
    ) -> None:
        """Statistics of `_ROWS` rows from `first` on, of a query head, counted over all batch entries.

        Where no key sees the rows nobody adds to their dq: it is zeroed here.
        """
        entry, head = head_index // scalars.num_heads, head_index % scalars.num_heads
        bounds = tiles.entry_bounds(self.spec, entry, buffers, scalars)
        # Past the end the last row is read once more, or the first one, which always exists, and dropped.
        last = Int32(cutlass.max(bounds["query_end"] - 1, 0))
        before = Int64(entry) * scalars.query_length * scalars.num_heads + head
        rows = _Rows(before, scalars.num_heads, first, last)
        delta = self._row_delta(buffers, rows, lane)
        row = first + lane % _ROWS
        live = self._live(bounds, row)
        source = before + Int64(cutlass.min(row, last)) * scalars.num_heads
        row_lse, delta = self._statistics(buffers, source * 4, delta, live, scalars.scale)

        def write() -> None:
            nbytes, first_row = stats_row_nbytes(self.spec.fused), Int64(head_index) * padded_rows(scalars.query_length)
            address = buffers.stats.toint() + (2 * first_row + row) * nbytes
            for which, value in enumerate((row_lse, delta)):
                target = address + Int64(padded_rows(scalars.query_length)) * (which * nbytes)
                if self.spec.fused:
                    ptx.store_global_chunk(target, gradient.thirds(-value))
                else:
                    ptx.store_global(target, value)

        cutlass.if_generate(lane < _ROWS, write)
        if not self.spec.fused:
            return
        queries, nbytes = self.config.queries, 2 * self.spec.head_dim
        visit = tiles.key_tiles(first // queries * queries, queries, self.config.keys, **bounds)

        def clear(i: Int32) -> None:
            target = buffers.dq.toint() + (before + Int64(first + i) * scalars.num_heads) * nbytes
            self._zero(target, lane, nbytes)

        hidden = ptx.where(Boolean(visit.end == visit.begin), scalars.query_length - first, Int32(0))
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
        buffers: BackwardBuffers,
        offset: Int64,
        delta: Float32,
        live: Boolean,
        scale: Float32,
    ) -> tuple[Float32, Float32]:
        """Returns (lse times a factor, delta - dlse), given `_row_delta` and the byte offset of a float32."""
        row_lse = ptx.load_global(buffers.lse.toint() + offset)
        row_dlse = None if buffers.dlse is None else ptx.load_global(buffers.dlse.toint() + offset)
        live = Boolean(live & (row_lse != Float32(float("-inf"))))
        if row_dlse is not None:
            delta = delta - row_dlse
        # Rows without keys: +inf, or where that has the sign of the scale, an infinity of this sign.
        row_lse = ptx.where(live, row_lse, Float32(float("inf"))) * self._factor(scale)
        return row_lse, ptx.where(live, delta, Float32(0.0))

    def _row_delta(self, buffers: BackwardBuffers, rows: _Rows, lane: Int32) -> Float32:
        """Returns rowsum(out * dout) of the lane's own row."""
        columns = self.spec.v_head_dim
        deltas = [Float32(0.0)] * _ROWS
        for column in range(0, columns // CHUNK, self.lanes):
            # Lanes past the end read the last chunk once more.
            valid = Boolean(lane + column < columns // CHUNK)
            start = rows.before * (2 * columns) + Int32(cutlass.min(lane + column, columns // CHUNK - 1)) * (2 * CHUNK)
            loaded = []
            for i in range(_ROWS):
                offset = start + Int64(cutlass.min(rows.first + i, rows.last)) * (rows.num_heads * (2 * columns))
                operands = (buffers.out, buffers.dout)
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

    def _write_counter(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder, counter: _Counter) -> None:
        """Sets a counter.

        A query tile's counter starts at the number of key tiles that will add to it; in semaphore order it starts at 0
        and counts those that have. The counter before a head's tiles is that of its zeros, none as yet, and of its
        statistics.
        """
        bounds = tiles.entry_bounds(self.spec, counter.head_index // scalars.num_heads, buffers, scalars)
        rows = self.config.queries
        visit = tiles.key_tiles((counter.number - 1) * rows, rows, self.config.keys, **bounds)
        # The first head's is that of the tiles of keys that have been taken.
        written = Boolean((counter.head_index > 0) & (counter.head_index < order.prepared * self.spec.group))
        count = Int32(0) if self.spec.ordered else visit.end - visit.begin
        value = ptx.where(counter.number > 0, count, ptx.where(written, Int32(1), Int32(0)))
        ptx.store_global_int(buffers.arrivals.toint() + Int64(counter.place) * 4, value)

    def _zero_sums(self, buffers: BackwardBuffers, first_row: Int64, lane: Int32, zeroes: Boolean) -> None:
        """Zeroes `_ROWS` rows of the sums, if there are any that CTAs add to in any order."""
        if self.spec.fused and not self.spec.ordered:
            nbytes = 4 * padded_head_dim(self.spec.head_dim)
            address = buffers.dq_sum.toint() + first_row * nbytes
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
