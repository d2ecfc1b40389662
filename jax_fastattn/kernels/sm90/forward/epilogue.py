# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of the forward kernel stores: log-sum-exps and the output, from registers."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import result_words
from jax_fastattn.kernels.device.row_store import RowStore
from jax_fastattn.kernels.device.softmax import quad_sum
from jax_fastattn.kernels.sm90.forward.softmax import OnlineSoftmax
from jax_fastattn.kernels.sm90.forward.state import Call, Lane, QueryTile
from jax_fastattn.kernels.sums.log_sum_exp import LogSumExps
from jax_fastattn.kernels.sums.plane_means import RowMean


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
            self._store_means(tile, first_row)

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

    def _store_means(self, tile: QueryTile, first_row: Int32) -> None:
        """Stores the means of a tile of queries, see `sums/row_means.py`."""
        buffers, heads, moments = self.call.buffers, self.call.scalars.num_heads, self.softmax.moments
        assert moments is not None
        for i in range(2):
            row = first_row + 8 * i
            mean = RowMean(*(quad_sum(x[i]) for x in (moments, self.softmax.sums))).value()
            address = buffers.row_means.toint() + tile.queries.row_head(row, heads, tile.head) * 4
            stores = Boolean((row < tile.queries.length) & (self.lane.column == 0))
            cutlass.if_generate(stores, lambda address=address, mean=mean: ptx.store_global(address, mean))
