# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tile of which head and sequence a CTA works on next. `key_tiles.py` has the tiles of keys."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int32, Int64

from jax_fastattn.kernels.arguments import Buffers, Scalars, Sizes
from jax_fastattn.kernels.device import tiles
from jax_fastattn.kernels.device.sequences import Sequence, Span
from jax_fastattn.kernels.sm90.backward_config import ROW_ALIGNMENT, head_counters
from jax_fastattn.kernels.spec import KernelSpec


class HeadOrder(NamedTuple):
    """In which order a kernel works on heads: on query heads for dq alone, else on key/value heads.

    Attributes:
        heads: those of all batch entries.
        section: how many are begun together, see `plan.section`.
        ahead: from the head that a CTA works on to that whose sums it zeroes; None for dq alone, like the next one.
        prepared: how many have their statistics written before the key-stationary kernel begins.
    """

    heads: Int32
    section: Int32
    ahead: Any = None
    prepared: Any = None


class Work(NamedTuple):
    """A tile of queries.

    Attributes:
        tile: its index among those of its sequence.
        head: query head.
        head_index: the same, counted over all batch entries.
        kv_head: key/value head.
        sequence: the rows.
    """

    tile: Int32
    head: Int32
    head_index: Int32
    kv_head: Int32
    sequence: Sequence


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of queries of batch entries of one length.

    Args:
        spec: the compile key.
        rows: of a tile.
    """

    spec: KernelSpec
    rows: int

    def count(self, scalars: Scalars | Sizes) -> Int32:
        """Tiles of a head."""
        return tiles.count(scalars.query_length, self.rows)

    def of_head(self, tile: Int32, index: Int32, buffers: Buffers, scalars: Scalars | Sizes) -> Work:
        """A tile of a head, which is counted over all batch entries."""
        batch, head = index // scalars.num_heads, index % scalars.num_heads
        sequence = Sequence.of_entry(self.spec, batch, buffers, scalars)
        return Work(tile, head, index, head // self.spec.group, sequence)


@dataclass(frozen=True)
class SectionedTiles(QueryTiles):
    """Those of a kernel with a CTA for each tile, which works on heads in sections, see `plan.place_in_sections`."""

    def order(self, scalars: Scalars) -> HeadOrder:
        """The order of the heads of a launch."""
        heads, count = scalars.batch * scalars.num_heads, self.count(scalars)
        return HeadOrder(heads, Int32(tiles.section(scalars.multiprocessors, count, heads, int(self.spec.uneven))))

    def blocks(self, scalars: Scalars, order: HeadOrder) -> Int32:
        """CTAs."""
        return self.count(scalars) * order.heads

    def at(self, block: Int32, order: HeadOrder, buffers: Buffers, sizes: Sizes) -> Work:
        """The tile of a CTA; under a causal mask the last rows see most, and come first."""
        count = self.count(sizes)
        place, index = tiles.place_in_sections(block, order.section, count, order.heads)
        return self.of_head(count - 1 - place, index, buffers, sizes)


def tile_counter(queries: Span, head: Int64, tile: Int32, rows: int) -> Int64:
    """Index of the counter of a tile of `rows` queries in `BackwardBuffers.arrivals`; of tile -1 the head's own.

    `head` is the index of the head in an array `[batch, heads]`.
    """
    return head * head_counters(queries.padded_rows(ROW_ALIGNMENT), rows) + 1 + tile
