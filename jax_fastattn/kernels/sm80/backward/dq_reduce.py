# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""How dQ of many CTAs becomes one sum, and the sum dq: atomic additions in any order, or in semaphore order.

`sm90/backward/dkdv_dq/dq_reduce.py` has the same words for Hopper.

dq_accum holds float32 fragments, not rows. Each warp of a CTA owns a part of every tile, and what the warp adds with
one instruction is contiguous: 512 bytes where an instruction adds four elements of a lane, else 128 bytes. Only the
conversion reads it, by `DqReduce.finish`.
"""

from dataclasses import dataclass
from typing import Protocol, final

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import mma, ptx
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig
from jax_fastattn.kernels.sm80.backward.state import DkdvDqState
from jax_fastattn.kernels.tiles.plan import TileRange


def adds_chunks(arch: str) -> bool:
    """Returns whether one instruction adds four float32 to global memory, as from compute capability 9.0 on."""
    return arch.startswith(("sm_90", "sm_10", "sm_11", "sm_12"))


class DqTile:
    """Fragments of a tile of dQ `[queries, head_dim]`: which warp has which, and where they lie in dq_accum."""

    def __init__(self, spec: KernelSpec, config: DkdvDqConfig):
        self.chunks = adds_chunks(spec.arch)
        self.warps, self.column_warps = config.dq_warps, config.dq_column_warps
        self.shared = config.memory(*spec.row_columns).dq
        self.blocks = (
            config.queries // (16 * config.dq_row_warps),
            self.shared.padded_columns // (8 * spec.terms * config.dq_column_warps),
        )
        self.count = self.blocks[0] * self.blocks[1] * 4
        self.warp_nbytes = 128 * self.count
        self.nbytes = self.warps * self.warp_nbytes

    def place(self, warp: Int32) -> tuple[Int32, Int32]:
        """Returns the first row and column of a warp's part."""
        return warp // self.column_warps * (16 * self.blocks[0]), warp % self.column_warps * (8 * self.blocks[1])

    def lane_address(self, address: Int64, warp: Int32, lane: Int32) -> Int64:
        """Returns the address of a lane's first element in a tile at `address`."""
        return address + Int64(warp * self.warp_nbytes + lane * (16 if self.chunks else 4))

    def add(self, address: Int64, acc: mma.Accumulator) -> None:
        """Adds a warp's fragments atomically; `lane_address` gives `address`, as in `store` and `load`."""
        for i in range(0, self.count, 4):
            if self.chunks:
                ptx.add_global_chunk(address + 128 * i, [acc[i + e] for e in range(4)])
            else:
                for e in range(4):
                    ptx.add_global(address + 128 * (i + e), acc[i + e])

    def store(self, address: Int64, acc: mma.Accumulator) -> None:
        """Stores a warp's fragments."""
        for i in range(0, self.count, 4):
            if self.chunks:
                ptx.store_global_chunk(address + 128 * i, [ptx.bits(acc[i + e]) for e in range(4)])
            else:
                for e in range(4):
                    ptx.store_global(address + 128 * (i + e), acc[i + e])

    def load(self, address: Int64) -> list[Float32]:
        """Loads a warp's fragments."""
        if self.chunks:
            chunks = [ptx.load_global_chunk(address + 128 * i) for i in range(0, self.count, 4)]
            return [ptx.from_bits(x) for chunk in chunks for x in chunk]
        return [ptx.load_global(address + 128 * i) for i in range(self.count)]

    def load_accum(self, buffers: Buffers, index: Int64, warp: Int32, lane: Int32) -> list[Float32]:
        """Loads a warp's fragments of tile `index` of dq_accum."""
        return self.load(self.lane_address(buffers.dq_accum.toint() + index * self.nbytes, warp, lane))

    def member_address(self, state: DkdvDqState, member: Int32, index: Int32) -> Int64:
        """Returns the address of a lane's first element in query tile `index` of head `member` of the group."""
        address = state.dq_scratch.accum + Int64(member * state.dq_scratch.tile_count + index) * self.nbytes
        return self.lane_address(address, state.at.dq_warp, state.at.lane)


class DqReduce(Protocol):
    """What the kernels of a backward pass do for dq, in this order.

    The preprocess kernel prepares. A CTA of `dkdv_dq.py` fetches a tile of keys; each of its warps that compute dQ
    starts, and for each query tile waits, accumulates, and counts. The conversion finishes.
    """

    @property
    def tile(self) -> DqTile:
        """Where the fragments of a tile lie."""
        ...

    def prepare(self, buffers: Buffers, index: Int64, thread: Int32, threads: int) -> None:
        """Makes tile `index` ready to be added to, by all threads of a CTA."""
        ...

    def next_tile(self, buffers: Buffers, thread: Int32, shared: Int32) -> Int32:
        """Returns the CTA's place in the order of key tiles. May use shared memory at `shared`, and leaves it free."""
        ...

    def start(self) -> cute.Tensor | None:
        """Returns the register in which a warp keeps the index of the count that is due; None if it counts nothing."""
        ...

    def wait(self, state: DkdvDqState, due: cute.Tensor | None, member: Int32, entry: Int32) -> Boolean | None:
        """Waits until the warp may add to the query tile of an entry (`Visit.entry`) of head `member`.

        Returns whether the warp is the first one to add there, so that sums hold anything; None if they hold zeros.
        """
        ...

    def accumulate(
        self, state: DkdvDqState, member: Int32, index: Int32, acc: mma.Accumulator, is_first: Boolean | None
    ) -> None:
        """Adds a warp's part of dQ of a tile to its sums; `is_first` is what `wait` has returned."""
        ...

    def count(self, state: DkdvDqState, due: cute.Tensor | None) -> None:
        """Counts what the warp has added last, if it is due. `wait` does that too; once more after the last tile."""
        ...

    def finish(
        self, buffers: Buffers, index: Int64, warp: Int32, lane: Int32, end: Int32
    ) -> tuple[list[Float32], Int32]:
        """Returns a warp's sums of tile `index`, to be scaled and rounded, and the rows that hold sums: `end` or 0."""
        ...


@final
@dataclass(frozen=True)
class DqAtomic:
    """Adds to sums that start at zero. The last bits of dq depend on the order of the additions, which varies.

    Attributes:
        tile: where the fragments of a tile lie.
    """

    tile: DqTile

    def prepare(self, buffers: Buffers, index: Int64, thread: Int32, threads: int) -> None:
        """Zeroes the sums of a tile."""
        address = buffers.dq_accum.toint() + index * self.tile.nbytes + Int64(thread * 16)
        zero = [Int32(0)] * 4
        for i in range(0, self.tile.nbytes, 16 * threads):
            ptx.store_global_chunk(address + i, zero)

    def next_tile(self, buffers: Buffers, thread: Int32, shared: Int32) -> Int32:
        """Returns the CTA's index: CTAs may begin tiles in any order."""
        del buffers, thread, shared
        return cute.arch.block_idx()[0]

    def start(self) -> None:
        """Returns None: nothing is counted."""
        return None

    def wait(self, state: DkdvDqState, due: cute.Tensor | None, member: Int32, entry: Int32) -> None:
        """Does nothing."""
        del state, due, member, entry

    def accumulate(
        self, state: DkdvDqState, member: Int32, index: Int32, acc: mma.Accumulator, is_first: Boolean | None
    ) -> None:
        """Adds a warp's part of the tile."""
        del is_first
        self.tile.add(self.tile.member_address(state, member, index), acc)

    def count(self, state: DkdvDqState, due: cute.Tensor | None) -> None:
        """Does nothing."""
        del state, due

    def finish(
        self, buffers: Buffers, index: Int64, warp: Int32, lane: Int32, end: Int32
    ) -> tuple[list[Float32], Int32]:
        """Returns a warp's sums, of all rows: they are zeros in tiles that nothing was added to."""
        return self.tile.load_accum(buffers, index, warp, lane), end


@final
@dataclass(frozen=True)
class DqSemaphore:
    """Adds to a tile in the order of the key tiles, so that dq has the same bits in every run.

    Each warp has a count of its own for each tile: how many key tiles have added to that part. The first one stores the
    sums, so they need no zeros. A warp counts what it has added when it comes to the next tile: a release waits until
    additions are visible, and by then they are.

    No CTA waits forever. It waits for earlier key tiles of the same head, CTAs fetch key tiles in that order by a
    counter, and a CTA that has a tile runs until it is done.

    Attributes:
        tile: where the fragments of a tile lie.
    """

    config: DkdvDqConfig
    tile: DqTile

    def prepare(self, buffers: Buffers, index: Int64, thread: Int32, threads: int) -> None:
        """Zeroes the counts of tile `index`, and the tile counter."""
        del threads
        counts = self._semaphore(buffers) + (index * self.tile.warps + thread) * 4
        cutlass.if_generate(thread < self.tile.warps, lambda: ptx.store_global_int(counts, Int32(0)))
        is_first = Boolean((index == 0) & (thread == 0))
        cutlass.if_generate(is_first, lambda: ptx.store_global_int(self._tile_counter(buffers), Int32(0)))

    def next_tile(self, buffers: Buffers, thread: Int32, shared: Int32) -> Int32:
        """Fetches the next tile. Uses shared memory at `shared`, which is free again afterwards."""

        def fetch() -> None:
            ptx.store_shared(shared, ptx.fetch_add_global(self._tile_counter(buffers), Int32(1), "relaxed"))

        cutlass.if_generate(thread == 0, fetch)
        cute.arch.sync_threads()
        index = cute.arch.make_warp_uniform(ptx.load_shared(shared))
        cute.arch.sync_threads()
        return index

    def _semaphore(self, buffers: Buffers) -> Int64:
        assert buffers.dq_semaphore is not None
        return Int64(buffers.dq_semaphore.toint())

    def _semaphore_address(self, state: DkdvDqState, index: Int32) -> Int64:
        assert state.dq_scratch.semaphore is not None
        return state.dq_scratch.semaphore + Int64(index) * 4

    def _tile_counter(self, buffers: Buffers) -> Int64:
        assert buffers.tile_counter is not None
        return Int64(buffers.tile_counter.toint())

    def start(self) -> cute.Tensor:
        """Returns the index of the count that is due, from the group's first; -1 if none is."""
        due = cute.make_rmem_tensor((1,), Int32)
        due.fill(Int32(-1))
        return due

    def wait(self, state: DkdvDqState, due: cute.Tensor | None, member: Int32, entry: Int32) -> Boolean:
        """Counts the last tile, and waits for the earlier key tiles of this one; returns whether there are none."""
        self.count(state, due)
        config, at = self.config, state.at

        def seen(tile: Int32) -> TileRange:
            return state.bounds.key_tiles(tile * config.queries, config.queries, config.keys)

        before = state.visit.turn(entry, at.tile, seen).before
        tile = state.visit.tile_of(entry)
        count = (member * state.dq_scratch.tile_count + tile) * self.tile.warps + at.dq_warp
        assert due is not None
        due[0] = count
        address = self._semaphore_address(state, count)
        cutlass.if_generate(before > 0, lambda: ptx.wait_global(address, before))
        return before <= 0

    def accumulate(
        self, state: DkdvDqState, member: Int32, index: Int32, acc: mma.Accumulator, is_first: Boolean | None
    ) -> None:
        """Stores a warp's part of the tile if it is the first one, else adds it."""
        address = self.tile.member_address(state, member, index)
        cutlass.if_generate(is_first, lambda: self.tile.store(address, acc), lambda: self.tile.add(address, acc))

    def count(self, state: DkdvDqState, due: cute.Tensor | None) -> None:
        """Counts what the warp has added last."""
        assert due is not None
        index = Int32(due[0])

        def count() -> None:
            ptx.fetch_add_global(self._semaphore_address(state, index), Int32(1), "release")

        cute.arch.sync_warp()
        cutlass.if_generate(Boolean((index >= 0) & (state.at.lane == 0)), count)

    def finish(
        self, buffers: Buffers, index: Int64, warp: Int32, lane: Int32, end: Int32
    ) -> tuple[list[Float32], Int32]:
        """Returns a warp's sums, of no rows if nothing was added: the sums then hold anything."""
        count = self._semaphore(buffers) + (index * self.tile.warps + warp) * 4
        end = ptx.where(ptx.bits(ptx.load_global(count)) == 0, Int32(0), end)
        return self.tile.load_accum(buffers, index, warp, lane), end


def dq_reduce(spec: KernelSpec, config: DkdvDqConfig) -> DqReduce:
    """Returns the reduction of a compile key."""
    tile = DqTile(spec, config)
    return DqSemaphore(config, tile) if spec.ordered else DqAtomic(tile)
