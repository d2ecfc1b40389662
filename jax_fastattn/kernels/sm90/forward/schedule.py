# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tile of queries of which head and sequence a CTA of the forward kernel works on next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments import ForwardBuffers, Scalars, Sizes
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.sequences import Sequence, load_record
from jax_fastattn.kernels.device.tile_counter import TakenTile, take_one
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig
from jax_fastattn.kernels.sm90.work import QueryTiles, Work
from jax_fastattn.kernels.tile_records import Record, slot_count

# Of the words of a packed tile, its record and its head: how many rows it has.
_ROWS = Record._fields.index("rows")

# Key/value heads whose tiles of one position come next to each other under a left window bound.
_SECTION_HEADS = 16


class _Place(NamedTuple):
    """A tile or a pair of tiles of a head: its position among those of the head, and which head it is."""

    position: Int32
    kv_head: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class ForwardTiles(QueryTiles):
    """Those of the forward kernel with a CTA for each tile, from the last one down: it has most under a causal mask.

    Heads of a group come next to each other (they share K and V in L2), then the query tiles of the group, then
    key/value heads and batch entries.
    """

    def blocks(self, scalars: Scalars) -> Int32:
        """CTAs."""
        return scalars.batch * scalars.num_heads * self.count(scalars)

    def each(self, buffers: ForwardBuffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for each tile of the CTA; the producer and the consumers go alike.

        Args:
            buffers: of the launch.
            scalars: of the launch.
            visit: works on a tile.
        """
        block, _, _ = cute.arch.block_idx()
        count = self.count(scalars)
        place = self._place(block, count, scalars)
        visit(self._work(count - 1 - place.position, place, buffers, scalars))

    def _place(self, index: Int32, count: Int32, scalars: Scalars) -> _Place:
        """What has an index, where a head has `count`."""
        group = self.spec.group
        kv_heads = scalars.num_heads // group
        member, index = index % group, index // group
        position, index = index % count, index // count
        kv_head, batch = index % kv_heads, index // kv_heads
        return _Place(position, kv_head, kv_head * group + member, batch)

    def _work(self, tile: Int32, place: _Place, buffers: ForwardBuffers, scalars: Scalars) -> Work:
        sequence = Sequence.of_entry(self.spec, place.batch, buffers, scalars)
        return Work(tile, place.head, place.kv_head, sequence)


@dataclass(frozen=True)
class WalkedPairs(ForwardTiles):
    """Those of CTAs that walk: a tile from the end of a head and its counterpart from the beginning.

    With a causal mask all such pairs are equally long.

    Args:
        blocks_per_sm: as many CTAs as the GPU holds walk.
    """

    blocks_per_sm: int

    def blocks(self, scalars: Scalars) -> Int32:
        """CTAs."""
        pairs = scalars.batch * scalars.num_heads * ((self.count(scalars) + 1) // 2)
        return Int32(cutlass.min(pairs, self.blocks_per_sm * scalars.multiprocessors))

    def each(self, buffers: ForwardBuffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for each tile of the CTA."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        count = self.count(scalars)
        pair_count = (count + 1) // 2
        total = pair_count * scalars.num_heads * scalars.batch

        def walk(i: Int32) -> None:
            place = self._place(block + i * grid, pair_count, scalars)
            # The middle of an odd number of tiles is its own counterpart.
            halves = ptx.where(2 * place.position == count - 1, Int32(1), Int32(2))

            def visit_half(half: Int32) -> None:
                tile = ptx.where(half == 0, count - 1 - place.position, place.position)
                visit(self._work(tile, place, buffers, scalars))

            wgmma.loop(halves, visit_half)

        wgmma.loop((total - block + (grid - 1)) // grid, walk)


@dataclass(frozen=True)
class WalkedSections(ForwardTiles):
    """Tiles of CTAs that walk under a left window bound: equally long, except for short ones at the start of a head.

    Heads come in sections. In a section the last tile of every head comes first, then the one before it of every head:
    the short ones come last, and several tiles of a head still run at a time, on the same keys. Each round deals one
    tile to each CTA, every other one in reverse.

    Args:
        blocks_per_sm: as many CTAs as the GPU holds walk.
    """

    blocks_per_sm: int

    def blocks(self, scalars: Scalars) -> Int32:
        """CTAs."""
        tiles = scalars.batch * scalars.num_heads * self.count(scalars)
        return Int32(cutlass.min(tiles, self.blocks_per_sm * scalars.multiprocessors))

    def each(self, buffers: ForwardBuffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for each tile of the CTA."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        count, group = self.count(scalars), self.spec.group
        heads = scalars.num_heads * scalars.batch
        full_section = _SECTION_HEADS * group

        def walk(i: Int32) -> None:
            index = i * grid + ptx.where(i % 2 == 0, block, grid - 1 - block)
            section = index // (full_section * count)
            first_head = section * full_section
            index = index - first_head * count
            section_heads = Int32(cutlass.min(heads - first_head, Int32(full_section)))
            position, head = index // section_heads, first_head + index % section_heads
            batch, head = head // scalars.num_heads, head % scalars.num_heads
            place = _Place(position, head // group, head, batch)
            visit(self._work(count - 1 - position, place, buffers, scalars))

        total = heads * count
        rounds, rest = total // grid, total % grid
        last = ptx.where(rounds % 2 == 0, block, grid - 1 - block)
        wgmma.loop(rounds + ptx.where(last < rest, Int32(1), Int32(0)), walk)


@dataclass(frozen=True)
class PackedTiles(ForwardTiles):
    """Those of packed sequences, from the records of slots, with a CTA for each.

    The last sequence comes first, and of a sequence the last tile. Its heads come in sections of about as many tiles as
    run at a time: the tiles in flight read the keys of few heads. A section has two heads at least, since the longest
    tiles of a single last head would begin when few others are left to run beside them.
    """

    def count(self, scalars: Scalars | Sizes) -> Int32:
        """Slots of a head."""
        return slot_count(scalars.query_length, self.rows, scalars.batch)

    def blocks(self, scalars: Scalars) -> Int32:
        """CTAs."""
        return self.count(scalars) * scalars.num_heads

    def each(self, buffers: ForwardBuffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for the tile of the CTA, unless it has a slot that no tile owns."""
        block, _, _ = cute.arch.block_idx()
        record = self._record(block, buffers, scalars)
        tile, head = self._at(block, record, scalars)
        words = [cute.arch.make_warp_uniform(word) for word in (*record._replace(tile=tile), head)]
        cutlass.if_generate(words[_ROWS] > 0, lambda: visit(self._packed_work(words, scalars)))

    def _record(self, index: Int32, buffers: ForwardBuffers, scalars: Scalars) -> Record:
        """The record of the slot that has an index in the order."""
        return load_record(buffers.query_tiles, self.count(scalars) - 1 - index // scalars.num_heads)

    def _at(self, index: Int32, record: Record, scalars: Scalars) -> tuple[Int32, Int32]:
        """The tile and the head of an index, given the record of its slot.

        A sequence has the indices of its slots times the heads, and the same record, `tile` apart, in each slot.
        """
        heads, group = scalars.num_heads, self.spec.group
        own = Int32(cutlass.max(copies.count(record.rows, self.rows), 1))
        section = Int32(cutlass.max(scalars.multiprocessors // own // group, 2 if group == 1 else 1)) * group
        before = index // heads - (own - 1 - record.tile)
        position, head = copies.place_in_sections(index - before * heads, section, own, heads)
        return own - 1 - position, head

    def _packed_work(self, words: list[Int32], scalars: Scalars) -> Work:
        record, head = Record(*words[:-1]), words[-1]
        sequence = Sequence.from_record(self.spec, record, scalars, of_keys=False)
        return Work(record.tile, head, head // self.spec.group, sequence)


@dataclass(frozen=True)
class TakenTiles(PackedTiles):
    """Those of CTAs that walk: each takes the next tile by a counter.

    Args:
        blocks_per_sm: as many CTAs as the GPU holds walk.
        taken: where the warps of a CTA find the tile; None where the launch is computed.
    """

    blocks_per_sm: int
    taken: TakenTile | None = None

    def blocks(self, scalars: Scalars) -> Int32:
        """CTAs."""
        return Int32(cutlass.min(super().blocks(scalars), self.blocks_per_sm * scalars.multiprocessors))

    def each(self, buffers: ForwardBuffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for each tile that `take_each` has taken. Its words are its record and its head."""
        taken = self._taken
        phase, words = wgmma.Uniform(Int32(1)), wgmma.Uniform(*[Int32(0)] * taken.words)

        def following(_: Int32) -> Boolean:
            phase[0] = phase[0] ^ 1
            for i, word in enumerate(taken.get(phase[0])):
                words[i] = word
            return Boolean(words[_ROWS] > 0)

        # The condition gets the words: loops in `visit` take more registers if they are what this loop carries.
        with while_generate([Int32(0)], following) as nothing:
            visit(self._packed_work([words[i] for i in range(taken.words)], scalars))
            # Lanes that store nothing may not go ahead to the condition.
            cute.arch.sync_warp()
            yield_out(nothing)

    @property
    def _taken(self) -> TakenTile:
        assert self.taken is not None
        return self.taken

    def take_each(self, buffers: ForwardBuffers, scalars: Scalars) -> None:
        """Takes tiles for the CTA until none is left, which a record without rows says. One lane calls it."""
        taken = self._taken
        total = super().blocks(scalars)
        phase = wgmma.Uniform(Int32(0))

        def take(_: Int32) -> Boolean:
            wgmma.wait(taken.empty, phase[0] ^ 1)
            index = take_one(buffers.taken.toint())
            at = Int32(cutlass.min(index, total - 1))
            record = self._record(at, buffers, scalars)
            left = Boolean(index < total)
            rows = ptx.where(left, record.rows, Int32(0))

            def write() -> None:
                tile, head = self._at(at, record, scalars)
                taken.put(*record._replace(rows=rows, tile=tile), head)
                phase[0] = phase[0] ^ 1

            # Past a slot that no tile owns.
            cutlass.if_generate(Boolean((rows > 0) | (index >= total)), write)
            return left

        with while_generate([Int32(0)], take) as nothing:
            yield_out(nothing)


def forward_schedule(spec: KernelSpec, config: ForwardConfig) -> ForwardTiles:
    """The schedule of a forward kernel."""
    if spec.packed:
        return TakenTiles(spec, config.rows, config.blocks) if spec.takes_tiles else PackedTiles(spec, config.rows)
    if not config.walks:
        return ForwardTiles(spec, config.rows)
    return (WalkedSections if spec.window_left else WalkedPairs)(spec, config.rows, config.blocks)
