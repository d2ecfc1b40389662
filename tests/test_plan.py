# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The tile plan against brute force: every small problem, and integers at the edge of int32."""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
from collections.abc import Callable

import pytest

from jax_fastattn.kernels.tiles.plan import (
    Bounds,
    BoundsKind,
    Limits,
    LiveRange,
    TileRange,
    alike_section,
    place_in_sections,
    section,
)
from jax_fastattn.limits import UNBOUNDED

LENGTHS = range(6)
BOUNDS = (0, 1, 2, 4, UNBOUNDED)
OFFSETS = (-UNBOUNDED, -7, -5, -3, -2, -1, 0, 1, 2, 3, 5, 7, UNBOUNDED)
TILES = (1, 2, 3, 4)
WINDOW = BoundsKind(left=True, right=True)


def visible_bits(query_end: int, key_end: int, offset: int, left: int, right: int) -> list[int]:
    """For each query, the set of keys that it sees as the bits of an integer; the definition in plan.py."""
    return [
        sum(1 << j for j in range(key_end) if i + offset - left <= j <= i + offset + right) for i in range(query_end)
    ]


def transpose(rows: list[int], columns: int) -> list[int]:
    return [sum((row >> j & 1) << i for i, row in enumerate(rows)) for j in range(columns)]


def check(found: TileRange, lines: list[int], length: int, tile: int) -> None:
    """Checks a tile range against the lines (queries, or keys) of one tile, whose bits are its partners."""
    assert 0 <= found.begin <= found.full_begin <= found.full_end <= found.end
    some, all_ = functools.reduce(operator.or_, lines, 0), functools.reduce(operator.and_, lines, (1 << length) - 1)
    bits = (1 << tile) - 1
    count = -(-length // tile)
    touched = [t for t in range(count) if some >> t * tile & bits]
    assert set(touched) <= set(range(found.begin, found.end)), "a visible pair is not visited"
    if touched:
        assert (touched[0], touched[-1] + 1) == (found.begin, found.end), "a tile is visited for nothing"
    else:
        assert found.end == found.begin, "tiles are visited for nothing"
    full = [t for t in range(count) if all_ >> t * tile & bits == bits]
    if lines:
        assert set(range(found.full_begin, found.full_end)) <= set(full), "a tile that needs a mask is called full"
        assert full == list(range(found.full_begin, found.full_end)), "a full tile is masked"


def check_live(found: LiveRange, lines: list[int]) -> None:
    """Checks a live range against the lines, each with the bits of its visible partners."""
    live = [i for i, line in enumerate(lines) if line]
    assert 0 <= found.begin <= found.end <= len(lines)
    assert list(range(found.begin, found.end)) == live


def check_limits(found: Limits, line: int, length: int) -> None:
    """Checks the limits of a row, or of a key, against the bits of its visible partners."""
    assert [i for i in range(length) if found.low <= i < found.high] == [i for i in range(length) if line >> i & 1]


@pytest.mark.parametrize("query_end", LENGTHS)
def test_tiles_match_brute_force(query_end: int) -> None:
    for key_end, offset, left, right in itertools.product(LENGTHS, OFFSETS, BOUNDS, BOUNDS):
        bounds = Bounds(query_end, key_end, offset, left, right, WINDOW)
        rows = visible_bits(query_end, key_end, offset, left, right)
        columns = transpose(rows, key_end)
        check_live(bounds.live_keys(), columns)
        check_live(bounds.live_queries(), rows)
        for row, line in enumerate(rows):
            check_limits(bounds.key_limits(row), line, key_end)
        for key, line in enumerate(columns):
            check_limits(bounds.query_limits(key), line, query_end)
        for size, tile in itertools.product(TILES, TILES):
            # One tile past the end: a grid covers the padded length.
            for start in range(0, query_end + size, size):
                check(bounds.key_tiles(start, size, tile), rows[start : start + size], key_end, tile)
            for start in range(0, key_end + size, size):
                check(bounds.query_tiles(start, size, tile), columns[start : start + size], query_end, tile)


def test_tiles_without_a_window_match_brute_force() -> None:
    for query_end, key_end, size, tile in itertools.product(LENGTHS, LENGTHS, TILES, TILES):
        bounds = Bounds(query_end, key_end, 0, UNBOUNDED, UNBOUNDED, BoundsKind())
        rows = [(1 << key_end) - 1] * query_end
        for start in range(0, query_end + size, size):
            check(bounds.key_tiles(start, size, tile), rows[start : start + size], key_end, tile)


class Int32(int):
    """An integer that refuses to leave int32, as a device integer silently would."""

    def __new__(cls, value: int) -> Int32:
        if not -(1 << 31) <= value < 1 << 31:
            raise OverflowError(value)
        return super().__new__(cls, value)


def _checked(name: str) -> Callable[[Int32, int], Int32]:
    method = getattr(int, name)
    return lambda a, b: Int32(method(a, b))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv"):
    setattr(Int32, f"__{_name}__", _checked(f"__{_name}__"))


@pytest.mark.parametrize(("tiles", "limits"), [
    (Bounds.key_tiles, Bounds.key_limits), (Bounds.query_tiles, Bounds.query_limits),
])  # fmt: skip
def test_plans_raise_nothing_on_integers_that_refuse_to_leave_int32(tiles, limits) -> None:
    with pytest.raises(OverflowError):
        Int32((1 << 31) - 1) + 1
    lengths = (0, 1, 1000, UNBOUNDED)
    widths, offsets = (0, 1000, UNBOUNDED), (-UNBOUNDED, -1000, 0, 1000, UNBOUNDED)
    for query_end, key_end, offset, left, right in itertools.product(lengths, lengths, offsets, widths, widths):
        bounds = Bounds(query_end, key_end, offset, left, right, WINDOW).map(Int32)
        bounds.live_keys(), bounds.live_queries()
        for start in (0, 128, UNBOUNDED - 128):
            tiles(bounds, Int32(start), 128, 64)
            limits(bounds, Int32(start))


def _busy(count: int, heads: int, together: int, multiprocessors: int = 132) -> float:
    """How busy a GPU is whose CTAs, under a causal mask, start by sections of so many heads, longest first."""
    free, work = [0] * multiprocessors, 0
    for first in range(0, heads, together):
        for length in range(count, 0, -1):
            for _ in range(min(together, heads - first)):
                heapq.heapreplace(free, free[0] + length)
                work += length
    return work / multiprocessors / max(free)


@pytest.mark.parametrize(("count", "heads", "least"), [
    (8, 256, 0.97), (32, 64, 0.99), (64, 16, 0.99), (128, 16, 0.99), (64, 17, 0.9), (48, 24, 0.95), (32, 12, 0.9),
    (67, 16, 0.95),
])  # fmt: skip
def test_uneven_sections_keep_the_gpu_busy(count: int, heads: int, least: float) -> None:
    assert _busy(count, heads, section(132, count, heads, 1)) > least


def test_sections_of_any_size() -> None:
    for multiprocessors, count, heads in itertools.product((1, 3, 132), (0, 1, 2, 5, 131, 1000), (0, 1, 2, 7, 600)):
        assert section(multiprocessors, count, heads, 0) == 1
        assert 1 <= section(multiprocessors, count, heads, 1) <= max(heads, 1)


@pytest.mark.parametrize("heads", [1, 2, 5, 7, 64])
@pytest.mark.parametrize("count", [1, 2, 8, 128])
def test_ctas_that_add_in_order_wait_for_earlier_tiles_alone(count: int, heads: int) -> None:
    """Every tile of keys comes once, and those of a head in order: else CTAs could wait for each other for ever."""
    for together in {1, 2, 3, alike_section(32768, 128 * count, heads), heads}:
        order = [place_in_sections(index, together, count, heads) for index in range(count * heads)]
        for head in range(heads):
            assert [tile for tile, owner in order if owner == head] == list(range(count))
        # Zeros come with a head that is `together` heads before: all of its tiles are earlier.
        last = {head: index for index, (_, head) in enumerate(order)}
        assert all(last[head - together] < index for index, (_, head) in enumerate(order) if head >= together)


@pytest.mark.parametrize(("rows", "heads", "together"), [
    (512, 160, 54), (512, 1024, 64), (640, 64, 32), (1024, 16, 16), (1024, 17, 17), (1024, 40, 20), (50000, 7, 1),
    (0, 5, 5), (1, 0, 1),
])  # fmt: skip
def test_sections_of_few_rows_are_alike(rows: int, heads: int, together: int) -> None:
    assert alike_section(32768, rows, heads) == together
