# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A CTA's way along its line of tiles (`line.py`), or along the units that it takes whole.

All roles of a CTA call `each`, and thus agree on the number of tiles of each segment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.decode.line import WARP, Entry, Line, Segment, Share, Unit, portion_end, slot
from jax_fastattn.kernels.device import copies, ptx, wgmma


def each(line: Line, visit: Callable[[Segment], None], begin: Callable[[Share, Unit], None] | None = None) -> None:
    """Emits a loop over the segments of the CTA; all lanes of a warp call this.

    Args:
        visit: emits what is done for a segment.
        begin: emits what is done before the loop, given the CTA's share, and its first unit or any unit if there is
            none.
    """
    cta, _, _ = cute.arch.block_idx()
    walk: _Walk
    if line.portion:
        walk = _PortionWalk.start(line, cta)
    else:
        walk = (_TileWalk if line.spec.config.splits else _UnitWalk).start(line, cta)
    walk.at.make_uniform()
    if begin is not None:
        begin(walk.own, walk.unit())

    def goes_on(_: Int32) -> Boolean:
        return Boolean(walk.left > 0)

    with while_generate([Int32(0)], goes_on) as nothing:
        walk.at.make_uniform()
        visit(walk.next())
        cute.arch.sync_warp()
        yield_out(nothing)


class _Walk(Protocol):
    """A CTA's place in its line of tiles or units."""

    @property
    def own(self) -> Share:
        """What the CTA takes."""
        ...

    @property
    def at(self) -> wgmma.Uniform:
        """The place, which loops carry."""
        ...

    @property
    def left(self) -> Int32:
        """How much of the share is left."""
        ...

    def unit(self) -> Unit:
        """Returns the unit at the place, which may be past the last one."""
        ...

    def next(self) -> Segment:
        """Returns the segment at the place, and goes on to the next one."""
        ...


@dataclass(frozen=True, eq=False)
class _UnitWalk:
    """Units are not cut: they are dealt without regard to their tiles. A unit without tiles is visited, too.

    Attributes:
        own: the CTA's share, of units.
        at: number of the unit in the line, and units left.
    """

    line: Line
    cta: Int32
    own: Share
    at: wgmma.Uniform

    @classmethod
    def start(cls, line: Line, cta: Int32) -> "_UnitWalk":
        """Returns the walk at the CTA's first unit."""
        own, units = cta // line.side, line.scalars.batch * line.heads
        begin, end = line.dealt(own, units)
        batch = begin // line.heads
        share = Share(own, cta % line.side, end, end - begin, units, batch, batch * line.heads)
        return cls(line, cta, share, wgmma.Uniform(begin, share.left))

    @property
    def left(self) -> Int32:
        """How much of the share is left."""
        return self.at[1]

    def unit(self) -> Unit:
        """Returns the unit at the place, which may be past the last one."""
        index, heads = Int32(cutlass.min(self.at[0], self.own.total - 1)), self.line.heads
        return Unit(index // heads, index % heads * self.line.side + self.own.line)

    def next(self) -> Segment:
        """Returns the unit at the place as a segment, and goes on to the next one."""
        unit = self.unit()
        entry = self.line.entry(unit.batch)
        count = cute.arch.make_warp_uniform(entry.tiles)
        self.at[0] = self.at[0] + 1
        self.at[1] = self.at[1] - 1
        return Segment(entry, *unit, Int32(0), count, slot(self.cta, Boolean(False)), Boolean(True), self.unit)


@dataclass(frozen=True, eq=False)
class _TileWalk:
    """Tiles are dealt.

    Attributes:
        own: the CTA's share.
        entries: the next batch entries.
        at: batch entry, head of the line, tile, and tiles left.
    """

    line: Line
    cta: Int32
    own: Share
    entries: "_LaneEntries"
    at: wgmma.Uniform

    @classmethod
    def start(cls, line: Line, cta: Int32) -> "_TileWalk":
        """Returns the walk at the CTA's first tile."""
        own = line.share(cta)
        entries = _LaneEntries.of(line, own.batch)
        unit = Int32(cutlass.max(entries.entry(own.batch).tiles, 1))
        ahead = own.end - own.left - own.before
        return cls(line, cta, own, entries, wgmma.Uniform(own.batch, ahead // unit, ahead % unit, own.left))

    @property
    def left(self) -> Int32:
        """How much of the share is left."""
        return self.at[3]

    def unit(self) -> Unit:
        """Returns the unit at the place, which may be past the last one."""
        line, at = self.line, self.at
        head = Int32(cutlass.min(at[1], line.heads - 1))
        return Unit(Int32(cutlass.min(at[0], line.scalars.batch - 1)), head * line.side + self.own.line)

    def next(self) -> Segment:
        """Returns the segment at the place, and goes on to the next one."""
        at = self.at
        unit, head, tile, left = self.unit(), at[1], at[2], at[3]
        entry = self.entries.entry(unit.batch)
        count = cute.arch.make_warp_uniform(Int32(cutlass.min(left, entry.tiles - tile)))
        wraps = Boolean(head == self.line.heads - 1)
        at[0] = ptx.where(wraps, unit.batch + 1, unit.batch)
        at[1] = ptx.where(wraps, Int32(0), head + 1)
        at[2] = Int32(0)
        at[3] = left - count
        cutlass.if_generate(Boolean(wraps & (at[3] > 0)), lambda: self.entries.skip_empty(at))
        place = slot(self.cta, tile == 0)
        return Segment(entry, *unit, tile, count, place, Boolean(count == entry.tiles), self.unit)


@dataclass(frozen=True, eq=False)
class _PortionWalk:
    """Tiles are dealt, and a CTA takes the portions that begin in its share, to their ends.

    Attributes:
        tiles: the place in the line. Its tiles left are below 0 if the last portion ends after the share.
    """

    tiles: _TileWalk

    @classmethod
    def start(cls, line: Line, cta: Int32) -> "_PortionWalk":
        """Returns the walk at the first portion that begins in the CTA's share."""
        walk = cls(_TileWalk.start(line, cta))
        is_within = Boolean(Boolean(walk.at[2] % line.portion != 0) & Boolean(walk.left > 0))
        cutlass.if_generate(is_within, walk._skip)
        return walk

    @property
    def own(self) -> Share:
        """What the CTA takes, before it is rounded to portions."""
        return self.tiles.own

    @property
    def at(self) -> wgmma.Uniform:
        """The place, which loops carry."""
        return self.tiles.at

    @property
    def left(self) -> Int32:
        """How much of the share is left."""
        return self.tiles.left

    def unit(self) -> Unit:
        """Returns the unit at the place, which may be past the last one."""
        return self.tiles.unit()

    def next(self) -> Segment:
        """Returns the portion at the place as a segment, and goes on to the next one."""
        line, unit, tile = self.tiles.line, self.unit(), self.at[2]
        entry = self.tiles.entries.entry(unit.batch)
        count = self._advance(unit, entry)
        place = line.portion_slot(unit, tile)
        return Segment(entry, *unit, tile, count, place, Boolean(count == entry.tiles), self.unit)

    def _skip(self) -> None:
        """Goes on to the next portion: the CTA before this one has the portion at the place."""
        unit = self.unit()
        self._advance(unit, self.tiles.entries.entry(unit.batch))

    def _advance(self, unit: Unit, entry: Entry) -> Int32:
        """Goes on to the next portion, given the unit at the place; returns how many tiles lie before it."""
        at, line = self.at, self.tiles.line
        head, tile, left = at[1], at[2], at[3]
        end = Int32(portion_end(tile, entry.tiles, line.portion))
        count = cute.arch.make_warp_uniform(end - tile)
        ends = Boolean(end == entry.tiles)
        wraps = Boolean(ends & Boolean(head == line.heads - 1))
        at[0] = ptx.where(wraps, unit.batch + 1, unit.batch)
        at[1] = ptx.where(wraps, Int32(0), ptx.where(ends, head + 1, head))
        at[2] = ptx.where(ends, Int32(0), end)
        at[3] = left - count
        cutlass.if_generate(Boolean(wraps & (at[3] > 0)), lambda: self.tiles.entries.skip_empty(at))
        return count


@dataclass(frozen=True, eq=False)
class _LaneEntries:
    """Batch entries from some first one on, one in each lane of a warp.

    Attributes:
        registers: `[4]`, the first entry, then the lane's query_end, key_end and offset.
    """

    line: Line
    registers: Any

    @classmethod
    def of(cls, line: Line, first: Int32) -> "_LaneEntries":
        """Returns the entries from one on."""
        entries = cls(line, cute.make_rmem_tensor((4,), Int32))
        entries.hold(first)
        return entries

    def hold(self, first: Int32) -> None:
        """Loads the entries from one on."""
        line = self.line
        batch = Int32(cutlass.min(first + line.lane, line.scalars.batch - 1))
        bounds = copies.entry_bounds(line.spec, batch, line.buffers, line.scalars)
        for i, x in enumerate((first, bounds.query_end, bounds.key_end, bounds.offset)):
            self.registers[i] = Int32(x)

    def entry(self, batch: Int32) -> Entry:
        """Returns what the queries of one of the entries see; all lanes call this."""
        line, kind = self.line, self.line.spec.bounds_kind
        lane = batch - self.registers[0]
        differs = (kind.query_end, kind.key_end, kind.offset)
        ends = [
            cute.arch.shuffle_sync(self.registers[1 + i], lane) if x else self.registers[1 + i]
            for i, x in enumerate(differs)
        ]
        return line.seen(copies.bounds(kind, *ends, line.scalars))

    def skip_empty(self, at: wgmma.Uniform) -> None:
        """Takes a place, at the first head of a batch entry, to the first entry from there on that has tiles."""
        if self.line.alike:
            return
        last = self.line.scalars.batch - 1

        def look() -> None:
            first, *ends = (self.registers[i] for i in range(4))
            tiles = self.line.seen(copies.bounds(self.line.spec.bounds_kind, *ends, self.line.scalars)).tiles
            index = first + self.line.lane
            has = Boolean(Boolean(tiles > 0) & Boolean(Boolean(index >= at[0]) & Boolean(index <= last)))
            at[0] = cute.arch.warp_redux_sync(ptx.where(has, index, first + WARP), "min")

        def goes_on(_: Int32) -> Boolean:
            return Boolean(Boolean(at[0] == self.registers[0] + WARP) & Boolean(at[0] <= last))

        look()
        with while_generate([Int32(0)], goes_on) as nothing:
            self.hold(self.registers[0] + WARP)
            look()
            yield_out(nothing)
