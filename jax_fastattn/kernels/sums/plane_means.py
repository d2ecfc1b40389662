# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a head's number by the main backward kernel, and the means of rows that it needs.

With d the derivative of a score by the number, the gradient is the sum of dS (d - mean): `row_means.py` says why. The
forward kernel sums P d for each row beside P. Where d is linear in the key, each pair of neighbors has one product with
the middle of both d, which is exact enough for a mean. The backward kernel keeps a sum for each key of a lane, and XLA
adds up the keys: the same bits in every run.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from cutlass import Float32, Int32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.features.feature import Feature
from jax_fastattn.kernels.features.places import Element, ScoreTile
from jax_fastattn.kernels.features.program.forms import Line, number, register
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sums.key_sums import KeySums
from jax_fastattn.kernels.sums.sums import DscorePair, LaneKeys, SummedTile


def row_moments(score: Score, tile: ScoreTile, acc: Accumulator, totals: list[Float32]) -> list[Float32]:
    """Returns the lane's sums of P d of its two rows.

    Args:
        score: maps products to probabilities of the query head.
        tile: where P lies; its rows are queries.
        acc: P, unnormalized.
        totals: the lane's sums of P of both rows.
    """
    feature = _averaged(score.read(tile))
    found = []
    for row, total in enumerate(totals):
        pairs = [4 * n + 2 * row for n in range(tile.n_blocks)]
        forms = [[feature.derivative(tile.at(i + e)) for e in range(2)] for i in pairs]
        steps = _steps(feature, [x for pair in forms for x in pair])
        if steps is None:
            sums = [acc[i + e] * _register(pair[e]) for i, pair in zip(pairs, forms, strict=True) for e in range(2)]
        else:
            sums = [_register(forms[0][0]) * total]
            for n, i in enumerate(pairs):
                middle = (steps[2 * n] + steps[2 * n + 1]) / 2
                sums[0] = ptx.fma(acc[i] + acc[i + 1], Float32(middle), sums[0])
        moment = sums[0]
        for x in sums[1:]:
            moment = moment + x
        found.append(moment)
    return found


def _averaged(score: Score) -> Feature:
    """Returns the function with the derivative."""
    (feature,) = score.steps
    return feature


def _steps(feature: Feature, forms: list[Any]) -> list[float] | None:
    """Returns by how much derivatives of a row exceed the first one, if all of them lie on one line of known slope."""
    if not feature.has_linear_derivative() or not all(isinstance(x, Line) and isinstance(x.slope, float) for x in forms):
        return None
    ends = [x.slope * x.step for x in forms]
    return [x - ends[0] for x in ends]


def _register(x: Any) -> Float32:
    return register("f", x)


@final
@dataclass(frozen=True, eq=False)
class PlaneSums:
    """The sums of dS (d - mean) of a lane's keys.

    Attributes:
        sums: the registers, and how they are stored.
        feature: the function of a tile's scores, since `at_tile`.
        tile: where these scores lie; rows are keys.
        means: address of the mean of the lane's first query of the tile, in shared memory.
    """

    sums: KeySums
    feature: Feature | None = None
    tile: ScoreTile | None = None
    means: Int32 | None = None

    def clear(self) -> None:
        """Clears the sums for the next query head."""
        self.sums.clear()

    def at_tile(self, tile: SummedTile) -> "PlaneSums":
        """Returns the sums for the scores of a tile."""
        feature = _averaged(tile.score.read(tile.scores))
        return replace(self, feature=feature, tile=tile.scores, means=tile.means)

    def add(self, part: DscorePair) -> None:
        """Adds a pair."""
        assert self.feature is not None and self.tile is not None and self.means is not None
        row = part.pair // 2 // self.sums.n_blocks * 2 + part.pair % 2
        total = self.sums.sums[row]
        for e, value in enumerate(part.values):
            at = self.tile.at(2 * part.pair + e)
            total = ptx.fma(value, _less(self.feature.derivative(at), self._mean(at)), total)
        self.sums.sums[row] = total

    def _mean(self, at: Element) -> Float32:
        return ptx.from_bits(ptx.load_shared(self.means + 16 * at.column))

    def store(self, place: LaneKeys) -> None:
        """Stores the sums of a query head to `dkey_bias`."""
        self.sums.store(place)


def _less(x: Any, mean: Float32) -> Float32:
    """Returns a derivative less a mean, which scores of a column share."""
    if isinstance(x, Line) and isinstance(x.slope, float):
        return number(Line(x.base - mean, x.slope, x.step))
    return _register(x) - mean


class RowMean(NamedTuple):
    """The mean of a row, given the sums of all lanes.

    Attributes:
        moment: the sum of P d.
        total: the sum of P.
    """

    moment: Float32
    total: Float32

    def value(self) -> Float32:
        """Returns the mean; 0 for a row that sees nothing."""
        return ptx.where(self.total == Float32(0.0), Float32(0.0), self.moment * ptx.reciprocal(self.total))
