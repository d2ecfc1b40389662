# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of rows: one number for each query, the same for all keys.

Without a soft cap it changes the log-sum-exp, and so the weight of a sink, but no ratio of the weights of two keys. A
row of -inf sees no key.
"""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.softmax import NEVER
from jax_fastattn.kernels.features.bias.planes import Planes
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.places import Element, Head, Logit, ScoreTile


@dataclass(frozen=True)
class RowShift(Feature):
    """Adds the number of a row to its maximum, when all of its scores are in.

    Attributes:
        operand: see `Buffers.row_bias`.
        plane: the plane of the head; None before `end`.
    """

    operand: cute.Pointer
    planes: Planes
    plane: Any = None

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "RowShift":
        """Returns the bias of a launch."""
        del code
        return cls(arguments.buffers.row_bias, Planes.of(arguments))

    def end(self, head: Head) -> "RowShift":
        """Returns the feature with the plane of a query head."""
        return replace(self, plane=self.planes.vector(self.operand, head))

    def shift_row(self, maximum: Float32, total: Float32, row: Int32) -> tuple[Float32, Float32]:
        """Returns a row's maximum logit in base 2, and its denominator relative to that."""
        shift = self.plane.load(row)
        # A row that sees no key keeps its maximum for any number. In other rows NaN and inf make the denominator NaN.
        hidden = Boolean((shift == Float32(NEVER)) | (total == Float32(0.0)))
        total = ptx.fma(shift, Float32(0.0), total)
        return ptx.where(hidden, Float32(NEVER), maximum + shift), ptx.where(hidden, Float32(0.0), total)


@dataclass(frozen=True)
class RowBias(Feature):
    """Adds the number of its query to each logit, from global memory: what a function of logits needs.

    Attributes:
        operand: see `Buffers.row_bias`.
        plane: the plane of the head; None before `start`.
        kept: the numbers of the lane's two accumulator rows since `hold_queries`; None without it.
        loaded: numbers by the query that they belong to, since `read`.
    """

    operand: cute.Pointer
    planes: Planes
    plane: Any = None
    kept: Any = None
    loaded: Any = None

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "RowBias":
        """Returns the bias of a launch."""
        del code
        return cls(arguments.buffers.row_bias, Planes.of(arguments))

    def start(self, head: Head) -> "RowBias":
        """Returns the feature with the plane of a query head."""
        return replace(self, plane=self.planes.vector(self.operand, head))

    def hold_queries(self, query: Int32) -> "RowBias":
        """Returns the feature with the numbers of a lane's two queries in registers."""
        return replace(self, kept=[self.plane.load(query + 8 * i) for i in range(2)])

    def read(self, tile: ScoreTile) -> "RowBias":
        """Returns the feature for one pass over the scores of a tile."""
        del tile
        return replace(self, loaded=dict(enumerate(self.kept or ())))

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the number of its query."""
        which = at.column if at.tile.transposed else at.i
        if which not in self.loaded:
            self.loaded[which] = self.plane.load(at.query)
        return x.plus(self.loaded[which])
