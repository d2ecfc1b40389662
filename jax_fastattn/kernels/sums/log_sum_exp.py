# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The end of the softmax of query rows: their log-sum-exps, and what becomes of their rows of the output."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx, softmax
from jax_fastattn.kernels.device.row_store import ResultRow
from jax_fastattn.kernels.device.sequences import Span
from jax_fastattn.kernels.score import Score


class RowEnd(NamedTuple):
    """The end of a row's softmax.

    Attributes:
        live: whether the row has an output.
        lse: its log-sum-exp, of which sinks are part.
        total: its denominator.
        weight: a factor on its output.
    """

    live: Boolean
    lse: Float32
    total: Float32
    weight: Float32

    @classmethod
    def of(cls, score: Score, log_max: Float32, total: Float32, inside: Boolean) -> "RowEnd":
        """Returns the end of a row.

        Args:
            score: maps products to logits of the row's query head, after `Score.finish`.
            log_max: the maximum logit, in base 2.
            total: the sum of exponentials relative to `log_max`.
            inside: whether the row is not padding.
        """
        live = Boolean((total != Float32(0.0)) & inside)
        log_max, total, weight = score.finish_row(log_max, total)
        # This rounds once: where one weight is 1, the logarithm is what the rounding of the maximum left of its logit.
        value = ptx.fma(log_max, Float32(softmax.LN_2), ptx.log2(total) * softmax.LN_2)
        return cls(live, ptx.where(inside, value, Float32(softmax.NEVER)), total, weight)

    def result(self) -> ResultRow:
        """Returns how the row of the output is stored."""
        return ResultRow(self.live, self.weight * ptx.reciprocal(self.total))


@dataclass(frozen=True, eq=False)
class LogSumExps:
    """Stores the log-sum-exps of a lane's rows of a query head.

    Attributes:
        score: maps products to logits of the query head; its features have what `Score.finish_row` needs.
        queries: the rows of the sequence.
        query_end: rows from there on are padding: their log-sum-exp is -inf, and they have no output.
        column: the lane's first accumulator column; the lane with column 0 stores for the four lanes that share a row.
    """

    score: Score
    queries: Span
    query_end: Int32
    head: Int32
    column: Int32

    def store(
        self, buffers: Buffers, scalars: Scalars, first_row: Int32, softmaxes: Iterable[tuple[Float32, Float32]]
    ) -> list[ResultRow]:
        """Stores the log-sum-exps, of which sinks are part.

        Args:
            first_row: the lane's first row; the others follow 8 apart.
            softmaxes: the maximum product of each row, and the lane's part of its sum of exponentials relative to that.

        Returns:
            How the output of each row is stored.
        """
        results, lse_row = [], self.queries.row()
        for i, (maximum, total) in enumerate(softmaxes):
            row = first_row + 8 * i
            total = softmax.quad_sum(total)
            inside = Boolean(row < self.query_end)
            log_max, total = self.score.shift_row(self.score.shift(maximum), total, row)
            end = RowEnd.of(self.score, log_max, total, inside)
            address = buffers.lse.toint() + ((lse_row + row) * scalars.num_heads + self.head) * 4
            stores = Boolean((row < self.queries.length) & (self.column == 0))
            cutlass.if_generate(stores, lambda address=address, lse=end.lse: ptx.store_global(address, lse))
            results.append(end.result())
        return results
