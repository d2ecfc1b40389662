# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The composition of a launch's features: what a kernel calls to get from products to probabilities.

With s the logit of a score, in base 2, and the statistics (lse2, delta) of its query row, lse2 in base 2:

    P = 2^(s - lse2)        weight = P ds/d(scale q . k)        dS = weight (dP - delta)        dP = dout . v

dS is the gradient of scale q . k; the factor `scale` is applied to dq and dk when they are stored. A row that sees no
key has lse2 = +inf and delta = 0, so that its P and dS vanish without a predicate if its scores are numbers.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx, softmax
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import summed
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.of_launch import features_of
from jax_fastattn.kernels.features.places import Element, Head, LoadedTile, Logit, ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.features.visible.bounds import hide
from jax_fastattn.kernels.features.visible.edge import Edge, EdgeRows
from jax_fastattn.kernels.features.visible.row_bits import SeenKeys
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.plan import Limits, LiveRange

# This number stands for a scale of 0: small enough to make every finite product vanish, yet -inf times it is -inf.
_TINY_SCALE = 2.0**-120


# It maps the index of a pair of neighbors in an accumulator to their masks, see `Feature.keep`.
Keep = Callable[[int], Int32]


@dataclass(frozen=True)
class Score:
    """What happens to the scores of a launch.

    Attributes:
        factor: the factor from products to logits in base 2.
        unit: the factor from what `logits` leaves to logits in base 2, greater than 0 in the forward pass.
        features: the features, in the order in which they change logits.
        codes: what the compile key says of each.
        negative: whether the forward kernel has to negate Q, since the scale is negative; None where it never has to.
        hides_keys: whether a bias of keys is a step of the product, and so no feature. It may hide keys.
        joins_lse: whether a backward pass adds what a feature adds and the log-sum-exp as one term.
        log2_weight: the binary logarithm of the factor on unnormalized weights, see `KernelSpec.log2_weight`.
        rounds: in the forward pass, returns two weights as the product with V has them, for sums; None if sums are of
            weights as they are.
    """

    factor: Float32
    unit: Float32
    features: tuple[Feature, ...] = ()
    codes: tuple[Code, ...] = ()
    negative: Boolean | None = None
    hides_keys: bool = False
    joins_lse: bool = True
    log2_weight: int = 0
    rounds: softmax.Rounding | None = None

    @classmethod
    def forward(
        cls,
        spec: KernelSpec,
        buffers: Buffers,
        scalars: Scalars,
        copied_bias: Feature | None = None,
    ) -> "Score":
        """Returns the composition for a forward launch; see `backward` for `copied_bias`."""
        if not spec.is_affine:
            return cls.backward(spec, buffers, scalars, scalars.scale, copied_bias)
        negative = scalars.scale < Float32(0.0)
        magnitude = ptx.where(negative, -scalars.scale, scalars.scale)
        factor = ptx.maximum(magnitude * LOG2_E, Float32(_TINY_SCALE))
        features = features_of(FeatureArguments(spec, buffers, scalars, scalars.scale))
        return cls(factor, factor, features, spec.codes, negative)._of_launch(spec)

    @classmethod
    def backward(
        cls,
        spec: KernelSpec,
        buffers: Buffers,
        scalars: Scalars | Sizes,
        scale: Float32,
        copied_bias: Feature | None = None,
    ) -> "Score":
        """Returns the composition for a backward launch, with a scale of any sign.

        Args:
            scale: the factor on products.
            copied_bias: a bias of pairs that the kernel copies to shared memory; None if it copies none.
        """
        factor = scale * LOG2_E
        features = features_of(FeatureArguments(spec, buffers, scalars, scale, copied_bias))
        unit = factor
        if steps := _with(features, "logit"):
            unit = steps[-1].unit() if steps[-1].defines("unit") else Float32(1.0)
        return cls(factor, unit, features, spec.codes)._of_launch(spec)

    def _of_launch(self, spec: KernelSpec) -> "Score":
        """Returns the composition with what a launch does to weights."""
        return replace(self, log2_weight=spec.log2_weight, rounds=summed(spec))

    @property
    def steps(self) -> tuple[Feature, ...]:
        """The features that change logits, in order."""
        return _with(self.features, "logit")

    @property
    def added(self) -> Feature | None:
        """The feature that changes logits, if it is the only one and adds a term to them."""
        steps = self.steps
        return steps[0] if len(steps) == 1 and steps[0].defines("term") else None

    @property
    def is_shifted(self) -> bool:
        """Whether a number that is subtracted from a logit joins the last feature that changes it."""
        return bool(self.steps) and self.steps[-1].defines("shifted")

    @property
    def hides_in_full(self) -> bool:
        """Whether tiles without an edge may hide all that a row sees."""
        return self.hides_keys or any(feature.hides_in_full for feature in self.features)

    @property
    def rules(self) -> tuple[Feature, ...]:
        """The features that hide scores."""
        return _with(self.features, "sees")

    @property
    def is_affine(self) -> bool:
        """Whether a logit is a factor times the product q . k, see `KernelSpec.is_affine`."""
        return not self.steps

    @property
    def folds_lse(self) -> bool:
        """Whether a logit is a factor times the product q . k, plus terms, see `KernelSpec.folds_lse`."""
        return all(step.defines("term") for step in self.steps)

    def start(self, head: Head) -> "Score":
        """Returns the composition with what features read for a query head."""
        return replace(self, features=_each(self.features, "start", head))

    @property
    def holds(self) -> bool:
        """Whether some feature has the hook `hold`."""
        return bool(_with(self.features, "hold"))

    def hold(self, key: Int32, live: LiveRange) -> "Score":
        """Returns the composition with what features read for a lane's two keys, see `Feature.hold`."""
        features = [x.hold(key, live) if x.defines("hold") else x for x in self.features]
        return replace(self, features=tuple(features))

    def hold_queries(self, query: Int32) -> "Score":
        """Returns the composition with what features read for a lane's two queries, see `Feature.hold_queries`."""
        return replace(self, features=_each(self.features, "hold_queries", query))

    # What features load for a tile, see `features/stages.py`.

    def loaded_nbytes(self, queries: int, keys: int) -> int:
        """Returns how many bytes are loaded for a tile."""
        return stages.loaded_nbytes(self.codes, queries, keys)

    def copy(self, tile: LoadedTile, address: Int32, barrier: cute.Pointer) -> None:
        """Starts the copies of a stage, at its address in shared memory."""
        for index, offset, _ in stages.parts(self.codes, tile.queries, tile.keys):
            self.features[index].copy(tile, address + offset, barrier)

    def load(self, tile: LoadedTile, address: Int32) -> "Score":
        """Returns the composition with what features have loaded for a tile."""
        loaded = list(self.features)
        for index, offset, _ in stages.parts(self.codes, tile.queries, tile.keys):
            loaded[index] = loaded[index].load(tile, address + offset)
        return replace(self, features=tuple(loaded))

    def read(self, tile: ScoreTile) -> "Score":
        """Returns the composition for one pass over the scores of a tile."""
        return replace(self, features=_each(self.features, "read", tile))

    def preload(self, tile: ScoreTile) -> "Score":
        """Returns the composition for one pass, with what features have for it in registers."""
        return replace(self, features=_each(self.read(tile).features, "preload", tile))

    # Forward.

    def full(self, acc: Accumulator, tile: ScoreTile) -> None:
        """Turns products into logits over `unit`, in place."""
        score = self.read(tile)
        for i in range(_size(acc)) if self.steps else ():
            acc[i] = score.logit(acc[i], tile.at(i)).value

    def exponentials(self, acc: Accumulator, tile: ScoreTile, maxima: Accumulator) -> list[Float32]:
        """Turns products into 2^(logit - maximum), in place, given maxima in units of `full`.

        What a feature adds and the maximum become one term: one FFMA for both. So do a last product and the maximum.

        Returns:
            the lane's sums of its rows.
        """
        blocks, score = (1, _size(acc) // 4), self.read(tile)
        if (added := score.added) is None and not score.is_shifted:
            self.full(acc, tile)
            return softmax.exponentials(acc, *blocks, self.unit, [self.shift(maxima[i]) for i in range(2)], self.rounds)
        shifts = [self._raised(maxima[i]) for i in range(2)]
        for i in range(_size(acc)):
            at = tile.at(i)
            if added is None:
                acc[i] = ptx.exp2(score.shifted(acc[i], at, shifts[at.i]).value)
            else:
                acc[i] = ptx.exp2(ptx.fma(acc[i], self.factor, added.term(at, shifts[at.i])))
        return softmax.row_sums(acc, *blocks, self.rounds)

    def shift(self, maximum: Float32) -> Float32:
        """Returns what is subtracted from logits in base 2 of a row, given its maximum in units of `full`."""
        return self._raised(maximum * self.unit)

    def _raised(self, shift: Float32) -> Float32:
        """Returns a shift of logits in base 2 less the logarithm of the factor on weights."""
        return shift - float(self.log2_weight) if self.log2_weight else shift

    def edge(
        self, acc: Accumulator, tile: ScoreTile, seen: Sequence[Limits] | Bits | SeenKeys, *, check_low: bool
    ) -> None:
        """Does what `full` does, and puts -inf where a score does not count.

        Args:
            tile: where the accumulator lies.
            seen: the limits of the columns that each of the lane's accumulator rows sees, or bits.
            check_low: whether the lower limit can lie above the first column of a tile.
        """
        self.full(acc, tile)
        self.hide(acc, tile, seen, Float32(float("-inf")), check_low=check_low)

    def hide(
        self,
        acc: Accumulator,
        tile: ScoreTile,
        seen: Sequence[Limits] | Bits | SeenKeys,
        hidden: Float32,
        *,
        check_low: bool,
    ) -> None:
        """Puts `hidden` where a score does not count, in place; see `edge`."""
        if isinstance(seen, Bits | SeenKeys):
            seen.hide(acc, tile, hidden)
        else:
            hide(acc, tile, seen, hidden, check_low=check_low)
        for rule in _each(self.rules, "read", tile):
            for i in range(_size(acc)):
                acc[i] = ptx.where(rule.sees(tile.at(i)), acc[i], hidden)

    # Dropout.

    @property
    def drops(self) -> bool:
        """Whether some feature has the hook `keep`."""
        return bool(_with(self.features, "keep"))

    @property
    def marks(self) -> bool:
        """Whether signs of weights say which are dropped, see `device/kept.py`: no slope is negative then."""
        return self.drops and not any(code.is_steep for code in self.codes)

    @property
    def draws_again(self) -> bool:
        """Whether dropout is drawn again where dP is, since weights have signs of their own."""
        return self.drops and not self.marks

    def keep(self, tile: ScoreTile) -> Keep | None:
        """Returns which weights of a tile have a part in the output, drawn where it is called; None for all."""
        kept = [feature.read(tile) for feature in _with(self.features, "keep")]
        if not kept:
            return None
        return lambda pair: functools.reduce(operator.and_, [feature.keep(tile.at(2 * pair)) for feature in kept])

    def survival(self) -> Float32 | None:
        """Returns the factor on the weights of a query head that are kept; None for 1."""
        factors = [feature.survival() for feature in _with(self.features, "keep")]
        return functools.reduce(operator.mul, factors) if factors else None

    def finish(self, head: Head) -> "Score":
        """Returns the composition with what `finish_row` needs."""
        return replace(self, features=_each(self.features, "end", head))

    def shift_row(self, maximum: Float32, total: Float32, row: Int32) -> tuple[Float32, Float32]:
        """Returns a row's maximum logit in base 2, and its denominator relative to that, before `finish_row`."""
        for feature in _with(self.features, "shift_row"):
            maximum, total = feature.shift_row(maximum, total, row)
        return maximum, total

    def finish_row(self, maximum: Float32, total: Float32) -> tuple[Float32, Float32, Float32]:
        """Returns a row's maximum logit in base 2, its denominator relative to that, and a factor on its output."""
        weight = Float32(1.0)
        for feature in _with(self.features, "finish_row"):
            maximum, total, change = feature.finish_row(maximum, total)
            weight = weight * change
        return maximum, total, weight

    # Backward.

    def logit(self, x: Float32, at: Element) -> Logit:
        """Returns the logit of a product."""
        logit = Logit(x, self.factor)
        for step in self.steps:
            logit = step.logit(logit, at)
        return logit

    def shifted(self, x: Float32, at: Element, less: Float32) -> Logit:
        """Returns the logit of a product in base 2, less a number, if the composition `is_shifted`."""
        logit = Logit(x, self.factor)
        for step in self.steps[:-1]:
            logit = step.logit(logit, at)
        return self.steps[-1].shifted(logit, at, less)

    def differentiate(self, x: Float32, lse2: Float32, change: Float32, at: Element) -> tuple[Float32, Float32]:
        """Returns P of a product, and dS, given dP - delta; see `gradient`, which needs one register more for a cap."""
        probability, slope = self._probability(x, lse2, at)
        dscore = probability * change
        return probability, dscore if slope is None else self.sloped(probability, dscore, slope())

    def gradient(self, x: Float32, lse2: Float32, at: Element, edge: Edge | None = None) -> tuple[Float32, Float32]:
        """Returns P of a product, and its weight; 0 where an edge tile hides them."""
        probability, slope = self._probability(x, lse2, at)
        weight = probability if slope is None else self.sloped(probability, probability, slope())
        return (probability, weight) if edge is None else edge.weigh(probability, weight, at)

    def summed(self, x: Float32, lse2: Float32, at: Element) -> tuple[Float32, Float32]:
        """Returns P of a product, and its weight in the gradient that a kernel of its own sums: see `sums/`."""
        planes = [step for step in self.steps if step.sums_plane]
        if not planes:
            return self.gradient(x, lse2, at)
        (summed,) = planes
        logit, partial = Logit(x, self.factor), Float32(1.0)
        for step in self.steps:
            if step is summed:
                partial = step.partial(logit, at)
            logit = step.logit(logit, at)
            # Steps before the plane are no part of its derivative.
            logit = logit._replace(slopes=()) if step is summed else logit
        less = logit.value - lse2 if logit.factor is None else ptx.fma(logit.value, logit.factor, -lse2)
        probability = ptx.exp2(less)
        weight = self.sloped(probability, probability, partial)
        return probability, self.sloped(probability, weight, logit.slope()) if logit.slopes else weight

    def sloped(self, probability: Float32, x: Float32, slope: Float32) -> Float32:
        """Returns P, or what it is a factor of, times a slope; 0 where P is 0, even if the slope is no number there."""
        if any(feature.has_wild_slopes() for feature in _with(self.features, "has_wild_slopes")):
            return ptx.where(probability == Float32(0.0), Float32(0.0), x * slope)
        return x * slope

    def _probability(self, x: Float32, lse2: Float32, at: Element) -> tuple[Float32, Callable[[], Float32] | None]:
        """Returns P of a product, and the derivative of its logit; None for 1."""
        if self.joins_lse and (added := self.added) is not None:
            # One FFMA computes both, as in `exponentials`.
            return ptx.exp2(ptx.fma(x, self.factor, added.term(at, lse2))), None
        if self.joins_lse and self.is_shifted:
            logit = self.shifted(x, at, lse2)
            return ptx.exp2(logit.value), logit.slope if logit.slopes else None
        logit = self.logit(x, at)
        less = logit.value - lse2 if logit.factor is None else ptx.fma(logit.value, logit.factor, -lse2)
        return ptx.exp2(less), logit.slope if logit.slopes else None

    def edges(self, rows: EdgeRows) -> Edge:
        """Returns what is hidden in an edge tile, given what its rows see."""
        return Edge(rows, self.rules)


def _with(features: tuple[Feature, ...], hook: str) -> tuple[Feature, ...]:
    """Returns the features that define a hook."""
    return tuple(feature for feature in features if feature.defines(hook))


def _each(features: tuple[Feature, ...], hook: str, argument: Any) -> tuple[Feature, ...]:
    """Returns what a hook makes of the features that define it, and the others as they are."""
    return tuple(getattr(feature, hook)(argument) if feature.defines(hook) else feature for feature in features)


def _size(acc: Accumulator) -> int:
    return len(acc) if isinstance(acc, list) else cute.size(acc)
