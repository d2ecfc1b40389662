# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The result of one row (a query and a query head) of a decoding launch, of which a thread stores four columns."""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from jax_fastattn.kernels.decode.line import Entry, Line
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.products import result_words
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sums.log_sum_exp import RowEnd


class QueryRow(NamedTuple):
    """The place of a row: its batch entry, query and query head."""

    batch: Int32
    query: Int32
    head: Int32


class FinishedRow(NamedTuple):
    """A row's result, apart from its accumulated output.

    Attributes:
        place: the place of the row in `[B, T, N]`.
        end: the end of the row's softmax.
    """

    line: Line
    place: Int64
    end: RowEnd

    @classmethod
    def of(
        cls, line: Line, score: Score, entry: Entry, row: QueryRow, log_max: Float32, total: Float32
    ) -> "FinishedRow":
        """Returns the result of a row.

        Args:
            score: maps products to logits.
            entry: what the queries of the batch entry see.
            log_max: its maximum logit, in base 2.
            total: its sum of exponentials relative to `log_max`.
        """
        inside = Boolean(row.query < entry.bounds.query_end)
        end = RowEnd.of(score.finish(Head(row.batch, row.head)), log_max, total, inside)
        position = Int64(row.batch * line.scalars.query_length + row.query)
        return cls(line, position * line.scalars.num_heads + row.head, end)

    def store(self, chunk: Int32, values: list[Float32]) -> None:
        """Stores four neighboring columns, and the log-sum-exp together with the first ones.

        Args:
            chunk: which four columns.
            values: the accumulated output, relative to the row's maximum.
        """
        spec, buffers, result = self.line.spec, self.line.buffers, self.end.result()
        words = result_words(spec)
        values = [result.value(x) for x in values]
        pairs = [ptx.from_bits(words.pair(values[i], values[i + 1])) for i in (0, 2)]
        ptx.store_global_pair(buffers.out.toint() + (self.place * spec.v_head_dim + chunk * 4) * 2, *pairs)
        address = buffers.lse.toint() + self.place * 4
        cutlass.if_generate(chunk == 0, lambda: ptx.store_global(address, self.end.lse))
