# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What is hidden in a tile that has an edge of what is visible."""

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass import Float32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.features.feature import Feature
from jax_fastattn.kernels.features.places import Element
from jax_fastattn.kernels.features.visible.bits import BitRow, LiveColumns, LiveRow
from jax_fastattn.kernels.features.visible.bounds import Visibility

EdgeRows = Sequence[Visibility] | Sequence[BitRow] | Sequence[LiveRow] | Sequence[LiveColumns]


@dataclass(eq=False)
class Edge:
    """What is hidden in an edge tile.

    Attributes:
        rows: what each of the lane's accumulator rows sees: by its limits, by bits, or by what is live.
        rules: features that hide scores.
    """

    rows: EdgeRows
    rules: tuple[Feature, ...]
    _are_read: bool = False

    def select(self, x: Float32, at: Element) -> Float32:
        """Returns x where the score counts, else 0. It is a select, not a product: a hidden value may be no number."""
        if not self._are_read:
            # All scores are of one tile.
            self.rules = tuple(x.read(at.tile) if x.defines("read") else x for x in self.rules)
            self._are_read = True
        x = self.rows[at.i].select(x, at.column)
        for rule in self.rules:
            x = ptx.where(rule.sees(at), x, Float32(0.0))
        return x

    def weigh(self, probability: Float32, weight: Float32, at: Element) -> tuple[Float32, Float32]:
        """Returns P and its weight where the score counts, else 0."""
        seen = self.select(probability, at)
        return seen, seen if weight is probability else self.select(weight, at)
