# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The weights of a tile, from products q . k to the words of the next product.

A kernel makes one of these objects where a tile begins. So what rounds P knows whose weights it rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cutlass import Float32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.kept import keep_pair
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import Factor, FactorWords, LeftFactor, Pair, WarpgroupWords, Words
from jax_fastattn.kernels.features.places import Element, ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.features.visible.row_bits import SeenKeys
from jax_fastattn.kernels.score import Keep, Score
from jax_fastattn.kernels.tiles.plan import Limits


@dataclass(frozen=True, eq=False)
class Weights:
    """Products, logits and P of a tile, one after the other in the same registers.

    Attributes:
        score: maps products to probabilities of the query head.
        tile: where the scores lie.
        acc: their accumulator.
    """

    score: Score
    tile: ScoreTile
    acc: Accumulator

    def full(self) -> None:
        """Turns products into logits, see `Score.full`."""
        self.score.full(self.acc, self.tile)

    def edge(self, seen: Sequence[Limits] | Bits | SeenKeys, *, check_low: bool) -> None:
        """Turns products into logits, and hides what does not count, see `Score.edge`."""
        self.score.edge(self.acc, self.tile, seen, check_low=check_low)

    def hide(self, seen: Sequence[Limits] | Bits | SeenKeys, hidden: Float32, *, check_low: bool) -> None:
        """Puts `hidden` where a score does not count, see `Score.hide`."""
        self.score.hide(self.acc, self.tile, seen, hidden, check_low=check_low)

    def exponentials(self, maxima: Accumulator) -> list[Float32]:
        """Turns products into P, and returns the sums of rows, see `Score.exponentials`."""
        return self.score.exponentials(self.acc, self.tile, maxima)

    def pairs(self, words: Words, keep: Keep | None = None) -> list[Pair]:
        """Returns what all pairs of P become, if they are a list; zeros where `keep` drops them."""
        return [self._pair(words, i, keep) for i in range(len(self.acc) // 2)]

    def keep(self) -> Keep | None:
        """Returns which weights have a part in the output, see `Score.keep`."""
        return self.score.keep(self.tile)

    def weighed_pairs(
        self, words: Words, kept: Words, weigh: Callable[[int, Element], tuple[Float32, Float32]]
    ) -> tuple[list[Pair], list[Pair]]:
        """Returns what all pairs of P become, and pairs of their weights in dS, see `score.py`.

        Args:
            words: what P becomes.
            kept: what weights become.
            weigh: returns P and its weight, given index and place of an element.
        """
        probabilities, weights = [], []
        for i in range(0, cute.size(self.acc), 2):
            pair = [weigh(j, self.tile.at(j)) for j in (i, i + 1)]
            probability, weight = zip(*pair, strict=True)
            probabilities.append(words.pair(*probability))
            weights.append(kept.pair(*weight))
        return probabilities, weights

    def anew(self) -> "Weights":
        """Returns the weights, whose draws the compiler does not know to be the same: it would keep all of them."""
        return replace(self, tile=replace(self.tile, row=ptx.move(self.tile.row))) if self.score.drops else self

    def fragment(self, words: FactorWords, m: int, k: int) -> Factor:
        """Returns what is kept of P of 16 rows and 16 columns, as left factor of a warp's product.

        See `FactorWords.fragment`.
        """
        keep = self.keep()
        return words.fragment(lambda i: self._pair(words, i, keep), self.tile.n_blocks, m, k)

    def _pair(self, words: Words, i: int, keep: Keep | None) -> Pair:
        pair = words.pair(self.acc[2 * i], self.acc[2 * i + 1])
        return pair if keep is None else keep_pair(pair, keep(i))

    def round(self, words: WarpgroupWords, into: LeftFactor, *, floor: bool = False) -> None:
        """Makes what is kept of P the left factor of a warpgroup's product.

        With a `floor` negative numbers become 0.
        """
        keep = self.keep()
        for i in range(cute.size(self.acc) // 2):
            pair = words.pair(self.acc[2 * i], self.acc[2 * i + 1], floor=floor)
            into.put(i, pair if keep is None else keep_pair(pair, keep(i)))
