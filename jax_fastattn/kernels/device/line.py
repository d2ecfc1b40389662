# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The line of all key tiles on the device, see `split.py`.

Lengths are data, so every warp finds its place in the line by itself. All roles of a CTA call `Line.each`, and thus
agree on the number of tiles of each segment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels import split
from jax_fastattn.kernels.arguments import DecodeBuffers, Scalars
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.plan import Bounds

_device_split = copies.with_device_min_max(split)
share = _device_split["share"]  # split.share on device integers
owner = _device_split["owner"]  # split.owner on device integers

_WARP = 32
# Distances of a scan over the lanes of a warp.
_DISTANCES = (1, 2, 4, 8, 16)


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
        bounds: of its rows.
        first: the first key of tile 0, which is the first one that some query sees, or in pages the first one of its
            box (`DecodeConfig.box_rows`).
        hidden_end: hidden keys of tile 0 end here; None if there are none for certain.
        end: keys from there on are seen by no query.
        tiles: of a unit; 0 if no query sees a key.
    """

    bounds: Bounds
    first: Int32
    hidden_end: Int32 | None
    end: Int32
    tiles: Int32


@dataclass(frozen=True)
class Segment:
    """Tiles [tile, tile + count) of a unit.

    Attributes:
        entry: what its queries see.
        batch: the batch entry.
        kv_head: the key/value head.
        tile: the first tile.
        count: how many tiles there are, at least one.
        slot: where a partial result lies.
        whole: whether these are all tiles of the unit, which then has no partial result.
    """

    entry: Entry
    batch: Int32
    kv_head: Int32
    tile: Int32
    count: Int32
    slot: Int32
    whole: Boolean


@dataclass(frozen=True)
class Line:
    """The lines of a launch.

    Attributes:
        spec: the compile key.
        keys: keys of a tile.
        buffers: of the launch.
        scalars: of the launch.
        ctas: CTAs that the tiles are dealt to.
        lane: index of the lane in its warp.
    """

    spec: KernelSpec
    keys: int
    buffers: DecodeBuffers
    scalars: Scalars
    ctas: Int32
    lane: Int32

    @classmethod
    def of(cls, spec: KernelSpec, buffers: DecodeBuffers, scalars: Scalars, lane: Int32) -> "Line":
        """Returns the lines of a launch."""
        config = spec.config
        return cls(spec, config.keys, buffers, scalars, scalars.multiprocessors * config.blocks, lane)

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
    def alike(self) -> bool:
        """Whether all batch entries have the same tiles."""
        kind = self.spec.bounds_kind
        return not (kind.query_end or kind.key_end or kind.offset)

    def slot(self, cta: Int32, begins: Any, line: Int32) -> Int32:
        """Returns the slot of a partial result.

        Args:
            cta: index of the CTA in its line.
            begins: whether it begins the unit, and then does not end it.
            line: which line.
        """
        return (2 * cta + ptx.where(begins, Int32(1), Int32(0))) * self.side + line

    def entry(self, batch: Int32) -> Entry:
        """Returns what the queries of a batch entry see."""
        bounds = copies.entry_bounds(self.spec, batch, self.buffers, self.scalars)
        live = bounds.live_keys()
        first, hidden_end = live.begin if live.hides_first else Int32(0), None
        if live.hides_first and self.spec.page:
            box_rows, hidden_end = self.spec.config.box_rows(self.spec.page), live.begin
            first = first // box_rows * box_rows
        tiles = copies.count(live.end - first, self.keys)
        return Entry(bounds, first, hidden_end, live.end, ptx.where(live.begin < live.end, tiles, Int32(0)))

    def page(self, batch: Int32, key: Int32, exists: Boolean) -> Int32:
        """Returns the page that holds a key of a batch entry which has some, an index of the pages whatever its id is.

        Args:
            batch: the batch entry.
            key: the key.
            exists: whether the entry has it; the page of its first key is returned otherwise.
        """
        columns = self.scalars.key_length // self.spec.page
        place = Int64(batch) * columns + ptx.where(exists, key // self.spec.page, Int32(0))
        page = ptx.load_global_int(self.buffers.page_table.toint() + place * 4)
        return copies.clamp(page, 0, self.scalars.pages - 1)

    def tiles_before(self, batch: Int32) -> Int32:
        """Returns how many tiles of a line the batch entries before one have."""
        if self.alike:
            return batch * (self.entry(Int32(0)).tiles * self.heads)
        total = cute.make_rmem_tensor((1,), Int32)
        total[0] = Int32(0)

        def add(i: Int32) -> None:
            total[0] = total[0] + self._tiles(i * _WARP + self.lane, batch)

        wgmma.loop(copies.count(batch, _WARP), add)
        return warp_sum(total[0]) * self.heads

    def find(self, tile: Int32) -> tuple[Int32, Int32]:
        """Returns the batch entry that a tile of a line belongs to, and how many tiles come before that entry."""
        last = self.scalars.batch - 1
        if self.alike:
            own = self.entry(Int32(0)).tiles * self.heads
            batch = Int32(cutlass.min(tile // Int32(cutlass.max(own, 1)), last))
            return batch, batch * own
        # Tiles before; the entry and its tiles before, in the lane that has found it, 0 in the others.
        state = cute.make_rmem_tensor((3,), Int32)
        state.fill(0)

        def look(i: Int32) -> None:
            index = i * _WARP + self.lane
            own = self._tiles(index, self.scalars.batch) * self.heads
            through = warp_scan(own, self.lane)
            before = state[0] + through - own
            inside = Boolean((before <= tile) & (tile < before + own))
            state[1] = ptx.where(inside, index, state[1])
            state[2] = ptx.where(inside, before, state[2])
            state[0] = state[0] + cute.arch.shuffle_sync(through, _WARP - 1)

        wgmma.loop(copies.count(self.scalars.batch, _WARP), look)
        return warp_sum(state[1]), warp_sum(state[2])

    def _tiles(self, batch: Int32, end: Int32) -> Int32:
        """Returns the tiles of a unit of a batch entry before `end`; 0 from there on."""
        existing = Int32(cutlass.min(batch, self.scalars.batch - 1))
        return ptx.where(batch < end, self.entry(existing).tiles, Int32(0))

    def each(self, cta: Int32, visit: Callable[[Segment], None]) -> None:
        """Emits a loop over the segments of a CTA; all lanes of a warp call this."""
        own, line = cta // self.side, cta % self.side
        begin, end = share(Int32(cutlass.min(own, self.shares - 1)), self.shares, self.tiles_before(self.scalars.batch))
        # CTAs that are left over have nothing.
        end = ptx.where(own < self.shares, end, begin)
        batch, before = self.find(begin)
        unit = Int32(cutlass.max(self.entry(batch).tiles, 1))
        # Batch entry, head of the line, tile, and tiles left.
        at = wgmma.Uniform(batch, (begin - before) // unit, (begin - before) % unit, end - begin)
        at.make_uniform()

        def goes_on(_: Int32) -> Boolean:
            return Boolean(at[3] > 0)

        with while_generate([Int32(0)], goes_on) as nothing:
            at.make_uniform()
            segment = self._segment(at, own, line)
            self._advance(at, segment)
            cutlass.if_generate(segment.count > 0, lambda: visit(segment))
            cute.arch.sync_warp()
            yield_out(nothing)

    def _segment(self, at: wgmma.Uniform, cta: Int32, line: Int32) -> Segment:
        """Returns the segment at a place, which has no tiles if its batch entry has none."""
        batch, head, tile = at[0], at[1], at[2]
        entry = self.entry(batch)
        count = cute.arch.make_warp_uniform(Int32(cutlass.min(at[3], entry.tiles - tile)))
        slot = self.slot(cta, tile == 0, line)
        return Segment(entry, batch, head * self.side + line, tile, count, slot, Boolean(count == entry.tiles))

    def _advance(self, at: wgmma.Uniform, segment: Segment) -> None:
        """Goes on to the next unit; a batch entry without tiles is passed at once."""
        head = at[1]
        wraps = Boolean((head == self.heads - 1) | (segment.entry.tiles == 0))
        at[0] = ptx.where(wraps, segment.batch + 1, segment.batch)
        at[1] = ptx.where(wraps, Int32(0), head + 1)
        at[2] = Int32(0)
        at[3] = at[3] - segment.count
