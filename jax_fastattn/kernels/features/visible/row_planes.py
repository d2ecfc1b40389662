# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Where the bits of the rows of decoding kernels lie, see `ops/cuda/row_bits.py`. Imports no DSL."""

from typing import Any, NamedTuple

from jax_fastattn.kernels.arguments.scalars import Scalars

Int = Any  # a Python int or a device integer


class RowPlanes(NamedTuple):
    """Where batch entries, heads and queries have their words, as launches know it.

    Attributes:
        batch: planes from one batch entry to the next; 0 if all entries share them.
        head: 1; 0 if the query heads of a group share a row.
        kv_head: 1; 0 if all key/value heads share a plane.
        query: 1; 0 if all queries share the rows of the first one.
    """

    batch: Int
    head: Int
    kv_head: Int
    query: Int

    @classmethod
    def of(cls, scalars: Scalars) -> "RowPlanes":
        """Returns the planes of a launch."""
        return cls(scalars.visit_batch, scalars.visit_head, scalars.visit_kv_head, scalars.visit_tile)

    def row(self, unit: tuple[Int, Int], row: Int, queries: Int, group: int) -> Int:
        """Returns the index among all rows of words of a row, see `decode/rows.py`.

        Args:
            unit: batch entry and key/value head.
            queries: T.
            group: query heads of a key/value head.
        """
        heads = (group - 1) * self.head + 1
        plane = unit[0] * self.batch + unit[1] * self.kv_head
        rows = ((queries - 1) * self.query + 1) * heads
        return plane * rows + row // group * (self.query * heads) + row % group * self.head
