# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The rule by which the prepass makes lists of tiles, on Python integers: what tests compare its lists with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_fastattn.kernels.tiles.lists import DEAD_ROWS, RANK_MASK, RANK_SHIFT, TILE_MASK, PrepassConfig


class Entry(NamedTuple):
    """An entry of a list, on Python integers.

    Attributes:
        tile: the visited tile.
        has_dead_rows: see `DEAD_ROWS`.
        rank: see `RANK_SHIFT`; 0 in key lists.
        is_last: see `LAST`; False in key lists.
    """

    tile: int
    has_dead_rows: bool
    rank: int = 0
    is_last: bool = False

    @classmethod
    def of(cls, word: int) -> Entry:
        """Reads an entry off its word."""
        return cls(word & TILE_MASK, bool(word & DEAD_ROWS), word >> RANK_SHIFT & RANK_MASK, word < 0)


@dataclass(frozen=True)
class TileList:
    """A list, on Python integers.

    Attributes:
        edges, fulls: its entries, ascending.
        live: for each own row that exists, whether it sees something.
    """

    edges: list[Entry]
    fulls: list[Entry]
    live: list[bool]

    def last_edges(self, config: PrepassConfig) -> int:
        """Returns how many edge tiles come after the full ones."""
        if not config.transposed:
            return len(self.edges)
        last = max((entry.tile for entry in self.fulls), default=-1)
        return sum(entry.tile > last for entry in self.edges) if config.splits_edges else 0

    def entries(self, config: PrepassConfig) -> list[Entry]:
        """Returns the entries in the order of the list."""
        first = len(self.edges) - self.last_edges(config)
        return [*self.edges[:first], *self.fulls, *self.edges[first:]]


# A matrix [queries, keys] of booleans, of Python or of numpy.
Seen = Any


def classify(config: PrepassConfig, planes: Sequence[Seen], query_end: int | None = None) -> list[TileList]:
    """Returns the list of each own tile: the rule that the prepass implements.

    Args:
        config: sizes of the tiles.
        planes: what is visible, for each of the heads that share lists; a tile is full if it is in all of them.
        query_end: queries from there on are padding, whose results key-list kernels discard: they make no tile an edge
            there. Query lists hide them.
    """
    sees = [[list(map(bool, row)) for row in plane] for plane in planes]
    end = len(sees[0]) if query_end is None else query_end
    hidden = [[row if i < end else [False] * len(row) for i, row in enumerate(plane)] for plane in sees]
    length = len(sees[0]) if config.transposed else end
    if config.transposed:
        sides = [[list(column) for column in zip(*plane, strict=True)] for plane in hidden]
        lists = [_tile_list(config, sides, first, length) for first in range(0, len(sides[0]), config.own)]
        return [_ranked(lists, i) for i in range(len(lists))]
    return [_tile_list(config, hidden, first, length) for first in range(0, len(hidden[0]), config.own)]


def _tile_list(config: PrepassConfig, planes: Sequence[Seen], first: int, queries: int) -> TileList:
    """Returns the list of the own tile with a first row; `planes` are `[own, visited]`."""
    rows = [plane[first : first + config.own] for plane in planes]
    edges, fulls, size = [], [], config.visited
    for tile, start in enumerate(range(0, len(planes[0][0]), size)):
        blocks = [[row[start : start + size] for row in plane] for plane in rows]
        if not any(any(map(any, block)) for block in blocks):
            continue
        # Queries past the end count as full, keys past the end as hidden.
        keys = len(rows[0]) if config.transposed else len(blocks[0][0])
        counted = blocks if config.transposed else [block[: max(queries - first, 0)] for block in blocks]
        if keys == config.keys and all(all(map(all, block)) for block in counted):
            fulls.append(Entry(tile, False))
        else:
            edges.append(Entry(tile, not all(any(column) for block in blocks for column in zip(*block, strict=True))))
    live = [any(any(plane[i]) for plane in rows) for i in range(len(rows[0]))]
    return TileList(edges, fulls, live)


def _ranked(lists: list[TileList], own: int) -> TileList:
    """Returns a query list with ranks."""

    def ranked(entry: Entry) -> Entry:
        visits = [any(entry.tile == x.tile for x in (*other.edges, *other.fulls)) for other in lists]
        return entry._replace(rank=sum(visits[:own]), is_last=not any(visits[own + 1 :]))

    found = lists[own]
    return TileList([ranked(x) for x in found.edges], [ranked(x) for x in found.fulls], found.live)
