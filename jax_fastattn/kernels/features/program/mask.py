# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A mask function in the edge tiles of lists, where its bits would take too much memory."""

from dataclasses import dataclass

from cutlass import Boolean

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.features.feature import FeatureArguments
from jax_fastattn.kernels.features.places import Element
from jax_fastattn.kernels.features.program.evaluated import Evaluated
from jax_fastattn.kernels.features.program.forms import register
from jax_fastattn.kernels.features.program.planes import PlaneReader


@dataclass(frozen=True, kw_only=True)
class EdgeProgram(Evaluated):
    """Hides scores by a mask function, see `codes.evaluates_edges`. The prepass knows which tiles have an edge."""

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "EdgeProgram":
        """Returns the function of a launch."""
        (parts,) = code.constants
        return cls(parts=parts, planes=PlaneReader(parts, arguments.buffers.added, arguments.scalars))

    def sees(self, at: Element) -> Boolean:
        """Returns whether a pair counts."""
        return Boolean(register("b", self.values.value(self.parts.code.results[0], at, None)))
