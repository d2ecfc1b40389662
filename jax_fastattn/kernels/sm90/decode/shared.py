# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the Hopper decoding kernel in shared memory, and what a warp reads of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from jax_fastattn.kernels.decode.config import DecodeBarrier
from jax_fastattn.kernels.decode.line import Segment
from jax_fastattn.kernels.decode.merge import MergeMemory
from jax_fastattn.kernels.device import mma, ptx, wgmma
from jax_fastattn.kernels.device.layout import crossed_lane, plain_lane
from jax_fastattn.kernels.device.shared_regions import SharedRegions
from jax_fastattn.kernels.device.warp_scores import swizzled_offset
from jax_fastattn.kernels.sm90.decode.config import DecodeMemory


@dataclass(frozen=True, eq=False)
class DecodeShared:
    """Holds the tiles and barriers in shared memory.

    Attributes:
        memory: their layout.
        regions: the rows of the table.
        key: boxes of K of all stages, `[box_rows, columns, box]`.
        value: boxes of V, likewise.
        full: barriers of the stages that TMA completes.
        empty: barriers of the stages on which every consumer warp arrives.
    """

    memory: DecodeMemory
    regions: SharedRegions
    key: cute.Tensor
    value: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    @classmethod
    def of(cls, memory: DecodeMemory, dtype: Any) -> "DecodeShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        regions = SharedRegions.of(memory.table, wgmma.shared_memory())
        count = memory.config.stages * memory.boxes
        return cls(
            memory=memory,
            regions=regions,
            key=regions.tiles("key", dtype, (memory.box_rows, memory.head_dim), count),
            value=regions.tiles("value", dtype, (memory.box_rows, memory.v_head_dim), count),
            full=regions.barriers["full"],
            empty=regions.barriers["empty"],
        )

    @property
    def merge(self) -> MergeMemory:
        """Returns where the warps merge their results."""
        memory = self.memory
        return MergeMemory(memory.config, memory.head_dim, memory.v_head_dim, self.regions.stage("merge", Int32(0)))

    def ring(self) -> wgmma.Ring:
        """Returns a warp's position in the ring, at its start."""
        return wgmma.Ring(self.full, self.empty, self.memory.config.stages)


@dataclass(frozen=True, eq=False)
class TmaSource:
    """Reads, as a `KeySource`, tiles of the ring that TMA fills.

    Attributes:
        ring: the warp's position in the ring.
        lane: index of the lane in its warp.
        part: which keys of a tile the warp has.
    """

    shared: DecodeShared
    ring: wgmma.Ring
    lane: Int32
    part: Int32

    @property
    def keeps_hidden(self) -> bool:
        """Returns True: TMA loads all that is in the array, and zeros only past its end."""
        return True

    def start(self, segment: Segment) -> None:
        """Prepares for the first tile of a segment."""
        del segment
        self.ring.make_uniform()

    def wait(self, segment: Segment, i: Int32) -> Int32:
        """Waits for the next tile, and returns its stage."""
        del segment, i
        return self.ring.consumer_wait()

    def key(self, place: Int32) -> Callable[[int, int], mma.Fragment]:
        """Returns what loads the strip of K."""
        memory, columns = self.shared.memory, self.shared.memory.head_dim
        row, column = crossed_lane(self.lane)
        start = self.shared.regions.stage("key", place) + self._strip(columns)

        def load(n: int, k: int) -> mma.Fragment:
            offset = swizzled_offset(row, k, column // 8, memory.box_rows, columns)
            return ptx.ldmatrix(start + (offset + self._rows(8 * n, columns)))

        return load

    def value(self, place: Int32) -> Callable[[int, int], mma.Fragment]:
        """Returns what loads the strip of V."""
        memory, columns = self.shared.memory, self.shared.memory.v_head_dim
        row, column = plain_lane(self.lane)
        start = self.shared.regions.stage("value", place) + self._strip(columns)

        def load(n: int, k: int) -> mma.Fragment:
            offset = swizzled_offset(row, n // 2, column // 8, memory.box_rows, columns)
            return ptx.ldmatrix(start + (offset + self._rows(16 * k, columns)), transpose=True)

        return load

    def release(self, place: Int32) -> None:
        """Gives the stage back."""
        wgmma.release(self.shared.empty + place)

    def end(self) -> None:
        """Waits for the previous merge: the loader goes on with the next segment, and merges have their own bytes."""
        threads = self.shared.memory.config.consumer_threads
        cute.arch.barrier(barrier_id=DecodeBarrier.MERGE.at(), number_of_threads=threads)

    def _strip(self, columns: int) -> Int32:
        """Returns the bytes from the first row of a tile to the first row of the warp's strip."""
        memory, strip = self.shared.memory, self.shared.memory.config.strip
        if memory.boxes == 1 or strip % memory.box_rows == 0:
            return self.part * self._rows(strip, columns)
        return self._rows(self.part * strip, columns)

    def _rows(self, row: Any, columns: int) -> Any:
        """Returns the bytes to a row from the start of a tile, or of a strip; the swizzle repeats every 8 rows."""
        return self.shared.memory.row_offset(row, 2 * wgmma.atom_columns(columns), columns)
