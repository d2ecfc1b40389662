# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The predicate of a launch, which warps evaluate tile by tile: mask, mask function, window, lengths, offset, ids."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.arguments.prepass import PrepassBuffers, PrepassScalars
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.instructions import shifted
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.prepass.matrix import BitMatrix, MatrixShape
from jax_fastattn.kernels.prepass.program import MaskProgram, Parts
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.tiles.plan import Bounds, TileRange

# The mask of this many steps is loaded before the first of them is used.
_BATCH = 4

# Multiplied by this, four bytes of 0 or 1 have their bits in the upper four of 32.
_GATHER = 0x10204080


def _least(x: Int32, y: Int32 | int) -> Int32:
    return Int32(cutlass.min(x, y))


def _most(x: Int32, y: Int32 | int) -> Int32:
    return Int32(cutlass.max(x, y))


class Evaluated(NamedTuple):
    """What a warp has found in its rows of a tile.

    Attributes:
        some: whether something is visible.
        all: whether everything is. Queries past the end count as visible, keys past the end as hidden.
        queries: which of its rows see some key, see `BitMatrix.live_queries`.
        keys: which keys some of its rows see, see `BitMatrix.live_keys`.
    """

    some: Boolean
    all: Boolean
    queries: Int32
    keys: Int32


class Extent(NamedTuple):
    """The smallest and the largest segment id of a tile's rows."""

    low: Int32
    high: Int32


@dataclass(frozen=True, eq=False)
class EntryPredicate:
    """Which queries of a batch entry see which of its keys.

    Attributes:
        bounds: window, lengths and offset.
    """

    spec: KernelSpec
    buffers: PrepassBuffers
    scalars: PrepassScalars
    entry: Int32
    bounds: Bounds

    @classmethod
    def of(cls, spec: KernelSpec, buffers: PrepassBuffers, scalars: PrepassScalars, entry: Int32) -> "EntryPredicate":
        """Returns the predicate of a batch entry."""
        return cls(spec, buffers, scalars, entry, copies.entry_bounds(spec, entry, buffers, scalars))

    @property
    def config(self) -> PrepassConfig:
        """Sizes of the tiles."""
        return self.spec.config

    def visited(self, own: Int32) -> TileRange:
        """Returns the tiles that the own tile visits by window, lengths and offset."""
        rows, keys = self.config.rows, self.config.keys
        if not self.config.transposed:
            return self.bounds.key_tiles(own * rows, rows, keys)
        tiles = self.bounds.query_tiles(own * keys, keys, rows)
        # Keys past the end make edges.
        is_whole = own * keys + keys <= self.bounds.key_end
        return tiles._replace(full_end=ptx.where(is_whole, tiles.full_end, tiles.full_begin))

    # Segment ids.

    def _ids(self, *, of_keys: bool) -> tuple[Int64, Int32]:
        """Returns the address of the ids of the entry's queries or keys, and how many there are."""
        ids = self.buffers.key_value_segment_ids if of_keys else self.buffers.query_segment_ids
        length = self.scalars.key_length if of_keys else self.scalars.query_length
        return ids.toint() + Int64(self.entry) * length * 4, length

    def _id(self, row: Int32, *, of_keys: bool) -> Int32:
        """Loads the id of a row; a row past the end has the last one's."""
        ids, length = self._ids(of_keys=of_keys)
        return ptx.load_global_int(ids + Int64(_least(row, length - 1)) * 4)

    def extent(self, tile: Int32, lane: Int32, *, of_keys: bool) -> Extent:
        """Returns the extent of the ids of a tile of queries or of keys. All lanes call it."""
        rows = self.config.keys if of_keys else self.config.rows
        ids = [
            self._id(tile * rows + _least(lane + 32 * i, rows - 1), of_keys=of_keys) for i in range((rows + 31) // 32)
        ]
        low = high = ids[0]
        for x in ids[1:]:
            low, high = _least(low, x), _most(high, x)
        return Extent(cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max"))

    def stage_ids(self, matrix: BitMatrix, key_tile: Int32) -> None:
        """Puts the ids of a tile of keys after the matrix. All warps call it."""
        words, warps = matrix.shape.words, matrix.shape.warps

        def stage(i: Int32) -> None:
            at = (matrix.warp + i * warps) * 32 + matrix.lane
            key = self._id(key_tile * self.config.keys + at, of_keys=True)
            ptx.store_shared(matrix.address + matrix.shape.nbytes + at * 4, key)

        wgmma.loop((words - matrix.warp + (warps - 1)) // warps, stage)

    # The mask function.

    def program(self, matrix: BitMatrix, head: Int32) -> MaskProgram | None:
        """Returns the mask function of a head; None without one."""
        if not self.spec.features:
            return None
        address = matrix.address + _ids_end(self.spec)
        return MaskProgram(Parts(self.spec), self.buffers, self.scalars, address, self.entry, head)

    # A tile.

    def evaluate(self, matrix: BitMatrix, head: Int32, query_tile: Int32, key_tile: Int32) -> Evaluated:
        """Puts the bits of the warp's rows of a tile into the matrix. All lanes of the warp call it.

        Args:
            matrix: as the warp sees it.
            head: the head of the mask.
            query_tile, key_tile: the tile. Its ids, and the planes of a mask function, are staged.
        """
        shape, config = matrix.shape, self.config
        first, last = query_tile * config.rows, key_tile * config.keys
        column = last + 32 * matrix.word
        exists = ptx.bit_range(Int32(0), copies.clamp(config.keys - 32 * matrix.word, 0, 32))
        found = cute.make_rmem_tensor((3,), Int32)
        for i, value in enumerate((0, -1, 0)):
            found[i] = Int32(value)
        program = self.program(matrix, head)
        values = None if program is None else program.start()
        batch = min(_BATCH if self.spec.mask or program is None else program.parts.batch, shape.steps)

        def run(i: Int32) -> None:
            steps = [i * batch + k for k in range(batch)]
            rows = [first + matrix.row(step) for step in steps]
            masks = self._load_mask(head, rows, column) if self.spec.mask else [Int32(-1)] * batch
            at_keys = None if values is None else values.at_keys(column, matrix.word)
            for step, row, bits in zip(steps, rows, masks, strict=True):
                # Columns past the end of the tile belong to the next one.
                bits = bits & self._in_bounds(row, column, last + config.keys)
                if self.spec.segment_ids:
                    bits = bits & self._same_id(matrix, row)
                if at_keys is not None:
                    bits = bits & at_keys.bits(row, matrix.row(step))
                self._note(matrix, found, step, row, bits, exists)

        wgmma.loop(Int32(shape.steps // batch), run)
        cute.arch.sync_warp()
        some, hidden = (cute.arch.vote_any_sync(Boolean(x)) for x in (found[0] != 0, found[1] != -1))
        everything = Boolean(hidden == Boolean(False))
        return Evaluated(some, everything, matrix.live_queries(), matrix.live_keys(found[0]))

    def _note(self, matrix: BitMatrix, found: cute.Tensor, step: Int32, row: Int32, bits: Int32, exists: Int32) -> None:
        """Stores a word, and updates union and intersection of the words of the lane."""
        seen = ptx.where(row < self.bounds.query_end, bits, Int32(0))
        if self.config.transposed:
            bits = seen
        # What padding sees does not matter where queries have lists, since it is discarded.
        end = self.scalars.query_length if self.config.transposed else self.bounds.query_end
        matrix.store(step, bits)
        found[0] = found[0] | seen
        found[1] = found[1] & ptx.where(row < end, bits | ~exists, Int32(-1))

    def _in_bounds(self, row: Int32, column: Int32, end: Int32) -> Int32:
        """Returns which of 32 columns a row sees by window, lengths and offset, and lie before the end of the tile."""
        limits = self.bounds.key_limits(row)
        high = copies.clamp(_least(limits.high, end) - column, 0, 32)
        low = copies.clamp(limits.low - column, 0, high) if self.bounds.kind.left else Int32(0)
        return ptx.bit_range(low, high - low)

    def _same_id(self, matrix: BitMatrix, row: Int32) -> Int32:
        """Returns which of the lane's 32 keys have the id of a row."""
        own, bits = self._id(row, of_keys=False), Int32(0)
        first = matrix.address + matrix.shape.nbytes + matrix.word * 128
        for i in range(8):
            for j, key in enumerate(ptx.load_shared_chunk(first + 16 * i)):
                bit = 4 * i + j
                bits = bits | ptx.where(key == own, Int32((1 << bit) - (1 << 32 if bit == 31 else 0)), Int32(0))
        return bits

    # The mask.

    def _load_mask(self, head: Int32, rows: list[Int32], column: Int32) -> list[Int32]:
        """Loads 32 columns of rows as bits. A row or column past the end of the mask is the last one."""
        scalars = self.scalars
        keys = scalars.mask_keys
        if scalars.mask_members is not None:
            head = head // scalars.mask_members
        plane = Int64(self.entry) * scalars.mask_batch + head
        first = self.buffers.mask.toint() + plane * scalars.mask_rows * keys
        lines = [first + Int64(_least(row, scalars.mask_rows - 1)) * keys for row in rows]
        loaded = cute.make_rmem_tensor((8 * len(rows),), Int32)

        def load_chunks() -> None:
            for half in range(2):
                at = _least(column + 16 * half, keys - 16)
                for i, line in enumerate(lines):
                    for k, x in enumerate(ptx.load_global_chunk(line + Int64(at))):
                        loaded[8 * i + 4 * half + k] = x

        def load_bytes() -> None:
            for i, line in enumerate(lines):
                for k in range(8):
                    word = Int32(0)
                    for j in range(4):
                        at = Int64(_least(column + 4 * k + j, keys - 1))
                        word = word | (ptx.load_global_byte(line + at) << (8 * j))
                    loaded[8 * i + k] = word

        cutlass.if_generate(keys % 16 == 0, load_chunks, load_bytes)
        return [_packed([loaded[8 * i + k] for k in range(8)]) for i in range(len(rows))]


def _packed(words: list[Int32]) -> Int32:
    """Returns the bits of 32 bytes that are 0 or 1."""
    bits = Int32(0)
    for i, word in enumerate(words):
        bits = bits | (shifted(word * Int32(_GATHER), 28) << (4 * i))
    return bits


def _ids_end(spec: KernelSpec) -> int:
    """Returns the bytes of a matrix, with the segment ids of a tile of keys."""
    shape = MatrixShape(spec.config)
    return shape.nbytes + (128 * shape.words if spec.segment_ids else 0)


def matrix_nbytes(spec: KernelSpec) -> int:
    """Returns the bytes of a matrix, with the segment ids of a tile of keys and the planes of a mask function."""
    return _ids_end(spec) + (Parts(spec).nbytes if spec.features else 0)
