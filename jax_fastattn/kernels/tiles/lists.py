# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Lists of tiles and bits of scores: what the prepass writes for a boolean mask or segment ids, and kernels read.

An attention kernel works on tiles of queries (`key_lists`: the key tiles of each) or on tiles of keys (`query_lists`:
the query tiles of each). The side whose tiles have lists is the own side, the other one the visited side. The prepass
classifies every pair of tiles by the whole predicate: mask, window, lengths, offset and ids. An empty tile is left out,
a full one needs no predicate, and an edge tile has bits. docs/kernels/masks.md has drawings.

A list is a row of int32: a header, then an entry for each visited tile that is not empty. Key lists have the full tiles
first and query lists the edge tiles, each group ascending. Where `PrepassConfig.splits_edges` says so, edge tiles after
the last full one come last. Kernels visit a list from its last entry to its first one, except for the portable backward
kernel, which ascends.

Imports no DSL. The rule of the prepass on Python integers is `tests/kernels/emulator/tile_list_rule.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

Int = Any  # a Python int or a device integer

# A list's header has these words: how many edge and full tiles it has, whether some own row is dead, how many edge
# tiles come after the full ones, and which own rows are live, a bit each. A row is live if it sees something, or if it
# lies past the end of the array.
HEADER_WORDS = 8
EDGES, FULLS, HAS_DEAD_ROWS, LAST_EDGES, LIVE = 0, 1, 2, 3, 4
LIVE_WORDS = 4

# An entry has these parts. The rank says how many own tiles before this one visit the tile, in query lists only, and
# the last bit that none after this one does. An edge tile has dead rows if a row of the visited side is not live in it.
TILE_MASK = 0x7FFF
DEAD_ROWS = 1 << 15
RANK_SHIFT, RANK_MASK = 16, 0x7FFF
LAST = -(1 << 31)

# The class of a pair of tiles says whether something is visible, and whether everything that exists is; then comes
# `DEAD_ROWS`.
SOME, ALL = 1, 2

# An own side of up to this many rows has live rows in the header; kernels with larger tiles do not ask.
MAX_LIVE_ROWS = 32 * LIVE_WORDS

# A side may have this many tiles.
MAX_TILES = TILE_MASK + 1

# The record of an own row that edge tiles compare has this many words: its id, the first visited row that it sees by
# its limits, the one after the last, and padding.
RECORD_WORDS = 4

# The bits of a launch have at most this many bytes, unless its mask is given whole. Above, edge tiles compare rows.
MAX_BITS_NBYTES = 1 << 28


@dataclass(frozen=True)
class PrepassConfig:
    """The tiles of the kernel that reads the results.

    Attributes:
        rows: queries of a tile, a multiple of 32.
        keys: keys of a tile, a multiple of 16.
        transposed: whether tiles of keys have the lists; rows of the kernel's accumulators are keys then.
        splits_edges: whether edge tiles after the last full one come after the full tiles in a query list, so that a
            list nearly ascends. CTAs that wait for each other's turns then meet tiles of a document in one order.
        bits: whether edge tiles have bits; else they have live rows alone, and the kernel compares rows.
    """

    rows: int
    keys: int
    transposed: bool = False
    splits_edges: bool = False
    bits: bool = True

    @property
    def own(self) -> int:
        """Rows of a tile of the own side, which are the rows of the kernel's accumulators."""
        return self.keys if self.transposed else self.rows

    @property
    def visited(self) -> int:
        """Rows of a tile of the visited side, which are columns of the kernel's accumulators."""
        return self.rows if self.transposed else self.keys

    @property
    def words(self) -> int:
        """Words of a lane for 16 accumulator rows: one for each 64 columns."""
        return -(-self.visited // 64)

    @property
    def bits_nbytes(self) -> int:
        """Bytes of the bits of a tile."""
        return self.own // 16 * self.words * 128 if self.bits else 0

    @property
    def tile_nbytes(self) -> int:
        """Bytes from one tile to the next: bits, then the live words of the visited side, in 16 bytes."""
        return self.bits_nbytes + 4 * LIVE_WORDS


def list_words(visited_tiles: Int) -> Int:
    """Returns the int32 words of a list, a multiple of 4, given how many tiles the visited side has."""
    return HEADER_WORDS + (visited_tiles + 3) // 4 * 4


def visitor_nbytes(key_tiles: Int) -> Int:
    """Returns the bytes that say which tiles of keys visit a query tile: one for each, a multiple of 16 of them."""
    return (key_tiles + 15) // 16 * 16


class Sizes(NamedTuple):
    """What the shapes of the results depend on.

    Attributes:
        batch: batch entries with lists of their own, B or 1.
        heads: heads with bits of their own, in each entry: query heads, key/value heads, or 1.
        members: heads that share a list: the heads of a group, if tiles of keys have the lists.
        query_length, key_length: of the evaluated matrix.
    """

    batch: int
    heads: int
    members: int
    query_length: int
    key_length: int


def shapes(config: PrepassConfig, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the buffers that the prepass writes, by name; all are int32."""
    query_tiles, key_tiles = -(-sizes.query_length // config.rows), -(-sizes.key_length // config.keys)
    own, visited = (key_tiles, query_tiles) if config.transposed else (query_tiles, key_tiles)
    planes = (sizes.batch, sizes.heads // sizes.members)
    found = {
        "lists": (*planes, own, list_words(visited)),
        "bits": (sizes.batch, sizes.heads, own, visited, config.tile_nbytes // 4),
        "classes": (*planes, own, visited),
        "live": (*planes, own, visited, LIVE_WORDS),
    }
    if config.transposed:
        found |= {"counts": (*planes, query_tiles), "visitors": (*planes, query_tiles, visitor_nbytes(key_tiles) // 4)}
    return found


def has_too_many_bits(config: PrepassConfig, sizes: Sizes) -> bool:
    """Returns whether bits would take more than `MAX_BITS_NBYTES`."""
    return 4 * math.prod(shapes(config, sizes)["bits"]) > MAX_BITS_NBYTES
