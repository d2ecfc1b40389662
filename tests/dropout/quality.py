# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Statistics of what dropout draws, in NumPy: each figure is a deviation in units of its standard deviation.

Tests ask for figures below `LIMIT`. Chance gives a greatest one of about 4 among a few thousand figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

Figures = dict[object, float]
LIMIT = 5.0


def deviation(agreements: int, count: int, share: float) -> float:
    """Of a count of events that each happen with the probability `share`."""
    return abs(agreements - count * share) / math.sqrt(count * share * (1 - share))


def in_common(x: np.ndarray, y: np.ndarray, share: float) -> float:
    """Of the count of pairs that both masks drop, given how many each drops."""
    return abs(np.count_nonzero(x & y) - x.size * x.mean() * y.mean()) / (share * (1 - share) * math.sqrt(x.size))


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    freedom = counts.size - 1
    return abs(float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def fields(bits: np.ndarray) -> Figures:
    """Each of the four fields of words: all values, and the bytes at both ends, are equally frequent."""
    found: Figures = {}
    for (name, field), (end, shift, width) in itertools.product(
        parts(bits).items(), (("all", 0, 15), ("low", 0, 8), ("high", 7, 8))
    ):
        counts = np.bincount((field.ravel() >> shift) & ((1 << width) - 1), minlength=1 << width)
        found[name, end] = chi_square(counts, field.size / counts.size)
    return found


def fields_against_fields(dropped: np.ndarray, share: float, moves: Iterable[int]) -> Figures:
    """Each field of the words drops as often as it should where another field drops, in words at some distance."""
    masks, found = parts(dropped), {}
    moves = [*moves]
    for ((a, x), (b, y)), i, j in itertools.product(itertools.combinations(masks.items(), 2), moves, moves):
        rows, columns = (size - move for size, move in zip(x.shape, (i, j), strict=True))
        found[a, b, i, j] = in_common(x[:rows, :columns], y[i:, j:], share)
    return found


def parts(decisions: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """The four pairs of each word, by half of its block: `[words of queries, words of keys]`."""
    rows, columns = (size // 16 for size in decisions.shape)
    blocks = decisions.reshape(rows, 2, 8, columns, 2, 8)
    return {(a, b): blocks[:, a, :, :, b].reshape(8 * rows, 8 * columns) for a in range(2) for b in range(2)}


def tiles(dropped: np.ndarray, share: float, size: int) -> float:
    """Counts in square tiles are binomial."""
    rows, columns = (x // size for x in dropped.shape)
    counts = dropped.reshape(rows, size, columns, size).sum((1, 3), dtype=np.int64)
    n = size**2
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)]
    chances = [math.exp(c + i * math.log(share) + (n - i) * math.log1p(-share)) for i, c in enumerate(logs)]
    expected = np.array(chances) * counts.size
    common = expected > 20  # of others chi-square says little
    return chi_square(np.bincount(counts.ravel(), minlength=n + 1)[common], expected[common])


def spectrum(dropped: np.ndarray, share: float) -> float:
    """The greatest power of a wave, less the logarithm of how many there are: chance gives -2 to 5."""
    powers = np.abs(np.fft.rfft2(dropped - np.float32(share))) ** 2 / (dropped.size * share * (1 - share))
    powers[0, 0] = 0
    return float(powers.max() - math.log(powers.size))


def pairs(masks: Sequence[np.ndarray], share: float) -> Figures:
    """Masks of several heads or keys have nothing in common."""
    return {(a, b): in_common(masks[a], masks[b], share) for a, b in itertools.combinations(range(len(masks)), 2)}


def avalanche(words: tuple[np.ndarray, np.ndarray], changed: tuple[np.ndarray, np.ndarray]) -> float:
    """The greatest figure of a bit of the words: half of them flip where a bit of the counter does."""
    flips = [
        deviation(np.count_nonzero((x ^ y) >> np.uint64(bit) & np.uint64(1)), x.size, 0.5)
        for x, y in zip(words, changed, strict=True)
        for bit in range(32)
        if bit % 16 != 15
    ]
    return max(flips)


def assert_clean(found: Figures) -> None:
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < LIMIT, (worst, found[worst])
