# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of pairs, a matrix that is added to the logits. Subclasses say where it is read from."""

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Float32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.features.feature import Feature
from jax_fastattn.kernels.features.places import Element, Logit


@dataclass(frozen=True)
class PairBias(Feature):
    """Adds the number of its pair to each logit."""

    # It hides scores by -inf.
    hides_in_full: ClassVar[bool] = True

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the bias of its pair."""
        return x.plus(self.value(at) * LOG2_E)

    def term(self, at: Element, less: Float32) -> Float32:
        """Returns the bias of a pair in base 2, less a number."""
        return ptx.fma(self.value(at), Float32(LOG2_E), -less)

    def value(self, at: Element) -> Float32:
        """Returns the bias of a pair, the sum of its terms."""
        raise NotImplementedError


def total(terms: list[Float32]) -> Float32:
    """Returns the sum of terms."""
    first, *others = terms
    for other in others:
        first = first + other
    return first
