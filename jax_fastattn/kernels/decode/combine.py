# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The second kernel of a decoding launch, for both families: a warp for each row adds up the row's partial results.

The first kernel has recorded for each CTA the unit that it begins and does not end; a unit whose results are partial is
begun by one CTA. So this kernel has a warp for each CTA of the first one and each row of a unit, for any batch size.
Other warps, one for each batch entry, write the results of entries without tiles.

If units are cut into portions, there are no records. This kernel then has a warp for each row of each unit, which adds
up the partial results of the row's portions in order, or writes the result of a row without keys.

Sinks join the denominator here or in the first kernel, once for each row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.decode.finished_row import FinishedRow, QueryRow
from jax_fastattn.kernels.decode.line import Entry, Line, Unit, owner, portions, slot
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.softmax import NEVER
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score

_WARPS = 4
# The loads of this many partial results are in flight at a time.
_TOGETHER = 8


@dataclass(frozen=True)
class _Row:
    """A row and its partial results.

    Attributes:
        entry: what the queries of the row's batch entry see.
        number: the row's index in its unit.
        slot: returns the slot of the i-th partial result.
        count: how many partial results there are.
        pending: whether there is such a row, and it has no result yet.
    """

    row: QueryRow
    entry: Entry
    number: Int32
    slot: Callable[[Int32], Int32]
    count: Int32
    pending: Boolean


class CombineKernel:
    """The kernel of one compile key."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec

    @property
    def begins_early(self) -> bool:
        """Whether it begins while the first kernel runs, for whose end it then waits."""
        return self.spec.family == "sm90"

    def launch(self, buffers: Buffers, scalars: Scalars) -> Launch:
        """Returns the launch."""
        units = self._begun_units(scalars)
        warps = units * self._unit_rows(scalars) + (0 if self.spec.config.portion else scalars.batch)
        return Launch(
            self.kernel,
            (buffers, scalars),
            grid=copies.count(warps, _WARPS),
            block=32 * _WARPS,
            min_blocks=0,
            begins_early=self.begins_early,
        )

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars):
        thread = wgmma.thread_index()
        block, _, _ = cute.arch.block_idx()
        line = Line.of(self.spec, buffers, scalars, thread % 32)
        index, rows = block * _WARPS + thread // 32, self._begun_units(scalars) * self._unit_rows(scalars)
        if cutlass.const_expr(self.begins_early):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.spec.config.portion > 0):
            if index < rows:
                self._combine(line, self._portions_row(line, index))
        elif index < rows:
            self._combine(line, self._row(line, index))
        elif index < rows + scalars.batch:
            self._finish_empty(line, index - rows)

    def _begun_units(self, scalars: Scalars) -> Int32:
        """Returns for how many units there are warps: all units, or at most one that each CTA begins."""
        if self.spec.config.portion:
            return scalars.batch * (scalars.num_heads // self.spec.group)
        return scalars.multiprocessors

    def _unit_rows(self, scalars: Scalars) -> Int32:
        """Returns the rows of a unit."""
        return scalars.query_length * self.spec.group

    def _row(self, line: Line, index: Int32) -> _Row:
        """Returns a warp's row: each CTA of the first kernel has a warp for every row of a unit."""
        rows, group = self._unit_rows(line.scalars), self.spec.group
        cta, number = index // rows, index % rows
        record = ptx.load_global_chunk(line.buffers.begun.toint() + Int64(cta) * 16)
        unit, rest, end, total = (cute.arch.make_warp_uniform(x) for x in record)
        pending, begin, heads = Boolean(unit >= 0), cta // line.side, line.kv_heads
        batch, kv_head = Int32(cutlass.max(unit, 0)) // heads, unit % heads

        def place(i: Int32) -> Int32:
            # The first CTA begins the unit and, since there are several, does not end it.
            return slot(cta + i * line.side, i == 0)

        return _Row(
            row=QueryRow(batch, number // group, kv_head * group + number % group),
            entry=line.entry(batch),
            number=number,
            slot=place,
            count=owner(end + rest - 1, line.shares, total) - begin + 1,
            pending=pending,
        )

    def _portions_row(self, line: Line, index: Int32) -> _Row:
        """Returns a warp's row if units are cut into portions: each unit has a warp for every row."""
        rows, group, heads = self._unit_rows(line.scalars), self.spec.group, line.kv_heads
        number, unit = index % rows, Unit(index // rows // heads, index // rows % heads)
        entry = line.entry(unit.batch)
        count = portions(entry.tiles, line.portion)
        return _Row(
            row=QueryRow(unit.batch, number // group, unit.kv_head * group + number % group),
            entry=entry,
            number=number,
            slot=lambda i: line.portion_slot(unit, Int32(0)) + i,
            count=count,
            pending=Boolean(count != 1),
        )

    def _finish_empty(self, line: Line, batch: Int32) -> None:
        """Writes the results of a batch entry if it has no tiles; a lane has four columns of a row at a time."""
        entry, scalars, chunks = line.entry(batch), line.scalars, self.spec.v_head_dim // 4
        score = Score.forward(self.spec, line.buffers, scalars)
        tasks = scalars.query_length * scalars.num_heads * chunks

        def finish(i: Int32) -> None:
            task = i * 32 + line.lane
            row, heads = task // chunks, scalars.num_heads

            def store() -> None:
                place = QueryRow(batch, row // heads, row % heads)
                finished = FinishedRow.of(line, score, entry, place, Float32(NEVER), Float32(0.0))
                finished.store(task % chunks, [Float32(0.0)] * 4)

            cutlass.if_generate(task < tasks, store)

        wgmma.loop(ptx.where(entry.tiles == 0, copies.count(tasks, 32), Int32(0)), finish)

    def _combine(self, line: Line, row: _Row) -> None:
        """Computes the result of a row, 128 columns at a time, of which a lane has four."""
        score = Score.forward(self.spec, line.buffers, line.scalars)
        chunks = self.spec.v_head_dim // 4
        for first in range(0, chunks, 32):
            chunk, stores = line.lane + first, row.pending
            if first + 32 > chunks:
                stores = Boolean(stores & (chunk < chunks))
                chunk = Int32(cutlass.min(chunk, chunks - 1))
            # The state holds the output, the maximum in base 2, and the sum.
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
        place = row.slot(Int32(cutlass.min(i, row.count - 1)))
        index = Int64(place) * (line.scalars.query_length * self.spec.group) + row.number
        lse = ptx.load_global(buffers.partial_lse.toint() + index * 4)
        values = ptx.load_global_chunk(buffers.partial_out.toint() + (index * columns + chunk * 4) * 4)
        return ptx.where(i < row.count, lse, Float32(NEVER)), [ptx.from_bits(x) for x in values]


def decode_launches(
    kernel: Callable[..., Any], spec: KernelSpec, buffers: Buffers, scalars: Scalars, **options: Any
) -> list[Launch]:
    """Returns the launches of a call, in order: the kernel that reads K and V and, if it splits units, the combine one.

    Args:
        kernel: the first kernel, a CTA for each SM.
        options: other attributes of the first kernel's launch.
    """
    launch = Launch(kernel, (buffers, scalars), grid=scalars.multiprocessors, block=spec.config.threads, **options)
    return [launch, CombineKernel(spec).launch(buffers, scalars)] if spec.config.splits else [launch]
