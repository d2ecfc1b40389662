# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles a kernel visits, which of them need a mask, which rows are live, and what runs together.

One plan serves forward, dq and dkdv.

Key j is visible to query i when

    i < query_end   and   j < key_end   and   i + offset - left <= j <= i + offset + right

An unlimited bound is passed as `UNBOUNDED`. Every function runs on Python integers as well as on device integers
(tests compare it with brute-force masks), so it is written with `+ - * // min max` and nothing else.
Widths and offsets are clamped by the caller to +-UNBOUNDED, so that no sum here leaves int32.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

Int = Any  # a Python int or a device integer


class TileRange(NamedTuple):
    """Half-open tile ranges: visit [begin, end); of these, [full_begin, full_end) needs no mask.

    `full_begin <= full_end` always holds and both lie inside [begin, end]; an empty visit has begin == end.
    """

    begin: Int
    end: Int
    full_begin: Int
    full_end: Int


class Order(enum.Enum):
    """In which direction tiles are visited."""

    UP = enum.auto()
    DOWN = enum.auto()


class LiveRange(NamedTuple):
    """A half-open range of rows, [begin, end) with begin <= end; empty where they are equal.

    Attributes:
        begin: the first row.
        end: the row after the last one.
        hides_first: whether there may be rows before the first one; known when a kernel is compiled.
    """

    begin: Int
    end: Int
    hides_first: bool = False


class Limits(NamedTuple):
    """What one row, or one key, sees: [low, high), which is empty where low >= high; low may be negative."""

    low: Int
    high: Int


def _clamp(x: Int, low: Int, high: Int) -> Int:
    return min(max(x, low), high)


def _tiles(first: Int, last: Int, full_first: Int, full_last: Int, tile: int) -> TileRange:
    """Turns element ranges [first, last) and [full_first, full_last), all >= 0, into tile ranges."""
    begin = first // tile
    end = begin + ((last + tile - 1) // tile - begin) * _clamp(last - first, 0, 1)
    full_begin = _clamp((full_first + tile - 1) // tile, begin, end)
    full_end = _clamp(full_last // tile, full_begin, end)
    return TileRange(begin, end, full_begin, full_end)


def _live(first: Int, last: Int, end: Int, others: Int, hides_first: bool) -> LiveRange:
    """Returns the elements [first, last) of [0, end), none where there are no `others` to see or be seen by."""
    begin = _clamp(first, 0, end)
    return LiveRange(begin, begin + (_clamp(last, begin, end) - begin) * _clamp(others, 0, 1), hides_first)


@dataclass(frozen=True)
class BoundsKind:
    """Which bounds there are, as far as a kernel knows when it is compiled.

    Attributes:
        left, right: whether the window has that bound; causal is a right bound of 0.
        query_end, key_end: whether sequences may be shorter than the arrays.
        offset: whether there are offsets.
        packed: whether rows belong to packed sequences.
        rules: whether a feature hides scores one by one, so that no tile is full.
        listed: whether lists stand for all bounds, see `lists.py`.
    """

    left: bool = False
    right: bool = False
    query_end: bool = False
    key_end: bool = False
    offset: bool = False
    packed: bool = False
    rules: bool = False
    listed: bool = False

    @property
    def has_window(self) -> bool:
        """Whether the window has a bound; else each query sees all keys, padding apart."""
        return self.left or self.right

    @property
    def hides_first_keys(self) -> bool:
        """Whether there may be keys before those that some query sees."""
        return self.left and self.offset

    @property
    def hides_keys(self) -> bool:
        """Whether there may be keys that no query sees."""
        return self.hides_first_keys or self.hides_last_keys

    @property
    def hides_last_keys(self) -> bool:
        """Whether there may be keys after those that some query sees."""
        return self.right or self.key_end or self.packed

    @property
    def hides_first_queries(self) -> bool:
        """Whether there may be queries before those that see some key."""
        return self.right and self.offset

    @property
    def hides_last_queries(self) -> bool:
        """Whether there may be queries after those that see some key."""
        return self.left or self.query_end or self.packed

    @property
    def hides_queries(self) -> bool:
        """Whether there may be queries that see no key."""
        return self.hides_first_queries or self.hides_last_queries

    @property
    def later_keys_have_fewer_queries(self) -> bool:
        """Whether tiles of keys of a sequence are visited by fewer tiles of queries the later they come."""
        return self.right and not (self.left or self.packed)

    @property
    def one_sided_window(self) -> bool:
        """Whether some tiles see much more than others: the window has one bound, or lists may say so."""
        return self.listed or self.left != self.right


@dataclass(frozen=True)
class Bounds:
    """What the queries and the keys of a sequence may see of each other: the definition above.

    Attributes:
        query_end: queries from there on are padding.
        key_end: keys from there on are padding.
        offset: the offset of the diagonal: query i is at the position of key i + offset.
        left: how many keys before its position a query sees.
        right: how many keys after its position a query sees.
        kind: what a kernel knows of them when it is compiled.
    """

    query_end: Int
    key_end: Int
    offset: Int
    left: Int
    right: Int
    kind: BoundsKind = BoundsKind()

    def key_tiles(self, row: Int, rows: int, tile: int) -> TileRange:
        """Returns the key tiles of size `tile` that the query rows [row, row + rows) visit.

        A tile is full when every key of it is visible to every row of the tile below `query_end`; rows from there on
        are padding whose results the kernel discards.
        """
        if not self.kind.has_window:
            # This case is apart because short calls feel the instructions of the general case.
            begin, full_end = row * 0, self.key_end // tile
            end = (self.key_end + tile - 1) // tile * _clamp(self.query_end - row, 0, 1)
            return self._classified(TileRange(begin, end, begin, min(full_end, end)))
        last_row = max(min(row + rows, self.query_end) - 1, row)
        first = _clamp(row + self.offset - self.left, 0, self.key_end)
        last = _clamp(last_row + self.offset + self.right + 1, first, self.key_end)
        last = first + (last - first) * _clamp(self.query_end - row, 0, 1)
        full_first = _clamp(last_row + self.offset - self.left, 0, self.key_end)
        full_last = _clamp(row + self.offset + self.right + 1, 0, self.key_end)
        return self._classified(_tiles(first, last, full_first, full_last, tile))

    def query_tiles(self, column: Int, columns: int, tile: int) -> TileRange:
        """Returns the query tiles of size `tile` that see the keys [column, column + columns).

        The transpose of `key_tiles`. A tile is full when every key of the tile below `key_end` is visible to every row
        of it; columns from there on are padding whose gradients the kernel discards.
        """
        last_column = max(min(column + columns, self.key_end) - 1, column)
        first = _clamp(column - self.offset - self.right, 0, self.query_end)
        last = _clamp(last_column - self.offset + self.left + 1, first, self.query_end)
        last = first + (last - first) * _clamp(self.key_end - column, 0, 1)
        full_first = _clamp(last_column - self.offset - self.right, 0, self.query_end)
        full_last = _clamp(column - self.offset + self.left + 1, 0, self.query_end)
        return self._classified(_tiles(first, last, full_first, full_last, tile))

    def live_keys(self) -> LiveRange:
        """Returns the keys that some query sees. A kernel multiplies no other row of K and V by anything."""
        first, last = self.offset - self.left, self.query_end + self.offset + self.right
        return _live(first, last, self.key_end, self.query_end, self.kind.hides_first_keys)

    def live_queries(self) -> LiveRange:
        """Returns the queries that see some key: the transpose of `live_keys`."""
        first, last = -self.offset - self.right, self.key_end - self.offset + self.left
        return _live(first, last, self.query_end, self.key_end, self.kind.hides_first_queries)

    def key_limits(self, row: Int) -> Limits:
        """Returns the keys that query `row` sees."""
        position = row + self.offset
        return Limits(position - self.left, min(position + self.right + 1, self.key_end))

    def query_limits(self, key: Int) -> Limits:
        """Returns the queries that see `key`: the transpose of `key_limits`."""
        position = key - self.offset
        return Limits(position - self.right, min(position + self.left + 1, self.query_end))

    def map(self, change: Callable[[Int], Int]) -> Bounds:
        """Returns the bounds with every number changed."""
        numbers = [change(getattr(self, field.name)) for field in fields(self) if field.name != "kind"]
        return type(self)(*numbers, self.kind)

    def _classified(self, tiles: TileRange) -> TileRange:
        """Returns tiles of which none is full if a feature hides scores one by one."""
        return tiles._replace(full_begin=tiles.begin, full_end=tiles.begin) if self.kind.rules else tiles


def section(multiprocessors: Int, count: Int, heads: Int, one_sided_window: int) -> Int:
    """Returns how many heads run together: their first tiles, then their second ones, and so on.

    Tiles of equal length run head by head. Under a one-sided window (a causal mask) the longest should start first: a
    section then has as many heads as fill the GPU, at least two. If a smaller section is left over, or if there are few
    sections, the longest tiles of the last one would begin when nothing is left to run concurrently: then sections fill
    the GPU twice, and are alike.

    Args:
        multiprocessors: multiprocessors of the GPU, which are the CTAs that run at a time.
        count: tiles of a head.
        heads: all heads of all batch entries.
        one_sided_window: 1 if the window has one bound, so that the tiles of a head differ in length, else 0.
    """
    count, heads = max(count, 1), max(heads, 1)
    wave = min(max(multiprocessors // count, 2), heads)
    differs = min(heads - heads // wave * wave + max(16 - heads // wave, 0), 1)
    most = max(min(2 * multiprocessors // count, heads), 1)
    sections = max(heads // most, 1)
    alike = (heads + sections - 1) // sections
    return 1 + one_sided_window * (wave + differs * (alike - wave) - 1)


def alike_section(most_rows: Int, rows: Int, heads: Int) -> Int:
    """Returns the heads of sections that are alike and have `most_rows` rows at most, or one head.

    Args:
        most_rows: rows of a section.
        rows: rows of a head.
        heads: all heads of all batch entries.
    """
    most = max(most_rows // max(rows, 1), 1)
    sections = max((heads + most - 1) // most, 1)
    return max((heads + sections - 1) // sections, 1)


def section_rows(nbytes: int, head_dim: int, v_head_dim: int) -> int:
    """Returns how many rows of Q, dO and float32 sums of dq take `nbytes` bytes."""
    return nbytes // (2 * (head_dim + v_head_dim) + 4 * head_dim)


def place_in_sections(index: Int, section: Int, count: Int, heads: Int) -> tuple[Int, Int]:
    """Returns the tile and the head of an index in the order in which tiles are begun.

    Heads come in sections (`section`). In a section the first tile of every head comes first, then the second: the
    longest can start first, and tiles that run together read the same operands. The tiles of one head are begun in
    ascending order, on which CTAs that add in semaphore order rely.

    Args:
        index: the index of the CTA, or in the order.
        section: heads of a section.
        count: tiles of a head.
        heads: all heads of all batch entries.
    """
    first_head = index // (section * count) * section
    together = min(section, heads - first_head)
    index = index - first_head * count
    return index // together, first_head + index % together
