# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tile of queries of which head and sequence a CTA of the forward kernel works on next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.sequences import Sequence, load_record
from jax_fastattn.kernels.device.tile_counter import NextTile, fetch_next
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.tiles.records import Record, slot_count

# A packed tile's words are its record and its head; the word at this index says how many rows it has.
_ROWS = Record._fields.index("rows")

# Under a left window bound, the tiles of one position of this many key/value heads come next to each other.
_SECTION_HEADS = 16

# A bias of pairs of up to this many bytes stays in L2; next to a larger one, this many bytes of keys and values do.
_RESIDENT_BIAS = 16 << 20
_RESIDENT_KEYS = 16 << 20


class _TilePlace(NamedTuple):
    """Names a tile or a pair of tiles: its position within the head, and the head."""

    position: Int32
    kv_head: Int32
    head: Int32
    batch: Int32


class ForwardSchedule(Protocol):
    """Orders the tiles of queries of a launch, and shares them among CTAs."""

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has."""
        ...

    def each(self, buffers: Buffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for each tile of the CTA. The producer and the consumers get the same tiles in the same order.

        Args:
            visit: works on a tile.
        """
        ...


@dataclass(frozen=True)
class HeadTiles:
    """Orders the tiles of queries of the heads of batch entries of one length.

    Attributes:
        rows: rows of a tile.
        shares_bias: see `ForwardConfig`.
    """

    spec: KernelSpec
    rows: int
    shares_bias: bool = False

    def count(self, scalars: Scalars) -> Int32:
        """Returns how many tiles a head has."""
        return copies.count(scalars.query_length, self.rows)

    def place(self, index: Int32, count: Int32, scalars: Scalars) -> _TilePlace:
        """Returns the place that has an index, where a head has `count` tiles or pairs of tiles.

        Heads of a group come next to each other (they share K and V in L2), then the positions of the group, then
        key/value heads and batch entries.
        """
        group = self.spec.group
        if self.shares_bias:
            return self._place_by_bias(index, count, scalars)
        kv_heads = scalars.num_heads // group
        member, index = index % group, index // group
        position, index = index % count, index // count
        kv_head, batch = index % kv_heads, index // kv_heads
        return _TilePlace(position, kv_head, kv_head * group + member, batch)

    def _place_by_bias(self, index: Int32, count: Int32, scalars: Scalars) -> _TilePlace:
        """Does what `place` does, where there is a bias of pairs.

        If the bias is too large for L2, the heads that share a plane of it come next to each other, and as many of them
        begin a position together as leave L2 room for their keys and values. Else the order is the same as in `place`.
        """
        heads, group = scalars.num_heads, self.spec.group
        row_nbytes = scalars.bias_pitch * (2 * self.spec.bias_terms)
        # The bias is large if its planes together have more rows than `_RESIDENT_BIAS` holds.
        is_large = Boolean(scalars.query_length > _RESIDENT_BIAS // row_nbytes // scalars.bias_planes)
        entries = ptx.where(Boolean(is_large & (scalars.bias_batch == 0)), scalars.batch, Int32(1))
        of_entry = ptx.where(scalars.bias_kv_head == 0, heads, Int32(group))
        of_entry = ptx.where(scalars.bias_head == 0, of_entry, Int32(1))
        most = _RESIDENT_KEYS // (scalars.key_length * (2 * (self.spec.head_dim + self.spec.v_head_dim)))
        section = Int32(cutlass.max(cutlass.min(entries * of_entry, most), group))
        section = ptx.where(is_large, section, Int32(group))
        position, place = copies.place_in_sections(index, section, count, heads * scalars.batch)
        entry, place = place % entries, place // entries
        head, batch = place % heads, place // heads * entries + entry
        return _TilePlace(position, head // group, head, batch)

    def work(self, tile: Int32, place: _TilePlace, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns a tile of the head of a place."""
        sequence = Sequence.of_entry(self.spec, place.batch, buffers, scalars)
        return Work(tile, place.head, place.kv_head, sequence)


@dataclass(frozen=True)
class SingleTiles:
    """Gives each CTA one tile. The last tile of a head comes first: under a causal mask it has most to do.

    Attributes:
        tiles: the tiles of the heads; `HeadTiles.place` has their order.
    """

    tiles: HeadTiles

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has: one for each tile."""
        return scalars.batch * scalars.num_heads * self.tiles.count(scalars)

    def each(self, buffers: Buffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for the tile of the CTA."""
        block, _, _ = cute.arch.block_idx()
        count = self.tiles.count(scalars)
        place = self.tiles.place(block, count, scalars)
        visit(self.tiles.work(count - 1 - place.position, place, buffers, scalars))


def _persistent_blocks(count: Int32, blocks_per_sm: int, scalars: Scalars) -> Int32:
    """Returns how many of `count` CTAs the GPU holds at a time."""
    return Int32(cutlass.min(count, blocks_per_sm * scalars.multiprocessors))


@dataclass(frozen=True)
class PersistentPairs:
    """Gives persistent CTAs pairs of tiles: one from the end of a head and its counterpart from the beginning.

    With a causal mask all such pairs are equally long.

    Attributes:
        tiles: the tiles of the heads; `HeadTiles.place` has the order of the pairs.
        blocks_per_sm: how many CTAs an SM holds.
    """

    tiles: HeadTiles
    blocks_per_sm: int

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has: one for each pair, or as many as the GPU holds."""
        pairs = scalars.batch * scalars.num_heads * ((self.tiles.count(scalars) + 1) // 2)
        return _persistent_blocks(pairs, self.blocks_per_sm, scalars)

    def each(self, buffers: Buffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for both tiles of each pair of the CTA; the CTAs take pairs in rounds."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        count = self.tiles.count(scalars)
        pair_count = (count + 1) // 2
        total = pair_count * scalars.num_heads * scalars.batch

        def visit_pair(i: Int32) -> None:
            place = self.tiles.place(block + i * grid, pair_count, scalars)
            # The middle of an odd number of tiles is its own counterpart.
            halves = ptx.where(2 * place.position == count - 1, Int32(1), Int32(2))

            def visit_half(half: Int32) -> None:
                tile = ptx.where(half == 0, count - 1 - place.position, place.position)
                visit(self.tiles.work(tile, place, buffers, scalars))

            wgmma.loop(halves, visit_half)

        wgmma.loop((total - block + (grid - 1)) // grid, visit_pair)


@dataclass(frozen=True)
class PersistentSections:
    """Gives persistent CTAs tiles under a left window bound.

    Such tiles are equally long, except for short ones at the start of a head.

    Heads come in sections. In a section the last tile of every head comes first, then the one before it of every head:
    the short ones come last, and several tiles of a head still run at a time, on the same keys. Each round deals one
    tile to each CTA, every other round in reverse.

    Attributes:
        tiles: the tiles of the heads.
        blocks_per_sm: how many CTAs an SM holds.
    """

    tiles: HeadTiles
    blocks_per_sm: int

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has: one for each tile, or as many as the GPU holds."""
        tiles = scalars.batch * scalars.num_heads * self.tiles.count(scalars)
        return _persistent_blocks(tiles, self.blocks_per_sm, scalars)

    def each(self, buffers: Buffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for the tile of each round of the CTA."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        count, group = self.tiles.count(scalars), self.tiles.spec.group
        heads = scalars.num_heads * scalars.batch
        full_section = _SECTION_HEADS * group

        def visit_round(i: Int32) -> None:
            index = i * grid + ptx.where(i % 2 == 0, block, grid - 1 - block)
            section = index // (full_section * count)
            first_head = section * full_section
            index = index - first_head * count
            section_heads = Int32(cutlass.min(heads - first_head, Int32(full_section)))
            position, head = index // section_heads, first_head + index % section_heads
            batch, head = head // scalars.num_heads, head % scalars.num_heads
            place = _TilePlace(position, head // group, head, batch)
            visit(self.tiles.work(count - 1 - position, place, buffers, scalars))

        total = heads * count
        rounds, rest = total // grid, total % grid
        last = ptx.where(rounds % 2 == 0, block, grid - 1 - block)
        wgmma.loop(rounds + ptx.where(last < rest, Int32(1), Int32(0)), visit_round)


@dataclass(frozen=True)
class HeadSlots:
    """Orders the tiles of queries of packed sequences, from the records of slots.

    The last sequence comes first, and the last tile within a sequence. Its heads come in sections of about as many
    tiles as run at a time: the tiles in flight read the keys of few heads. A section has two heads at least, since the
    longest tiles of a single last head would begin when few others are left to run at the same time.

    Attributes:
        rows: rows of a tile.
    """

    spec: KernelSpec
    rows: int

    def count(self, scalars: Scalars) -> Int32:
        """Returns how many slots a head has."""
        return slot_count(scalars.query_length, self.rows, scalars.batch)

    def total(self, scalars: Scalars) -> Int32:
        """Returns how many slots all heads have."""
        return self.count(scalars) * scalars.num_heads

    def record(self, index: Int32, buffers: Buffers, scalars: Scalars) -> Record:
        """Returns the record of the slot that has an index in the order."""
        return load_record(buffers.query_tiles, self.count(scalars) - 1 - index // scalars.num_heads)

    def at(self, index: Int32, record: Record, scalars: Scalars) -> tuple[Int32, Int32]:
        """Returns the tile and the head of an index, given the record of its slot.

        A sequence has the indices of its slots times the heads, and the same record, `tile` apart, in each slot.
        """
        heads, group = scalars.num_heads, self.spec.group
        own = Int32(cutlass.max(copies.count(record.rows, self.rows), 1))
        section = Int32(cutlass.max(scalars.multiprocessors // own // group, 2 if group == 1 else 1)) * group
        before = index // heads - (own - 1 - record.tile)
        position, head = copies.place_in_sections(index - before * heads, section, own, heads)
        return own - 1 - position, head

    def work(self, words: list[Int32], scalars: Scalars) -> Work:
        """Returns the tile of the record and the head that `words` hold."""
        record, head = Record(*words[:-1]), words[-1]
        sequence = Sequence.from_record(self.spec, record, scalars, of_keys=False)
        return Work(record.tile, head, head // self.spec.group, sequence)


@dataclass(frozen=True)
class PackedTiles:
    """Gives each CTA one slot of packed sequences."""

    slots: HeadSlots

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has: one for each slot."""
        return self.slots.total(scalars)

    def each(self, buffers: Buffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for the tile of the CTA, unless it has a slot that no tile owns."""
        block, _, _ = cute.arch.block_idx()
        record = self.slots.record(block, buffers, scalars)
        tile, head = self.slots.at(block, record, scalars)
        words = [cute.arch.make_warp_uniform(word) for word in (*record._replace(tile=tile), head)]
        cutlass.if_generate(words[_ROWS] > 0, lambda: visit(self.slots.work(words, scalars)))


@dataclass(frozen=True)
class PersistentPackedTiles:
    """Gives persistent CTAs tiles of packed sequences: each CTA fetches the next tile by the tile counter.

    Attributes:
        blocks_per_sm: how many CTAs an SM holds.
        next_tile: where the warps of a CTA find the tile that it has fetched; None while the launch is computed.
    """

    slots: HeadSlots
    blocks_per_sm: int
    next_tile: NextTile | None = None

    def blocks(self, scalars: Scalars) -> Int32:
        """Returns how many CTAs a launch has: one for each slot, or as many as the GPU holds."""
        return _persistent_blocks(self.slots.total(scalars), self.blocks_per_sm, scalars)

    def each(self, buffers: Buffers, scalars: Scalars, visit: Callable[[Work], None]) -> None:
        """Calls `visit` for each tile that `fetch_each` has fetched. Its words are its record and its head."""
        counter = self._next_tile
        phase, words = wgmma.Uniform(Int32(1)), wgmma.Uniform(*[Int32(0)] * counter.words)

        def following(_: Int32) -> Boolean:
            phase[0] = phase[0] ^ 1
            for i, word in enumerate(counter.get(phase[0])):
                words[i] = word
            return Boolean(words[_ROWS] > 0)

        # The condition gets the words: loops in `visit` take more registers if they are what this loop carries.
        with while_generate([Int32(0)], following) as nothing:
            visit(self.slots.work([words[i] for i in range(counter.words)], scalars))
            # Lanes that store nothing may not go ahead to the condition.
            cute.arch.sync_warp()
            yield_out(nothing)

    @property
    def _next_tile(self) -> NextTile:
        assert self.next_tile is not None
        return self.next_tile

    def fetch_each(self, buffers: Buffers, scalars: Scalars) -> None:
        """Fetches tiles for the CTA until none is left, which a record without rows says. One lane calls it."""
        counter = self._next_tile
        total = self.slots.total(scalars)
        phase = wgmma.Uniform(Int32(0))

        def fetch(_: Int32) -> Boolean:
            wgmma.wait(counter.empty, phase[0] ^ 1)
            index = fetch_next(buffers.tile_counter.toint())
            at = Int32(cutlass.min(index, total - 1))
            record = self.slots.record(at, buffers, scalars)
            left = Boolean(index < total)
            rows = ptx.where(left, record.rows, Int32(0))

            def write() -> None:
                tile, head = self.slots.at(at, record, scalars)
                counter.put(*record._replace(rows=rows, tile=tile), head)
                phase[0] = phase[0] ^ 1

            # Slots that no tile owns are passed over.
            cutlass.if_generate(Boolean((rows > 0) | (index >= total)), write)
            return left

        with while_generate([Int32(0)], fetch) as nothing:
            yield_out(nothing)


def forward_schedule(spec: KernelSpec, config: ForwardConfig) -> ForwardSchedule:
    """Returns the schedule of a forward kernel."""
    if spec.packed:
        slots = HeadSlots(spec, config.rows)
        return PersistentPackedTiles(slots, config.blocks) if spec.has_tile_counter else PackedTiles(slots)
    tiles = HeadTiles(spec, config.rows, config.shares_bias)
    if not config.persistent:
        return SingleTiles(tiles)
    # Sections of heads would undo the order in which a large bias is read once.
    if spec.bounds_kind.left and not config.shares_bias:
        return PersistentSections(tiles, config.blocks)
    return PersistentPairs(tiles, config.blocks)
