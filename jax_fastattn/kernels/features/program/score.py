# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A score function as a feature: of any kind, or one that adds a term to the score."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Float32

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.softmax import LN_2, LOG2_E
from jax_fastattn.kernels.features.feature import FeatureArguments
from jax_fastattn.kernels.features.places import Element, Logit
from jax_fastattn.kernels.features.program.evaluated import Evaluated
from jax_fastattn.kernels.features.program.forms import Line, Scaled, add, register
from jax_fastattn.kernels.features.program.planes import PlaneReader
from jax_fastattn.programs import analysis

# In the backward pass a logit is at most this, in base 2, and never NaN. A row without weights subtracts infinity from
# it, which makes P 0 wherever it is evaluated. Other rows subtract a log-sum-exp that is NaN if one of its scores is.
_MOST = 1e30


@dataclass(frozen=True, kw_only=True)
class _Program(Evaluated):
    """A score function of a launch.

    Attributes:
        finite_score: whether what the function gets is a finite number, even past the end of the sequence.
        packed: whether rows are those of packed sequences.
        bounds_logits: whether logits have to be made numbers, see `_MOST`.
        summed: the plane whose gradient is summed; None if none is.
    """

    finite_score: bool
    packed: bool
    bounds_logits: bool
    summed: int | None = None

    # Whether more than a sum depends on the score.
    _reads_score: ClassVar[bool] = True

    @property
    def hides_in_full(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] (one launch may, another not)
        """Whether a score may become -inf."""
        return analysis.may_hide(self.parts.code)

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "_Program":
        """Returns the function of a launch."""
        (parts,) = code.constants
        spec = arguments.spec
        finite_score = spec.bias is None or not cls._reads_score
        bounds = spec.op == "backward" and not parts.is_tame(0, finite_score=finite_score, packed=spec.packed)
        planes = PlaneReader(parts, arguments.buffers.added, arguments.scalars)
        return cls(
            parts=parts,
            planes=planes,
            finite_score=finite_score,
            packed=spec.packed,
            bounds_logits=bounds,
            summed=spec.dplane,
        )

    @property
    def sums_plane(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] (as above)
        """Whether the gradient of a plane is summed."""
        return self.summed is not None

    def partial(self, x: Logit, at: Element) -> Float32:
        """Returns the derivative of the new score by a number of the summed plane."""
        assert self.summed is not None
        return register("f", self.values.value(self.parts.code.results[2 + self.summed], at, _score(x)))

    def has_wild_slopes(self) -> bool:
        """Returns whether a derivative may be no number where P is 0."""
        results = [1] if self.summed is None else [1, 2 + self.summed]
        known = {"finite_score": self.finite_score, "packed": self.packed}
        return not all(self.parts.is_tame(result, **known) for result in results)

    def _bounded(self, x: Any) -> Float32:
        x = register("f", x)
        return -ptx.maximum(-x, Float32(-_MOST)) if self.bounds_logits else x


def _score(x: Logit) -> Scaled:
    """Returns what a logit in base 2 is as a score."""
    return Scaled(x.value, Float32(LN_2) if x.factor is None else x.factor * LN_2)


@dataclass(frozen=True)
class ScoreProgram(_Program):
    """Replaces a score by a function of it."""

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit of the new score."""
        score = _score(x)
        value, factor = self.parts.factored
        if factor is None:
            found, unit = self._bounded(self.values.times(value, LOG2_E, at, score)), None
        else:
            found, unit = self._bounded(self.values.value(value, at, score)), Float32(factor * LOG2_E)
        return Logit(found, unit, self._slopes(x, at))

    def _slopes(self, x: Logit, at: Element) -> tuple[Callable[[], Float32], ...]:
        """Returns `Logit.slopes` of the new score."""
        if self.parts.slope_is_one:
            return x.slopes
        slope, score = self.parts.code.results[1], _score(x)
        return (*x.slopes, lambda: register("f", self.values.value(slope, at, score)))

    def unit(self) -> Float32:
        """Returns the last factor of the function, if it is known."""
        _, factor = self.parts.factored
        return Float32(1.0 if factor is None else factor * LOG2_E)


@dataclass(frozen=True)
class ShiftedProgram(ScoreProgram):
    """Replaces a score by a function of it whose last factor is not known."""

    def shifted(self, x: Logit, at: Element, less: Float32) -> Logit:
        """Returns the logit of the new score in base 2, less a number."""
        result = self.parts.code.results[0]
        if self.bounds_logits:
            logit = self.logit(x, at)
            return logit._replace(value=logit.value - less)
        found = Logit(register("f", self.values.less(result, at, _score(x), less)), None)
        return found._replace(slopes=self._slopes(x, at))


@dataclass(frozen=True)
class TermProgram(_Program):
    """Adds a term to a score, which does not depend on it."""

    _reads_score: ClassVar[bool] = False

    def term(self, at: Element, less: Float32) -> Float32:
        """Returns the term in base 2, less a number."""
        x = self._term(at)
        if self.bounds_logits:
            return self._bounded(x) - less
        if isinstance(x, Line):
            return register("f", Line(x.base - less, x.slope, x.step))
        return register("f", add(x, -less))

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the term."""
        return x.plus(self._bounded(self._term(at)))

    def _term(self, at: Element) -> Any:
        found: Any = None
        for sign, i in self.parts.terms:
            x = self.values.times(i, sign * LOG2_E, at, None)
            found = x if found is None else add(found, x)
        return found
