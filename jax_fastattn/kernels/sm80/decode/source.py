# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""How K and V come to the warps of the portable decoding kernel: they copy their strips by cp.async.

Warps with the same strip of keys, one for each block of rows, copy a part of it each and meet once a tile. With one
block of rows a warp waits for no other one. Copies of a segment begin when the one before it is merged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.decode.config import DecodeBarrier, DecodeConfig
from jax_fastattn.kernels.decode.line import Line, Segment
from jax_fastattn.kernels.device import copies, mma, ptx
from jax_fastattn.kernels.device.layout import crossed_lane, plain_lane
from jax_fastattn.kernels.sm80.decode.config import DecodeMemory


class StripRows(Protocol):
    """Where the rows of strips lie, which a warp asks for one after the other."""

    def start(self, segment: Segment, key: Int32) -> None:
        """Prepares for the first strip of a segment, given its first key."""
        ...

    def row(self, segment: Segment, key: Int32, exists: Boolean) -> Int64:
        """Returns the row, among the rows of all batch entries, that a strip begins with; any row if there is no strip.

        Args:
            key: the strip's first key. A warp asks for the strips of all tiles, in order.
            exists: whether there is a strip.
        """
        ...


@dataclass(frozen=True, eq=False)
class DenseRows:
    """`StripRows` of arrays `[B, S, ...]`."""

    line: Line

    def start(self, segment: Segment, key: Int32) -> None:
        """Does nothing."""

    def row(self, segment: Segment, key: Int32, exists: Boolean) -> Int64:
        """Returns the row of a key."""
        return Int64(segment.batch) * self.line.scalars.key_length + ptx.where(exists, key, Int32(0))


@dataclass(frozen=True, eq=False)
class PagedRows:
    """`StripRows` of pages `[P, page, ...]`: a strip lies in one, whose id is asked for one strip ahead.

    Attributes:
        page: the page of the next strip, `[1]`.
    """

    line: Line
    page: cute.Tensor

    @classmethod
    def begin(cls, line: Line) -> "PagedRows":
        """Returns the rows with their register."""
        return cls(line, cute.make_rmem_tensor((1,), Int32))

    def start(self, segment: Segment, key: Int32) -> None:
        """Asks for the page of the first strip."""
        self._ask(segment, key)

    def row(self, segment: Segment, key: Int32, exists: Boolean) -> Int64:
        """Returns a row of the page that was asked for, and asks for the next strip's."""
        del exists
        page_rows = self.line.spec.page
        row = Int64(self.page[0]) * page_rows + key % page_rows
        self._ask(segment, key + self.line.keys)
        return row

    def _ask(self, segment: Segment, key: Int32) -> None:
        self.page[0] = self.line.page(segment.batch, key, Boolean(key < segment.entry.end))


@dataclass(frozen=True, eq=False)
class CopySource:
    """A `KeySource`: strips that warps copy themselves.

    Attributes:
        rows: where the rows of strips lie.
        address: the address of the strip's first stage.
        block: which block of rows the warp has.
        part: which strip.
    """

    line: Line
    memory: DecodeMemory
    rows: StripRows
    address: Int32
    block: Int32
    part: Int32

    @classmethod
    def begin(cls, line: Line, memory: DecodeMemory, rows: StripRows, address: Int32, warp: Int32) -> "CopySource":
        """Returns the source of a warp, given the address of shared memory."""
        config = memory.config
        part = warp % config.parts
        first = memory.table.offset("ring") + part * (config.stages * memory.stage_nbytes)
        return cls(line, memory, rows, address + first, warp // config.parts, part)

    @property
    def config(self) -> DecodeConfig:
        """The variant."""
        return self.memory.config

    @property
    def keeps_hidden(self) -> bool:
        """Rows that no query sees are zeros."""
        return False

    def start(self, segment: Segment) -> None:
        """Starts the copies of the first tiles of a segment, once no warp reads what the merge has put there."""
        self.rows.start(segment, self._first_key(segment, Int32(0)))
        self._sync_all()
        for i in range(self.config.stages - 1):
            self._copy(segment, Int32(i))

    def wait(self, segment: Segment, i: Int32) -> Int32:
        """Waits for the i-th tile of a segment, starts the copy of a later one, and returns the stage's address."""
        stages = self.config.stages
        cute.arch.cp_async_wait_group(stages - 2)
        # The stage that is filled next held the tile before this one, which all warps of the strip have read here.
        self._sync()
        self._copy(segment, i + (stages - 1))
        return self._stage(i)

    def key(self, place: Int32) -> Callable[[int, int], mma.Fragment]:
        """Returns what loads the strip of K."""
        tile = self.memory.key
        return mma.load_b(tile, place + tile.offset(*crossed_lane(self.line.lane)))

    def value(self, place: Int32) -> Callable[[int, int], mma.Fragment]:
        """Returns what loads the strip of V."""
        tile = self.memory.value
        start = place + self.memory.key.nbytes
        return mma.load_b_transposed(tile, start + tile.offset(*plain_lane(self.line.lane)))

    def release(self, place: Int32) -> None:
        """Does nothing: the next wait does it."""

    def end(self) -> None:
        """Waits until no copy is on its way and no warp reads a strip, for the merge uses their bytes."""
        cute.arch.cp_async_wait_group(0)
        self._sync_all()

    def _sync_all(self) -> None:
        """Waits for all warps."""
        cute.arch.barrier(barrier_id=DecodeBarrier.MERGE.at(), number_of_threads=self.config.consumer_threads)

    def _sync(self) -> None:
        """Waits for the warps that have the same strip."""
        if self.config.row_blocks == 1:
            cute.arch.sync_warp()
        else:
            threads = 32 * self.config.row_blocks
            cute.arch.barrier(barrier_id=DecodeBarrier.STRIP.at(self.part), number_of_threads=threads)

    def _stage(self, i: Int32) -> Int32:
        return self.address + i % self.config.stages * self.memory.stage_nbytes

    def _copy(self, segment: Segment, i: Int32) -> None:
        """Starts the warp's part of the copy of the i-th tile, as a group that is empty past the segment's end."""
        config, memory, buffers = self.config, self.memory, self.line.buffers
        spec, scalars, entry = self.line.spec, self.line.scalars, segment.entry
        kv_heads = scalars.num_heads // spec.group
        first = self._first_key(segment, i)
        exists = Boolean((i < segment.count) & (first < entry.end))
        # Rows outside of [begin, end) become zeros, and are not read.
        begin = None if entry.hidden_end is None else ptx.where(exists, entry.hidden_end - first, Int32(0))
        rows = copies.Rows(begin, ptx.where(exists, entry.end - first, Int32(0)))
        row = self.rows.row(segment, first, exists) * kv_heads + segment.kv_head
        threads, thread, target = 32 * config.row_blocks, self.block * 32 + self.line.lane, self._stage(i)
        for pointer, tile in ((buffers.key, memory.key), (buffers.value, memory.value)):
            nbytes = 2 * tile.columns
            source = pointer.toint() + row * nbytes
            copies.load_tile(tile, threads, thread, target, source, Int64(kv_heads) * nbytes, rows)
            target = target + tile.nbytes
        cute.arch.cp_async_commit_group()

    def _first_key(self, segment: Segment, i: Int32) -> Int32:
        """Returns the first key of the strip of the i-th tile of a segment."""
        return segment.entry.first + (segment.tile + i) * self.config.keys + self.part * self.config.strip
