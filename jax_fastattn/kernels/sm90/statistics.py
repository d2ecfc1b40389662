# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What runs before the other backward kernels: statistics of the rows; for sums of dq, zeros and counters.

It is bound by memory: every thread moves 16 bytes at a time, and neighbouring threads neighbouring bytes.
"""

import functools

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, tiles
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import (
    MAGNITUDE_PARTS,
    BackwardConfig,
    padded_rows,
    stats_row_nbytes,
)
from jax_fastattn.kernels.sm90.config import padded_head_dim
from jax_fastattn.kernels.spec import KernelSpec

THREADS = 256


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
        self.rows = THREADS // self.lanes

    def blocks(self, batch: Int32, query_length: Int32, num_heads: Int32) -> Int32:
        """CTAs of the grid."""
        return (batch * padded_rows(query_length) * num_heads + (self.rows - 1)) // self.rows

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
        magnitudes: cute.Pointer | None,
        resolutions: cute.Pointer | None,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        ahead: Int32,
        scale: Float32,
    ):
        """Rows in the order `[B, padded_rows(T), N]`; see `BackwardKernel` for the arguments."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        padded = padded_rows(query_length)
        index, lane = block * self.rows + thread // self.lanes, thread % self.lanes
        head, row, entry = index % num_heads, index // num_heads % padded, index // num_heads // padded
        exists = Boolean((entry < batch) & (row < query_length))
        bounds = tiles.load_bounds(
            self.spec,
            ptx.where(entry < batch, entry, Int32(0)),
            (query_length, key_length),
            (query_seq_lengths, key_value_seq_lengths, query_offset),
            (window_left, window_right),
        )
        live = Boolean(exists & (row < bounds["query_end"]))
        # Elsewhere the first row is read, which always exists, and dropped.
        source = ptx.where(live, (Int64(entry) * query_length + row) * num_heads + head, Int64(0))

        kv_head = (ptx.where(entry < batch, entry, Int32(0)) * num_heads + head) // self.spec.group
        largest = self._largest(magnitudes, kv_head, lane)
        delta, dout_sum = self._row_sums(out.toint(), dout.toint(), source, lane, live)
        factor = self._factor(scale)
        row_lse, delta = self._statistics(lse, dlse, delta, source * 4, live, factor)
        resolution = self._resolution(largest, row_lse, delta, dout_sum)
        head_index = Int64(entry) * num_heads + head
        head_row = head_index * padded + row
        dq_row = (Int64(entry) * query_length + row) * num_heads + head

        def write_stats() -> None:
            nbytes = stats_row_nbytes(self.spec.fused)
            address = stats.toint() + (head_row + head_index * padded) * nbytes
            for which, value in enumerate((row_lse, delta)):
                target = address + Int64(padded) * (which * nbytes)
                if self.spec.fused:
                    ptx.store_global_chunk(target, gradient.thirds(-value))
                else:
                    ptx.store_global(target, value)
            self._store_resolution(resolutions, head_index * padded * 2 + gradient.resolution_offset(row), resolution)

        def write() -> None:
            cutlass.if_generate(lane == 0, write_stats)
            arrays, place = (dq_sum, arrivals, dq), (head_index, row, head_row, dq_row)
            self._prepare_dq(arrays, place, lane, exists, head_index < Int64(ahead) * self.spec.group, bounds)

        cutlass.if_generate(entry < batch, write)

    def _factor(self, scale: Float32) -> Float32:
        """On log-sum-exps, see `gradient.py`."""
        return Float32(1.0) / gradient.nonzero(scale) if self.spec.fused else Float32(LOG2_E)

    def _statistics(
        self,
        lse: cute.Pointer,
        dlse: cute.Pointer | None,
        delta: Float32,
        offset: Int64,
        live: Boolean,
        factor: Float32,
    ) -> tuple[Float32, Float32]:
        """(lse * factor, delta) of a row, given its rowsum and the byte offset of its float32."""
        row_lse = ptx.load_global(lse.toint() + offset)
        if dlse is not None:
            delta = delta - ptx.load_global(dlse.toint() + offset)
        live = Boolean(live & (row_lse != Float32(float("-inf"))))
        # Rows without keys: +inf, or where that has the sign of the scale, an infinity of this sign.
        row_lse = ptx.where(live, row_lse, Float32(float("inf"))) * factor
        return row_lse, ptx.where(live, delta, Float32(0.0))

    def _row_sums(self, out: Int64, dout: Int64, row: Int64, lane: Int32, live: Boolean) -> tuple[Float32, Float32]:
        """rowsum(out * dout) and, for integer sums, rowsum(|dout|) of a row, whose lanes share it; 0 unless live."""
        delta, dout_sum = Float32(0.0), Float32(0.0)
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
                    if self.spec.integers:
                        dout_sum = dout_sum + cutlass.max(y, -y)
        for i in range(self.lanes.bit_length() - 1):
            delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1 << i)
            if self.spec.integers:
                dout_sum = dout_sum + cute.arch.shuffle_sync_bfly(dout_sum, offset=1 << i)
        return delta, dout_sum

    def _largest(self, magnitudes: cute.Pointer | None, kv_head: Int32, lane: Int32) -> list[Float32]:
        """Of |K| and of |V| of a head, counted over all batch entries: the lanes of a row have a part each."""
        if magnitudes is None:
            return []
        found = []
        for which in range(2):
            first = magnitudes.toint() + (Int64(kv_head) * 2 + which) * (4 * MAGNITUDE_PARTS) + lane * 4
            parts = [ptx.load_global(first + 4 * i) for i in range(0, MAGNITUDE_PARTS, self.lanes)]
            found.append(ptx.from_bits(Int32(functools.reduce(cutlass.max, map(ptx.bits, parts)))))
        return found

    def _resolution(self, largest: list[Float32], row_lse: Float32, delta: Float32, dout_sum: Float32) -> Float32:
        """That of a row, see `gradient.py`; 0 where sums are no integers. All its lanes call it."""
        if not largest:
            return Float32(0.0)
        for i in range(self.lanes.bit_length() - 1):
            others = [cute.arch.shuffle_sync_bfly(x, offset=1 << i) for x in largest]
            pairs = zip(largest, others, strict=True)
            largest = [ptx.from_bits(Int32(cutlass.max(ptx.bits(x), ptx.bits(y)))) for x, y in pairs]
        found = gradient.resolution(largest[1] * dout_sum + cutlass.max(delta, -delta), largest[0])
        # What keys hold says nothing about a row that sees none.
        return ptx.where(cutlass.max(row_lse, -row_lse) == Float32(float("inf")), Float32(1.0), found)

    def _store_resolution(self, resolutions: cute.Pointer | None, offset: Int64, resolution: Float32) -> None:
        """Stores it where there is a place for it."""
        if resolutions is not None:
            ptx.store_global_half(resolutions.toint() + offset, ptx.bits(resolution) >> 16)

    def _prepare_dq(
        self,
        arrays: tuple[cute.Pointer | None, cute.Pointer | None, cute.Pointer | None],
        place: tuple[Int64, Int32, Int64, Int64],
        lane: Int32,
        exists: Boolean,
        first: Boolean,
        bounds: dict[str, Int32],
    ) -> None:
        """Zeroes a row of the sums of the first heads; sets the counters of a tile's, or a head's, first row.

        A tile's counter is of the key tiles that it sees; before them comes that of the head's zeros, none as yet.
        Nobody adds to a tile that sees none: its dq is zeroed here. `place` has the index of the head, and the row's in
        it, in the sums and in dq.
        """
        dq_sum, arrivals, dq = arrays
        if dq_sum is None or arrivals is None or dq is None:
            return
        head_index, row, head_row, dq_row = place
        cutlass.if_generate(first, lambda: self._zero(dq_sum, head_row, lane, 4 * padded_head_dim(self.spec.head_dim)))
        rows = self.config.queries
        visit = tiles.key_tiles(row // rows * rows, rows, self.config.keys, **bounds)
        seen = visit.end - visit.begin
        counter = arrivals.toint() + (head_row // rows + head_index + 1) * 4

        def write_seen() -> None:
            ptx.store_global_int(counter, seen)

        def write_none() -> None:
            ptx.store_global_int(counter - 4, Int32(0))

        cutlass.if_generate(Boolean((row % rows == 0) & (lane == 0)), write_seen)
        cutlass.if_generate(Boolean((row == 0) & (lane == 0)), write_none)
        hidden = Boolean(exists & (seen == 0))
        cutlass.if_generate(hidden, lambda: self._zero(dq, dq_row, lane, 2 * self.spec.head_dim))

    def _zero(self, target: cute.Pointer, row: Int64, lane: Int32, nbytes: int) -> None:
        """Zeroes `nbytes`, a multiple of 16, of row `row` of as many."""
        address = target.toint() + row * nbytes + lane * 16
        for i in range(0, nbytes, 16 * self.lanes):

            def clear(address: Int64 = address + i) -> None:
                ptx.store_global_chunk(address, [Int32(0)] * 4)

            if i + 16 * self.lanes <= nbytes:
                clear()
            else:
                cutlass.if_generate(lane * 16 < nbytes - i, clear)
