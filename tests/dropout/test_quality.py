# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Statistics of 2^24 decisions of dropout: nothing is seen of their rows, columns, heads and keys."""

from __future__ import annotations

import itertools

import drawn
import jax
import numpy as np
import pytest
import quality

ROWS = 1 << 12
KEYS = {"zero": (0, 0), "seed": (0, 123)}
RATES = [0.1, 0.5]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=KEYS)
def decisions(request: pytest.FixtureRequest) -> np.ndarray:
    return drawn.bits(drawn.numbers(KEYS[request.param], 0, 0), ROWS, ROWS)


def share_of(rate: float) -> float:
    return drawn.threshold(rate) / 2**15


@pytest.mark.parametrize("rate", RATES)
def test_neighbours_are_independent(decisions: np.ndarray, rate: float) -> None:
    dropped, share = decisions < drawn.threshold(rate), share_of(rate)
    found: quality.Figures = {"all": quality.deviation(int(dropped.sum()), dropped.size, share)}
    for axis in range(2):
        sums = dropped.sum(axis, dtype=np.int64)
        expected = ROWS * share * (1 - share)
        found[f"sums over {axis}"] = abs(((sums - ROWS * share) ** 2).mean() / expected - 1) / np.sqrt(2 / ROWS)
    moves = (0, 1, 2, 7, 8, 9, 16, 64, 1024)
    for i, j in itertools.product(moves, moves):
        if i or j:
            found[i, j] = quality.in_common(dropped[: ROWS - i, : ROWS - j], dropped[i:, j:], share)
    quality.assert_clean(found)


@pytest.mark.parametrize("rate", RATES)
def test_tiles_and_waves_are_as_chance_has_them(decisions: np.ndarray, rate: float) -> None:
    dropped, share = decisions < drawn.threshold(rate), share_of(rate)
    found: quality.Figures = {size: quality.tiles(dropped, share, size) for size in (4, 16)}
    quality.assert_clean(found)
    # 1 in 1800 masks of chance has a greater one.
    assert -3 < quality.spectrum(dropped, share) < 7.5


def test_fields_of_words_are_uniform_and_independent(decisions: np.ndarray) -> None:
    quality.assert_clean(quality.fields(decisions))
    for rate in RATES:
        dropped = decisions < drawn.threshold(rate)
        quality.assert_clean(quality.fields_against_fields(dropped, share_of(rate), (0, 1, 2, 8, 512)))


def test_corners_of_rectangles_are_independent(decisions: np.ndarray) -> None:
    moves = (1, 2, 8, 16, 1000)
    found: quality.Figures = {}
    for bit in (14, 13, 0):
        plane = (decisions >> bit & 1).astype(bool)
        for i, j in itertools.product(moves, moves):
            odd = plane[:-i, :-j] ^ plane[i:, :-j] ^ plane[:-i, j:] ^ plane[i:, j:]
            found[bit, i, j] = quality.deviation(np.count_nonzero(odd), odd.size, 0.5)
    quality.assert_clean(found)


def words_of(key: jax.Array) -> tuple[int, ...]:
    return tuple(int(x) for x in jax.random.key_data(key))


# Key and place of a head: its neighbours in the call, and keys that differ in a bit or that users make of another.
HEADS = [((0, 0), 0, n) for n in range(3)] + [((0, 0), b, 0) for b in range(1, 3)]
CLOSE = [((0, 0), 0, 0)] + [((0, 1 << bit), 0, 0) for bit in (0, 17, 31)] + [((1 << bit, 0), 0, 0) for bit in (0, 31)]


@pytest.mark.parametrize("name", ["heads", "bits-of-keys", "fold-in-and-seeds"])
def test_heads_entries_and_close_keys_are_independent(name: str) -> None:
    """Of 2^24 decisions each."""
    key, rate = jax.random.key(7), 0.1
    made = [key, *(jax.random.fold_in(key, i) for i in range(3)), *(jax.random.key(seed) for seed in (8, 9))]
    places = {"heads": HEADS, "bits-of-keys": CLOSE, "fold-in-and-seeds": [(words_of(x), 0, 0) for x in made]}[name]
    threshold = drawn.threshold(rate)
    masks = [drawn.bits(drawn.numbers(*place), ROWS, ROWS) < threshold for place in places]
    quality.assert_clean(quality.pairs(masks, share_of(rate)))


@pytest.mark.parametrize("axis", [0, 1], ids=["queries", "keys"])
def test_a_bit_of_the_counter_flips_half_of_the_bits(axis: int) -> None:
    """Of 2^18 words of random heads, at places below 2^17: 14 bits of the counter."""
    random, count = np.random.default_rng(1), 1 << 18
    places = [random.integers(0, 1 << 14, count, dtype=np.uint64) for _ in range(2)]
    keys = [random.integers(0, 1 << 32, count, dtype=np.uint64) for _ in range(2)]

    def words(*places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return drawn.words(*((x + y) & drawn.LOW for x, y in zip(places, keys, strict=True)))

    found: quality.Figures = {}
    for bit in range(14):
        moved = [x ^ np.uint64(1 << bit) if i == axis else x for i, x in enumerate(places)]
        found[bit] = quality.avalanche(words(*places), words(*moved))
    quality.assert_clean(found)


@pytest.mark.whole
def test_fewer_products_are_noticed() -> None:
    """The tests above mean something: with 3 products of 5."""
    size = 1 << 11
    bits = drawn.bits((0, 0), size, size, skip=True)
    plane = (bits >> 14 & 1).astype(bool)
    odd = plane[:-1, :-1] ^ plane[1:, :-1] ^ plane[:-1, 1:] ^ plane[1:, 1:]
    dropped = bits < drawn.threshold(0.5)
    found = {
        "rectangles": quality.deviation(np.count_nonzero(odd), odd.size, 0.5),
        "fields": max(quality.fields(bits).values()),
        "tiles": quality.tiles(dropped, 0.5, 4),
        "spectrum": quality.spectrum(dropped, 0.5),
    }
    assert min(found.values()) > 2 * quality.LIMIT, found
