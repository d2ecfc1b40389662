# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The soft cap: logits pass through cap * tanh(x / cap)."""

from dataclasses import dataclass

from cutlass import Float32

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.softmax import LN_2, LOG2_E
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.places import Element, Logit


@dataclass(frozen=True)
class SoftCap(Feature):
    """Caps logits. Both passes use one tanh, so that a row of probabilities adds up to 1 at most.

    Attributes:
        factor: the factor of the tanh in what enters the softmax, which is in base 2.
        inner: twice the factor inside of the tanh, in base 2.
        exact: whether `_tanh` computes the tanh, else `_rough_tanh`.
    """

    factor: Float32
    inner: Float32
    exact: bool

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "SoftCap":
        """Returns the cap of a launch."""
        (exact,), cap = code.constants, arguments.scalars.logits_soft_cap
        return cls(cap * LOG2_E, arguments.scale / cap * (2 * LOG2_E), exact)

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the capped logit."""
        del at
        capped = (_tanh if self.exact else _rough_tanh)(x, self.inner)
        return x.then(capped, self.factor, lambda: ptx.fma(-capped, capped, Float32(1.0)))

    def unit(self) -> Float32:
        """Returns the factor of the tanh."""
        return self.factor


def _tanh(x: Logit, inner: Float32) -> Float32:
    """Returns tanh(x * inner / (2 log2(e))) as 1 - 2 / (2^(inner * x) + 1): absolute error 2e-7, two MUFU."""
    return ptx.fma(Float32(-2.0), ptx.reciprocal(ptx.exp2(x.times(inner)) + Float32(1.0)), Float32(1.0))


def _rough_tanh(x: Logit, inner: Float32) -> Float32:
    """Does what `_tanh` does, by one MUFU, with a relative error of 2^-11.

    P at a logit of 8 then has a relative error of 2^-8, as in bfloat16. 1 - tanh^2 has an absolute error of 2^-10.
    Sinks do not use it: their gradient, a sum over all rows, would show that the error is not even.
    """
    return ptx.tanh(x.times(inner * (0.5 * LN_2)))
