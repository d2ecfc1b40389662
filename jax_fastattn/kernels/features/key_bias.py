# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of keys: one number for each key, the same for all queries."""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import cute

from jax_fastattn.kernels.features.feature import Feature
from jax_fastattn.kernels.features.places import Element, Head, Logit, ScoreTile
from jax_fastattn.kernels.features.planes import Planes


@dataclass(frozen=True)
class KeyBias(Feature):
    """Adds the number of its key to each logit, from global memory. Any kernel can have it.

    Attributes:
        operand: see `ForwardBuffers.key_bias`.
        planes: of the bias.
        plane: of the head; None before `start`.
        loaded: numbers by the key that they belong to, since `read`.
    """

    operand: cute.Pointer
    planes: Planes
    plane: Any = None
    loaded: Any = None

    def start(self, head: Head) -> "KeyBias":
        """Returns the feature with the plane of a query head."""
        return replace(self, plane=self.planes.vector(self.operand, head))

    def read(self, tile: ScoreTile) -> "KeyBias":
        """Returns the feature for one pass over the scores of a tile."""
        del tile
        return replace(self, loaded={})

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the number of its key."""
        which = at.i if at.tile.transposed else at.column
        if which not in self.loaded:
            self.loaded[which] = self.plane.load(at.key)
        return x.plus(self.loaded[which])
