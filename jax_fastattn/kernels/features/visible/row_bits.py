# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A mask or segment ids in the decoding kernels: bits say which keys each row sees, see `ops/cuda/row_bits.py`.

A lane loads the words of its two rows from global memory, one tile ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.row_planes import RowPlanes
from jax_fastattn.kernels.key import KernelSpec

# A word has this many keys.
_WORD = 32


class SeenKeys(NamedTuple):
    """Which keys of a strip a lane's rows see.

    Attributes:
        rows: for each of its two accumulator rows words whose first bit is the lane's first column, 32 columns each.
        some: words of the keys that some row of the warp sees.
    """

    rows: Sequence[Sequence[Int32]]
    some: Sequence[Int32]

    def hide(self, acc: Accumulator, tile: ScoreTile, hidden: Float32) -> None:
        """Puts `hidden` where a score does not count, in place."""
        for index in range(4 * tile.n_blocks):
            at = tile.at(index)
            acc[index] = ptx.where(_has(self.rows[at.i], at.column), acc[index], hidden)

    def pairs(self, count: int) -> list[Int32]:
        """Returns masks of pairs of 16 bits for the first two of each 8 columns: those that some row sees."""
        found = []
        for at in range(0, count, 8):
            halves = [ptx.where(_has(self.some, at + i), Int32(x), Int32(0)) for i, x in enumerate((0xFFFF, -0x10000))]
            found.append(halves[0] | halves[1])
        return found


@dataclass(frozen=True, eq=False)
class RowBits:
    """Loads the words of a lane.

    Attributes:
        words: words of all rows.
        strip: keys of a tile that a warp computes.
        next: words of the next tile, `[rows * count]`.
    """

    spec: KernelSpec
    words: cute.Pointer
    scalars: Scalars
    strip: int
    next: cute.Tensor

    @classmethod
    def of(cls, spec: KernelSpec, buffers: Buffers, scalars: Scalars, strip: int) -> "RowBits | None":
        """Returns the row bits of a launch; None if the compile key has none."""
        if not spec.row_bits:
            return None
        return cls(spec, buffers.row_bits, scalars, strip, cute.make_rmem_tensor((2 * _count(strip),), Int32))

    @property
    def _columns(self) -> Int32:
        """Returns how many words a row has."""
        return (self.scalars.key_length + _WORD - 1) // _WORD

    def rows(self, batch: Int32, kv_head: Int32, rows: Sequence[Int32]) -> list[Int64]:
        """Returns the addresses of the words of rows; row 0 takes the place of rows that do not exist."""
        planes, queries, group = RowPlanes.of(self.scalars), self.scalars.query_length, self.spec.group
        unit = Int64(batch), Int64(kv_head)
        existing = [ptx.where(row < queries * group, row, Int32(0)) for row in rows]
        indices = [planes.row(unit, row, queries, group) for row in existing]
        return [self.words.toint() + Int64(index) * self._columns * 4 for index in indices]

    def ask(self, rows: Sequence[Int64], key: Int32) -> None:
        """Starts to load the words of a strip, given its first key; words past the last one are 0."""
        columns, count = self._columns, _count(self.strip)
        for w in range(count):
            index = key // _WORD + w
            inside, place = Boolean(index < columns), Int32(cutlass.min(index, columns - 1))
            for i, row in enumerate(rows):
                word = ptx.load_global_int(row + Int64(place) * 4)
                self.next[i * count + w] = ptx.where(inside, word, Int32(0))

    def take(self, column: Int32) -> SeenKeys:
        """Returns what was asked for, given the lane's first column; all lanes of a warp call this."""
        count, shift = _count(self.strip), column % _WORD
        rows = [[self.next[i * count + w] for w in range(count)] for i in range(2)]
        some = [cute.arch.warp_redux_sync(x | y, "or") for x, y in zip(*rows, strict=True)]
        return SeenKeys([[x >> shift for x in row] for row in rows], [x >> shift for x in some])


def _count(strip: int) -> int:
    """Returns the words of a strip."""
    return (strip + _WORD - 1) // _WORD


def _has(words: Sequence[Int32], column: int) -> Boolean:
    """Returns whether the bit of a column, counted from the lane's first one, is set."""
    return Boolean((words[column // _WORD] & (1 << column % _WORD)) != 0)
