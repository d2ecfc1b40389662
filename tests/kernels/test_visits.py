# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The loops of a visit on Python integers: every position once, in order, with a mask where it is not full."""

import itertools
from collections.abc import Iterable, Iterator

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from jax_fastattn.kernels.plan import Order, TileRange
from jax_fastattn.kernels.visits import Edges, Phase, Visit

ENDS = range(2, 7)


def ranges() -> Iterator[TileRange]:
    """Every small range of tiles."""
    for begin, full_begin, full_end, end in itertools.combinations_with_replacement(ENDS, 4):
        yield TileRange(begin, end, full_begin, full_end)


def visited(phases: Iterable[Phase]) -> list[tuple[int, bool]]:
    """Returns positions as the loops visit them, and whether each is masked."""
    return [(phase.position(i), phase.masked) for phase in phases for i in range(phase.steps)]


def expected(tiles: TileRange, order: Order) -> list[tuple[int, bool]]:
    """Returns what a visit of tiles has to be."""
    found = [(i, not tiles.full_begin <= i < tiles.full_end) for i in range(tiles.begin, tiles.end)]
    return found if order is Order.UP else found[::-1]


@pytest.mark.parametrize("order", Order)
def test_loops_visit_each_position_once(order: Order) -> None:
    for tiles in ranges():
        visit = Visit.of_range(tiles, Edges(True, True))
        assert visited(visit.phases(order)) == expected(tiles, order)
        assert [i for i, _ in visited([visit.whole(order)])] == [i for i, _ in expected(tiles, order)]


@pytest.mark.parametrize("order", Order)
def test_the_first_position_is_taken_apart(order: Order) -> None:
    for tiles in ranges():
        if tiles.begin < tiles.end:
            rest = Visit.of_range(tiles, Edges(True, True)).rest(order)
            assert visited(rest.phases(order)) == expected(tiles, order)[1:]


@pytest.mark.parametrize("order", Order)
def test_an_edge_that_cannot_be_has_no_loop(order: Order) -> None:
    for tiles in ranges():
        low, high = tiles.full_begin > tiles.begin, tiles.full_end < tiles.end
        visit = Visit.of_range(tiles, Edges(low, high))
        phases = visit.phases(order)
        assert len(phases) == 1 + low + high and visited(phases) == expected(tiles, order)
        if tiles.begin < tiles.end:
            assert visited(visit.rest(order).phases(order)) == expected(tiles, order)[1:]


def test_the_high_edge_may_be_in_the_tile_taken_apart() -> None:
    for tiles in ranges():
        if tiles.begin < tiles.end and tiles.full_end >= tiles.end - 1:
            visit = Visit.of_range(tiles, Edges(True, True), masks_high=False)
            assert visited(visit.rest(Order.DOWN).phases(Order.DOWN)) == expected(tiles, Order.DOWN)[1:]
