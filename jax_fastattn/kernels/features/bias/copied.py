# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of pairs, a matrix that is added to the logits, from a tile that the kernel has copied to shared memory."""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Float32, Int32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import SharedTile
from jax_fastattn.kernels.features.bias.pairs import PairBias, total
from jax_fastattn.kernels.features.places import Element, ScoreTile


@dataclass(frozen=True)
class CopiedBias(PairBias):
    """Adds a matrix from a tile `[queries, keys]` of each term, one after the other.

    Attributes:
        address: the address of the lane's first element, of the first term.
        shape: the shape of a term's tile.
        dtype: the dtype of a term.
        terms: their number.
        registers: registers of the lane, by the row and the pair of columns that they belong to, since `read`.
    """

    address: Int32
    shape: SharedTile
    dtype: str
    terms: int
    registers: Any = None

    def read(self, tile: ScoreTile) -> "CopiedBias":
        """Returns the feature for one pass over the scores of a tile, whose rows are queries."""
        assert not tile.transposed
        return replace(self, registers={})

    def value(self, at: Element) -> Float32:
        """Returns the bias of a pair, the sum of its terms."""
        which = at.i, at.column // 2
        if which not in self.registers:
            address = self.address + self.shape.offset(8 * at.i, at.column // 2 * 2)
            words = [ptx.load_shared(address + term * self.shape.nbytes) for term in range(self.terms)]
            self.registers[which] = [ptx.unpack(word, dtype=ptx.MMA_DTYPE[self.dtype]) for word in words]
        return total([pair[at.column % 2] for pair in self.registers[which]])
