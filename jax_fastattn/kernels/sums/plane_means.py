# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a head's number by Hopper's main backward kernel, and the mean keys of rows of both families.

`sums/row_means.py` says why the gradient is a slope times the sum of dS (key - mean key). The forward kernel sums P
times the key of each row beside P. The backward kernel keeps two sums for the two keys of a lane, and XLA adds up the
keys: the same bits in every run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.sequences import Span
from jax_fastattn.kernels.device.softmax import quad_sum
from jax_fastattn.kernels.features.places import Element, ScoreTile
from jax_fastattn.kernels.sums.key_sums import KeySums
from jax_fastattn.kernels.sums.sums import DscorePair, LaneKeys, SummedTile


def row_moments(tile: ScoreTile, acc: Accumulator, totals: list[Float32]) -> list[Float32]:
    """Returns the lane's sums of P times the key of each of its rows.

    Two neighbors count as if both lay halfway between them: a mean needs no more.

    Args:
        tile: where P lies; its rows are queries.
        acc: P, unnormalized.
        totals: the lane's sums of P of each row.
    """
    first, found = Float32(tile.column), []
    for row, total in enumerate(totals):
        moment = first * total
        for n in range(tile.n_blocks):
            i = 4 * (row // 2 * tile.n_blocks + n) + 2 * (row % 2)
            moment = ptx.fma(acc[i] + acc[i + 1], Float32(8 * n + 0.5), moment)
        found.append(moment)
    return found


class RowMean(NamedTuple):
    """The mean key of a row, given the sums of all lanes.

    Attributes:
        moment: the sum of P times the key.
        total: the sum of P.
    """

    moment: Float32
    total: Float32

    def value(self) -> Float32:
        """Returns the mean; 0 for a row that sees nothing."""
        return ptx.where(self.total == Float32(0.0), Float32(0.0), self.moment * ptx.reciprocal(self.total))


@dataclass(frozen=True, eq=False)
class RowMeans:
    """Stores the mean keys of a lane's rows of a query head.

    Attributes:
        queries: the rows of the sequence.
        column: the lane's first accumulator column; the lane with column 0 stores for the four lanes that share a row.
    """

    queries: Span
    head: Int32
    column: Int32

    def store(
        self, buffers: Buffers, scalars: Scalars, first_row: Int32, sums: Iterable[tuple[Float32, Float32]]
    ) -> None:
        """Stores the means.

        Args:
            first_row: the lane's first row; the others follow 8 apart.
            sums: of each row, the lane's sums of P times the key, and of P.
        """
        for i, row_sums in enumerate(sums):
            row = first_row + 8 * i
            mean = RowMean(*(quad_sum(x) for x in row_sums)).value()
            address = buffers.row_means.toint() + self.queries.row_head(row, scalars.num_heads, self.head) * 4
            stores = Boolean((row < self.queries.length) & (self.column == 0))
            cutlass.if_generate(stores, lambda address=address, mean=mean: ptx.store_global(address, mean))


@final
@dataclass(frozen=True, eq=False)
class PlaneSums:
    """The sums of dS (key - mean key) of a lane's two keys.

    Attributes:
        keys: the sums of both keys, as if both were the first one, and how they are stored. The second key may lie past
            the end, where dS may be anything: it joins no other sum.
        second: the sum of dS of the second key, which is 8 keys further on.
        slope: the derivative of scores by the number is this times the key, plus what a row has in common.
        tile: where the scores of a tile lie, since `at_tile`; rows are keys.
        means: address of the mean key of the lane's first query of the tile, in shared memory.
    """

    keys: KeySums
    second: cute.Tensor
    slope: float
    tile: ScoreTile | None = None
    means: Int32 | None = None

    @classmethod
    def start(cls, keys: KeySums, slope: float) -> "PlaneSums":
        """Returns the sums with their registers."""
        return cls(keys, cute.make_rmem_tensor((1,), Float32), slope)

    def clear(self) -> None:
        """Clears the sums for the next query head."""
        self.keys.clear()
        self.second.fill(0.0)

    def at_tile(self, tile: SummedTile) -> "PlaneSums":
        """Returns the sums for the scores of a tile."""
        return replace(self, tile=tile.scores, means=tile.means)

    def add(self, part: DscorePair) -> None:
        """Adds a pair."""
        assert self.tile is not None
        first, sums, row = Float32(self.tile.row), self.keys.sums, part.pair % 2
        for e, value in enumerate(part.values):
            sums[row] = ptx.fma(value, first - self._mean(self.tile.at(2 * part.pair + e)), sums[row])
        if row:
            self.second[0] = self.second[0] + (part.values[0] + part.values[1])

    def _mean(self, at: Element) -> Float32:
        assert self.means is not None
        return ptx.from_bits(ptx.load_shared(self.means + 16 * at.column))

    def store(self, place: LaneKeys) -> None:
        """Stores the sums of a query head to `dkey_bias`."""
        sums = self.keys.sums
        for i, total in enumerate((sums[0], ptx.fma(Float32(8.0), self.second[0], sums[1]))):
            sums[i] = Float32(total) * self.slope
        self.keys.store(place)
