# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The list of a tile of queries, for the kernels that visit its keys: forward in both families, and Hopper's dq."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import copies
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.visits.compared import ComparedRows
from jax_fastattn.kernels.visits.lists import GlobalList, Planes, TileBits
from jax_fastattn.kernels.visits.visit import Visit

Work = Any  # of either family: a tile of queries with its heads and its sequence


@dataclass(frozen=True)
class QueryTileList:
    """What the lists of a launch say of a tile of queries.

    Attributes:
        entries: its list.
        visit: the tiles of keys in it.
        bits: the bits of these tiles.
    """

    entries: GlobalList
    visit: Visit
    bits: TileBits

    @classmethod
    def of(cls, config: PrepassConfig, work: Work, buffers: Buffers, sizes: Scalars | Sizes) -> QueryTileList:
        """Returns the list of a tile of either family's schedule."""
        planes = Planes.of(sizes)
        plane = planes.bits(work.sequence.queries.batch, work.head, work.kv_head)
        query_tiles = copies.count(sizes.query_length, config.rows)
        row = planes.row(plane, work.tile, query_tiles)
        key_tiles = copies.count(sizes.key_length, config.keys)
        entries = GlobalList.of(buffers.key_lists, row, key_tiles)
        visit = Visit.of_list(entries, fulls_first=True)
        arrays = buffers.query_records, buffers.key_ids
        compared = ComparedRows.of(config, arrays, plane, work.tile, (query_tiles, key_tiles))
        return cls(entries, visit, TileBits.of(config, buffers.key_bits, row, key_tiles, compared))
