# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles of the other side a CTA visits: key tiles for its queries, query tiles for its keys.

Tiles are visited by position. Kernels count positions and compare them; where they make an address or a limit from a
tile, and nowhere else, they ask `Visit.tile` which tile is at a position. For a range of tiles (`plan.TileRange`, which
`plan.Bounds` computes) positions are the tiles themselves. For a list of tiles (`tiles/lists.py`, which the prepass
writes) they are places in the list.

A visit knows when it is made which loops it has, so that kernels ask no compile key about it. `phases` and `rest` run
on Python integers too: tests compare them with brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.tiles.lists import DEAD_ROWS, RANK_MASK, RANK_SHIFT, TILE_MASK
from jax_fastattn.kernels.tiles.plan import Bounds, Order, TileRange
from jax_fastattn.kernels.visits.lists import GlobalList

Int = Any  # a Python int or a device integer


class Edges(NamedTuple):
    """Which ends of what is visible a masked tile may hold.

    Attributes:
        low: the first key that a query of the CTA sees, or the first query that sees a key of it.
        high: the last one.
    """

    low: bool
    high: bool


class Phase(NamedTuple):
    """Positions [begin, end) that one loop visits.

    Attributes:
        begin: the first one.
        end: the position after the last one.
        edges: what its tiles may hold; None for tiles that need no mask.
        order: the order of the loop.
    """

    begin: Int
    end: Int
    edges: Edges | None
    order: Order

    @property
    def steps(self) -> Int:
        """How many positions there are."""
        return self.end - self.begin

    def position(self, i: Int) -> Int:
        """Returns the position that is visited after `i` others of the phase."""
        return self.begin + i if self.order is Order.UP else self.end - 1 - i

    @property
    def masked(self) -> bool:
        """Whether the tiles need a mask."""
        return self.edges is not None


class Turn(Protocol):
    """The turn of a tile of keys among those that a query tile sees. Nothing is computed before it is asked for."""

    @property
    def before(self) -> Int:
        """How many come before it."""
        ...

    @property
    def is_first(self) -> Any:
        """Whether none comes before it."""
        ...

    @property
    def has_earlier(self) -> Any:
        """Whether some come before it."""
        ...

    @property
    def is_last(self) -> Any:
        """Whether none comes after it."""
        ...

    @property
    def has_later(self) -> Any:
        """Whether some come after it."""
        ...


@dataclass(frozen=True)
class RangeTurn:
    """The turn of a tile of keys `own` among the tiles of the range [begin, end), of which it is one."""

    own: Int
    begin: Int
    end: Int

    @property
    def before(self) -> Int:
        """How many come before it."""
        return self.own - self.begin

    @property
    def is_first(self) -> Any:
        """Whether none comes before it."""
        return self.begin == self.own

    @property
    def has_earlier(self) -> Any:
        """Whether some come before it."""
        return self.begin < self.own

    @property
    def is_last(self) -> Any:
        """Whether none comes after it."""
        return self.end == self.own + 1

    @property
    def has_later(self) -> Any:
        """Whether some come after it."""
        return self.own + 1 < self.end


@dataclass(frozen=True)
class EntryTurn:
    """The turn that an entry of a query list names, see `tiles/lists.py`."""

    entry: Int

    @property
    def before(self) -> Int:
        """How many come before it."""
        return (self.entry >> RANK_SHIFT) & RANK_MASK

    @property
    def is_first(self) -> Any:
        """Whether none comes before it."""
        return self.before == 0

    @property
    def has_earlier(self) -> Any:
        """Whether some come before it."""
        return self.before > 0

    @property
    def is_last(self) -> Any:
        """Whether none comes after it."""
        return self.entry < 0

    @property
    def has_later(self) -> Any:
        """Whether some come after it."""
        return self.entry >= 0


@dataclass(frozen=True)
class Visit:
    """Visits the positions [begin, end); of these, [full_begin, full_end) need no mask.

    Attributes:
        begin: the first position.
        end: the position after the last one.
        full_begin: the first position of a full tile. Without a low edge no tile comes before it.
        full_end: the position after the last full tile. If `masks_high` is False, no tile comes after it, except for
            one that a kernel takes apart from its loops, see `rest`.
        edges: what masked tiles may hold.
        masks_high: whether a loop visits masked tiles after the full ones.
        entries: the list that positions are places of; None for a range. Tests have one without a device.
        first_entry: first entry of a list that has all tiles, whose entries differ by the tile alone; else None.
        mirrors: whether positions are mirrored, see `mirrored`.
    """

    begin: Int
    end: Int
    full_begin: Int
    full_end: Int
    edges: Edges
    masks_high: bool
    entries: Any = None
    first_entry: Any = None
    mirrors: bool = False

    @classmethod
    def of_range(cls, tiles: TileRange, edges: Edges, *, masks_high: bool | None = None) -> Visit:
        """Returns the visit of a range of tiles.

        Args:
            tiles: the range.
            edges: what masked tiles may hold.
            masks_high: see the attribute; by default whether tiles may hold the high edge.
        """
        return cls(*tiles, edges, edges.high if masks_high is None else masks_high)

    @classmethod
    def listed(
        cls, entries: GlobalList, edges: Int, fulls: Int, *, fulls_first: bool, last_edges: Int | None = None
    ) -> Visit:
        """Returns the visit of a list of tiles.

        Args:
            entries: the list.
            edges, fulls: how many edge and full tiles it has.
            fulls_first: whether full tiles come first, as in lists of tiles of queries.
            last_edges: how many edge tiles come after the full ones, if these may be in the middle.
        """
        count = edges + fulls
        if last_edges is not None:
            first = edges - last_edges
            return cls(Int32(0), count, first, first + fulls, Edges(True, True), True, entries)
        if fulls_first:
            return cls(Int32(0), count, Int32(0), fulls, Edges(False, True), True, entries)
        return cls(Int32(0), count, edges, count, Edges(True, False), False, entries)

    @classmethod
    def of_list(cls, entries: GlobalList, *, fulls_first: bool) -> Visit:
        """Returns the visit of a list in global memory; see `listed`."""
        edges, fulls, _, _ = entries.counts()
        return cls.listed(entries, edges, fulls, fulls_first=fulls_first)

    def entry(self, position: Int) -> Int:
        """Returns what is known of the tile at a position: a list's entry, else the position.

        A role that has to know several things, or knows the position early, keeps it.
        """
        if self.first_entry is not None:
            return self.first_entry + position
        return position if self.entries is None else self.entries.load(position)

    def mirrored(self) -> Visit:
        """Returns the visit of a range with positions of which -1 - i has the tile i, masked tiles at either end.

        A loop that descends visits the first tile first then.
        """
        ends = (-self.end, -self.begin, -self.full_end, -self.full_begin)
        return Visit(*ends, self.edges, masks_high=True, mirrors=True)

    def tile_of(self, entry: Int) -> Int:
        """Returns the index of the tile of an entry."""
        if self.mirrors:
            return -1 - entry
        return entry if self.entries is None else entry & TILE_MASK

    def tile(self, position: Int) -> Int:
        """Returns the index of the tile at a position."""
        return position if self.first_entry is not None else self.tile_of(self.entry(position))

    def is_edge(self, position: Int) -> Any:
        """Returns whether the tile at a position needs a mask."""
        return (position < self.full_begin) | (position >= self.full_end)

    def has_dead_rows(self, entry: Int) -> Any:
        """Returns whether an edge tile of a list has rows that see nothing, or that nothing sees, in it."""
        return (entry & DEAD_ROWS) != 0

    def turn(self, entry: Int, own: Int, seen: Callable[[Int], TileRange]) -> Turn:
        """Returns the turn of the visiting tile of keys among those that see the query tile of an entry.

        Args:
            entry: see `entry`.
            own: the tile of keys.
            seen: computes the tiles of keys that a query tile sees; called if no list knows the turn.
        """
        if self.entries is not None:
            return EntryTurn(entry)
        tiles = seen(self.tile_of(entry))
        if self.mirrors:  # tiles of keys come in descending order then
            return RangeTurn(-1 - own, -tiles.end, -tiles.begin)
        return RangeTurn(own, tiles.begin, tiles.end)

    def phases(self, order: Order) -> list[Phase]:
        """Returns the loops of the visit, in order; loops that can never have a position are left out."""
        phases = [Phase(self.full_begin, self.full_end, None, order)]
        if self.edges.low:
            phases.insert(0, Phase(self.begin, self.full_begin, self.edges, order))
        if self.masks_high:
            phases.append(Phase(self.full_end, self.end, self.edges, order))
        return phases if order is Order.UP else phases[::-1]

    def whole(self, order: Order) -> Phase:
        """Returns all positions as one loop, for roles that mask nothing."""
        return Phase(self.begin, self.end, None, order)

    def half(self, i: Int32) -> Iterator[Phase]:
        """Emits the loops of one half of a descending visit, for kernels that share code between both ends.

        Half 0 is the high edge, half 1 what comes after it. Each has a loop over full tiles, empty in half 0, and then
        one over masked tiles. The bounds of a loop are computed where it is taken from the iterator.
        """
        upper = i == 0
        yield Phase(self.full_begin, ptx.where(upper, self.full_begin, self.full_end), None, Order.DOWN)
        begin, end = ptx.where(upper, self.full_end, self.begin), ptx.where(upper, self.end, self.full_begin)
        yield Phase(begin, end, self.edges, Order.DOWN)

    def rest(self, order: Order) -> Visit:
        """Returns the visit without its first position, for kernels that take that tile apart from their loops.

        There has to be one.
        """
        if order is Order.DOWN:
            last = self.end - 1
            full_end = cutlass.min(self.full_end, last)
            return replace(self, end=last, full_end=full_end, full_begin=cutlass.min(self.full_begin, last))
        begin = self.begin + 1
        full_begin = cutlass.max(self.full_begin, begin)
        full_end = cutlass.max(self.full_end, full_begin) if self.masks_high else self.full_end
        return replace(self, begin=begin, full_begin=full_begin, full_end=full_end)

    def own(self, bounds: Bounds, row: Int32, rows: int, keys: int) -> Visit:
        """Returns those positions of a CTA's visit that the query rows [row, row + rows) see, in tiles of `keys`.

        Of a list, these are all positions.
        """
        if self.entries is not None:
            return self
        seen = bounds.key_tiles(row, rows, keys)
        end = _clamp(seen.end, self.begin, self.end)
        begin = _clamp(seen.begin, self.begin, end)
        full_end = _clamp(seen.full_end, begin, end)
        full_begin = _clamp(seen.full_begin, begin, full_end)
        return replace(self, begin=begin, end=end, full_begin=full_begin, full_end=full_end).uniform()

    def uniform(self) -> Visit:
        """Tells the compiler that all lanes run through loops around wgmma equally often."""
        ends = (self.begin, self.end, self.full_begin, self.full_end)
        uniform = [cute.arch.make_warp_uniform(Int32(end)) for end in ends]
        return Visit(*uniform, self.edges, self.masks_high, self.entries, self.first_entry, self.mirrors)


def mask_past_end(tiles: TileRange, has_some: Any, *, low: bool) -> TileRange:
    """Returns the query tiles that see a tile of keys, with no full one if some of the keys are past the end.

    Such keys would add to dq in a tile without a mask.

    Args:
        tiles: the query tiles.
        has_some: whether there are keys past the end.
        low: whether the loop of the low edge visits all tiles then, or the loop of the high edge.
    """
    empty = tiles.end if low else tiles.begin
    full_begin, full_end = (ptx.where(has_some, empty, x) for x in (tiles.full_begin, tiles.full_end))
    return tiles._replace(full_begin=full_begin, full_end=full_end)


def _clamp(x: Int, low: Int, high: Int) -> Int:
    return cutlass.min(cutlass.max(x, low), high)
