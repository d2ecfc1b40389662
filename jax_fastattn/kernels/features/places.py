# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What hooks of features are given: a query head, a tile of scores, one score and where it lies, and its logit."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Float32, Int32

from jax_fastattn.kernels.device import ptx


class Head(NamedTuple):
    """The query head whose scores a warp works on until the next head.

    Attributes:
        batch: its batch entry.
        head: its index.
        starts: the first rows of queries and of keys of its packed sequence; None if rows are those of a batch entry.
    """

    batch: Int32
    head: Int32
    starts: tuple[Int32, Int32] | None = None


@dataclass(frozen=True)
class ScoreTile:
    """A lane's part of a tile of scores, in the accumulator layout of `device/mma.py`.

    Rows are queries and columns keys, or the other way around where `transposed`. All are counted from the first one of
    the sequence. Nothing is computed before it is asked for.

    Attributes:
        row: the lane's first accumulator row; the others follow 8 apart.
        index: the index of the tile, along the columns.
        columns: columns from one index to the next.
        lane_column: the lane's first column, counted from the tile's first one.
        n_blocks: blocks of 8 columns.
        transposed: whether rows are keys.
    """

    row: Int32
    index: Int32
    columns: int
    lane_column: Int32
    n_blocks: int
    transposed: bool = False

    @property
    def column(self) -> Int32:
        """The lane's first column."""
        return self.index * self.columns + self.lane_column

    def at(self, index: int) -> "Element":
        """Returns where an element of the accumulator lies."""
        block, element = divmod(index, 4)
        return Element(self, block // self.n_blocks * 2 + element // 2, block % self.n_blocks * 8 + element % 2)


class Element(NamedTuple):
    """Where one score lies.

    Attributes:
        i: which of the lane's accumulator rows.
        column: counted from the lane's first one.
    """

    tile: ScoreTile
    i: int
    column: int

    @property
    def query(self) -> Int32:
        """Its query, counted from the first one of the sequence."""
        return self._column if self.tile.transposed else self._row

    @property
    def key(self) -> Int32:
        """Its key, counted from the first one of the sequence."""
        return self._row if self.tile.transposed else self._column

    @property
    def _row(self) -> Int32:
        return self.tile.row + 8 * self.i

    @property
    def _column(self) -> Int32:
        return self.tile.column + self.column


class LoadedTile(NamedTuple):
    """A tile of scores for which features load.

    Attributes:
        head: its query head.
        query: its first query, counted from the first one of the sequence.
        key: its first key, counted from the first one of the sequence.
        queries: number of its queries; queries past the end of the sequence are part of it.
        keys: number of its keys; keys past the end of the sequence are part of it.
    """

    head: Head
    query: Int32
    key: Int32
    queries: int
    keys: int


class Logit(NamedTuple):
    """A score on its way to the exponential.

    Attributes:
        value: `factor * value` is the logit times log2(e).
        factor: it is folded into what comes next; None for 1.
        slopes: slopes of the steps so far, whose product is the derivative of the logit with respect to the scaled
            product q . k. They are computed where they are used.
        addends: a number, a factor on it and a term, which add up to `value`; None if it is no such sum.
    """

    value: Float32
    factor: Float32 | None
    slopes: tuple[Callable[[], Float32], ...] = ()
    addends: tuple[Float32, Float32 | None, Float32] | None = None

    def then(self, value: Float32, factor: Float32 | None, slope: Callable[[], Float32]) -> "Logit":
        """Returns what a feature makes of it, given the derivative of its own step."""
        return Logit(value, factor, (*self.slopes, slope))

    def slope(self) -> Float32:
        """Returns the derivative, which is not 1."""
        return functools.reduce(operator.mul, [slope() for slope in self.slopes])

    def plus(self, term: Float32) -> "Logit":
        """Returns the logit plus a term in base 2."""
        value = self.value + term if self.factor is None else ptx.fma(self.value, self.factor, term)
        return Logit(value, None, self.slopes, (self.value, self.factor, term))

    def times(self, number: Float32) -> Float32:
        """Returns the value times a number, which the terms of a sum may have before: one FFMA for each score."""
        if self.addends is None:
            return self.value * number
        value, factor, term = self.addends
        return ptx.fma(value, number if factor is None else factor * number, term * number)
