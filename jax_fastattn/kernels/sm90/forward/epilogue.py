# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of the forward kernel stores: log-sum-exps and the output, from registers."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from jax_fastattn.kernels.device import ptx, softmax
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.sm90.forward.softmax import NEVER, OnlineSoftmax
from jax_fastattn.kernels.sm90.forward.work import Call, Lane, QueryTile


class _Row(NamedTuple):
    """One of a lane's two rows.

    Attributes:
        weight: factor on its accumulated output.
        live: whether it has an output; else it is zeros.
    """

    weight: Float32
    live: Boolean


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """Emits the stores of one warpgroup.

    Attributes:
        call: what the roles share.
        lane: the thread.
        softmax: maxima and sums.
        out: accumulator `[64, columns of V]` of O.
    """

    call: Call
    lane: Lane
    softmax: OnlineSoftmax
    out: Accumulator

    def store(self, tile: QueryTile, first_row: Int32) -> None:
        """Stores the results of a tile of queries, of which `first_row` is the lane's first row."""
        self._store_out(tile, self._store_lse(tile, first_row), first_row)

    def _store_lse(self, tile: QueryTile, first_row: Int32) -> list[_Row]:
        """Stores the log-sum-exp, of which a sink is part, and returns the lane's rows."""
        call, rows, score = self.call, [], self.call.score.finish(tile.score_head)
        lse_row = tile.queries.row()
        for i in range(2):
            row = first_row + 8 * i
            total = softmax.quad_sum(self.softmax.sums[i])
            live = Boolean((total != Float32(0.0)) & (row < tile.bounds.query_end))
            log_max, total, weight = score.finish_row(self.softmax.maxima[i] * score.unit, total)
            value = (log_max + ptx.log2(total)) * softmax.LN_2
            value = ptx.where(row < tile.bounds.query_end, value, Float32(NEVER))
            address = call.buffers.lse.toint() + ((lse_row + row) * call.scalars.num_heads + tile.head) * 4
            stores = Boolean((row < tile.queries.length) & (self.lane.column == 0))
            cutlass.if_generate(stores, lambda address=address, value=value: ptx.store_global(address, value))
            rows.append(_Row(weight * ptx.reciprocal(total), live))
        return rows

    def _store_out(self, tile: QueryTile, rows: list[_Row], first_row: Int32) -> None:
        """Stores the output: 16 bytes a lane, 64 neighbouring bytes of a row the quad."""
        call, head_dim = self.call, self.call.spec.v_head_dim
        lane = self.lane.column // 2
        for i, weighted in enumerate(rows):
            row = first_row + 8 * i
            offset = tile.queries.row_head(row, call.scalars.num_heads, tile.head) * (2 * head_dim)
            address = call.buffers.out.toint() + offset + lane * 16
            for block in range(0, head_dim // 8, 4):
                chunk = [self._rounded(block + j, i, weighted) for j in range(4)]
                chunk = ptx.transpose_quad(chunk, lane)
                stores = row < tile.queries.length
                if block + 4 > head_dim // 8:
                    stores = Boolean(stores & (lane < head_dim // 8 - block))

                def store(address: Int64 = address + block * 16, chunk: list = chunk) -> None:
                    ptx.store_global_chunk(address, chunk)

                cutlass.if_generate(stores, store)

    def _rounded(self, block: int, i: int, row: _Row) -> Int32:
        """Returns this lane's two elements of a block of 8 columns, in row i of its two."""
        # A select, not a product: a padding row's sum can be NaN.
        pair = [ptx.where(row.live, self.out[4 * block + 2 * i + e] * row.weight, Float32(0.0)) for e in range(2)]
        return ptx.pack(*pair, dtype=self.call.mma_dtype)
