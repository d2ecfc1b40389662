# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels that run before the other backward kernels: statistics of rows; for sums of dq, zeros and counters.

If the gradient of sinks is computed, what each row adds to it is stored too.

Memory is its limit if enough loads are in flight and little is computed: lanes that share rows load all of them, 16
bytes at a time, and each lane computes for one row what is needed once for a row. `dkdv_dq/` does not wait for all
rows: `prologue` prepares the first heads; `background` runs concurrently with `dkdv_dq/`, on a few SMs, and counts each
of the other heads, whose CTAs wait for that.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.device.products import product_words, result_words
from jax_fastattn.kernels.features import sinks
from jax_fastattn.kernels.features.dropout import load_factor
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward import gradient
from jax_fastattn.kernels.sm90.backward.config import ROW_ALIGNMENT, BackwardConfig, stats_row_nbytes
from jax_fastattn.kernels.sm90.backward.listed_tiles import key_tile_count
from jax_fastattn.kernels.sm90.backward.row_schedule import preprocess_schedule
from jax_fastattn.kernels.sm90.geometry import padded_head_dim
from jax_fastattn.kernels.sm90.query_order import HeadOrder
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.sums.row_preprocess import (
    Base2,
    Delta,
    GivenDelta,
    InProducts,
    OutputDelta,
    ReadRow,
    RowPreprocess,
    only_if,
    output_numbers,
    where_not_zeros,
)
from jax_fastattn.kernels.tiles import plan

THREADS = 256

# Lanes share this many rows.
_ROWS = 8
# `background` has this many CTAs, each on an SM of its own, with this many threads; 8 or 24 CTAs are as fast at length
# 1024.
_BACKGROUND_CTAS, BACKGROUND_THREADS = 16, 512
# Where a query sees fewer keys, `dkdv_dq/` might wait: by arithmetic it takes statistics from 7 of those SMs.
_FEW_KEYS = 512
# For packed sequences `prologue` prepares this many slots of 128 queries per slot of keys that is begun at first.
_PROLOGUE_WAVES = 3


class _HeadRows(NamedTuple):
    """Describes `_ROWS` rows of a query head.

    Attributes:
        before: index of the head's first row among all rows of all heads.
        num_heads: query heads, which is also the distance from a row of the head to the next one.
        first: the first one of the rows.
        last: the last one of the head that is read.
    """

    before: Int64
    num_heads: Int32
    first: Int32
    last: Int32


@dataclass(frozen=True)
class _Row:
    """Describes the row for which a lane computes what is needed once for a row.

    Attributes:
        index: index of the row within its sequence.
        end: rows from this one on are padding, and have the numbers of another row.
        read: its numbers.
        mean: its mean key; None if no kernel takes it.
    """

    index: Int32
    end: Int32
    read: ReadRow
    mean: Float32 | None


class PreprocessKernel:
    """Writes the statistics of every row, padding included. Where dq is added up, it prepares zeros and counters."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.config: BackwardConfig = spec.config.main
        # This many lanes share a row.
        self.lanes = 8 if spec.v_head_dim <= 8 * CHUNK else 16
        self.schedule = preprocess_schedule(spec, _ROWS, self.config.queries)

    @property
    def has_background(self) -> bool:
        """Returns whether heads are left to `background`."""
        return self.config.adds_dq

    @property
    def begins_early(self) -> bool:
        """Returns whether CTAs of `prologue` may begin before the previous launch ends, as a rule the prepass."""
        return self.spec.listed

    def order(self, scalars: Scalars, order: HeadOrder) -> HeadOrder:
        """Returns the order of a launch; its `prologue` has the first `prefetch_distance` heads, or all of them."""
        if not self.has_background:
            return order._replace(prologue=self.schedule.parts(order, scalars))
        if self.spec.packed:
            return order._replace(prologue=self._prologue_slots(scalars, self.schedule.parts(order, scalars)))
        few = cutlass.min(scalars.key_length, scalars.window_left + scalars.window_right + 1) < _FEW_KEYS
        return order._replace(
            prologue=ptx.where(few, order.heads, Int32(cutlass.min(order.prefetch_distance, order.heads)))
        )

    def _prologue_slots(self, scalars: Scalars, slots: Int32) -> Int32:
        """Returns how many slots of packed queries are not left to `background`: all of them if sums need zeros."""
        if not self.spec.ordered:
            return slots
        kv_heads = scalars.num_heads // self.spec.group
        begun = (scalars.multiprocessors + (kv_heads - 1)) // kv_heads
        keys = scalars.key_length // scalars.batch
        few = cutlass.min(keys, scalars.window_left + scalars.window_right + 1) < _FEW_KEYS
        return ptx.where(few, slots, Int32(cutlass.min(slots, _PROLOGUE_WAVES * begun)))

    def launches(self, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> list[Launch]:
        """Returns what is launched: `prologue`, and `background` if heads are left to it.

        The first CTAs of `prologue` set counters, if dq is added up. Where nothing is left a CTA of `background` does
        nothing.
        """
        arguments = (buffers, scalars, order)
        lanes = self.schedule.prologue_units(order, scalars) * self.lanes
        blocks = (lanes + (THREADS - 1)) // THREADS
        if self.config.adds_dq:
            blocks = blocks + self._counter_blocks(scalars)
        # Asked for one CTA on an SM, ptxas gives all loads of a lane registers of their own.
        launches = [
            Launch(self.prologue, arguments, grid=blocks, block=THREADS, min_blocks=1, begins_early=self.begins_early)
        ]
        if self.has_background:
            left = self.schedule.parts(order, scalars) - order.prologue
            background_blocks = Int32(cutlass.max(cutlass.min(left, _BACKGROUND_CTAS), 1))
            launches.append(
                Launch(self.background, arguments, grid=background_blocks, block=BACKGROUND_THREADS, begins_early=True)
            )
        return launches

    def _counter_blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs set counters."""
        return (self.schedule.dq_tiles(scalars) + (THREADS - 1)) // THREADS

    @cute.kernel
    def prologue(self, buffers: Buffers, scalars: Scalars, order: HeadOrder):
        """Writes statistics and zeros of the first heads, and all counters."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.begins_early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        schedule, group = self.schedule, self.spec.group

        def write_rows(block: Int32) -> None:
            last = schedule.prologue_units(order, scalars) - 1
            unit = Int32(cutlass.min((block * THREADS + thread) // self.lanes, last))
            work, lane = schedule.unit(unit, order, buffers, scalars), thread % self.lanes

            def write() -> None:
                self._write_rows(buffers, scalars, work, lane)
                first_row = work.sequence.queries.padded_row(Int64(work.head_index), ROW_ALIGNMENT, work.tile * _ROWS)
                place = order.place_of(work.head_index, group)
                self._zero_accum(buffers, first_row, lane, place < order.prefetch_distance * group)

            if cutlass.const_expr(self.spec.packed):
                # The length is 0 in a slot that no tile owns.
                cutlass.if_generate(work.sequence.queries.length > 0, write)
            else:
                write()

        def write_counter(block: Int32) -> None:
            index = block * THREADS + thread
            exists = index < schedule.dq_tiles(scalars)
            cutlass.if_generate(exists, lambda: self._write_counters(buffers, scalars, order, index))

        if cutlass.const_expr(not self.config.adds_dq):
            write_rows(block)
        else:
            counters = self._counter_blocks(scalars)
            cutlass.if_generate(block < counters, lambda: write_counter(block), lambda: write_rows(block - counters))

    @cute.kernel
    def background(self, buffers: Buffers, scalars: Scalars, order: HeadOrder):
        """Writes the statistics of the other heads in the order in which kernels visit them, and counts each head."""
        thread, _, _ = cute.arch.thread_idx()
        # The kernel of `dkdv_dq/`, which this lets begin, relies on what `prologue` has written.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        def finish(index: Int32) -> None:
            cute.arch.sync_threads()

            def count() -> None:
                ptx.fetch_add_global(buffers.head_ready.toint() + Int64(index) * 4, Int32(1), "release")

            cutlass.if_generate(thread == 0, count)

        self.schedule.each_of_background(
            order,
            buffers,
            scalars,
            place=thread // self.lanes,
            step=BACKGROUND_THREADS // self.lanes,
            write=lambda work: self._write_rows(buffers, scalars, work, thread % self.lanes),
            finish=finish,
        )

    def _write_rows(self, buffers: Buffers, scalars: Scalars, work: Work, lane: Int32) -> None:
        """Writes the statistics of a unit of rows. If no key sees them, no CTA adds to their dq: it is zeroed here."""
        queries, bounds, first = work.sequence.queries, work.sequence.bounds(), work.tile * _ROWS
        # Past the end the last row is read once more, or the first one, which always exists, and dropped.
        last = Int32(cutlass.max(bounds.query_end - 1, 0))
        before = queries.row() * scalars.num_heads + work.head
        rows = _HeadRows(before, scalars.num_heads, first, last)
        own = self._own_row(buffers, bounds, rows, lane)
        in_products = self.spec.folds_lse and self.config.adds_dq
        kv_heads = scalars.num_heads // self.spec.group
        units = gradient.load_units(self.spec, buffers, queries, kv_heads, work.head // self.spec.group)
        survival = load_factor(buffers, scalars.num_heads, Head(queries.batch, work.head))
        log2_p = units.log2_p if survival is None else units.log2_p + ptx.log2(survival)
        lse_scale = InProducts(scalars.scale, log2_p) if in_products else Base2(log2_p)
        given = units if self.spec.has_gradient_units else None
        preprocess = RowPreprocess.of(self.spec, lse_scale, given, survival)
        lse_scaled, delta = preprocess.statistics(own.read)

        def write() -> None:
            nbytes = stats_row_nbytes(self.config.adds_dq)
            first_row = queries.padded_row(Int64(work.head_index), ROW_ALIGNMENT)
            address = buffers.stats.toint() + (2 * first_row + queries.padded(own.index, ROW_ALIGNMENT)) * nbytes
            for which, value in enumerate((lse_scaled, delta)):
                target = address + Int64(queries.padded_rows(ROW_ALIGNMENT)) * (which * nbytes)
                if self.config.adds_dq:
                    mean = own.mean if which else None
                    ptx.store_global_chunk(target, gradient.split_bf16x3(-value, mean))
                else:
                    ptx.store_global(target, value)

        cutlass.if_generate(lane < _ROWS, write)
        if self.spec.dsinks:
            self._write_dsinks_term(buffers, scalars, work, own, lane)
        if not self.config.adds_dq:
            return
        rows_of_tile, nbytes = self.config.queries, self.spec.result_nbytes * self.spec.head_dim
        visitors = self._visitors(buffers, scalars, work, bounds, first // rows_of_tile)

        def clear(i: Int32) -> None:
            target = buffers.dq.toint() + (before + Int64(first + i) * scalars.num_heads) * nbytes
            self._zero(target, lane, nbytes)

        hidden = ptx.where(Boolean(visitors == 0), queries.length - first, Int32(0))
        wgmma.loop(copies.clamp(hidden, 0, _ROWS), clear)

    def _own_row(self, buffers: Buffers, bounds: plan.Bounds, rows: _HeadRows, lane: Int32) -> _Row:
        """Loads the lane's own row."""
        product = Float32(0.0) if buffers.out is None else self._row_product(buffers, rows, lane)
        index = rows.first + lane % _ROWS
        live = self._live(bounds, index)
        offset = (rows.before + Int64(cutlass.min(index, rows.last)) * rows.num_heads) * 4
        lse = ptx.load_global(buffers.lse.toint() + offset)
        delta: Delta
        if buffers.delta is not None:
            delta = GivenDelta(ptx.load_global(buffers.delta.toint() + offset))
        else:
            dlse = None if buffers.dlse is None else ptx.load_global(buffers.dlse.toint() + offset)
            delta = OutputDelta(product, dlse, live)
        mean = None if buffers.row_means is None else ptx.load_global(buffers.row_means.toint() + offset)
        return _Row(index, bounds.query_end, ReadRow(live, lse, delta), mean)

    def _write_dsinks_term(self, buffers: Buffers, scalars: Scalars, work: Work, own: _Row, lane: Int32) -> None:
        """Stores what the lane's own row adds to the gradient of its sink; 0 of padding that the arrays have."""
        queries = work.sequence.queries
        sink = sinks.load_sink(buffers.sinks, scalars, queries, work.head)
        term = own.read.sink_term(sink, Boolean(own.index < own.end))
        address = buffers.dsinks_terms.toint() + queries.head_row(scalars.num_heads, work.head, own.index) * 4
        stored = Boolean((lane < _ROWS) & (own.index < queries.length))
        cutlass.if_generate(stored, lambda: ptx.store_global(address, term))

    def _live(self, bounds: plan.Bounds, row: Int32) -> Boolean:
        """Returns whether a row sees some key. If a sink makes its log-sum-exp finite, only this tells."""
        if not (bounds.kind.hides_queries or bounds.kind.key_end):
            return Boolean(row < bounds.query_end)
        rows = bounds.live_queries()
        live = row < rows.end
        return Boolean(live & (row >= rows.begin)) if rows.hides_first else Boolean(live)

    def _row_product(self, buffers: Buffers, rows: _HeadRows, lane: Int32) -> Float32:
        """Returns rowsum(out * dout) of the lane's own row."""
        columns, pitch = self.spec.v_head_dim, 2 * self.spec.row_columns[1]
        out_words, dout_words = result_words(self.spec), product_words(self.spec)
        deltas = [Float32(0.0)] * _ROWS
        for column in range(0, columns // CHUNK, self.lanes):
            # Lanes past the end read the last chunk once more.
            valid = Boolean(lane + column < columns // CHUNK)
            chunk = Int32(cutlass.min(lane + column, columns // CHUNK - 1))
            loaded = []
            for i in range(_ROWS):
                row = Int64(cutlass.min(rows.first + i, rows.last)) * (rows.num_heads * pitch)

                def load(operand: cute.Pointer, at: Int32, row: Int64 = row) -> list[Int32]:
                    return ptx.load_global_chunk(operand.toint() + (rows.before * pitch + at + row))

                operands = (out_words, buffers.out), (dout_words, buffers.dout)
                pairs = [x.row_pairs(functools.partial(load, at), chunk, columns) for x, at in operands]
                loaded.append((*pairs, self._load_rests(buffers, rows, rows.first + i, chunk)))
            for i, (outs, douts, rests) in enumerate(loaded):
                if column + self.lanes > columns // CHUNK:
                    douts = [only_if(valid, pair) for pair in douts]
                if self.spec.listed:
                    douts = [where_not_zeros(out, pair) for out, pair in zip(outs, douts, strict=True)]
                for j, (out, dout) in enumerate(zip(outs, douts, strict=True)):
                    numbers = output_numbers(out_words, out, rests, j)
                    for x, y in zip(numbers, dout_words.numbers(dout), strict=True):
                        deltas[i] = ptx.fma(x, y, deltas[i])
        return self._own(deltas, lane)

    def _load_rests(self, buffers: Buffers, rows: _HeadRows, row: Int32, chunk: Int32) -> list[Int32] | None:
        """Loads what rounding has taken from a chunk of a row of the output; None if that is not kept."""
        if buffers.out_rests is None:
            return None
        at = rows.before + Int64(cutlass.min(row, rows.last)) * rows.num_heads
        return ptx.load_constant_pair(buffers.out_rests.toint() + at * self.spec.v_head_dim + Int64(chunk * CHUNK))

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

    def _write_counters(self, buffers: Buffers, scalars: Scalars, order: HeadOrder, index: Int32) -> None:
        """Sets the semaphore of a tile of dq, given its index, and the other counters that have that index, if any.

        A semaphore starts at the number of key tiles that will add to the tile; in semaphore order it starts at 0 and
        counts those that have. The counter of a key/value head starts at 1 if the prologue writes its statistics. There
        are as many tiles of dq as heads or slots, or more.
        """
        work = self.schedule.dq_tile(index, buffers, scalars)
        count = Int32(0)
        if not self.spec.ordered:
            count = self._visitors(buffers, scalars, work, work.sequence.bounds(), work.tile)
        ptx.store_global_int(buffers.dq_semaphore.toint() + Int64(index) * 4, count)

        def write_head() -> None:
            ready = Int32(0) if self.spec.packed else ptx.where(index < order.prologue, Int32(1), Int32(0))
            ptx.store_global_int(buffers.head_ready.toint() + Int64(index) * 4, ready)

        cutlass.if_generate(index < self.schedule.parts(order, scalars), write_head)
        cutlass.if_generate(index == 0, lambda: ptx.store_global_int(buffers.tile_counter.toint(), Int32(0)))

    def _visitors(self, buffers: Buffers, scalars: Scalars, work: Work, bounds: plan.Bounds, tile: Int32) -> Int32:
        """Returns how many tiles of keys visit a tile of dq of the head of some work."""
        rows = self.config.queries
        if self.spec.listed:
            return key_tile_count(self.spec, buffers, scalars, work, tile, rows)
        visit = bounds.key_tiles(tile * rows, rows, self.config.keys)
        return visit.end - visit.begin

    def _zero_accum(self, buffers: Buffers, first_row: Int64, lane: Int32, zeroes: Boolean) -> None:
        """Zeroes `_ROWS` rows of the sums, if there are any that CTAs add to in any order."""
        if self.config.adds_dq and not self.spec.ordered:
            nbytes = 4 * padded_head_dim(self.spec.head_dim)
            address = buffers.dq_accum.toint() + first_row * nbytes
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
