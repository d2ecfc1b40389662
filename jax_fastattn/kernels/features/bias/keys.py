# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of keys: one number for each key, the same for all queries."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.features.bias.planes import Planes
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.places import Element, Head, Logit, ScoreTile
from jax_fastattn.kernels.tiles.plan import LiveRange


@dataclass(frozen=True)
class KeyBias(Feature):
    """Adds the number of its key to each logit, from global memory. Any kernel can have it.

    Attributes:
        operand: see `Buffers.key_bias`.
        plane: the plane of the head; None before `start`.
        own: numbers of the lane's two keys since `hold`, where rows of the accumulator are keys.
        loaded: numbers by the key that they belong to, since `read`.
    """

    # It hides scores by -inf.
    hides_in_full: ClassVar[bool] = True

    operand: cute.Pointer
    planes: Planes
    plane: Any = None
    own: Any = None
    loaded: Any = None

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "KeyBias":
        """Returns the bias of a launch."""
        del code
        return cls(arguments.buffers.key_bias, Planes.of(arguments))

    def start(self, head: Head) -> "KeyBias":
        """Returns the feature with the plane of a query head."""
        return replace(self, plane=self.planes.vector(self.operand, head))

    def hold(self, key: Int32, live: LiveRange) -> "KeyBias":
        """Returns the feature with the numbers of two keys; 0 for a key that no query sees, even if its number differs.

        Rows past the last query see such a key, too; there the statistics alone make P 0.
        """
        own = []
        for i in range(2):
            index = key + 8 * i
            is_live = Boolean((index >= live.begin) & (index < live.end))
            own.append(ptx.where(is_live, self.plane.load(index), Float32(0.0)))
        return replace(self, own=tuple(own))

    def read(self, tile: ScoreTile) -> "KeyBias":
        """Returns the feature for one pass over the scores of a tile."""
        del tile
        return replace(self, loaded={} if self.own is None else dict(enumerate(self.own)))

    def term(self, at: Element, less: Float32) -> Float32:
        """Returns the number of a key, less another one."""
        return self._value(at) - less

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the number of its key."""
        return x.plus(self._value(at))

    def _value(self, at: Element) -> Float32:
        """Returns the number of a key."""
        which = at.i if at.tile.transposed else at.column
        if which not in self.loaded:
            self.loaded[which] = self.plane.load(at.key)
        return self.loaded[which]
