# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""How key tiles are dealt to CTAs, compared with a list of all tiles."""

from __future__ import annotations

import itertools

import pytest

from jax_fastattn.kernels.decode.split import heads_side_by_side, owner, portion_end, portions, share


@pytest.mark.parametrize("ctas", [1, 2, 3, 7, 132])
def test_each_tile_belongs_to_one_cta_and_no_share_is_two_tiles_longer_than_another(ctas: int) -> None:
    for total in [*range(40), 131, 132, 133, 500]:
        shares = [share(cta, ctas, total) for cta in range(ctas)]
        tiles = [tile for begin, end in shares for tile in range(begin, end)]
        assert tiles == list(range(total))
        lengths = [end - begin for begin, end in shares]
        assert max(lengths) - min(lengths) <= 1
        assert all(shares[owner(tile, ctas, total)][0] <= tile < shares[owner(tile, ctas, total)][1] for tile in tiles)


@pytest.mark.parametrize("lengths", [[5, 0, 1, 8, 0], [3], [1] * 30, [40, 2, 40]])
@pytest.mark.parametrize("ctas", [1, 3, 8])
def test_a_cta_has_two_partial_results_at_most(lengths: list[int], ctas: int) -> None:
    """One of a unit that it begins and does not end, and one of a unit that it did not begin."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    for cta in range(ctas):
        begin, end = share(cta, ctas, ends[-1])
        partial = []
        for length, unit_end in zip(lengths, ends, strict=True):
            first, last = max(begin, unit_end - length), min(end, unit_end)
            if first < last and last - first < length:
                partial.append(first == unit_end - length)
        assert len(set(partial)) == len(partial)


@pytest.mark.parametrize("tiles", [1, 4, 5, 8, 13])
@pytest.mark.parametrize("portion", [1, 4, 32])
def test_portions_follow_each_other_from_the_first_tile_of_a_unit(tiles: int, portion: int) -> None:
    ends = sorted({portion_end(tile, tiles, portion) for tile in range(tiles)})
    assert ends == [*range(portion, tiles, portion), tiles]
    assert portions(tiles, portion) == len(ends)
    assert all(portion_end(tile, tiles, portion) == next(end for end in ends if tile < end) for tile in range(tiles))
    assert portions(0, portion) == 0


@pytest.mark.parametrize(
    ("heads", "ctas", "wanted"),
    [(8, 132, 8), (4, 132, 4), (8, 108, 8), (7, 132, 1), (32, 132, 32), (40, 132, 10), (8, 3, 1), (1, 1, 1)],
)
def test_as_many_heads_are_read_side_by_side_as_leave_few_ctas_without_work(heads: int, ctas: int, wanted: int) -> None:
    assert heads_side_by_side(heads, ctas) == wanted


def test_more_heads_side_by_side_would_not_divide_or_leave_many_ctas_without_work() -> None:
    for heads, ctas in itertools.product(range(1, 41), range(1, 140)):
        found = heads_side_by_side(heads, ctas)
        allowed = [n for n in range(1, heads + 1) if heads % n == 0 and 25 * (ctas % n) <= ctas]
        assert found == allowed[-1], (heads, ctas)
