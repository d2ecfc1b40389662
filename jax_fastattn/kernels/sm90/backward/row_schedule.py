# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which rows of which head and sequence a CTA prepares next, in the backward pass.

`query_order.py` has tiles of queries, `key_schedule.py` the tiles of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.sequences import Sequence, Span, load_record
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import ROW_ALIGNMENT, padded_rows
from jax_fastattn.kernels.sm90.query_order import HeadOrder
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.tiles.records import slot_count


class PreprocessSchedule(Protocol):
    """Orders units of rows, for statistics, padding included, and tiles of dq, which have a semaphore each."""

    def parts(self, order: HeadOrder, scalars: Scalars) -> Int32:
        """Returns how many heads or slots there are, of which all but `order.prologue` are left to `background`.

        `background` is a launch of `PreprocessKernel`.
        """
        ...

    def prologue_units(self, order: HeadOrder, scalars: Scalars) -> Int32:
        """Returns how many units are not left to `PreprocessKernel.background`: the first ones."""
        ...

    def unit(self, index: Int32, order: HeadOrder, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns one of all units."""
        ...

    def each_of_background(
        self,
        order: HeadOrder,
        buffers: Buffers,
        scalars: Scalars,
        *,
        place: Int32,
        step: int,
        write: Callable[[Work], None],
        finish: Callable[[Int32], None],
    ) -> None:
        """Visits the units that are left to `PreprocessKernel.background`, in the order in which heads are worked on.

        Args:
            place: the place of this thread's unit among the CTA's next ones.
            step: units that a CTA works on at a time.
            write: is called with a unit; with the last one again, by threads that have no other.
            finish: is called after the units of a part, with the index of its counter in `head_ready`.
        """
        ...

    def dq_tiles(self, scalars: Scalars) -> Int32:
        """Returns how many tiles of dq there are: elements of `dq_semaphore`."""
        ...

    def dq_tile(self, index: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns one of all tiles of dq."""
        ...


@dataclass(frozen=True)
class RowUnits:
    """Visits units of batch entries of one length; a part is a key/value head.

    Attributes:
        rows: rows of a unit, a divisor of `ROW_ALIGNMENT`.
        queries: rows of a tile of dq.
    """

    spec: KernelSpec
    rows: int
    queries: int

    def parts(self, order: HeadOrder, scalars: Scalars) -> Int32:
        """Returns how many heads there are; all but `order.prologue` are left to `PreprocessKernel.background`."""
        del scalars
        return order.heads

    def prologue_units(self, order: HeadOrder, scalars: Scalars) -> Int32:
        """Returns how many units the heads have that are not left to `PreprocessKernel.background`: the first ones."""
        return order.prologue * self.spec.group * self._count(scalars)

    def unit(self, index: Int32, order: HeadOrder, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns one of all units."""
        count = self._count(scalars)
        head = order.head_at(index // count, self.spec.group)
        return Work.of_head(self.spec, index % count, head, buffers, scalars)

    def each_of_background(
        self,
        order: HeadOrder,
        buffers: Buffers,
        scalars: Scalars,
        *,
        place: Int32,
        step: int,
        write: Callable[[Work], None],
        finish: Callable[[Int32], None],
    ) -> None:
        """Visits the units that are left to `PreprocessKernel.background`, see `PreprocessSchedule.each_of_background`.

        `finish` is called after the units of the query heads of a key/value head, with the index of its counter.
        """
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group, count = self.spec.group, self._count(scalars)
        kv_heads = scalars.batch * scalars.num_heads // group

        def visit_head(i: Int32) -> None:
            head = order.prologue + block + i * blocks
            first = order.head_at(head) * group

            def visit_member(member: Int32) -> None:
                def visit(j: Int32) -> None:
                    unit = Int32(cutlass.min(j * step + place, count - 1))
                    write(Work.of_head(self.spec, unit, first + member, buffers, scalars))

                wgmma.loop((count + (step - 1)) // step, visit)

            wgmma.loop(Int32(group), visit_member)
            finish(head)

        wgmma.loop((kv_heads - order.prologue - block + (blocks - 1)) // blocks, visit_head)

    def dq_tiles(self, scalars: Scalars) -> Int32:
        """Returns how many tiles of dq all heads have."""
        return scalars.batch * scalars.num_heads * self._head_tiles(scalars)

    def dq_tile(self, index: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns one of all tiles of dq."""
        count = self._head_tiles(scalars)
        return Work.of_head(self.spec, index % count, index // count, buffers, scalars)

    def _count(self, scalars: Scalars) -> Int32:
        """Returns how many units a head has."""
        return padded_rows(scalars.query_length) // self.rows

    def _head_tiles(self, scalars: Scalars) -> Int32:
        """Returns how many tiles of dq a head has."""
        return padded_rows(scalars.query_length) // self.queries


@dataclass(frozen=True)
class PackedRowUnits:
    """Visits units of packed sequences; a part is a slot of `ROW_ALIGNMENT` queries, whose heads come together.

    Attributes:
        rows: rows of a unit, a divisor of `ROW_ALIGNMENT`.
        queries: rows of a tile of dq.
    """

    spec: KernelSpec
    rows: int
    queries: int

    def parts(self, order: HeadOrder, scalars: Scalars) -> Int32:
        """Returns how many slots there are; all but `order.prologue` are left to `PreprocessKernel.background`."""
        del order
        return self._slots(scalars)

    def prologue_units(self, order: HeadOrder, scalars: Scalars) -> Int32:
        """Returns how many units the slots have that are not left to `PreprocessKernel.background`: the first ones."""
        return order.prologue * scalars.num_heads * self._units

    def unit(self, index: Int32, order: HeadOrder, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns one of all units."""
        del order
        count = scalars.num_heads * self._units
        slot = index // count
        tile, sequence = Sequence.of_record(self.spec, buffers.query_tiles, slot, scalars, of_keys=False)
        return self._unit(tile, sequence, index % count)

    def each_of_background(
        self,
        order: HeadOrder,
        buffers: Buffers,
        scalars: Scalars,
        *,
        place: Int32,
        step: int,
        write: Callable[[Work], None],
        finish: Callable[[Int32], None],
    ) -> None:
        """Visits the units that are left to `background`, slot by slot; see `PreprocessSchedule.each_of_background`.

        `finish` is called after all heads of a slot, with the index of its sequence's counter (`first_slot`). A slot
        that no tile owns is not counted: a producer waits for the slots of its sequence alone.
        """
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        count = scalars.num_heads * self._units

        def visit_slot(i: Int32) -> None:
            slot = order.prologue + block + i * blocks
            tile, sequence = Sequence.of_record(self.spec, buffers.query_tiles, slot, scalars, of_keys=False)

            def visit(j: Int32) -> None:
                write(self._unit(tile, sequence, Int32(cutlass.min(j * step + place, count - 1))))

            def visit_owned() -> None:
                wgmma.loop((count + (step - 1)) // step, visit)
                finish(first_slot(sequence.queries))

            cutlass.if_generate(sequence.queries.length > 0, visit_owned)

        wgmma.loop((self._slots(scalars) - order.prologue - block + (blocks - 1)) // blocks, visit_slot)

    def dq_tiles(self, scalars: Scalars) -> Int32:
        """Returns how many tiles of dq all heads have."""
        return scalars.num_heads * self._head_tiles(scalars)

    def dq_tile(self, index: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns one of all tiles of dq."""
        count, per_slot = self._head_tiles(scalars), ROW_ALIGNMENT // self.queries
        head, tile = index // count, index % count
        record = load_record(buffers.query_tiles, tile // per_slot)
        sequence = Sequence.from_record(self.spec, record, scalars, of_keys=False)
        return Work(record.tile * per_slot + tile % per_slot, head, head // self.spec.group, sequence, head)

    @property
    def _units(self) -> int:
        """Returns how many units a head has in a slot. Lanes of a warp have units of one slot."""
        return ROW_ALIGNMENT // self.rows

    def _slots(self, scalars: Scalars) -> Int32:
        """Returns how many slots a head has."""
        return slot_count(scalars.query_length, ROW_ALIGNMENT, scalars.batch)

    def _unit(self, tile: Int32, sequence: Sequence, index: Int32) -> Work:
        """Returns one of the units of a slot, given the tile that owns it."""
        head, unit = index // self._units, index % self._units
        return Work(tile * self._units + unit, head, head // self.spec.group, sequence, head)

    def _head_tiles(self, scalars: Scalars) -> Int32:
        """Returns how many tiles of dq a head has."""
        return self._slots(scalars) * (ROW_ALIGNMENT // self.queries)


def preprocess_schedule(spec: KernelSpec, rows: int, queries: int) -> PreprocessSchedule:
    """Returns the schedule of `PreprocessKernel`, for units of `rows` rows and tiles of dq of `queries` queries."""
    return (PackedRowUnits if spec.packed else RowUnits)(spec, rows, queries)


def dq_tile_index(queries: Span, head: Int64, tile: Int32, rows: int) -> Int64:
    """Returns the index of a tile of `rows` queries in `dq_semaphore`; `head` indexes an array `[batch, heads]`."""
    return head * (queries.padded_rows(ROW_ALIGNMENT) // rows) + queries.padded(tile, ROW_ALIGNMENT // rows)


def first_slot(queries: Span) -> Int32:
    """Returns the index of a packed sequence's first slot, which is also the index of its counter in `head_ready`."""
    return queries.padded(Int32(0), 1)
