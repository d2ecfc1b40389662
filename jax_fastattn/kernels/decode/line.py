# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The line of all key tiles on the device, see `split.py`.

Lengths are data, so every warp finds its place in the line by itself. `walk.py` goes on from there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.decode import split
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.plan import Bounds

_device_split = copies.with_device_min_max(split)
share = _device_split["share"]  # split.share on device integers
owner = _device_split["owner"]  # split.owner on device integers
portions = _device_split["portions"]  # split.portions on device integers
portion_end = _device_split["portion_end"]  # split.portion_end on device integers

# A warp has this many lanes.
WARP = 32
# A scan over the lanes of a warp has these distances.
_DISTANCES = (1, 2, 4, 8, 16)
# A lane loads this many batch entries at a time when it counts tiles.
_TOGETHER = 4


def slot(cta: Int32, begins: Any) -> Int32:
    """Returns the slot of a partial result, given a CTA and whether it begins the unit, and then does not end it."""
    return 2 * cta + ptx.where(begins, Int32(1), Int32(0))


def warp_sum(x: Int32) -> Int32:
    """Returns the sum over the lanes of a warp, all of which call this."""
    for offset in _DISTANCES:
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x


def warp_scan(x: Int32, lane: Int32) -> Int32:
    """Returns the sum over the lanes up to this one; all lanes of a warp call this."""
    for distance in _DISTANCES:
        other = cute.arch.shuffle_sync(x, Int32(cutlass.max(lane - distance, 0)))
        x = x + ptx.where(lane >= distance, other, Int32(0))
    return x


@dataclass(frozen=True)
class Entry:
    """What the queries of a batch entry see.

    Attributes:
        bounds: bounds of its rows.
        first: the first key of tile 0, which is the first one that some query sees, or in pages the first one of its
            box (`DecodeConfig.box_rows`).
        hidden_end: hidden keys of tile 0 end here; None if there certainly are none.
        end: keys from there on are seen by no query.
        tiles: tiles of a unit; 0 if no query sees a key.
    """

    bounds: Bounds
    first: Int32
    hidden_end: Int32 | None
    end: Int32
    tiles: Int32

    def pairs(self, key: Int32, count: int) -> list[Int32]:
        """Returns masks of pairs of 16 bits for the first two of each 8 keys: those that some query may see.

        Args:
            key: the first one.
            count: how many keys.
        """
        left, places = self.end - key, range(0, count, 8)
        words = [ptx.where(left > at + 1, Int32(-1), ptx.where(left > at, Int32(0xFFFF), Int32(0))) for at in places]
        if self.hidden_end is None:
            return words
        hidden = self.hidden_end - key
        shown = [
            ptx.where(hidden <= at, Int32(-1), ptx.where(hidden <= at + 1, Int32(-0x10000), Int32(0))) for at in places
        ]
        return [x & y for x, y in zip(words, shown, strict=True)]


class Unit(NamedTuple):
    """A batch entry and a key/value head."""

    batch: Int32
    kv_head: Int32


@dataclass(frozen=True)
class Segment:
    """Tiles [tile, tile + count) of a unit.

    Attributes:
        entry: what its queries see.
        tile: the first tile.
        count: how many tiles there are; at least one, unless units are whole.
        slot: where a partial result lies.
        whole: whether these are all tiles of the unit, which then has no partial result.
        following: returns the CTA's next unit; any unit if there is none.
    """

    entry: Entry
    batch: Int32
    kv_head: Int32
    tile: Int32
    count: Int32
    slot: Int32
    whole: Boolean
    following: Callable[[], Unit]


class Share(NamedTuple):
    """What a CTA takes of its line, and where that begins.

    Attributes:
        cta: index of the CTA in its line.
        line: which line.
        end: the tile of the line that the share ends before.
        left: tiles of the share.
        total: tiles of the line.
        batch: the batch entry of its first tile.
        before: tiles of the line before that entry.
    """

    cta: Int32
    line: Int32
    end: Int32
    left: Int32
    total: Int32
    batch: Int32
    before: Int32


@dataclass(frozen=True)
class Line:
    """The lines of a launch.

    Attributes:
        keys: keys of a tile.
        ctas: CTAs that the tiles are dealt to.
        lane: index of the lane in its warp.
    """

    spec: KernelSpec
    keys: int
    buffers: Buffers
    scalars: Scalars
    ctas: Int32
    lane: Int32

    @classmethod
    def of(cls, spec: KernelSpec, buffers: Buffers, scalars: Scalars, lane: Int32) -> "Line":
        """Returns the lines of a launch."""
        config = spec.config
        return cls(spec, config.keys, buffers, scalars, scalars.multiprocessors, lane)

    @property
    def side(self) -> Any:
        """How many lines there are."""
        return self.scalars.side_heads

    @property
    def shares(self) -> Int32:
        """CTAs of a line."""
        return self.ctas // self.side

    @property
    def heads(self) -> Int32:
        """Key/value heads of a line."""
        return self.scalars.num_heads // self.spec.group // self.side

    @property
    def kv_heads(self) -> Int32:
        """Key/value heads of all lines."""
        return self.scalars.num_heads // self.spec.group

    @property
    def portion(self) -> int:
        """Tiles of a portion; 0 if units are not cut into portions."""
        return self.spec.config.portion

    def portion_slot(self, unit: Unit, tile: Int32) -> Int32:
        """Returns the slot of the partial result of the portion that begins with a tile of a unit."""
        slots = portions(copies.count(self.scalars.key_length, self.keys), self.portion)
        return (unit.batch * self.kv_heads + unit.kv_head) * slots + tile // self.portion

    @property
    def alike(self) -> bool:
        """Whether all batch entries have the same tiles."""
        kind = self.spec.bounds_kind
        return not (kind.query_end or kind.key_end or kind.offset)

    def entry(self, batch: Int32) -> Entry:
        """Returns what the queries of a batch entry see."""
        return self.seen(copies.entry_bounds(self.spec, batch, self.buffers, self.scalars))

    def seen(self, bounds: Bounds) -> Entry:
        """Returns what queries with these bounds see."""
        live = bounds.live_keys()
        first, hidden_end = live.begin if live.hides_first else Int32(0), None
        if live.hides_first and self.spec.page:
            box_rows, hidden_end = self.spec.config.box_rows(self.spec.page), live.begin
            first = first // box_rows * box_rows
        tiles = copies.count(live.end - first, self.keys)
        return Entry(bounds, first, hidden_end, live.end, ptx.where(live.begin < live.end, tiles, Int32(0)))

    def page(self, batch: Int32, key: Int32, exists: Boolean) -> Int32:
        """Returns the page that holds a key of a batch entry which has some: an existing page, for any id.

        Args:
            exists: whether the entry has the key; otherwise the page of its first key is returned.
        """
        columns = self.scalars.key_length // self.spec.page
        place = Int64(batch) * columns + ptx.where(exists, key // self.spec.page, Int32(0))
        page = ptx.load_global_int(self.buffers.page_table.toint() + place * 4)
        return copies.clamp(page, 0, self.scalars.pages - 1)

    def share(self, cta: Int32) -> Share:
        """Returns what a CTA takes; all lanes of a warp call this."""
        own, line = cta // self.side, cta % self.side
        if self.alike:
            unit = self.entry(Int32(0)).tiles
            total = self.scalars.batch * self.heads * unit
            begin, end = self.dealt(own, total)
            batch = Int32(cutlass.min(begin // Int32(cutlass.max(unit * self.heads, 1)), self.scalars.batch - 1))
            return Share(own, line, end, end - begin, total, batch, batch * self.heads * unit)
        # A lane counts the tiles of neighboring entries.
        chunk = copies.count(self.scalars.batch, WARP)
        mine = self._count(self.lane * chunk, chunk) * self.heads
        through = warp_scan(mine, self.lane)
        total = cute.arch.shuffle_sync(through, WARP - 1)
        begin, end = self.dealt(own, total)
        before = through - mine
        inside = Boolean((before <= begin) & (begin < through))
        first, before = (warp_sum(ptx.where(inside, x, Int32(0))) for x in (self.lane * chunk, before))
        return Share(own, line, end, end - begin, total, *self._find(begin, first, before, chunk))

    def dealt(self, cta: Int32, total: Int32) -> tuple[Int32, Int32]:
        """Returns what a CTA of a line takes of `total` tiles or units."""
        begin, end = share(Int32(cutlass.min(cta, self.shares - 1)), self.shares, total)
        # Surplus CTAs have nothing.
        return begin, ptx.where(cta < self.shares, end, begin)

    def _count(self, first: Int32, entries: Int32) -> Int32:
        """Returns the tiles of a unit of each of some batch entries, from the lane's own first one on, in total."""
        total = cute.make_rmem_tensor((1,), Int32)
        total[0] = Int32(0)
        end = Int32(cutlass.min(first + entries, self.scalars.batch))

        def add(i: Int32) -> None:
            tiles = [self._tiles(first + i * _TOGETHER + j, end) for j in range(_TOGETHER)]
            total[0] = sum(tiles, total[0])

        wgmma.loop(copies.count(entries, _TOGETHER), add)
        return total[0]

    def _find(self, tile: Int32, first: Int32, before: Int32, entries: Int32) -> tuple[Int32, Int32]:
        """Returns the batch entry that a tile of the line belongs to, and how many tiles come before that entry.

        Args:
            tile: index of the tile in the line.
            first: the first of the entries that it may belong to.
            before: tiles of the line before that entry.
            entries: how many entries it may belong to.
        """
        # These are the tiles before; the entry and its tiles before, in the lane that has found it, 0 in the others.
        state = cute.make_rmem_tensor((3,), Int32)
        state.fill(0)
        state[0] = before
        end = Int32(cutlass.min(first + entries, self.scalars.batch))

        def look(i: Int32) -> None:
            index = first + i * WARP + self.lane
            own = self._tiles(index, end) * self.heads
            through = warp_scan(own, self.lane)
            before = state[0] + through - own
            inside = Boolean((before <= tile) & (tile < before + own))
            state[1] = ptx.where(inside, index, state[1])
            state[2] = ptx.where(inside, before, state[2])
            state[0] = state[0] + cute.arch.shuffle_sync(through, WARP - 1)

        wgmma.loop(copies.count(entries, WARP), look)
        return warp_sum(state[1]), warp_sum(state[2])

    def _tiles(self, batch: Int32, end: Int32) -> Int32:
        """Returns the tiles of a unit of a batch entry before `end`; 0 from there on."""
        existing = Int32(cutlass.min(batch, self.scalars.batch - 1))
        return ptx.where(batch < end, self.entry(existing).tiles, Int32(0))
