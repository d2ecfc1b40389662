# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The second kernel of a decoding launch, for both families: a warp for each row adds up the row's partial results.

Rows of units that one CTA has computed alone have their results already, and are left as they are. Rows of units
without tiles get theirs here. Sinks join the denominator here or in the first kernel, once for each row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments import DecodeBuffers, Scalars
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.line import Entry, Line, owner
from jax_fastattn.kernels.device.softmax import NEVER
from jax_fastattn.kernels.finished_row import FinishedRow, QueryRow
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score

_WARPS = 4
# Partial results whose loads are in flight at a time.
_TOGETHER = 8


@dataclass(frozen=True)
class _Row:
    """A row and its partial results.

    Attributes:
        row: which row it is.
        entry: what the queries of its batch entry see.
        number: of the row among those of its unit.
        line: of its key/value head.
        begin: the first CTA of the line that has tiles of the unit.
        count: how many CTAs have some.
        pending: whether the row has no result yet; False for a warp that has no row.
    """

    row: QueryRow
    entry: Entry
    number: Int32
    line: Int32
    begin: Int32
    count: Int32
    pending: Boolean


class CombineKernel:
    """The kernel of one compile key.

    Args:
        spec: what is compiled in.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec

    @property
    def begins_early(self) -> bool:
        """Whether it begins while the first kernel runs, for whose end it then waits."""
        return self.spec.family == "sm90"

    def launch(self, buffers: DecodeBuffers, scalars: Scalars) -> Launch:
        """Returns the launch."""
        rows = scalars.batch * scalars.query_length * scalars.num_heads
        return Launch(
            self.kernel,
            (buffers, scalars),
            grid=copies.count(rows, _WARPS),
            block=32 * _WARPS,
            min_blocks=0,
            begins_early=self.begins_early,
        )

    @cute.kernel
    def kernel(self, buffers: DecodeBuffers, scalars: Scalars):
        thread = wgmma.thread_index()
        block, _, _ = cute.arch.block_idx()
        line = Line.of(self.spec, buffers, scalars, thread % 32)
        row = self._row(line, block * _WARPS + thread // 32)
        if cutlass.const_expr(self.begins_early):
            cute.arch.griddepcontrol_wait()
        self._combine(line, row)

    def _row(self, line: Line, index: Int32) -> _Row:
        """Returns a warp's row, given its index in `[B, T, N]`."""
        scalars, group = line.scalars, self.spec.group
        heads, length = scalars.num_heads, scalars.query_length
        rows = scalars.batch * length * heads
        exists = Boolean(index < rows)
        index = Int32(cutlass.min(index, rows - 1))
        row = QueryRow(index // heads // length, index // heads % length, index % heads)
        entry, kv_head = line.entry(row.batch), row.head // group
        total = line.tiles_before(scalars.batch)
        first = line.tiles_before(row.batch) + kv_head // line.side * entry.tiles
        begin = owner(first, line.shares, total)
        last = owner(Int32(cutlass.max(first + entry.tiles - 1, 0)), line.shares, total)
        count = ptx.where(entry.tiles > 0, last - begin + 1, Int32(0))
        return _Row(
            row=row,
            entry=entry,
            number=row.query * group + row.head % group,
            line=kv_head % line.side,
            begin=begin,
            count=count,
            pending=Boolean(exists & (count != 1)),
        )

    def _combine(self, line: Line, row: _Row) -> None:
        """Computes the result of a row, 128 columns at a time, of which a lane has four."""
        score = Score.forward(self.spec, line.buffers, line.scalars)
        chunks = self.spec.v_head_dim // 4
        for first in range(0, chunks, 32):
            chunk, stores = line.lane + first, row.pending
            if first + 32 > chunks:
                stores = Boolean(stores & (chunk < chunks))
                chunk = Int32(cutlass.min(chunk, chunks - 1))
            # Output, maximum in base 2, and sum.
            state = cute.make_rmem_tensor((6,), Float32)
            state.fill(0.0)
            state[4] = Float32(NEVER)
            steps = ptx.where(row.pending, copies.count(row.count, _TOGETHER), Int32(0))
            wgmma.loop(steps, self._add(line, row, chunk, state))

            def store(chunk: Int32 = chunk, state: cute.Tensor = state) -> None:
                finished = FinishedRow.of(line, score, row.entry, row.row, state[4], state[5])
                finished.store(chunk, [state[e] for e in range(4)])

            cutlass.if_generate(stores, store)

    def _add(self, line: Line, row: _Row, chunk: Int32, state: cute.Tensor) -> Callable[[Int32], None]:
        """Returns a function that adds the i-th few partial results to the state."""

        def add(i: Int32) -> None:
            parts = [self._load(line, row, i * _TOGETHER + j, chunk) for j in range(_TOGETHER)]
            old, top = state[4], state[4]
            for lse, _ in parts:
                top = ptx.maximum(top, lse)
            # All of them may be -inf, if logits are: -inf minus -inf is not a number.
            shift = ptx.where(top == Float32(NEVER), Float32(0.0), top)
            factor = ptx.exp2(old - shift)
            state[4] = top
            for e in (0, 1, 2, 3, 5):
                state[e] = state[e] * factor
            for lse, values in parts:
                weight = ptx.exp2(lse - shift)
                for e in range(4):
                    state[e] = ptx.fma(weight, values[e], state[e])
                state[5] = state[5] + weight

        return add

    def _load(self, line: Line, row: _Row, i: Int32, chunk: Int32) -> tuple[Float32, list[Float32]]:
        """Loads the log-sum-exp and four columns of a partial result; past the last one the first of these is -inf."""
        buffers, columns = line.buffers, self.spec.v_head_dim
        at = Int32(cutlass.min(i, row.count - 1))
        # The first CTA begins the unit and, since there are several, does not end it.
        slot = line.slot(row.begin + at, at == 0, row.line)
        index = Int64(slot) * (line.scalars.query_length * self.spec.group) + row.number
        lse = ptx.load_global(buffers.partial_lse.toint() + index * 4)
        values = ptx.load_global_chunk(buffers.partial_out.toint() + (index * columns + chunk * 4) * 4)
        return ptx.where(i < row.count, lse, Float32(NEVER)), [ptx.from_bits(x) for x in values]
