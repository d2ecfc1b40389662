# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A function of scores or positions as a feature: what a kernel reads for it."""

from dataclasses import dataclass, replace
from typing import Any, Self

from jax_fastattn.kernels.codes import ScoreParts
from jax_fastattn.kernels.features.feature import Feature
from jax_fastattn.kernels.features.places import Head, ScoreTile
from jax_fastattn.kernels.features.program.planes import PlaneReader
from jax_fastattn.kernels.features.program.values import Values


@dataclass(frozen=True, kw_only=True)
class Evaluated(Feature):
    """A function that is evaluated for one score after the other.

    Attributes:
        parts: what is compiled in.
        planes: the planes of the launch, or of the head since `start`.
        of_head: the values that the head alone decides, since `start`.
        values: the values of a pass, since `read`.
    """

    parts: ScoreParts
    planes: PlaneReader
    of_head: Any = None
    values: Any = None

    def start(self, head: Head) -> Self:
        """Returns the function with its numbers of a query head."""
        planes = self.planes.start(head)
        return replace(self, planes=planes, of_head=Values.head(self.parts, planes))

    def read(self, tile: ScoreTile) -> Self:
        """Returns the function for one pass over the scores of a tile."""
        del tile
        return replace(self, values=Values(self.parts, self.planes, self.of_head))
