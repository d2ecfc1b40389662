# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel after the products of the backward pass: dq from dq_accum, scaled and rounded."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import result_words
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig
from jax_fastattn.kernels.sm80.backward.dq_reduce import dq_reduce
from jax_fastattn.kernels.sm80.schedule import schedule
from jax_fastattn.kernels.sums.units import load_units, over_ds


class ConvertKernel:
    """Writes dq. It has one CTA for each query tile of a head."""

    def __init__(self, spec: KernelSpec):
        config: DkdvDqConfig = spec.config
        self.spec, self.config = spec, config
        self.schedule = schedule(spec, config.queries)
        self.words = result_words(spec)
        self.reduce = dq_reduce(spec, config)
        self.tile = self.reduce.tile.shared
        self.threads = 32 * config.dq_warps
        self.shared_nbytes = self.tile.nbytes
        # The tile of a 16-bit operand has no room for them.
        self.stores_numbers = spec.terms == 1 and spec.result_nbytes == 4
        self.factor = 2.0 ** -gradient.log2_probability_factor(spec, config)

    def launch(self, buffers: Buffers, scalars: Scalars, query_tiles: Int32) -> Launch:
        """Returns the launch; `query_tiles` is the number of query tiles of all heads."""
        return Launch(
            self.kernel,
            (buffers, scalars),
            grid=query_tiles,
            block=self.threads,
            shared_bytes=self.shared_nbytes,
            min_blocks=0,
        )

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars):
        rows = self.config.queries
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        # The sums of the heads that were visited last are in L2.
        work = self.schedule.last_entry_first(block, buffers, scalars)
        head, heads, first, queries = work.head, scalars.num_heads, work.tile * rows, work.sequence.queries
        end = work.sequence.bounds().query_end - first
        index = self.schedule.index(work.sequence, scalars, head, work.tile)
        acc, end = self.reduce.finish(buffers, index, warp, lane, end)
        shared = cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint()
        units = load_units(buffers, queries, heads // self.spec.group, work.kv_head)
        scale, stored_rows = over_ds(units, scalars.scale), queries.length - first
        if cutlass.const_expr(self.stores_numbers):
            nbytes = 4 * self.spec.head_dim
            target = buffers.dq.toint() + queries.row_head(first, heads, head) * nbytes
            stored = gradient.NumberRows(target, Int64(heads) * nbytes, self.spec.head_dim, stored_rows)
            self._store_numbers(acc, (warp, lane), end, scale, stored)
        else:
            self._scatter(acc, shared, warp, lane, end, scale)
            cute.arch.sync_threads()
            target = buffers.dq.toint() + queries.row_head(first, heads, head) * (2 * self.tile.columns)
            self._store(shared, target, warp, lane, gradient.row_stride(heads, self.tile.columns), stored_rows)

    def _scatter(self, acc: list[Float32], shared: Int32, warp: Int32, lane: Int32, end: Int32, scale: Float32) -> None:
        blocks, (row, column) = self.reduce.tile.blocks, self.reduce.tile.place(warp)
        gradient.finish_rows(acc, blocks, row + accumulator_lane(lane)[0], end, scale * self.factor)
        gradient.scatter(
            acc, blocks, self.tile, shared + self.tile.offset(row, self.words.columns(column)), lane, self.words
        )

    def _store_numbers(
        self, acc: list[Float32], place: tuple[Int32, Int32], end: Int32, scale: Float32, rows: gradient.NumberRows
    ) -> None:
        """Stores a warp's part, given warp and lane, in float32 from registers; zeros from row `end` on."""
        tile, (warp, lane) = self.reduce.tile, place
        row, column = tile.place(warp)
        gradient.finish_rows(acc, tile.blocks, row + accumulator_lane(lane)[0], end, scale * self.factor)
        gradient.store_numbers(acc, tile.blocks, rows, (row, column), lane, tile.column_warps, add=False)

    def _store(self, shared: Int32, target: Int64, warp: Int32, lane: Int32, stride: Int64, stored_rows: Int32) -> None:
        """Stores the rows in blocks of 16, which the warps take in turn."""
        for block in range(0, self.tile.rows // 16, self.config.dq_warps):
            row = (warp + block) * 16

            def store(row: Int32 = row) -> None:
                source, first = shared + row * self.tile.pitch, target + Int64(row) * stride
                copies.store_rows(self.tile, 16, lane, source, first, stride, stored_rows - row)

            cutlass.if_generate(row < self.tile.rows, store)
