# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The items of a tile of `dbias.py` that see something, one after the other. All warps find the same ones."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.sums.schedule import HIDDEN, DbiasSchedule, DbiasTile

# This many items are looked at together, one by each lane.
_LANES = 32


class Item(NamedTuple):
    """An item.

    Attributes:
        names: tell it from the others of its tile, see `sums.schedule.DbiasTile`.
        kind: see `sums.schedule.HIDDEN`, which says that none is left.
        place: see `ItemList.place`.
    """

    names: tuple[Int32, ...]
    kind: Int32
    place: Int32

    @classmethod
    def of(cls, *values: Int32) -> "Item":
        """Returns the item of such values as `values` returns."""
        return cls(values[:-2], *values[-2:])

    def values(self) -> list[Int32]:
        """Returns what a loop carries."""
        return [*self.names, self.kind, self.place]


@dataclass(frozen=True, eq=False)
class VisibleItems:
    """Finds items.

    Attributes:
        looks: what the lane has seen of an item: kind and place.
        left: the first item that lanes have looked at, and a bit for each one that sees something and was not returned.
    """

    schedule: DbiasSchedule
    tile: DbiasTile
    buffers: Buffers
    scalars: Scalars
    looks: cute.Tensor
    left: cute.Tensor

    @classmethod
    def of(cls, schedule: DbiasSchedule, tile: DbiasTile, buffers: Buffers, scalars: Scalars) -> "VisibleItems":
        """Returns the items of a tile, before the first one."""
        looks, left = (cute.make_rmem_tensor((2,), Int32) for _ in range(2))
        looks.fill(0)
        left[0], left[1] = tile.begin - _LANES, Int32(0)
        return cls(schedule, tile, buffers, scalars, looks, left)

    def next(self) -> Item:
        """Returns the next item."""
        end = self.tile.end

        def finds_none(first: Int32, bits: Int32) -> Boolean:
            return Boolean(Boolean(bits == 0) & Boolean(first + _LANES < end))

        with while_generate(self._left(), finds_none) as loop:
            yield_out(self._look(Int32(loop[0]) + _LANES))
        first, bits = self._left()
        lane = cute.arch.popc((bits & -bits) - 1)
        self.left[1] = bits & (bits - 1)
        kind, place = (cute.arch.make_warp_uniform(cute.arch.shuffle_sync(self.looks[i], lane & 31)) for i in range(2))
        names = self.tile.names(self.tile.item(first + lane))
        return Item(tuple(names), ptx.where(bits == 0, Int32(HIDDEN), kind), place)

    def _left(self) -> list[Int32]:
        """Returns the first item that lanes have looked at, and the bits."""
        return [Int32(self.left[i]) for i in range(2)]

    def _look(self, first: Int32) -> list[Int32]:
        """Looks at as many items as a warp has lanes, from one on; returns what `_left` does then."""
        index = first + (ptx.thread_index() & 31)
        item = self.tile.item(Int32(cutlass.min(index, self.tile.end - 1)))
        kind, place = self.schedule.look(item, self.buffers, self.scalars)
        self.looks[0], self.looks[1] = kind, place
        bits = cute.arch.vote_ballot_sync(Boolean(Boolean(index < self.tile.end) & Boolean(kind != HIDDEN)))
        self.left[0], self.left[1] = first, cute.arch.make_warp_uniform(bits)
        return self._left()
