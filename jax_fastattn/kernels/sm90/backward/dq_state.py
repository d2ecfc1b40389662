# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the warps that add up dq keep from tile to tile, in whatever order CTAs add (`dq_atomic.py`, `dq_semaphore.py`).

All of it is frozen: what changes in loops lies in registers of `wgmma.Uniform` and of accumulators.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared


class Chunk(NamedTuple):
    """A part of a tile of dq.

    Attributes:
        row_block: its block of 64 rows.
        column: its first column.
    """

    row_block: int
    column: int


class TileRows(NamedTuple):
    """Where the rows of a tile of dq are.

    Attributes:
        first: its first row, counted from the first one of the sequence.
        place: index of that row and the head in an array `[batch, rows, heads]`.
    """

    first: Int32
    place: Int64


@dataclass(frozen=True, eq=False)
class TileCursor:
    """A tile of dq that loops carry, the same in all lanes.

    Attributes:
        position: the query head of its batch entry, and the position of the tile in the visit.
    """

    position: wgmma.Uniform

    @classmethod
    def start(cls) -> "TileCursor":
        """Returns a cursor with registers of its own; `move_to_first` gives it a tile."""
        return cls(wgmma.Uniform(Int32(0), Int32(0)))

    @property
    def head(self) -> Int32:
        """Query head of its batch entry."""
        return self.position[0]

    def tile(self, work: KeyTile) -> Int32:
        """Returns the index of the tile among those of its sequence."""
        return work.visit.tile(self.position[1])

    def move_to_first(self, work: KeyTile) -> None:
        """Goes to the first tile to visit for a tile of keys: the last visible one of the first head."""
        self.position[0], self.position[1] = work.first_head, work.visit.end - 1

    def advance(self, work: KeyTile) -> None:
        """Goes to the next tile: all visible ones of one head, the last first, then those of the next head."""
        at, ends = self.position, self.position[1] == work.visit.begin
        at[0], at[1] = at[0] + ptx.where(ends, Int32(1), Int32(0)), ptx.where(ends, work.visit.end, at[1]) - 1


@dataclass(frozen=True, eq=False)
class CountingWarp:
    """A warp that counts the tiles of one slot.

    Attributes:
        slot: the slot; negative in a warp that does not count.
        position: the slot of the first tile of the next tile of keys, and the parity of the tiles counted so far.
    """

    slot: Int32
    position: wgmma.Uniform

    @classmethod
    def start(cls, slot: Int32) -> "CountingWarp":
        """Returns the warp of a slot before it counts."""
        return cls(slot, wgmma.Uniform(Int32(0), Int32(0)))

    def wait_for_sums(self, shared: BackwardShared) -> None:
        """Waits until the third warpgroup has added to the next tile of the slot."""
        wgmma.wait(shared.added + self.slot, self.position[1])
        self.position[1] = self.position[1] ^ 1


@dataclass(frozen=True, eq=False)
class DqWarpgroup:
    """What the third warpgroup keeps from one tile of keys to the next.

    Attributes:
        shared: tiles and barriers.
        mma: the product dS K.
        dq: accumulator `[64, columns]` of a part of a tile.
        dscore: descriptors of both buffers of dS.
        key: descriptors of K as right factor, of all parts of its columns.
        thread: index of this thread in the warpgroup.
        warp: index of its warp.
        row: the lane's first row of the accumulator; the other one is 8 further.
        dq_address: address of dq.
        sums: address of the sums.
        scale: factor on the sums.
        added: the next tile to add to.
        counted: the next tile to finish.
        slot: slot of the tile to add to, and the parity of its lap.
        done: slot of the tile to finish, and the parity of its lap.
        turn: tiles added to so far; says which buffer of dS is next, and its phase.
    """

    shared: BackwardShared
    mma: cute.TiledMma
    dq: cute.Tensor
    dscore: cute.Tensor
    key: cute.Tensor
    thread: Int32
    warp: Int32
    row: Int32
    dq_address: Int64
    sums: Int64
    scale: Float32
    added: TileCursor
    counted: TileCursor
    slot: wgmma.Uniform
    done: wgmma.Uniform
    turn: wgmma.Uniform
