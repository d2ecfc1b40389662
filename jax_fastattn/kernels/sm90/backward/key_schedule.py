# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Says which tiles of keys a CTA of a key-stationary kernel works on, and in which order."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import copies, wgmma
from jax_fastattn.kernels.device.sequences import Sequence, Span, first_rows
from jax_fastattn.kernels.device.tile_counter import fetch_next
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.places import Head, LoadedTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.bias_order import entries_together
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig, BackwardMemory
from jax_fastattn.kernels.sm90.backward.gradient import load_units
from jax_fastattn.kernels.sm90.backward.listed_tiles import KeyTileList, KeyTilePlace
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.query_order import HeadOrder
from jax_fastattn.kernels.sums.units import Units
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.tiles.records import slot_count
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.visit import Edges, Visit, mask_past_end

# Where CTAs add in one order, the heads of a section have this many bytes of Q, dO and sums of dq, by whether the
# window is one-sided. With fewer heads CTAs wait for earlier ones; with more, L2 does not hold the rows until the
# next tile of keys.
SECTION_NBYTES = {False: 16 << 20, True: 24 << 20}

# Where lists say which tiles are visited, about this many queries of a head are in use at a time, as in one document.
# Tiles of keys of a document wait for each other in a chain. In a section of one head they would begin together; in one
# of several heads the tiles of other heads come between them.
LISTED_ROWS = 1024


@dataclass(frozen=True)
class Call:
    """Holds what a key-stationary kernel computes with.

    Attributes:
        tma: the operands that TMA loads.
    """

    tma: Tma
    buffers: Buffers
    sizes: Sizes
    order: HeadOrder


@dataclass(frozen=True)
class KeyTile:
    """Describes a tile of keys that a CTA works on.

    Attributes:
        tile: its index within its sequence.
        key_tiles: tiles of a key/value head; for packed sequences its slots.
        place: the place of the key/value head in the order of heads.
        row: its first key, counted from the first one of the sequence.
        queries: rows of the queries of its sequence.
        keys: rows of the keys of its sequence.
        kv_head: the key/value head of its batch entry.
        kv_heads: key/value heads of a batch entry.
        first_head: the first query head that reads the key/value head.
        num_heads: query heads of a batch entry.
        bounds: what rows of the sequence may see, see `plan.Bounds`.
        visit: the tiles of queries that see one of the keys, of each query head.
        steps: tiles of queries to visit in all query heads of the group.
        listed: what lists say of it; None without lists.
    """

    tile: Int32
    key_tiles: Int32
    order: HeadOrder
    place: Int32
    row: Int32
    queries: Span
    keys: Span
    kv_head: Int32
    kv_heads: Int32
    first_head: Int32
    num_heads: Int32
    bounds: plan.Bounds
    visit: Visit
    steps: Int32
    listed: KeyTileList | None

    def scores(self, member: Int32, tile: Int32, config: BackwardConfig) -> LoadedTile:
        """Returns the scores of a tile of queries of a query head of the group."""
        return LoadedTile(self.score_head(member), tile * config.queries, self.row, config.queries, config.keys)

    def head_bits(self, member: Int32) -> TileBits:
        """Returns the bits of the tiles of a list that a query head of the group has."""
        assert self.listed is not None
        return self.listed.head_bits(self.first_head + member)

    def score_head(self, member: Int32) -> Head:
        """Returns which scores a query head of the group has."""
        return Head(self.queries.batch, self.first_head + member, first_rows(self.queries, self.keys))

    def units(self, spec: KernelSpec, buffers: Buffers) -> Units:
        """Loads the units of the head, where they are needed: nothing keeps them in registers."""
        return load_units(spec, buffers, self.keys, self.kv_heads, self.kv_head)


@dataclass(frozen=True)
class QueryHead:
    """Describes a query head whose tiles of queries visit a tile of keys.

    Attributes:
        member: which head of the group it is.
        score: turns products into probabilities of the head.
    """

    work: KeyTile
    member: Int32
    score: Score

    @classmethod
    def start(cls, work: KeyTile, member: Int32, score: Score, row: Int32) -> "QueryHead":
        """Returns a head of the group.

        Args:
            member: which head of the group it is.
            score: the composition before it starts.
            row: the lane's first key, counted from the first one of the tile.
        """
        score = score.start(work.score_head(member))
        if score.holds:
            # Lists hide what no query sees.
            live = plan.LiveRange(Int32(0), work.keys.length) if work.listed is not None else work.bounds.live_keys()
            score = score.hold(work.row + row, live)
        return cls(work, member, score)

    def bits(self) -> TileBits:
        """Returns the bits of its tiles of a list."""
        return self.work.head_bits(self.member)

    def load(self, shared: BackwardShared, index: Int32, stage: Int32) -> "QueryHead":
        """Returns the head with what features have loaded for the tile of queries at a position, with a stage of Q."""
        if stages.NAME not in shared.regions.table:
            return self
        tile = self.work.scores(self.member, self.work.visit.tile(index), shared.memory.config)
        return replace(self, score=self.score.load(tile, shared.regions.stage(stages.NAME, stage)))


class KeyPlace(NamedTuple):
    """Describes a tile of keys in the order of the tiles.

    Attributes:
        tile: its index within its sequence.
        place: the place of the key/value head in the order of heads.
        head_index: the head, counted over all batch entries.
        sequence: the rows.
    """

    tile: Int32
    place: Int32
    head_index: Int32
    sequence: Sequence


class KeyTiles(Protocol):
    """Orders the tiles of keys of a launch."""

    def count(self, scalars: Scalars | Sizes) -> Int32:
        """Returns how many tiles a key/value head has, or for packed sequences how many slots."""
        ...

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order of the heads of a launch, without `prologue`."""
        ...

    def at(self, index: Int32, call: Call) -> KeyPlace:
        """Returns the tile that has an index in the order."""
        ...


@dataclass(frozen=True)
class EntryKeyTiles:
    """Orders the tiles of batch entries of one length. Heads come in sections, see `plan.place_in_sections`.

    CTAs that add in one order under a causal mask wait for each other: if the first tile of keys of a head begins
    first, and all begin with the last tile of queries, a tile waits until the ones before it have had that one. With
    `BackwardConfig.mirrors` the last tile of keys begins first, and each begins with the first tile of queries that
    sees it, so that it hardly ever waits. But the longest tiles begin last, and more tiles of queries are in use at a
    time than L2 holds over head dim 64 and for heads in groups.

    Attributes:
        memory: the kernel's shared memory, with its config.
    """

    spec: KernelSpec
    memory: BackwardMemory

    def count(self, scalars: Scalars | Sizes) -> Int32:
        """Returns how many tiles a key/value head has."""
        return copies.count(scalars.key_length, self.memory.config.keys)

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order of the heads of a launch, without `prologue`.

        `prefetch_distance` heads are begun before zeros and statistics of other heads can be there.
        """
        spec, memory, multiprocessors = self.spec, self.memory, scalars.multiprocessors
        heads, key_tiles = scalars.batch * (scalars.num_heads // spec.group), self.count(scalars)
        most_rows = plan.section_rows(
            SECTION_NBYTES[spec.bounds_kind.one_sided_window], *(memory.terms * x for x in memory.columns)
        )
        head_rows = scalars.query_length
        if spec.listed:
            head_rows = cutlass.min(head_rows, LISTED_ROWS)
        # Tiles of most masks are much alike; the tiles of a causal mask lose less by this than the others gain.
        one_sided = spec.bounds_kind.one_sided_window and not spec.listed
        section = copies.key_section(
            spec, scalars, key_tiles, multiprocessors, most_rows, head_rows, one_sided=one_sided
        )
        wave = (multiprocessors + (key_tiles - 1)) // cutlass.max(key_tiles, 1)
        return HeadOrder(heads, section, Int32(cutlass.max(section, wave)), sharing=entries_together(spec, scalars))

    def at(self, index: Int32, call: Call) -> KeyPlace:
        """Returns the tile that has an index in the order."""
        sizes, order, count = call.sizes, call.order, self.count(call.sizes)
        tile, place = copies.place_in_sections(index, order.section, count, order.heads)
        if self.memory.config.mirrors:
            tile = count - 1 - tile
        head_index = order.head_at(place)
        batch = head_index // (sizes.num_heads // self.spec.group)
        return KeyPlace(tile, place, head_index, Sequence.of_entry(self.spec, batch, call.buffers, sizes))


@dataclass(frozen=True)
class PackedKeyTiles:
    """Orders the tiles of packed sequences, from the records of slots: one sequence after the other.

    The heads of a sequence come in sections of about as many tiles as run at a time. The tiles in flight then read the
    queries of few heads. CTAs fetch the tiles of a head in ascending order, on which CTAs that add in semaphore order
    rely.

    Attributes:
        keys: keys of a tile.
    """

    spec: KernelSpec
    keys: int

    def count(self, scalars: Scalars | Sizes) -> Int32:
        """Returns how many slots a key/value head has."""
        return slot_count(scalars.key_length, self.keys, scalars.batch)

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order of the heads of a launch, without `prologue`; a section is counted in tiles.

        Zeros of all heads are written before the kernel begins.
        """
        kv_heads = scalars.num_heads // self.spec.group
        return HeadOrder(kv_heads, scalars.multiprocessors, kv_heads)

    def at(self, index: Int32, call: Call) -> KeyPlace:
        """Returns the tile that has an index in the order.

        A sequence has the indices of its slots times the heads, and the same record, `tile` apart, in each slot.
        """
        kv_heads = call.sizes.num_heads // self.spec.group
        slot = index // kv_heads
        tile, sequence = Sequence.of_record(self.spec, call.buffers.key_tiles, slot, call.sizes, of_keys=True)
        count = Int32(cutlass.max(copies.count(sequence.keys.length, self.keys), 1))
        # If tiles differ in length, a section has two heads or more: the longest should start first.
        section = cutlass.max(call.order.section // count, 1 + int(self.spec.bounds_kind.one_sided_window))
        section = Int32(cutlass.min(section, kv_heads))
        first_index = (slot - tile) * kv_heads
        tile, head = copies.place_in_sections(index - first_index, section, count, kv_heads)
        return KeyPlace(tile, head, head, sequence)


@dataclass(frozen=True)
class KeySchedule:
    """Gives each CTA one tile of keys, or where dq is computed, gives persistent CTAs one after the other.

    Attributes:
        tiles: the tiles of keys of a launch, and their order.
    """

    spec: KernelSpec
    config: BackwardConfig
    tiles: KeyTiles

    def blocks(self, scalars: Scalars, order: HeadOrder) -> Int32:
        """Returns how many CTAs a launch has: one for each tile of keys, or where dq is computed, one for each SM."""
        count = self.tiles.count(scalars) * order.heads
        return Int32(cutlass.min(count, scalars.multiprocessors)) if self.config.adds_dq else count

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order of the heads of a launch, see `KeyTiles.order`."""
        return self.tiles.order(scalars)

    def each(
        self,
        shared: BackwardShared,
        call: Call,
        visit: Callable[[KeyTile, Int32], None],
        *,
        fetches: bool = False,
    ) -> None:
        """Calls `visit(work, phase)` for the CTA's tile of keys; where dq is computed for one after the other.

        In that case the producer, which alone `fetches` tiles, fetches the next one for all of the CTA. `tile_counter`
        says which.

        No CTA waits forever, however few CTAs run and however many tiles there are. Work on a tile waits for work on
        tiles that are earlier in the order: for zeros of sums, which come with an earlier section of heads, or for a
        turn, which comes after earlier tiles of the same head (`plan.place_in_sections`). CTAs that run fetch tiles in
        order, and a CTA finishes a tile before it begins the next one that it has fetched. So the earliest unfinished
        tile waits for no other one, and its CTA is at work on it.
        """
        if not self.config.adds_dq:
            visit(self._work(cute.arch.block_idx()[0], call), Int32(0))
            return

        next_tile, phase = shared.next_tile, wgmma.Uniform(Int32(0))

        def following() -> Int32:
            if fetches:
                wgmma.wait(next_tile.empty, phase[0] ^ 1)
                with cute.arch.elect_one():
                    next_tile.put(fetch_next(call.buffers.tile_counter.toint()))
            return next_tile.get(phase[0])[0]

        def available(index: Int32) -> Boolean:
            return Boolean(index < self.tiles.count(call.sizes) * call.order.heads)

        with while_generate([following()], available) as (index,):
            visit(self._work(index, call), phase[0])
            phase[0] = phase[0] ^ 1
            yield_out([following()])

    def _work(self, index: Int32, call: Call) -> KeyTile:
        """Returns the tile that has an index in the order in which CTAs fetch tiles, and the query tiles that see it.

        Under a causal mask most query tiles see the first keys.
        """
        spec, config, sizes, order = self.spec, self.config, call.sizes, call.order
        kv_heads = sizes.num_heads // spec.group
        key_tiles = self.tiles.count(sizes)
        tile, place, head_index, sequence = self.tiles.at(index, call)
        row = tile * config.keys
        bounds = sequence.bounds()
        listed = None
        if spec.listed:
            own = KeyTilePlace(sequence.queries.batch, head_index % kv_heads, kv_heads, tile)
            listed = KeyTileList.of(spec, call.buffers, sizes, own)
        visit = self._visit(row, bounds) if listed is None else listed.visit
        return KeyTile(
            tile=tile,
            key_tiles=key_tiles,
            order=order,
            place=place,
            row=row,
            queries=sequence.queries,
            keys=sequence.keys,
            kv_head=head_index % kv_heads,
            kv_heads=kv_heads,
            first_head=head_index % kv_heads * spec.group,
            num_heads=sizes.num_heads,
            bounds=bounds,
            visit=visit,
            steps=(visit.end - visit.begin) * spec.group,
            listed=listed,
        )

    def _visit(self, row: Int32, bounds: plan.Bounds) -> Visit:
        """Returns the query tiles that see some key of the tile that begins at `row`."""
        config = self.config
        tiles = bounds.query_tiles(row, config.keys, config.queries)
        if config.adds_dq:
            tiles = mask_past_end(tiles, row + config.keys > bounds.key_end, low=True)
        # Scores of queries past query_seq_lengths may be no numbers. Past the end of the array, and past the end of a
        # packed sequence, whose rows are zeroed, P is 0 by the statistics. `dkdv/` zeroes them in masked tiles.
        kind = bounds.kind
        checks_high = kind.left or kind.query_end or kind.rules
        masks_high = checks_high or (kind.packed and not config.adds_dq)
        edges = Edges(kind.right or config.adds_dq, checks_high)
        visit = Visit.of_range(tiles, edges, masks_high=masks_high).uniform()
        visit = visit if masks_high else replace(visit, full_end=visit.end)
        return visit.mirrored().uniform() if config.mirrors else visit


def key_schedule(spec: KernelSpec, memory: BackwardMemory) -> KeySchedule:
    """Returns the schedule of a key-stationary kernel, given its shared memory."""
    tiles = PackedKeyTiles(spec, memory.config.keys) if spec.packed else EntryKeyTiles(spec, memory)
    return KeySchedule(spec, memory.config, tiles)
