# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The loops of a visit on Python integers: every position once, in order, with a mask where it is not full."""

import itertools
from collections.abc import Iterable, Iterator

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from jax_fastattn.kernels.tiles.lists import DEAD_ROWS, LAST, RANK_SHIFT
from jax_fastattn.kernels.tiles.plan import Order, TileRange
from jax_fastattn.kernels.visits.lists import Planes
from jax_fastattn.kernels.visits.visit import Edges, Phase, Turn, Visit

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


class ListOnHost(list[int]):
    """A list without header, for visits on Python integers."""

    load = list.__getitem__


@pytest.mark.parametrize("fulls_first", [True, False])
def test_a_list_is_visited_from_its_end(fulls_first: bool) -> None:
    for edges, fulls in itertools.product(range(4), repeat=2):
        # Tiles 10, 11, ... are edges, 20, 21, ... are full.
        groups = [[10 + i for i in range(edges)], [20 + i for i in range(fulls)]]
        entries = ListOnHost(itertools.chain(*(groups[::-1] if fulls_first else groups)))
        visit = Visit.listed(entries, edges, fulls, fulls_first=fulls_first)
        positions = visited(visit.phases(Order.DOWN))
        assert [(visit.tile(i), masked) for i, masked in positions] == [(x, x < 20) for x in entries[::-1]]
        assert all(bool(visit.is_edge(i)) == masked for i, masked in positions)
        if entries:
            assert visited(visit.rest(Order.DOWN).phases(Order.DOWN)) == positions[1:]


def test_edges_on_both_sides_of_full_tiles() -> None:
    for first, fulls, last in itertools.product(range(3), repeat=3):
        # Tiles 10, 11, ... are edges, 20, 21, ... are full.
        edges = [10 + i for i in range(first + last)]
        entries = ListOnHost([*edges[:first], *[20 + i for i in range(fulls)], *edges[first:]])
        visit = Visit.listed(entries, first + last, fulls, fulls_first=False, last_edges=last)
        positions = visited(visit.phases(Order.DOWN))
        assert [(visit.tile(i), masked) for i, masked in positions] == [(x, x < 20) for x in entries[::-1]]
        assert all(bool(visit.is_edge(i)) == masked for i, masked in positions)


def _checked(turn: Turn) -> tuple[int, bool, bool]:
    """Returns what comes before, and whether the turn is the first and the last one; checks the opposites."""
    assert (turn.has_earlier, turn.has_later) == (not turn.is_first, not turn.is_last)
    return turn.before, turn.is_first, turn.is_last


def test_what_an_entry_says() -> None:
    entries = ListOnHost([7, 7 | DEAD_ROWS | 3 << RANK_SHIFT, 8 | LAST, 9 | LAST | 1 << RANK_SHIFT])
    visit = Visit.listed(entries, 4, 0, fulls_first=False)
    assert [visit.tile(i) for i in range(4)] == [7, 7, 8, 9]
    assert [visit.has_dead_rows(x) for x in entries] == [False, True, False, False]
    turns = [visit.turn(x, 0, lambda _: pytest.fail("a list knows")) for x in entries]
    wanted = [(0, True, False), (3, False, False), (0, True, True), (1, False, True)]
    assert [_checked(turn) for turn in turns] == wanted


def test_the_turn_in_a_range() -> None:
    visit = Visit.of_range(TileRange(0, 4, 0, 4), Edges(False, False))
    assert _checked(visit.turn(2, 5, lambda tile: TileRange(tile + 1, 7, 0, 0))) == (2, False, False)
    assert _checked(visit.turn(2, 3, lambda tile: TileRange(tile + 1, 4, 0, 0))) == (0, True, True)


def test_a_mirrored_visit_ascends_and_its_turns_descend() -> None:
    visit = Visit.of_range(TileRange(2, 7, 3, 7), Edges(low=True, high=False)).mirrored()
    phases = visit.phases(Order.DOWN)
    found = [(visit.tile(phase.position(i)), phase.masked) for phase in phases for i in range(phase.steps)]
    assert found == [(2, True), (3, False), (4, False), (5, False), (6, False)]
    assert [visit.is_edge(-1 - tile) for tile in range(2, 7)] == [True, False, False, False, False]
    # The tile of queries 3 sees the tiles of keys 0 to 3, of which the last one adds first.
    turns = [visit.turn(-1 - 3, own, lambda tile: TileRange(0, tile + 1, 0, 0)) for own in range(4)]
    assert [_checked(x) for x in turns] == [(3, False, True), (2, False, False), (1, False, False), (0, True, False)]


def test_planes_are_numbered_one_after_another() -> None:
    # Two entries of four query heads and two key/value heads, all with bits of their own.
    planes = Planes(4, 1, 0, 1)
    assert [planes.bits(b, h, h // 2) for b in range(2) for h in range(4)] == list(range(8))
    assert [planes.query_lists(b, k, 2) for b in range(2) for k in range(2)] == list(range(4))
    # The same with bits for each key/value head, and with one plane for each entry.
    assert [Planes(2, 0, 1, 1).bits(b, h, h // 2) for b in range(2) for h in range(4)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [Planes(1, 0, 0, 1).query_lists(b, k, 2) for b in range(2) for k in range(2)] == [0, 0, 1, 1]
    assert planes.row(3, 2, 5) == 17 and Planes(4, 1, 0, 0).row(3, 2, 5) == 3
