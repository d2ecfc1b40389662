# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tile of queries of which head and sequence a CTA works on, where each tile has a CTA: for dq, and for tangents.

`forward/schedule.py` has the tiles of the forward pass.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cutlass import Int32

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import copies
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.tiles.records import slot_count


class HeadOrder(NamedTuple):
    """Says in which order a kernel works on heads: on query heads if it has tiles of queries, else on key/value heads.

    Attributes:
        heads: number of heads of all batch entries.
        section: how many are begun together, see `plan.section`; for packed sequences how many tiles of keys.
        prefetch_distance: distance from the head that a CTA works on to the head whose sums it zeroes; None
            for tiles of queries, like `prologue`.
        prologue: how many have their statistics written before the key-stationary kernel begins; for packed sequences
            how many slots of queries of all heads have them written.
        sharing: how many batch entries have heads that come next to each other, since they share a bias that L2 does
            not hold; None where there is no such bias. Sections, and what is begun first, are counted in places.
    """

    heads: Int32
    section: Int32
    prefetch_distance: Any = None
    prologue: Any = None
    sharing: Any = None

    def head_at(self, place: Int32, group: int = 1) -> Int32:
        """Returns the head that has a place in the order; `group` of them at a time come as they are."""
        if self.sharing is None:
            return place
        place, member = place // group, place % group
        return ((place % self.sharing) * (self.heads // self.sharing) + place // self.sharing) * group + member

    def place_of(self, head: Int32, group: int = 1) -> Int32:
        """Returns the place of a head, see `head_at`."""
        if self.sharing is None:
            return head
        head, member = head // group, head % group
        of_entry = self.heads // self.sharing
        return ((head % of_entry) * self.sharing + head // of_entry) * group + member


class QuerySchedule(Protocol):
    """Orders the tiles of queries of a launch, which has a CTA for each."""

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order of the heads of a launch."""
        ...

    def blocks(self, scalars: Scalars, order: HeadOrder) -> Int32:
        """Returns how many CTAs a launch has."""
        ...

    def at(self, block: Int32, order: HeadOrder, buffers: Buffers, sizes: Scalars | Sizes) -> Work:
        """Returns the tile of a CTA."""
        ...


@dataclass(frozen=True)
class SectionedTiles:
    """Orders tiles of batch entries of one length. Heads come in sections, see `plan.place_in_sections`.

    Attributes:
        rows: rows of a tile.
    """

    spec: KernelSpec
    rows: int

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order of the heads of a launch."""
        heads, count = scalars.batch * scalars.num_heads, self._count(scalars)
        return HeadOrder(
            heads,
            Int32(copies.section(scalars.multiprocessors, count, heads, int(self.spec.bounds_kind.one_sided_window))),
        )

    def blocks(self, scalars: Scalars, order: HeadOrder) -> Int32:
        """Returns how many CTAs a launch has: one for each tile."""
        return self._count(scalars) * order.heads

    def at(self, block: Int32, order: HeadOrder, buffers: Buffers, sizes: Scalars | Sizes) -> Work:
        """Returns the tile of a CTA; under a causal mask the last rows see most, and come first."""
        count = self._count(sizes)
        place, index = copies.place_in_sections(block, order.section, count, order.heads)
        return Work.of_head(self.spec, count - 1 - place, index, buffers, sizes)

    def _count(self, scalars: Scalars | Sizes) -> Int32:
        """Returns how many tiles a head has."""
        return copies.count(scalars.query_length, self.rows)


@dataclass(frozen=True)
class PackedSlots:
    """Orders tiles of packed sequences, from the records of slots: all heads of a slot together, the last slot first.

    Attributes:
        rows: rows of a tile.
    """

    spec: KernelSpec
    rows: int

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order of the heads of a launch: all of them are one section."""
        return HeadOrder(scalars.num_heads, scalars.num_heads)

    def blocks(self, scalars: Scalars, order: HeadOrder) -> Int32:
        """Returns how many CTAs a launch has: one for each slot."""
        return self._count(scalars) * order.heads

    def at(self, block: Int32, order: HeadOrder, buffers: Buffers, sizes: Scalars | Sizes) -> Work:
        """Returns the tile of a CTA."""
        slot, head = self._count(sizes) - 1 - block // order.heads, block % order.heads
        tile, sequence = Sequence.of_record(self.spec, buffers.query_tiles, slot, sizes, of_keys=False)
        return Work(tile, head, head // self.spec.group, sequence, head)

    def _count(self, scalars: Scalars | Sizes) -> Int32:
        """Returns how many slots a head has."""
        return slot_count(scalars.query_length, self.rows, scalars.batch)


def query_schedule(spec: KernelSpec, rows: int) -> QuerySchedule:
    """Returns the schedule of a compile key, for tiles of `rows` rows."""
    return (PackedSlots if spec.packed else SectionedTiles)(spec, rows)
