# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel before the products of the backward pass: row statistics, and what dQ is added to.

For each query row it stores (lse_scaled, delta): log2(e) * lse, less the binary logarithm of a factor that P gets, and
rowsum(out * dout) - dlse. A row that sees no key gets infinity and 0, so that its P and dS vanish.
If the gradient of sinks is computed, it also stores what each row adds to it. If a gradient takes mean keys of rows, it
stores them next to these, as rows of a factor (`sums/plane_products.py`).
"""

import functools
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import CHUNK, CopyShape, SharedTile
from jax_fastattn.kernels.device.products import product_words, result_words
from jax_fastattn.kernels.features import sinks
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig
from jax_fastattn.kernels.sm80.backward.dq_reduce import dq_reduce
from jax_fastattn.kernels.sm80.schedule import schedule
from jax_fastattn.kernels.sums.plane_products import factor_row
from jax_fastattn.kernels.sums.row_means import MEAN_NBYTES
from jax_fastattn.kernels.sums.row_preprocess import (
    Base2,
    GivenDelta,
    OutputDelta,
    ReadRow,
    RowPreprocess,
    output_numbers,
)
from jax_fastattn.kernels.sums.units import Units, load_units


@dataclass(frozen=True)
class QueryRows:
    """Rows of one query head in global memory, from the first one of a CTA's tile on. Addresses are bytes.

    Attributes:
        heads: query heads of a row.
        live: rows of the tile that may be read.
        out: address of O, rows `[heads, v_columns]` of 16-bit columns, see `KernelSpec.row_columns`; None if there is
            delta.
        out_rests: address of what rounding has taken from O, rows `[heads, v_head_dim]` of bytes; None if not kept.
        dout: address of dO, laid out as O.
        lse: address of the log-sum-exp, rows `[heads]` of float32.
        delta: address of that, laid out as the log-sum-exp.
        dlse: address of the cotangent of the log-sum-exp, laid out as it; None if there is none.
        stats: address of (lse_scaled, delta), see `DkdvDqConfig.stats_pitch`; the rows of a head are contiguous.
        sink: the sink of the head; None if its gradient is not computed.
        dsinks_terms: address of what rows add to that gradient, 4 bytes for each row, contiguous; or None.
        preprocess: makes the statistics.
        means: address of the mean keys, laid out as the log-sum-exp; None if no kernel takes them.
    """

    heads: Int32
    live: copies.Rows
    out: Int64 | None
    out_rests: Int64 | None
    dout: Int64
    lse: Int64
    delta: Int64 | None
    dlse: Int64 | None
    stats: Int64
    sink: Float32 | None
    dsinks_terms: Int64 | None
    preprocess: RowPreprocess
    means: Int64 | None


class PreprocessKernel:
    """Writes stats, and clears dq_accum or dq_semaphore. It has one CTA for each query tile of a head."""

    threads = 128

    def __init__(self, spec: KernelSpec):
        config: DkdvDqConfig = spec.config
        self.spec, self.config = spec, config
        self.schedule = schedule(spec, config.queries)
        self.out_words, self.dout_words = result_words(spec), product_words(spec)
        self.reduce = dq_reduce(spec, config)

    def launch(self, buffers: Buffers, scalars: Scalars, query_tiles: Int32) -> Launch:
        """Returns the kernel's launch; `query_tiles` is how many there are of all heads."""
        return Launch(self.kernel, (buffers, scalars), grid=query_tiles, block=self.threads, min_blocks=0)

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars):
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # The zeros of the heads that are visited first are then in L2.
        work = self.schedule.last_entry_first(block, buffers, scalars)
        head, heads, queries = work.head, scalars.num_heads, work.sequence.queries
        first = work.tile * self.config.queries
        sink = sinks.load_sink(buffers.sinks, scalars, queries, head) if spec.dsinks else None
        row_head = queries.row_head(first, heads, head)
        rows = QueryRows(
            heads=heads,
            live=copies.Rows.live(work.sequence.bounds().live_queries(), first),
            out=None if buffers.out is None else buffers.out.toint() + row_head * (2 * spec.row_columns[1]),
            out_rests=None if buffers.out_rests is None else buffers.out_rests.toint() + row_head * spec.v_head_dim,
            dout=buffers.dout.toint() + row_head * (2 * spec.row_columns[1]),
            lse=buffers.lse.toint() + row_head * 4,
            delta=None if buffers.delta is None else buffers.delta.toint() + row_head * 4,
            dlse=None if buffers.dlse is None else buffers.dlse.toint() + row_head * 4,
            stats=buffers.stats.toint() + queries.head_row(heads, head, first) * self.config.stats_pitch,
            sink=sink,
            dsinks_terms=None
            if buffers.dsinks_terms is None
            else buffers.dsinks_terms.toint() + queries.head_row(heads, head, first) * 4,
            preprocess=self._preprocess(load_units(buffers, queries, heads // spec.group, work.kv_head)),
            means=None if buffers.row_means is None else buffers.row_means.toint() + row_head * 4,
        )
        index = self.schedule.index(work.sequence, scalars, head, work.tile)
        self.reduce.prepare(buffers, index, thread, self.threads)
        self._write(rows, thread, queries.length - first)

    def _preprocess(self, units: Units | None) -> RowPreprocess:
        """Returns what makes the statistics of a head."""
        if units is not None:
            return RowPreprocess.of(self.spec, Base2(units.log2_p), units)
        return RowPreprocess.of(self.spec, Base2(float(gradient.log2_probability_factor(self.spec, self.config))))

    def _write(self, rows: QueryRows, thread: Int32, stored_rows: Int32) -> None:
        tile = SharedTile(self.config.queries, self.spec.v_head_dim)
        shape = CopyShape(tile, self.threads)
        row, chunk = shape.thread_chunk(thread)
        for first in range(0, tile.rows, shape.rows_per_pass):
            index = row + first
            live = Boolean((index < tile.rows) & rows.live.contain(index))
            product = Float32(0.0) if rows.out is None else self._row_product(rows, shape, index, chunk, live)
            # The log-sum-exp of a row that sees no key may still depend on a sink.
            exists = live if rows.sink is None else Boolean((index < tile.rows) & (index < stored_rows))
            read = self._read(rows, index, product, live, exists)
            lse_scaled, delta = rows.preprocess.statistics(read)
            writes = Boolean((index < tile.rows) & (chunk == 0) & (index < stored_rows))
            address = rows.stats + Int64(index) * self.config.stats_pitch
            cutlass.if_generate(writes, lambda a=address, x=lse_scaled, y=delta: ptx.store_global_pair(a, x, y))
            if rows.means is not None:
                # Others read the mean of another row, which may be NaN: their dS is 0, but 0 times NaN is not.
                offset = ptx.where(live, Int64(index) * (Int64(rows.heads) * 4), Int64(0))
                mean = ptx.where(live, ptx.load_global(rows.means + offset), Float32(0.0))
                address = address + (self.config.stats_pitch - MEAN_NBYTES)
                row_words = factor_row(self.dout_words, mean)
                cutlass.if_generate(writes, lambda a=address, x=row_words: ptx.store_global_chunk(a, x))
            if rows.sink is not None and rows.dsinks_terms is not None:
                term = read.sink_term(rows.sink, exists)
                address = rows.dsinks_terms + Int64(index) * 4
                cutlass.if_generate(writes, lambda a=address, x=term: ptx.store_global(a, x))

    def _read(self, rows: QueryRows, index: Int32, product: Float32, live: Boolean, exists: Boolean) -> ReadRow:
        """Returns the numbers of one row, or of the first one if it does not exist.

        `product` is rowsum(out * dout), and 0 if the row sees no key.
        """
        offset = ptx.where(exists, Int64(index) * (Int64(rows.heads) * 4), Int64(0))
        lse = ptx.load_global(rows.lse + offset)
        if rows.delta is not None:
            return ReadRow(live, lse, GivenDelta(ptx.load_global(rows.delta + offset)))
        dlse = None if rows.dlse is None else ptx.load_global(rows.dlse + offset)
        return ReadRow(live, lse, OutputDelta(product, dlse))

    @property
    def _hides_rows(self) -> bool:
        """Whether rows that see no key have to be told by their output, which is exactly 0.

        Their log-sum-exp is -inf unless it is a sink, and by lists they may lie anywhere. Their dO may be no number.
        """
        return self.spec.listed and self.spec.dsinks

    def _row_product(self, rows: QueryRows, shape: CopyShape, index: Int32, chunk: Int32, live: Boolean) -> Float32:
        """Returns the sum of out * dout of one row, with dout as dP is made of it: rows of dS then add up to 0."""
        row = Int64(index) * gradient.row_stride(rows.heads, self.spec.row_columns[1])
        total = Float32(0.0)
        for first_chunk in range(0, shape.tile.chunks, shape.lanes):
            column = chunk + first_chunk
            valid = Boolean(live & (column < self.spec.v_head_dim // CHUNK))

            def load(source: Int64, offset: Int32, valid: Boolean = valid) -> list[Int32]:
                # Elsewhere the CTA's first chunk is read, which always exists, and dropped.
                at = ptx.where(valid, row + Int64(offset), Int64(0))
                return [ptx.where(valid, x, Int32(0)) for x in ptx.load_global_chunk(source + at)]

            out, dout = (
                words.row_pairs(functools.partial(load, source), column, self.spec.v_head_dim)
                for words, source in ((self.out_words, rows.out), (self.dout_words, rows.dout))
            )
            rests = self._load_rests(rows, index, column, valid)
            for i, (x, y) in enumerate(zip(out, dout, strict=True)):
                numbers = output_numbers(self.out_words, x, rests, i)
                for left, right in zip(numbers, self.dout_words.numbers(y), strict=True):
                    if self._hides_rows:
                        right = ptx.where(left == Float32(0.0), Float32(0.0), right)
                    total = ptx.fma(left, right, total)
        distance = shape.lanes // 2
        while distance > 0:
            total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
            distance //= 2
        return total

    def _load_rests(self, rows: QueryRows, index: Int32, column: Int32, valid: Boolean) -> list[Int32] | None:
        """Loads what rounding has taken from a chunk of a row of O, or zeros; None if that is not kept."""
        if rows.out_rests is None:
            return None
        at = Int64(index) * (Int64(rows.heads) * self.spec.v_head_dim) + Int64(column * CHUNK)
        loaded = ptx.load_constant_pair(rows.out_rests + ptx.where(valid, at, Int64(0)))
        return [ptx.where(valid, x, Int32(0)) for x in loaded]
