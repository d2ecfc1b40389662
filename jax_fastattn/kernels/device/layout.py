# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Where elements live: tiles in shared memory, and the lanes of a warp in mma.sync fragments.

Every function runs on Python integers as well as on device integers; `tests/kernels/test_device_layouts.py` checks the
whole index arithmetic on the CPU. No import of the DSL here.

Fragments of `mma.sync.m16n8k16` (g = lane // 4, t = lane % 4; all element types of 16 bits, two per register):

    A [16 x 16]  a0 (g, 2t)   a1 (g + 8, 2t)   a2 (g, 2t + 8)   a3 (g + 8, 2t + 8)
    B [16 x  8]  b0 (k = 2t, n = g)            b1 (k = 2t + 8, n = g)
    C [16 x  8]  c0 c1 (g, 2t and 2t + 1)      c2 c3 (g + 8, 2t and 2t + 1)

So two neighboring C fragments, packed to 16 bits, are one A fragment: a0 = (c0, c1) and a1 = (c2, c3) of the left one,
a2 and a3 the same of the right one. P and dS need no trip through shared memory between two products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Int = Any  # a Python int or a device integer

CHUNK = 8  # elements of one 16-byte access


def padded(columns: int, align: int = 16) -> int:
    """Returns the columns that the k or n loops of mma see: the next multiple of `align`."""
    return (columns + align - 1) // align * align


@dataclass(frozen=True)
class SharedTile:
    """A row-major tile of 16-bit elements in shared memory.

    Rows are one 16-byte chunk longer than their data. An even number of chunks plus one is odd, so the eight rows that
    one ldmatrix phase touches fall on eight different bank groups for every head dim, and an address stays affine in
    row and column: one register per lane, the rest immediates. (An XOR swizzle saves that chunk, 6 % at 128 columns,
    but needs a register for each of its patterns and another one for widths that are no multiple of 64.)

    Attributes:
        rows: rows of the tile.
        columns: columns of the operand, a multiple of 8.
        align: columns up to the next multiple of it are zero-filled; 16, or more where warps share the columns.
    """

    rows: int
    columns: int
    align: int = 16

    @property
    def padded_columns(self) -> int:
        """Columns rounded up to a whole mma step of each warp."""
        return padded(self.columns, self.align)

    @property
    def chunks(self) -> int:
        """16-byte chunks of a row that hold data or zero fill."""
        return self.padded_columns // CHUNK

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next, an odd multiple of 16."""
        return 16 * (self.chunks + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the tile, a multiple of 16."""
        return self.rows * self.pitch

    def offset(self, row: Int, column: Int) -> Int:
        """Returns the byte offset of an element."""
        return row * self.pitch + column * 2


def plain_lane(lane: Int) -> tuple[Int, Int]:
    """Returns the (row, column) inside a 16 x 16 block that a lane passes to ldmatrix.x4 for a fragment

    - A, from a tile stored [m, k] (no transpose), or
    - two neighboring B (n and n + 8), from a tile stored [k, n], with `.trans`: registers b0 b1 of n, b0 b1 of n + 8.
    """
    return lane % 16, lane // 16 * 8


def crossed_lane(lane: Int) -> tuple[Int, Int]:
    """Returns the (row, column) inside a 16 x 16 block that a lane passes to ldmatrix.x4 for a fragment

    - two neighboring B (n and n + 8), from a tile stored [n, k] (no transpose): b0 b1 of n, b0 b1 of n + 8, or
    - A, from a tile stored [k, m], with `.trans`.
    """
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8


def accumulator_lane(lane: Int) -> tuple[Int, Int]:
    """Returns (row, column) of c0 in a C fragment; c1 is one column to the right, c2 and c3 are eight rows below."""
    return lane // 4, lane % 4 * 2


@dataclass(frozen=True)
class CopyShape:
    """How `threads` threads share the 16-byte chunks of a tile: thread t takes row `t // lanes` of each pass.

    Attributes:
        tile: the tile in shared memory.
        threads: threads of the CTA.
    """

    tile: SharedTile
    threads: int

    @property
    def lanes(self) -> int:
        """Threads side by side in a row: the largest power of two that divides both."""
        lanes = 1
        while self.tile.chunks % (2 * lanes) == 0 and self.threads % (2 * lanes) == 0:
            lanes *= 2
        return lanes

    @property
    def rows_per_pass(self) -> int:
        """Rows that all threads together cover at a time."""
        return self.threads // self.lanes

    def passes(self) -> list[tuple[int, int, bool, bool]]:
        """Returns each copy of a thread: `(first row, first chunk, rows may end, columns may end)`.

        Add the thread's own row and chunk. "Rows may end" means that the thread's row may lie past the tile and the
        copy must then be left out; "columns may end" that its chunk may be the zero-filled one.
        """
        return [
            (row, chunk, row + self.rows_per_pass > self.tile.rows, (chunk + self.lanes) * CHUNK > self.tile.columns)
            for row in range(0, self.tile.rows, self.rows_per_pass)
            for chunk in range(0, self.tile.chunks, self.lanes)
        ]

    def thread_chunk(self, thread: Int) -> tuple[Int, Int]:
        """Returns the (row, chunk) of a thread in the first pass."""
        return thread // self.lanes, thread % self.lanes


@dataclass(frozen=True)
class WarpPiece:
    """A tile of 16-bit elements that a warp copies for itself, a chunk by each lane, and reads by one ldmatrix.x4.

    Chunks of a row change places, so that the eight rows of a phase of ldmatrix fall on eight different bank groups.

    Attributes:
        rows: 8, of 32 columns, or 16, of 16 columns.
    """

    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tile."""
        return 32 * 2 * CHUNK

    @property
    def columns(self) -> int:
        """Columns of the tile."""
        return self.chunks * CHUNK

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return 32 // self.rows

    def lane_chunk(self, lane: Int) -> tuple[Int, Int]:
        """Returns the (row, chunk) that a lane copies: neighboring lanes copy neighboring chunks."""
        return lane // self.chunks, lane % self.chunks

    def copy_offset(self, lane: Int) -> Int:
        """Returns the byte offset of that chunk."""
        return self._offset(*self.lane_chunk(lane))

    def read_offset(self, lane: Int) -> Int:
        """Returns the byte offset that a lane passes to ldmatrix.x4, whose matrices go down the rows of each chunk."""
        return self._offset(lane % self.rows, lane // self.rows)

    def _offset(self, row: Int, chunk: Int) -> Int:
        return row * (2 * CHUNK * self.chunks) + (chunk ^ row // (8 // self.chunks) % self.chunks) * (2 * CHUNK)


@dataclass(frozen=True)
class PieceRing:
    """The pieces of a warp.

    Attributes:
        piece: their shape.
        terms: terms of a piece, one after the other.
        places: pieces that shared memory has room for, from the first one of a tile on.
        count: pieces of a tile.
        across: pieces side by side; a tile is read from left to right, then from top to bottom.
    """

    piece: WarpPiece
    terms: int
    places: int
    count: int
    across: int = 1

    @property
    def piece_nbytes(self) -> int:
        """Bytes of all terms of a piece."""
        return self.terms * self.piece.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of a warp's pieces."""
        return self.places * self.piece_nbytes

    @property
    def refills(self) -> bool:
        """Whether pieces are copied while a tile is read."""
        return self.places < self.count

    def offset(self, index: int, term: int) -> int:
        """Returns where a term of a piece of the tile begins."""
        return index % self.places * self.piece_nbytes + term * self.piece.nbytes

    def corner(self, index: int) -> tuple[int, int]:
        """Returns the first row and column of a piece in the tile."""
        down, right = divmod(index, self.across)
        return down * self.piece.rows, right * self.piece.columns
