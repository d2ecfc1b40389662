# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of the forward kernel stores: log-sum-exps and the output, from registers."""

from dataclasses import dataclass

from cutlass import Int32, cute

from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import result_words
from jax_fastattn.kernels.device.row_store import RowStore
from jax_fastattn.kernels.sm90.forward.softmax import OnlineSoftmax
from jax_fastattn.kernels.sm90.forward.state import Call, Lane, QueryTile
from jax_fastattn.kernels.sums.log_sum_exp import LogSumExps
from jax_fastattn.kernels.sums.plane_means import RowMeans


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """Emits the stores of one warpgroup.

    Attributes:
        softmax: maxima and sums.
        out: accumulator `[64, columns of V]` of O.
    """

    call: Call
    lane: Lane
    softmax: OnlineSoftmax
    out: Accumulator

    def store(self, tile: QueryTile, first_row: Int32) -> None:
        """Stores the results of a tile of queries, of which `first_row` is the lane's first row."""
        call, softmax = self.call, self.softmax
        buffers, scalars, head_dim = call.buffers, call.scalars, call.spec.v_head_dim
        score = call.score.finish(tile.score_head)
        sums = LogSumExps(score, tile.queries, tile.bounds.query_end, tile.head, self.lane.column)
        rows = sums.store(buffers, scalars, first_row, ((softmax.maxima[i], softmax.sums[i]) for i in range(2)))

        if softmax.moments is not None:
            means = RowMeans(tile.queries, tile.head, self.lane.column)
            means.store(buffers, scalars, first_row, ((softmax.moments[i], softmax.sums[i]) for i in range(2)))

        def rows_of(buffer: cute.Pointer, nbytes: int) -> RowStore:
            return RowStore(
                address=lambda row: buffer.toint() + tile.queries.row_head(row, scalars.num_heads, tile.head) * nbytes,
                columns=head_dim,
                row=first_row,
                end=tile.queries.length,
                quad_lane=self.lane.column // 2,
                words=result_words(call.spec),
            )

        rows_of(buffers.out, call.spec.result_nbytes * head_dim).store(self.out, rows)
        if buffers.out_rests is not None:
            rows_of(buffers.out_rests, head_dim).store_rests(self.out, rows)
