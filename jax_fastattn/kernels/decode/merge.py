# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The end of a segment of a decoding kernel: a CTA merges the results of its warps, and stores the segment's result."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.decode.config import BLOCK_ROWS, DecodeConfig
from jax_fastattn.kernels.decode.finished_row import FinishedRow, QueryRow
from jax_fastattn.kernels.decode.line import Line, Segment, Share
from jax_fastattn.kernels.device import copies, ptx, softmax, wgmma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score


class MergeMemory(NamedTuple):
    """Where the warps of a CTA merge their results.

    Attributes:
        head_dim: columns of K in shared memory, padded.
        v_head_dim: columns of V in shared memory, padded.
        address: the address of the region of `DecodeConfig.merge_region`.
    """

    config: DecodeConfig
    head_dim: int
    v_head_dim: int
    address: Int32

    def stats(self, place: Any) -> Int32:
        """Returns the address of maximum and sum of a row, given its place among the rows of all warps."""
        return self.address + self.config.stats_offset(self.v_head_dim) + place * 8

    def partial(self, place: Any) -> Int32:
        """Returns the address of the partial output of a row."""
        return self.address + place * self.config.partial_pitch(self.v_head_dim)


@dataclass(frozen=True, eq=False)
class SegmentMerge:
    """Emits the code that merges what the warps have left in shared memory.

    Attributes:
        memory: where results are merged.
        score: maps products to logits.
        thread: index of the thread among those that compute.
    """

    line: Line
    memory: MergeMemory
    score: Score
    thread: Int32

    @property
    def spec(self) -> KernelSpec:
        """The compile key."""
        return self.line.spec

    def begin(self, share: Share) -> None:
        """Records that no unit is begun yet, given the CTA's share."""
        if self.memory.config.records:
            record = [Int32(-1), Int32(0), share.end, share.total]
            cutlass.if_generate(self.thread == 0, lambda: ptx.store_global_chunk(self._begun(), record))

    def run(self, segment: Segment) -> None:
        """Adds up what the warps have, and stores it; a thread has four columns of a row at a time."""
        threads, chunks = self.memory.config.consumer_threads, self.spec.v_head_dim // 4
        tasks = self.line.scalars.query_length * self.spec.group * chunks

        def merge(i: Int32) -> None:
            task = i * threads + self.thread
            cutlass.if_generate(task < tasks, lambda: self._merge_chunk(segment, task // chunks, task % chunks))

        wgmma.loop(copies.count(tasks, threads), merge)
        if self.memory.config.records:
            begins = Boolean(Boolean(segment.tile == 0) & Boolean(segment.count < segment.entry.tiles))
            cutlass.if_generate(Boolean(begins & (self.thread == 0)), lambda: self._record(segment))

    def _record(self, segment: Segment) -> None:
        """Records which unit the CTA begins and does not end."""
        heads = self.line.scalars.num_heads // self.spec.group
        record = segment.batch * heads + segment.kv_head, segment.entry.tiles - segment.count
        for i, x in enumerate(record):
            ptx.store_global_int(self._begun() + 4 * i, x)

    def _merge_chunk(self, segment: Segment, row: Int32, chunk: Int32) -> None:
        """Adds up four columns of a row, and stores them."""
        memory, parts = self.memory, self.memory.config.parts
        first = row // BLOCK_ROWS * (parts * BLOCK_ROWS) + row % BLOCK_ROWS
        places = [first + part * BLOCK_ROWS for part in range(parts)]
        stats = [ptx.load_shared_pair(memory.stats(place)) for place in places]
        log_max = stats[0][0]
        for x, _ in stats[1:]:
            log_max = ptx.maximum(log_max, x)
        shift = ptx.where(log_max == Float32(softmax.NEVER), Float32(0.0), log_max)
        total, out = Float32(0.0), [Float32(0.0)] * 4
        for place, (x, part) in zip(places, stats, strict=True):
            weight = ptx.exp2(x - shift)
            total = ptx.fma(weight, part, total)
            values = ptx.load_shared_pairs(memory.partial(place) + chunk * 16)
            out = [ptx.fma(weight, value, old) for value, old in zip(values, out, strict=True)]

        def store_whole() -> None:
            group = self.spec.group
            place = QueryRow(segment.batch, row // group, segment.kv_head * group + row % group)
            FinishedRow.of(self.line, self.score, segment.entry, place, log_max, total).store(chunk, out)

        def store_partial() -> None:
            self._store_partial(segment, row, chunk, log_max + ptx.log2(total), total, out)

        if self.memory.config.splits:
            cutlass.if_generate(segment.whole, store_whole, store_partial)
        else:
            store_whole()

    def _store_partial(
        self, segment: Segment, row: Int32, chunk: Int32, lse: Float32, total: Float32, out: list[Float32]
    ) -> None:
        """Stores four columns of a partial result, and its log-sum-exp together with the first ones."""
        buffers, factor = self.line.buffers, ptx.reciprocal(total)
        live = Boolean(total != Float32(0.0))
        values = [ptx.bits(ptx.where(live, x * factor, Float32(0.0))) for x in out]
        index = Int64(segment.slot) * (self.line.scalars.query_length * self.spec.group) + row
        address = buffers.partial_out.toint() + (index * self.spec.v_head_dim + chunk * 4) * 4
        ptx.store_global_chunk(address, values)
        target = buffers.partial_lse.toint() + index * 4
        cutlass.if_generate(chunk == 0, lambda: ptx.store_global(target, lse))

    def _begun(self) -> Int64:
        """Returns the address of the CTA's record of the unit that it begins and does not end."""
        block, _, _ = cute.arch.block_idx()
        return self.line.buffers.begun.toint() + block * 16
