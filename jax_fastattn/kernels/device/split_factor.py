# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A left factor of a warpgroup's product in two bfloat16 terms, see `products.Split`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.device import ptx, wgmma

# The products of terms that count, the smallest first.
TERMS = ((0, 1), (1, 0), (0, 0))


@final
@dataclass(frozen=True, eq=False)
class SplitFactor:
    """A left factor with the words of a pair in two registers.

    Attributes:
        fragments: the registers of each term.
        words: the same registers, by pairs.
    """

    product: cute.TiledMma
    fragments: list[cute.Tensor]
    words: list[cute.Tensor]

    @classmethod
    def of(cls, product: cute.TiledMma, shape: tuple[int, int]) -> "SplitFactor":
        """Returns registers for a factor, given its rows and columns."""
        fragments = [wgmma.fragment_a(product, shape, cutlass.BFloat16) for _ in range(2)]
        return cls(product, fragments, [cute.recast_tensor(x, Int32) for x in fragments])

    def put(self, pair: int, word: tuple[Int32, Int32]) -> None:
        """Sets a pair."""
        for own, x in zip(self.words, word, strict=True):
            own[pair] = x

    def copied(self) -> list[tuple[Int32, Int32]]:
        """Returns the pairs in registers of their own."""
        high, low = self.words
        return [(ptx.move(high[i]), ptx.move(low[i])) for i in range(cute.size(high))]

    def multiply(self, acc: cute.Tensor, right: Sequence[cute.Tensor], *, accumulate: bool = True) -> None:
        """Starts three products with the terms of a right factor."""
        factors = [(self.fragments[i], right[j]) for i, j in TERMS]
        steps = [step for left, stage in factors for step in wgmma.steps_of(self.product, left, stage)]
        wgmma.gemm_steps(acc, steps, accumulate=accumulate)
