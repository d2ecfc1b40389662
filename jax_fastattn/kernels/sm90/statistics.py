# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What runs before the other backward kernels: statistics of the rows; for sums of dq, zeros, counters, magnitudes.

It is bound by memory: every thread moves 16 bytes at a time, and neighbouring threads neighbouring bytes.
"""

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
from jax_fastattn.kernels.sm90.magnitudes import UNSIGNED, Magnitudes, Rows
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
        self.magnitudes = Magnitudes(spec)

    def blocks(self, batch: Int32, query_length: Int32, num_heads: Int32, ahead: Int32) -> Int32:
        """CTAs of the grid: the first ones find magnitudes, where dq is added up in integers."""
        rows = (batch * padded_rows(query_length) * num_heads + (self.rows - 1)) // self.rows
        return rows + self._first_heads(batch, num_heads, ahead) * MAGNITUDE_PARTS if self.spec.integers else rows

    def _first_heads(self, batch: Int32, num_heads: Int32, ahead: Int32) -> Int32:
        """Key/value heads that nobody works before."""
        return Int32(cutlass.min(ahead, batch * num_heads // self.spec.group))

    @property
    def shared_nbytes(self) -> int:
        """Bytes of shared memory to ask for at launch."""
        return THREADS // 32 * 4 if self.spec.integers else 0

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
        resolutions: cute.Pointer | None,
        magnitudes: cute.Pointer | None,
        key: cute.Pointer | None,
        value: cute.Pointer | None,
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
        cute.arch.griddepcontrol_launch_dependents()

        def write_rows(block: Int32) -> None:
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

            delta, dout_sum, out_max = self._row_sums(out.toint(), dout.toint(), source, lane, live)
            row_lse, delta, row_part = self._statistics(lse, dlse, (delta, dout_sum, out_max), source * 4, live, scale)
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
                self._store_row_part(resolutions, head_index * padded * 2 + gradient.resolution_offset(row), row_part)

            def write() -> None:
                cutlass.if_generate(lane == 0, write_stats)
                arrays, place = (dq_sum, arrivals, dq, magnitudes), (head_index, row, head_row, dq_row)
                self._prepare_dq(arrays, place, lane, exists, Int64(ahead) * self.spec.group, bounds)

            cutlass.if_generate(entry < batch, write)

        def write_magnitudes(block: Int32) -> None:
            # CTAs that run together read what lies together.
            heads, kv_heads = self._first_heads(batch, num_heads, ahead), num_heads // self.spec.group
            rows = Rows(key, value, key_value_seq_lengths, key_length, kv_heads)
            self.magnitudes.write_part(rows, magnitudes, (block % heads, block // heads), thread, THREADS)

        if cutlass.const_expr(self.spec.integers):
            first = self._first_heads(batch, num_heads, ahead) * MAGNITUDE_PARTS
            cutlass.if_generate(block < first, lambda: write_magnitudes(block), lambda: write_rows(block - first))
        else:
            write_rows(block)

    def _factor(self, scale: Float32) -> Float32:
        """On log-sum-exps, see `gradient.py`."""
        return Float32(1.0) / gradient.nonzero(scale) if self.spec.fused else Float32(LOG2_E)

    def _statistics(
        self,
        lse: cute.Pointer,
        dlse: cute.Pointer | None,
        sums: tuple[Float32, Float32, Float32],
        offset: Int64,
        live: Boolean,
        scale: Float32,
    ) -> tuple[Float32, Float32, Int32]:
        """(lse times a factor, delta, row part of the resolution), given `_row_sums` and the byte offset of a float32.

        The last one is of no use where sums are no integers.
        """
        delta, dout_sum, out_max = sums
        row_lse = ptx.load_global(lse.toint() + offset)
        row_dlse = None if dlse is None else ptx.load_global(dlse.toint() + offset)
        live = Boolean(live & (row_lse != Float32(float("-inf"))))
        row_part = Int32(0)
        if self.spec.integers:
            # Where out is 0, so is delta.
            share = ptx.absolute(delta) * ptx.reciprocal(cutlass.max(out_max, Float32(1e-30)))
            row_part = ptx.where(
                live, gradient.row_part(dout_sum + share, row_dlse), gradient.sees_none(self.spec.dlse)
            )
        if row_dlse is not None:
            delta = delta - row_dlse
        # Rows without keys: +inf, or where that has the sign of the scale, an infinity of this sign.
        row_lse = ptx.where(live, row_lse, Float32(float("inf"))) * self._factor(scale)
        return row_lse, ptx.where(live, delta, Float32(0.0)), row_part

    def _row_sums(
        self, out: Int64, dout: Int64, row: Int64, lane: Int32, live: Boolean
    ) -> tuple[Float32, Float32, Float32]:
        """rowsum(out * dout) and, for integer sums, rowsum(|dout|) and the largest |out| of a row; 0 unless live.

        The lanes of a row share the work, and all have the results.
        """
        delta, dout_sum, largest = Float32(0.0), Float32(0.0), Int32(0)
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
                        dout_sum = dout_sum + ptx.absolute(y)
                if self.spec.integers:
                    largest = ptx.max_halves(largest, pairs[0] & UNSIGNED)
        for i in range(self.lanes.bit_length() - 1):
            delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1 << i)
            if self.spec.integers:
                dout_sum = dout_sum + cute.arch.shuffle_sync_bfly(dout_sum, offset=1 << i)
        if not self.spec.integers:
            return delta, dout_sum, Float32(0.0)
        largest = self.magnitudes.over_lanes(largest, self.lanes)
        largest = ptx.max_halves(largest, ptx.permute(largest, largest, 0x1032))
        return delta, dout_sum, ptx.unpack(largest, dtype=ptx.MMA_DTYPE[self.spec.dtype])[0]

    def _store_row_part(self, resolutions: cute.Pointer | None, offset: Int64, row_part: Int32) -> None:
        """Stores it where there is a place for it."""
        if resolutions is not None:
            ptx.store_global_half(resolutions.toint() + offset, row_part)

    def _prepare_dq(
        self,
        arrays: tuple[cute.Pointer | None, cute.Pointer | None, cute.Pointer | None, cute.Pointer | None],
        place: tuple[Int64, Int32, Int64, Int64],
        lane: Int32,
        exists: Boolean,
        first_heads: Int64,
        bounds: dict[str, Int32],
    ) -> None:
        """Zeroes a row of the sums of the first heads; sets the counters of a tile's, or a head's, first row.

        A tile's counter is of the key tiles that it sees; before them comes that of the head's zeros, none as yet.
        Behind the first heads magnitudes are 0 as yet. Nobody adds to a tile that sees none: its dq is zeroed here.
        `place` has the index of the head, and the row's in it, in the sums and in dq.
        """
        dq_sum, arrivals, dq, magnitudes = arrays
        if dq_sum is None or arrivals is None or dq is None:
            return
        head_index, row, head_row, dq_row = place
        cutlass.if_generate(
            head_index < first_heads,
            lambda: self._zero(dq_sum, head_row, lane, 4 * padded_head_dim(self.spec.head_dim)),
        )
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
        if magnitudes is not None:
            kv_head, group = head_index // self.spec.group, self.spec.group
            clears = Boolean((row == 0) & (kv_head * group == head_index) & (head_index >= first_heads))
            nbytes = 2 * MAGNITUDE_PARTS * 4
            cutlass.if_generate(clears, lambda: self._zero(magnitudes, kv_head, lane, nbytes))
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
