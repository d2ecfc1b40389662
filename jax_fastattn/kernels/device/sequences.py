# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a batch entry lie in the arrays of a launch.

array `[batch, rows, heads, columns]`      row r of the entry is row `batch * rows + r` of all
array `[batch, heads, rows]`               ... row `(batch * heads + head) * rows + r`
array `[batch, heads, padded rows]`        ... row `(batch * heads + head) * padded_rows + r`
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cutlass import Int32, Int64

from jax_fastattn.kernels.arguments import Buffers, Scalars, Sizes
from jax_fastattn.kernels.device import tiles
from jax_fastattn.kernels.spec import KernelSpec


@dataclass(frozen=True)
class Span:
    """The queries or the keys of a batch entry.

    Methods emit code where they are called; a member would be computed once, and kept in a register.

    Attributes:
        batch: index of the entry.
        length: rows of it that are stored.
    """

    batch: Int32
    length: Int32

    def row(self, row: Int32 | None = None) -> Int64:
        """Index of a row, or of the first one, in an array `[batch, rows]`."""
        first = Int64(self.batch) * self.length
        return first if row is None else first + row

    def row_head(self, row: Int32, heads: Int32, head: Int32) -> Int64:
        """Index of a row and head in an array `[batch, rows, heads]`."""
        return self.row(row) * heads + head

    def head(self, heads: Int32, head: Int32) -> Int64:
        """Index of a head in an array `[batch, heads]`."""
        return Int64(self.batch) * heads + head

    def head_row(self, heads: Int32, head: Int32, row: Int32 | None = None) -> Int64:
        """Index of a head's row, or of its first one, in an array `[batch, heads, rows]`."""
        first = self.head(heads, head) * self.length
        return first if row is None else first + row

    def padded_rows(self, alignment: int) -> Int32:
        """Rows from one head to the next in an array `[batch, heads, padded rows]`: a multiple of `alignment`."""
        return (self.length + (alignment - 1)) // alignment * alignment

    def padded_row(self, head: Int64, alignment: int, row: Int32 | None = None) -> Int64:
        """Index of a head's row, or of its first one, in an array `[batch, heads, padded rows]`.

        `head` is the index of the head in an array `[batch, heads]`.
        """
        first = head * self.padded_rows(alignment)
        return first if row is None else first + row


@dataclass(frozen=True)
class Sequence:
    """The queries and the keys that attend to each other.

    Attributes:
        queries: their rows.
        keys: their rows.
        bounds: computes ends, offset and window, the keyword arguments of the tile plan, where it is called.
    """

    queries: Span
    keys: Span
    bounds: Callable[[], dict[str, Int32]]

    @classmethod
    def of_entry(cls, spec: KernelSpec, batch: Int32, buffers: Buffers, scalars: Scalars | Sizes) -> "Sequence":
        """Those of a batch entry."""
        bounds = functools.partial(tiles.entry_bounds, spec, batch, buffers, scalars)
        return cls(Span(batch, scalars.query_length), Span(batch, scalars.key_length), bounds)
