# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The prepass: a launch that evaluates a predicate once, tile by tile, and one that makes lists of what it has found.

A CTA takes the visited tiles of an own tile one after the other, a few of them or one. Its warps share a tile, so that
all its loads are in flight together. Tiles that window, lengths and offset hide altogether, or whose segment ids lie
apart, read no mask. It runs on every architecture.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.arguments.prepass import PrepassBuffers, PrepassScalars
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.prepass.decision import truth
from jax_fastattn.kernels.prepass.lists import ALL, SOME, ClassWriter, ListWriter, OwnTilePlace
from jax_fastattn.kernels.prepass.matrix import BitMatrix, MatrixShape
from jax_fastattn.kernels.prepass.predicate import EntryPredicate, Extent, matrix_nbytes
from jax_fastattn.kernels.prepass.program import Parts
from jax_fastattn.kernels.prepass.summary import WARP_NBYTES, Summary
from jax_fastattn.kernels.tiles.lists import DEAD_ROWS, LIVE_WORDS, MAX_LIVE_ROWS, PrepassConfig
from jax_fastattn.kernels.tiles.plan import TileRange

# About this many CTAs share the tiles of a launch: eight on each SM of an H100.
_CTAS = 1056
# At least this many warps evaluate tiles on an SM together, so that some load while others compute. Functions with more
# than `_FEW_LISTS` numbers for each key have more registers and fewer warps.
_RUNNING_WARPS, _RICH_WARPS = 20, 12
_FEW_LISTS = 2
# A CTA that makes lists has this many warps.
_LIST_WARPS = 4


@dataclass(frozen=True, eq=False)
class _OwnTile:
    """An own tile as a warp sees it.

    Attributes:
        predicate: the predicate of the tile's batch entry.
        writer: writes what is known of the visited tiles.
        extent: the extent of its segment ids; None if there are none.
        visited: the tiles that it visits by window, lengths and offset.
        first: the first visited tile of the CTA.
    """

    predicate: EntryPredicate
    writer: ClassWriter
    matrix: BitMatrix
    summary: Summary
    extent: Extent | None
    visited: TileRange
    first: Int32


@dataclass(frozen=True, eq=False)
class _Found:
    """What is known of a visited tile, so far.

    Attributes:
        flags: three words: `SOME` or 0, `ALL` or 0, `DEAD_ROWS` or 0.
        live: which own rows see something, or are seen, see `BitMatrix.live_keys`.
    """

    flags: wgmma.Uniform
    live: wgmma.Uniform


class PrepassKernel:
    """The prepass of one compile key.

    Args:
        ctas: how many CTAs share the tiles of a launch, about.
    """

    def __init__(self, spec: KernelSpec, ctas: int = _CTAS):
        self.spec = spec
        self.ctas = ctas
        self.config: PrepassConfig = spec.config
        self.shape = MatrixShape(self.config)
        self.matrix_nbytes = matrix_nbytes(spec)

    @property
    def overlaps(self) -> bool:
        """Whether the second launch may begin before the first one ends; older architectures cannot do that."""
        return self.spec.arch == "sm_90a"

    @cute.jit
    def __call__(self, buffers: PrepassBuffers, scalars: PrepassScalars, stream: cuda.CUstream):
        """Launches the kernels."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: PrepassBuffers, scalars: PrepassScalars) -> list[Launch]:
        """Returns the launches of a call, in order."""
        own, visited = self._tiles(scalars)
        rows = scalars.batch * (scalars.heads // scalars.members) * own
        evaluate = Launch(
            self.evaluate,
            (buffers, scalars),
            grid=rows * self._parts(scalars),
            block=32 * self.shape.warps,
            shared_bytes=self.matrix_nbytes + WARP_NBYTES * self.shape.warps,
            min_blocks=max(1, self._running_warps() // self.shape.warps),
        )
        ctas = (rows * copies.count(visited, 32) + (_LIST_WARPS - 1)) // _LIST_WARPS
        lists = Launch(
            self.write_lists,
            (buffers, scalars),
            grid=ctas,
            block=32 * _LIST_WARPS,
            min_blocks=0,
            begins_early=self.overlaps,
        )
        return [evaluate, lists]

    def _running_warps(self) -> int:
        is_rich = self.spec.features and Parts(self.spec).lists > _FEW_LISTS
        return _RICH_WARPS if is_rich else _RUNNING_WARPS

    def _tiles(self, scalars: PrepassScalars) -> tuple[Int32, Int32]:
        """Returns how many own tiles and visited tiles there are."""
        tiles = [
            copies.count(length, rows)
            for length, rows in (
                (scalars.query_length, self.config.rows),
                (scalars.key_length, self.config.keys),
            )
        ]
        own, visited = reversed(tiles) if self.config.transposed else tiles
        return own, visited

    def _parts(self, scalars: PrepassScalars) -> Int32:
        """Returns how many CTAs share the visited tiles of an own tile."""
        own, visited = self._tiles(scalars)
        rows = scalars.batch * (scalars.heads // scalars.members) * own
        return copies.clamp(self.ctas // rows, 1, visited)

    # Classes and bits.

    @cute.kernel
    def evaluate(self, buffers: PrepassBuffers, scalars: PrepassScalars):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.overlaps):
            cute.arch.griddepcontrol_launch_dependents()
        self._evaluate(buffers, scalars, block, cute.arch.make_warp_uniform(thread // 32), thread % 32)

    def _evaluate(
        self, buffers: PrepassBuffers, scalars: PrepassScalars, block: Int32, warp: Int32, lane: Int32
    ) -> None:
        """Classifies the CTA's part of the visited tiles of its own tile."""
        tiles, parts = self._tiles(scalars), self._parts(scalars)
        row, first = block // parts, block % parts
        place = OwnTilePlace(row // tiles[0], row % tiles[0], tiles)
        shared = cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint()
        predicate = EntryPredicate.of(self.spec, buffers, scalars, place.plane // (scalars.heads // scalars.members))
        tile = _OwnTile(
            predicate,
            ClassWriter(buffers, self.config.transposed, place, lane),
            BitMatrix(self.shape, shared, warp, lane),
            Summary(shared + self.matrix_nbytes, self.shape.warps, warp, lane),
            predicate.extent(place.own, lane, of_keys=self.config.transposed) if self.spec.segment_ids else None,
            predicate.visited(place.own),
            first,
        )
        steps = (tiles[1] - first + (parts - 1)) // parts
        wgmma.loop(Int32(steps), lambda i: self._classify(tile, first + i * parts))

    # One visited tile.

    def _classify(self, tile: _OwnTile, visited: Int32) -> None:
        """Writes the class of a visited tile, and the bits of each head that shares the list."""
        found = _Found(wgmma.Uniform(Int32(0), Int32(ALL), Int32(0)), wgmma.Uniform(Int32(0)))
        inside = Boolean((visited >= tile.visited.begin) & (visited < tile.visited.end))

        def evaluate() -> None:
            if self.spec.segment_ids:
                key_tile = tile.writer.place.own if self.config.transposed else visited
                tile.predicate.stage_ids(tile.matrix, key_tile)
                cute.arch.sync_threads()
            wgmma.loop(tile.predicate.scalars.members, lambda member: self._evaluate_head(tile, visited, member, found))

        def fill() -> None:
            found.flags[0] = Int32(SOME)
            found.live[0] = Int32(-1)

        def look() -> None:
            apart, whole = self._known(tile, visited)
            cutlass.if_generate(whole, fill, lambda: cutlass.if_generate(apart, lambda: None, evaluate))

        cutlass.if_generate(inside, look if self.spec.segment_ids or self.spec.features else evaluate)
        cutlass.if_generate(tile.matrix.warp == 0, lambda: self._write_class(tile, visited, found))

    def _write_class(self, tile: _OwnTile, visited: Int32, found: _Found) -> None:
        live, flags = found.live[0], found.flags[0] | found.flags[1] | found.flags[2]
        if not self.config.transposed:
            # What padding sees does not matter: it is discarded.
            end = tile.predicate.bounds.query_end - tile.writer.place.own * self.config.rows
            live = live & ptx.bit_range(Int32(0), copies.clamp(end - 32 * tile.writer.lane, 0, 32))
        tile.writer.write(visited, flags, live)

    def _known(self, tile: _OwnTile, visited: Int32) -> tuple[Boolean, Boolean]:
        """Returns whether it is known that nothing is visible, and that everything is, by segment ids and function."""
        apart = Boolean(False)
        whole = Boolean((visited >= tile.visited.full_begin) & (visited < tile.visited.full_end))
        if tile.extent is not None:
            own = tile.extent
            other = tile.predicate.extent(visited, tile.writer.lane, of_keys=not self.config.transposed)
            apart = Boolean((own.high < other.low) | (other.high < own.low))
            same = Boolean((own.low == own.high) & (other.low == other.high) & (own.low == other.low))
            whole = Boolean(whole & same)
        if self.spec.features:
            may, must = self._says(tile, visited)
            apart, whole = Boolean(apart | Boolean(may == 0)), Boolean(whole & Boolean(must != 0))
        return apart, Boolean(False) if self.spec.mask else whole

    def _says(self, tile: _OwnTile, visited: Int32) -> tuple[Int32, Int32]:
        """Returns 1 or 0 for whether the function may be, and must be True, for the heads that share the list."""
        found = wgmma.Uniform(Int32(0), Int32(1))
        place = tile.writer.place
        query_tile, key_tile = (visited, place.own) if self.config.transposed else (place.own, visited)

        def ask(member: Int32) -> None:
            program = tile.predicate.program(tile.matrix, self._head(tile, member))
            assert program is not None
            says = truth(program, tile.writer.lane, query_tile, key_tile)
            found[0] = found[0] | Int32(says.may)
            found[1] = found[1] & Int32(says.must)

        wgmma.loop(tile.predicate.scalars.members, ask)
        found.make_uniform()
        return found[0], found[1]

    @staticmethod
    def _head(tile: _OwnTile, member: Int32) -> Int32:
        """Returns a head that shares a list."""
        scalars = tile.predicate.scalars
        return tile.writer.place.plane % (scalars.heads // scalars.members) * scalars.members + member

    def _evaluate_head(self, tile: _OwnTile, visited: Int32, member: Int32, found: _Found) -> None:
        """Evaluates the predicate of one head, and writes its bits if they may be read."""
        predicate, scalars, place = tile.predicate, tile.predicate.scalars, tile.writer.place
        head = self._head(tile, member)
        query_tile, key_tile = (visited, place.own) if self.config.transposed else (place.own, visited)
        program = predicate.program(tile.matrix, head)
        if program is not None and Parts(self.spec).nbytes:
            program.stage(tile.matrix, query_tile, key_tile)
            cute.arch.sync_threads()

        def evaluate() -> None:
            tile.summary.put(predicate.evaluate(tile.matrix, head, query_tile, key_tile))

        cutlass.if_generate(self._differs(tile, visited), evaluate)
        cute.arch.sync_threads()
        some, everything = tile.summary.flags()
        found.flags[0] = found.flags[0] | some
        found.flags[1] = found.flags[1] & everything
        has_live = self.config.own <= MAX_LIVE_ROWS
        live = tile.summary.live(of_keys=self.config.transposed) if has_live else Int32(-1)
        found.live[0] = found.live[0] | live
        # Where heads share a list, a tile may be an edge although it is full or empty for this head.
        mixed = Boolean(Boolean((some != 0) & (everything == 0)) | (scalars.members > 1))
        plane = Int64(predicate.entry) * scalars.heads + head
        target = predicate.buffers.bits.toint() + place.of(plane, visited) * self.config.tile_nbytes
        cutlass.if_generate(mixed, lambda: self._store(tile, visited, target, found))
        # The next tile overwrites matrix and summary.
        cute.arch.sync_threads()

    def _differs(self, tile: _OwnTile, visited: Int32) -> Boolean:
        """Returns whether a tile may differ from the one that the CTA has evaluated before.

        Tiles of queries do not if no query differs from another, as with a padding mask, except for the last one.
        """
        spec, scalars = self.spec, tile.predicate.scalars
        kind = spec.bounds_kind
        if not (spec.mask and self.config.transposed) or spec.segment_ids or spec.features:
            return Boolean(True)
        if kind.left or kind.right or kind.query_end:
            return Boolean(True)
        differs = Boolean((visited == tile.first) | ((visited + 1) * self.config.rows > scalars.query_length))
        return Boolean(differs | Boolean((scalars.mask_rows > 1) | (scalars.members > 1)))

    def _store(self, tile: _OwnTile, visited: Int32, target: Int64, found: _Found) -> None:
        """Writes bits and live rows of the visited side to an address."""
        if self.config.bits:
            tile.matrix.store_fragments(target)

        def store_live() -> None:
            scalars, lane = tile.predicate.scalars, tile.writer.lane
            length = scalars.query_length if self.config.transposed else scalars.key_length
            live = tile.summary.live(of_keys=not self.config.transposed)
            live = _existing(live, lane, self.config.visited, visited, length)
            word = target + self.config.bits_nbytes + lane * 4
            cutlass.if_generate(lane < LIVE_WORDS, lambda: ptx.store_global_int(word, live))
            dead = ptx.where(cute.arch.vote_any_sync(live != -1), Int32(DEAD_ROWS), Int32(0))
            found.flags[2] = found.flags[2] | dead

        cutlass.if_generate(tile.matrix.warp == 0, store_live)

    # Lists.

    @cute.kernel
    def write_lists(self, buffers: PrepassBuffers, scalars: PrepassScalars):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.overlaps):
            # The kernel that reads the lists may begin now; it waits for this one.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        self._write_list(buffers, scalars, block * _LIST_WARPS + cute.arch.make_warp_uniform(thread // 32), thread % 32)

    def _write_list(self, buffers: PrepassBuffers, scalars: PrepassScalars, index: Int32, lane: Int32) -> None:
        """Writes a warp's part of a list: 32 visited tiles of an own tile, and with the first ones the header."""
        tiles = self._tiles(scalars)
        chunks = copies.count(tiles[1], 32)
        row, chunk = index // chunks, index % chunks
        place = OwnTilePlace(row // tiles[0], row % tiles[0], tiles)
        writer = ListWriter(buffers, self.config, place, chunk, lane)
        length = scalars.key_length if self.config.transposed else scalars.query_length

        def write() -> None:
            writer.write(lambda live: _existing(live, lane, self.config.own, place.own, length))

        cutlass.if_generate(place.plane < scalars.batch * (scalars.heads // scalars.members), write)


def _existing(live: Int32, lane: Int32, rows: int, tile: Int32, length: Int32) -> Int32:
    """Returns live rows of a tile, with rows that do not exist as live ones: lane i has rows 32 i to 32 i + 31."""
    existing = Int32(cutlass.min(length - tile * rows, rows))
    return live | ~ptx.bit_range(Int32(0), copies.clamp(existing - 32 * lane, 0, 32))
