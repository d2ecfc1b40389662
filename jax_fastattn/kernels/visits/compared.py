# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of both sides that an edge tile of a list compares, where its bits would take too much memory.

A score counts if both of its rows have the same id, and the visited row lies between the limits of the own row. So the
words of `features/visible/bits.py` are made in registers. docs/kernels/masks.md says what ids and limits stand for.
"""

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.tiles.lists import RECORD_WORDS, PrepassConfig

# A lane's word has this many columns, and each accumulator row has this many of them.
_COLUMNS = 64
_BITS = 16


@dataclass(frozen=True)
class ComparedRows:
    """Makes words of bits for the tiles that an own tile visits.

    Attributes:
        config: sizes of the tiles.
        records: records of all own rows.
        ids: ids of all visited rows.
        plane: the plane of the head.
        tiles: how many own tiles and visited tiles a plane has.
    """

    config: PrepassConfig
    records: cute.Pointer
    ids: cute.Pointer
    plane: Int32
    own: Int32
    tiles: tuple[Int32, Int32]

    @classmethod
    def of(
        cls,
        config: PrepassConfig,
        arrays: tuple[cute.Pointer | None, cute.Pointer | None],
        plane: Int32,
        own: Int32,
        tiles: tuple[Int32, Int32],
    ) -> "ComparedRows | None":
        """Returns the rows that an own tile compares, given records and ids of a launch; None if it has bits."""
        records, ids = arrays
        return None if records is None or ids is None else cls(config, records, ids, plane, own, tiles)

    def moved(self, planes: Int32) -> "ComparedRows":
        """Returns the rows of the plane that lies `planes` planes later."""
        return replace(self, plane=self.plane + planes)

    def fragment(self, tile: Int32, fragment: Int32, lane: Int32) -> list[Int32]:
        """Returns the words of a lane for 16 accumulator rows, one for each 64 columns."""
        config, (own_tiles, visited_tiles) = self.config, self.tiles
        row, column = accumulator_lane(lane)
        first = (Int64(self.plane) * own_tiles + self.own) * config.own + (fragment * 16 + row)
        record_nbytes = 4 * RECORD_WORDS
        records = self.records.toint() + first * record_nbytes
        rows = [ptx.load_global_chunk(records + 8 * i * record_nbytes) for i in range(2)]
        start = tile * config.visited + column
        ids = self.ids.toint() + (Int64(self.plane) * visited_tiles * config.visited + start) * 4
        columns = range(0, config.visited, _COLUMNS)
        return [_word(rows, ids + 4 * at, start + at, min(_COLUMNS, config.visited - at)) for at in columns]


def _word(rows: list[list[Int32]], ids: Int64, start: Int32, columns: int) -> Int32:
    """Returns a lane's word of a number of columns.

    Args:
        rows: the records of its two rows: id, first column seen, column after the last one.
        ids: address of the ids of its columns.
        start: its first column in the whole matrix.
        columns: how many there are, a multiple of 8.
    """
    same, inside = Int32(0), Int32(0)
    for block in range(columns // 8):
        for e, column in enumerate(ptx.load_constant_pair(ids + 32 * block)):
            for i, (own, *_) in enumerate(rows):
                bit = _BITS * i + 2 * block + e
                # Bit 31 alone is a negative number.
                same = same | ptx.where(column == own, Int32((1 << bit) - (1 << 32 if bit == 31 else 0)), Int32(0))
    for i, (_, low, high, _) in enumerate(rows):
        begin, end = _bits_before(low - start), _bits_before(high - start)
        inside = inside | ptx.bit_range(begin + _BITS * i, Int32(cutlass.max(end - begin, 0)))
    return same & inside


def _bits_before(column: Int32) -> Int32:
    """Returns how many of an accumulator row's bits are for columns before one, counted from the lane's first."""
    column = copies.clamp(column, 0, _COLUMNS)
    return column // 8 * 2 + Int32(cutlass.min(column % 8, 2))
