# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What runs before and after the backward kernels: statistics of the rows, float32 sums of dq zeroed and rounded.

Both are bound by memory: every thread moves 16 bytes at a time, and neighbouring threads neighbouring bytes.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, tiles
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import padded_rows
from jax_fastattn.kernels.spec import KernelSpec

THREADS = 256


class StatisticsKernel:
    """Writes the statistics of every row, padding included, and zeroes its sums of dq.

    Args:
        spec: the compile key.
        columns: float32 sums of a row; None where there are no sums.
    """

    def __init__(self, spec: KernelSpec, columns: int | None):
        self.spec, self.columns = spec, columns
        # Lanes that share a row.
        self.lanes = 8 if spec.v_head_dim <= 8 * CHUNK else 16
        self.rows = THREADS // self.lanes

    def blocks(self, batch: Int32, query_length: Int32, num_heads: Int32) -> Int32:
        """CTAs of the grid."""
        return (batch * padded_rows(query_length) * num_heads + (self.rows - 1)) // self.rows

    @cute.kernel
    def kernel(
        self,
        query_seq_lengths: cute.Pointer | None,
        out: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        dlse: cute.Pointer | None,
        stats: cute.Pointer,
        dq_sum: cute.Pointer | None,
        batch: Int32,
        query_length: Int32,
        num_heads: Int32,
    ):
        """Rows in the order `[B, padded_rows(T), N]`; see `BackwardKernel` for the arguments."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        padded = padded_rows(query_length)
        index, lane = block * self.rows + thread // self.lanes, thread % self.lanes
        head, row, entry = index % num_heads, index // num_heads % padded, index // num_heads // padded
        exists = Boolean((entry < batch) & (row < query_length))
        end = tiles.load_entry(
            query_seq_lengths, ptx.where(entry < batch, entry, Int32(0)), query_length, 0, query_length
        )
        live = Boolean(exists & (row < end))
        # Elsewhere the first row is read, which always exists, and dropped.
        source = ptx.where(live, (Int64(entry) * query_length + row) * num_heads + head, Int64(0))

        delta = self._delta(out.toint(), dout.toint(), source, lane, live)
        lse2, delta = self._statistics(lse, dlse, delta, source * 4, live)
        head_index = Int64(entry) * num_heads + head
        head_row = head_index * padded + row

        def write_stats() -> None:
            address = stats.toint() + (head_row + head_index * padded) * 4
            ptx.store_global(address, lse2)
            ptx.store_global(address + Int64(padded) * 4, delta)

        def write() -> None:
            cutlass.if_generate(lane == 0, write_stats)
            self._zero(dq_sum, head_row, lane)

        cutlass.if_generate(entry < batch, write)

    def _statistics(
        self, lse: cute.Pointer, dlse: cute.Pointer | None, delta: Float32, offset: Int64, live: Boolean
    ) -> tuple[Float32, Float32]:
        """(lse2, delta) of a row, given its rowsum and the byte offset of its float32."""
        row_lse = ptx.load_global(lse.toint() + offset)
        if dlse is not None:
            delta = delta - ptx.load_global(dlse.toint() + offset)
        live = Boolean(live & (row_lse != Float32(float("-inf"))))
        lse2 = ptx.where(live, row_lse * LOG2_E, Float32(float("inf")))
        return lse2, ptx.where(live, delta, Float32(0.0))

    def _delta(self, out: Int64, dout: Int64, row: Int64, lane: Int32, live: Boolean) -> Float32:
        """rowsum(out * dout) of a row, whose lanes share it; 0 unless live."""
        delta = Float32(0.0)
        for first in range(0, self.spec.v_head_dim // CHUNK, self.lanes):
            chunk = lane + first
            valid = Boolean(live & (chunk < self.spec.v_head_dim // CHUNK))
            offset = row * (2 * self.spec.v_head_dim) + ptx.where(valid, chunk * (2 * CHUNK), Int32(0))
            chunks = [
                [ptx.where(valid, pair, Int32(0)) for pair in ptx.load_global_chunk(operand + offset)]
                for operand in (out, dout)
            ]
            for pairs in zip(*chunks, strict=True):
                left, right = (ptx.unpack(pair, dtype=ptx.MMA_DTYPE[self.spec.dtype]) for pair in pairs)
                for x, y in zip(left, right, strict=True):
                    delta = ptx.fma(x, y, delta)
        for i in range(self.lanes.bit_length() - 1):
            delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1 << i)
        return delta

    def _zero(self, dq_sum: cute.Pointer | None, row: Int64, lane: Int32) -> None:
        """Zeroes a row's share of the sums: they lie in another order, but have as many elements for a row."""
        if dq_sum is None or self.columns is None:
            return
        address = dq_sum.toint() + row * (4 * self.columns) + lane * 16
        for i in range(0, 4 * self.columns, 16 * self.lanes):
            ptx.store_global_chunk(address + i, [Int32(0)] * 4)


class RoundKernel:
    """Writes dq: the sums, scaled and rounded.

    Args:
        spec: the compile key.
        columns: float32 sums of a row.
    """

    def __init__(self, spec: KernelSpec, columns: int):
        self.spec, self.columns = spec, columns

    def blocks(self, batch: Int32, query_length: Int32, num_heads: Int32) -> Int32:
        """CTAs of the grid."""
        threads = batch * padded_rows(query_length) * num_heads * (self.columns // (2 * CHUNK))
        return (threads + (THREADS - 1)) // THREADS

    @cute.kernel
    def kernel(
        self,
        query_seq_lengths: cute.Pointer | None,
        dq_sum: cute.Pointer,
        dq: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        num_heads: Int32,
        scale: Float32,
    ):
        """A thread takes 64 bytes of sums: 8 columns of a row and of the row 8 below, see `gradient.dq_sum_offset`."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        padded = padded_rows(query_length)
        blocks = self.columns // CHUNK
        # Fastest first: 8 columns, pair of rows, head, rows of a pair's block of 64, batch entry.
        index, column = (block * THREADS + thread) // blocks, (block * THREADS + thread) % blocks
        pair, index = index % 32, index // 32
        head, index = index % num_heads, index // num_heads
        row_block, entry = index % (padded // 64), index // (padded // 64)
        row = row_block * 64 + pair // 8 * 16 + pair % 8

        first = (Int64(entry) * num_heads + head) * padded * self.columns
        source = dq_sum.toint() + (first + gradient.dq_sum_offset(Int64(row), 8 * column, self.columns)) * 4
        target = dq.toint() + ((Int64(entry) * query_length + row) * num_heads + head) * (2 * self.spec.head_dim)

        def write() -> None:
            end = tiles.load_entry(query_seq_lengths, entry, query_length, 0, query_length)
            stride = Int64(num_heads) * (2 * self.spec.head_dim)
            self._round(source, target + column * (2 * CHUNK), stride, (end - row, query_length - row), scale)

        cutlass.if_generate(Boolean((entry < batch) & (column < self.spec.head_dim // CHUNK)), write)

    def _round(self, source: Int64, target: Int64, stride: Int64, ends: tuple[Int32, Int32], scale: Float32) -> None:
        """The two rows of a thread: those from `ends[0]` on are zeroed, those from `ends[1]` on do not exist."""
        sums = [ptx.load_global_floats(source + 16 * i) for i in range(4)]
        for i in range(2):
            chunk = []
            for quad in sums:
                # A select, not a product: sums past the end may be no numbers.
                pair = [ptx.where(ends[0] > 8 * i, x * scale, Float32(0.0)) for x in quad[2 * i : 2 * i + 2]]
                chunk.append(ptx.pack(*pair, dtype=ptx.MMA_DTYPE[self.spec.dtype]))

            def store(address: Int64 = target + stride * (8 * i), chunk: list = chunk) -> None:
                ptx.store_global_chunk(address, chunk)

            cutlass.if_generate(ends[1] > 8 * i, store)
