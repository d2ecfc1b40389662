# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The prepass: one launch that evaluates a predicate once, and with query lists a second one for ranks.

A CTA has an own tile, and a warp takes one visited tile after the other. Tiles that window, lengths and offset hide
altogether, or whose segment ids lie apart, read no mask. It runs on every architecture.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.arguments import PrepassBuffers, PrepassScalars
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.plan import TileRange
from jax_fastattn.kernels.prepass.lists import Classes, ListWriter, RankWriter
from jax_fastattn.kernels.prepass.matrix import BitMatrix, MatrixShape
from jax_fastattn.kernels.prepass.predicate import Extent, Predicate, matrix_nbytes
from jax_fastattn.kernels.tile_lists import LIVE_WORDS, MAX_LIVE_ROWS, PrepassConfig

# Warps of a CTA that evaluates, and of one that ranks.
_WARPS = 16
_RANK_WARPS = 4


@dataclass(frozen=True, eq=False)
class _OwnTile:
    """An own tile as a warp sees it.

    Attributes:
        predicate: of its batch entry.
        writer: of its list.
        matrix: of the warp.
        extent: of its segment ids; None if there are none.
        visited: the tiles that it visits by window, lengths and offset.
        live: rows that have seen something so far, see `BitMatrix`.
    """

    predicate: Predicate
    writer: ListWriter
    matrix: BitMatrix
    extent: Extent | None
    visited: TileRange
    live: wgmma.Uniform


class PrepassKernel:
    """The prepass of one compile key.

    Args:
        spec: what is compiled in.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.config: PrepassConfig = spec.config
        self.matrix_nbytes = matrix_nbytes(spec)

    @cute.jit
    def __call__(self, buffers: PrepassBuffers, scalars: PrepassScalars, stream: cuda.CUstream):
        """Launches the kernels."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: PrepassBuffers, scalars: PrepassScalars) -> list[Launch]:
        """Returns the launches of a call, in order."""
        planes, (own, visited) = scalars.batch * (scalars.heads // scalars.members), self._tiles(scalars)
        evaluate = Launch(
            self.evaluate,
            (buffers, scalars),
            grid=planes * own,
            block=32 * _WARPS,
            shared_bytes=_WARPS * (self.matrix_nbytes + 4 * LIVE_WORDS),
            min_blocks=0,
        )
        if not self.config.transposed:
            return [evaluate]
        ctas = (planes * visited + (_RANK_WARPS - 1)) // _RANK_WARPS
        return [evaluate, Launch(self.rank, (buffers, scalars), grid=ctas, block=32 * _RANK_WARPS, min_blocks=0)]

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

    # Classes, bits and lists.

    @cute.kernel
    def evaluate(self, buffers: PrepassBuffers, scalars: PrepassScalars):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self._evaluate(buffers, scalars, block, cute.arch.make_warp_uniform(thread // 32), thread % 32)

    def _evaluate(
        self, buffers: PrepassBuffers, scalars: PrepassScalars, block: Int32, warp: Int32, lane: Int32
    ) -> None:
        """Classifies all visited tiles of the CTA's own tile, and writes its list."""
        tiles = self._tiles(scalars)
        plane, own = block // tiles[0], block % tiles[0]
        shared = cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint()
        predicate = Predicate.of(self.spec, buffers, scalars, plane // (scalars.heads // scalars.members))
        tile = _OwnTile(
            predicate,
            ListWriter(buffers, self.config.transposed, plane, own, tiles, lane),
            BitMatrix(MatrixShape(self.config), shared + warp * self.matrix_nbytes, lane),
            predicate.extent(own, lane, of_keys=self.config.transposed) if self.spec.segment_ids else None,
            predicate.visited(own),
            wgmma.Uniform(Int32(0)),
        )
        steps = (tile.visited.end - tile.visited.begin - warp + (_WARPS - 1)) // _WARPS
        wgmma.loop(Int32(steps), lambda i: self._classify(tile, tile.visited.begin + warp + i * _WARPS))
        live = shared + _WARPS * self.matrix_nbytes
        own_live = live + (warp * LIVE_WORDS + lane) * 4
        cutlass.if_generate(lane < LIVE_WORDS, lambda: ptx.store_shared(own_live, tile.live[0]))
        cute.arch.sync_threads()
        cutlass.if_generate(warp == 0, lambda: self._write_list(tile, live))

    def _write_list(self, tile: _OwnTile, live: Int32) -> None:
        """Writes the list, given where the live rows of each warp are."""
        lane, scalars = tile.writer.lane, tile.predicate.scalars
        bits = Int32(0)
        for warp in range(_WARPS):
            word = Int32(cutlass.min(lane, LIVE_WORDS - 1))
            bits = bits | ptx.load_shared(live + (warp * LIVE_WORDS + word) * 4)
        length, own = scalars.key_length, tile.writer.own
        if not self.config.transposed:
            length, end = scalars.query_length, tile.predicate.bounds.query_end
            bits = bits & ptx.bit_range(Int32(0), copies.clamp(end - own * self.config.rows - 32 * lane, 0, 32))
        tile.writer.write(tile.visited, _existing(bits, lane, self.config.own, own, length))

    # One visited tile.

    def _classify(self, tile: _OwnTile, visited: Int32) -> None:
        """Writes the class of a visited tile, and the bits of each head that shares the list."""
        lane, state = tile.writer.lane, wgmma.Uniform(Int32(0), Int32(1), Int32(0))
        apart, whole = self._known(tile, visited)

        def evaluate() -> None:
            wgmma.loop(tile.predicate.scalars.members, lambda member: self._evaluate_head(tile, visited, member, state))

        def fill() -> None:
            state[0] = Int32(1)
            tile.live[0] = Int32(-1)

        if self.spec.segment_ids:
            cutlass.if_generate(whole, fill, lambda: cutlass.if_generate(apart, lambda: None, evaluate))
        else:
            evaluate()
        word = Classes.of(Boolean(state[0] != 0), Boolean(state[1] != 0), Boolean(state[2] != 0))
        cutlass.if_generate(lane == 0, lambda: ptx.store_global_int(tile.writer.class_address(visited), word))

    def _known(self, tile: _OwnTile, visited: Int32) -> tuple[Boolean, Boolean]:
        """Returns whether segment ids say that nothing is visible, and whether they say that everything is."""
        if tile.extent is None:
            return Boolean(False), Boolean(False)
        own = tile.extent
        other = tile.predicate.extent(visited, tile.writer.lane, of_keys=not self.config.transposed)
        apart = Boolean((own.high < other.low) | (other.high < own.low))
        if self.spec.mask:
            return apart, Boolean(False)
        same = Boolean((own.low == own.high) & (other.low == other.high) & (own.low == other.low))
        inside = Boolean((visited >= tile.visited.full_begin) & (visited < tile.visited.full_end))
        return apart, Boolean(same & inside)

    def _evaluate_head(self, tile: _OwnTile, visited: Int32, member: Int32, state: wgmma.Uniform) -> None:
        """Evaluates the predicate of one head, and writes its bits if they may be read."""
        predicate, scalars, writer = tile.predicate, tile.predicate.scalars, tile.writer
        lists = scalars.heads // scalars.members
        head = writer.plane % lists * scalars.members + member
        query_tile, key_tile = (visited, writer.own) if self.config.transposed else (writer.own, visited)
        found = predicate.evaluate(tile.matrix, head, query_tile, key_tile)
        queries = tile.matrix.live_queries() if self.config.rows <= MAX_LIVE_ROWS else Int32(-1)
        own, other = (found.keys, queries) if self.config.transposed else (queries, found.keys)
        tile.live[0] = tile.live[0] | own
        state[0] = state[0] | ptx.where(found.some, Int32(1), Int32(0))
        state[1] = state[1] & ptx.where(found.all, Int32(1), Int32(0))
        # Where heads share a list, a tile may be an edge although it is full or empty for this head.
        mixed = Boolean(Boolean(found.some & Boolean(found.all == Boolean(False))) | (scalars.members > 1))
        plane = Int64(predicate.entry) * scalars.heads + head
        place = (plane * writer.tiles[0] + writer.own) * writer.tiles[1] + visited

        def store() -> None:
            target = predicate.buffers.bits.toint() + place * self.config.tile_nbytes
            tile.matrix.store_fragments(target)
            length = scalars.query_length if self.config.transposed else scalars.key_length
            live = _existing(other, writer.lane, self.config.visited, visited, length)
            word = target + self.config.bits_nbytes + writer.lane * 4
            cutlass.if_generate(writer.lane < LIVE_WORDS, lambda: ptx.store_global_int(word, live))
            state[2] = state[2] | ptx.where(cute.arch.vote_any_sync(live != -1), Int32(1), Int32(0))

        cutlass.if_generate(mixed, store)
        # The next tile of the warp overwrites the matrix.
        cute.arch.sync_warp()

    # Ranks.

    @cute.kernel
    def rank(self, buffers: PrepassBuffers, scalars: PrepassScalars):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self._rank(buffers, scalars, block * _RANK_WARPS + cute.arch.make_warp_uniform(thread // 32), thread % 32)

    def _rank(self, buffers: PrepassBuffers, scalars: PrepassScalars, index: Int32, lane: Int32) -> None:
        """Ranks the lists that a query tile is in, which is counted over all planes."""
        tiles = self._tiles(scalars)
        plane, tile = index // tiles[1], index % tiles[1]
        exists = index < scalars.batch * (scalars.heads // scalars.members) * tiles[1]
        cutlass.if_generate(exists, lambda: RankWriter(buffers, plane, tile, tiles, lane).write())


def _existing(live: Int32, lane: Int32, rows: int, tile: Int32, length: Int32) -> Int32:
    """Returns live rows of a tile with those that do not exist as live ones, see `BitMatrix` for the lanes."""
    existing = Int32(cutlass.min(length - tile * rows, rows))
    return live | ~ptx.bit_range(Int32(0), copies.clamp(existing - 32 * lane, 0, 32))
