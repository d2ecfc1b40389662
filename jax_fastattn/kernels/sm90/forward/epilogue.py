# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of the forward kernel stores: log-sum-exps and the output, from registers."""

from dataclasses import dataclass

from cutlass import Int32, Int64

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
        nbytes = call.spec.result_nbytes * head_dim
        score = call.score.finish(tile.score_head)
        sums = LogSumExps(score, tile.queries, tile.bounds.query_end, tile.head, self.lane.column)
        rows = sums.store(buffers, scalars, first_row, ((softmax.maxima[i], softmax.sums[i]) for i in range(2)))

        if softmax.moments is not None:
            means = RowMeans(tile.queries, tile.head, self.lane.column)
            means.store(buffers, scalars, first_row, ((softmax.moments[i], softmax.sums[i]) for i in range(2)))

        def address(row: Int32) -> Int64:
            return buffers.out.toint() + tile.queries.row_head(row, scalars.num_heads, tile.head) * nbytes

        RowStore(
            address=address,
            columns=head_dim,
            row=first_row,
            end=tile.queries.length,
            quad_lane=self.lane.column // 2,
            words=result_words(call.spec),
        ).store(self.out, rows)
