# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A mask or segment ids as a predicate: bits say which scores of an edge tile count, see docs/kernels/masks.md."""

from collections.abc import Sequence
from typing import NamedTuple

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.features.places import ScoreTile


def _bit(i: int) -> Int32:
    """Returns a word of which one bit is set."""
    return Int32((1 << i) - (1 << 32 if i == 31 else 0))  # bit 31 alone is a negative number


class Bits(NamedTuple):
    """Which scores of a lane's part of a tile count.

    Attributes:
        words: for each block of 16 accumulator rows the words of its columns, 64 each.
    """

    words: Sequence[Sequence[Int32]]

    def sees(self, row: int, column: int) -> Boolean:
        """Returns whether a score counts.

        Args:
            row: which of the lane's accumulator rows, see `mma.accumulator_row`.
            column: the column of the score, counted from the lane's first one.
        """
        bit = _bit(16 * (row % 2) + 2 * (column // 8 % 8) + column % 2)
        return Boolean((self.words[row // 2][column // 64] & bit) != 0)

    def hide(self, acc: Accumulator, tile: ScoreTile, hidden: Float32) -> None:
        """Puts `hidden` where a score does not count, in place."""
        for index in range(len(acc) if isinstance(acc, list) else cute.size(acc)):
            at = tile.at(index)
            acc[index] = ptx.where(self.sees(at.i, at.column), acc[index], hidden)

    def hides(self, columns: int) -> Boolean:
        """Returns whether a score of the lane does not count, given how many columns the tile has."""
        hidden = Boolean(False)
        for words in self.words:
            for i, word in enumerate(words):
                # A word has two rows, of which 16 columns of 64 are the lane's.
                row = (1 << (min(columns - 64 * i, 64) // 4)) - 1
                every = row | row << 16
                every = Int32(every - (every >> 31 << 32))
                hidden = Boolean(hidden | ((word & every) != every))
        return hidden

    def rows(self) -> "list[BitRow]":
        """Returns what each of the lane's accumulator rows sees."""
        return [BitRow(self, i) for i in range(2 * len(self.words))]


class LiveRow(NamedTuple):
    """An accumulator row that sees all columns or none.

    Attributes:
        is_live: whether it sees them.
    """

    is_live: Boolean

    def select(self, x: Float32, at: int) -> Float32:
        """Returns x if the row is live, else 0."""
        del at
        return ptx.where(self.is_live, x, Float32(0.0))


class LiveColumns(NamedTuple):
    """What every accumulator row sees: columns that are live.

    Attributes:
        words: their bits, 32 columns each, counted from the lane's first column.
    """

    words: Sequence[Int32]

    def select(self, x: Float32, at: int) -> Float32:
        """Returns x where column `at`, counted from the lane's first one, is live, else 0."""
        return ptx.where(Boolean((self.words[at // 32] & _bit(at % 32)) != 0), x, Float32(0.0))


class BitRow(NamedTuple):
    """What one accumulator row sees; `bounds.Visibility` has the same interface.

    Attributes:
        bits: bits of the tile.
        row: which of the lane's accumulator rows it is.
    """

    bits: Bits
    row: int

    def select(self, x: Float32, at: int) -> Float32:
        """Returns x where column `at`, counted from the lane's first one, is seen, else 0."""
        return ptx.where(self.bits.sees(self.row, at), x, Float32(0.0))
