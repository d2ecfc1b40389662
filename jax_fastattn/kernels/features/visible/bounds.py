# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Window, lengths and offset as a predicate: each row of an accumulator sees a range of columns."""

from collections.abc import Sequence
from typing import NamedTuple

from cutlass import Float32, Int32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator, accumulator_row
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.tiles.plan import Limits


class Visibility(NamedTuple):
    """What one accumulator row sees, counted from the lane's first column of a tile.

    Attributes:
        limits: the columns seen.
        check_low: whether their lower end can lie inside of a tile.
        check_high: whether their upper end can.
    """

    limits: Limits
    check_low: bool
    check_high: bool

    @classmethod
    def of(cls, limits: Limits, column: Int32, check_low: bool, check_high: bool = True) -> "Visibility":
        """Returns the bounds of a lane. `column` is the number of the lane's first column in the whole matrix."""
        return cls(Limits(limits.low - column, limits.high - column), check_low, check_high)

    def select(self, x: Float32, at: int) -> Float32:
        """Returns x where column `at` is seen, else 0."""
        if self.check_high:
            x = ptx.where(Int32(at) < self.limits.high, x, Float32(0.0))
        return ptx.where(Int32(at) >= self.limits.low, x, Float32(0.0)) if self.check_low else x


def hide(acc: Accumulator, tile: ScoreTile, limits: Sequence[Limits], hidden: Float32, *, check_low: bool) -> None:
    """Puts `hidden` where a score lies outside of the limits of its row, in place.

    Args:
        tile: where the accumulator lies.
        limits: the columns that each of the lane's accumulator rows sees.
        hidden: the value put there.
        check_low: whether their lower end can lie above the first column of a tile.
    """
    column = tile.column
    for i in range(4 * (len(limits) // 2)):
        m, element = divmod(i, 4)
        row = limits[accumulator_row(m, element)]
        high, low = row.high - column, row.low - column
        for n in range(tile.n_blocks):
            index, at = (m * tile.n_blocks + n) * 4 + element, 8 * n + element % 2
            acc[index] = ptx.where(Int32(at) < high, acc[index], hidden)
            if check_low:
                acc[index] = ptx.where(Int32(at) >= low, acc[index], hidden)
