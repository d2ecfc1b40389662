# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Records of tiles: how kernels find the rows of packed sequences.

Sequences lie one after the other in arrays `[1, rows, heads, columns]`, and each is cut into tiles from its own first
row on. Sequence b owns the slots from `start // tile_rows + b` on, one for each of its tiles. That ascends strictly
with b, and there is a slot for every tile, so no prefix sum of tile counts is needed:

    sequence       0          1    2             rows 0..9 | 10..12 | 13..22, tiles of 4 rows
    slots      0  1  2 | 3        | 5  6  7      0 // 4 + 0 = 0, 10 // 4 + 1 = 3, 13 // 4 + 2 = 5

A slot that no tile owns (4 above) has no stored rows, and its CTA stores nothing. Rows outside of all sequences form
two more sequences, the first and the last one, without anything on the other side: they are padding, whose results
the kernels write as for any row that sees nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Record(NamedTuple):
    """One slot, int32 each. Rows are on the tile's side, "others" are on the other side.

    Attributes:
        first: first row of the sequence.
        rows: rows of the sequence that are stored; 0 if no tile owns the slot.
        tile: index of the tile in its sequence.
        first_other: first of the other side's rows.
        others: how many there are; 0 for padding.
        first_slot: the first slot of the sequence's query tiles.
        offset: the offset of the queries among the keys.
        entry: batch entry that the sequence belongs to; -1 for padding.
    """

    first: Any
    rows: Any
    tile: Any
    first_other: Any
    others: Any
    first_slot: Any
    offset: Any
    entry: Any


WORDS = len(Record._fields)


def slot_count(rows: Any, tile_rows: int, sequences: Any) -> Any:
    """Returns how many slots the tiles of packed rows need."""
    return rows // tile_rows + sequences
