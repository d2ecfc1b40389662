# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tile of which head and sequence a CTA works on next. `key_tiles.py` has the tiles of keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.arguments import Buffers, Scalars, Sizes
from jax_fastattn.kernels.device import tiles, wgmma
from jax_fastattn.kernels.device.sequences import Sequence, Span
from jax_fastattn.kernels.sm90.backward_config import ROW_ALIGNMENT, head_counters, padded_rows
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


@dataclass(frozen=True)
class RowUnits(QueryTiles):
    """Units of rows of which statistics are written, padding included, and counters of tiles of dq.

    Args:
        rows: of a unit, a divisor of `ROW_ALIGNMENT`.
        queries: rows of a tile of dq.
    """

    queries: int

    def count(self, scalars: Scalars | Sizes) -> Int32:
        """Units of a head."""
        return padded_rows(scalars.query_length) // self.rows

    def prepared(self, order: HeadOrder, scalars: Scalars) -> Int32:
        """Units of the heads that are not left to `StatisticsKernel.later`: the first ones."""
        return order.prepared * self.spec.group * self.count(scalars)

    def unit(self, index: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """One of all units."""
        count = self.count(scalars)
        return self.of_head(index % count, index // count, buffers, scalars)

    def each_left(
        self,
        order: HeadOrder,
        buffers: Buffers,
        scalars: Scalars,
        *,
        place: Int32,
        step: int,
        write: Callable[[Work], None],
        finish: Callable[[Int64], None],
    ) -> None:
        """Visits the units that are left to `StatisticsKernel.later`, in the order in which heads are worked on.

        Args:
            order: of the heads.
            buffers: of the launch.
            scalars: of the launch.
            place: which of the CTA's next units this thread's is.
            step: units that a CTA works on at a time.
            write: is called with a unit; with the last one again, by threads that have no other.
            finish: is called behind the units of the query heads of a key/value head, with the index of its counter.
        """
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group, count = self.spec.group, self.count(scalars)
        kv_heads = scalars.batch * scalars.num_heads // group

        def visit_head(i: Int32) -> None:
            first = (order.prepared + block + i * blocks) * group

            def visit_member(member: Int32) -> None:
                def visit(j: Int32) -> None:
                    unit = Int32(cutlass.min(j * step + place, count - 1))
                    write(self.of_head(unit, first + member, buffers, scalars))

                wgmma.loop((count + (step - 1)) // step, visit)

            wgmma.loop(Int32(group), visit_member)
            finish(Int64(first) * self._head_counters(scalars))

        wgmma.loop((kv_heads - order.prepared - block + (blocks - 1)) // blocks, visit_head)

    def _head_counters(self, scalars: Scalars) -> Int32:
        return head_counters(padded_rows(scalars.query_length), self.queries)

    def counters(self, scalars: Scalars) -> Int32:
        """Counters of all heads."""
        return scalars.batch * scalars.num_heads * self._head_counters(scalars)

    def counter(self, index: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """The tile of dq of one of all counters; -1 where the counter is the head's own."""
        count = self._head_counters(scalars)
        return self.of_head(index % count - 1, index // count, buffers, scalars)


def tile_counter(queries: Span, head: Int64, tile: Int32, rows: int) -> Int64:
    """Index of the counter of a tile of `rows` queries in `BackwardBuffers.arrivals`; of tile -1 the head's own.

    `head` is the index of the head in an array `[batch, heads]`.
    """
    return head * head_counters(queries.padded_rows(ROW_ALIGNMENT), rows) + 1 + tile
