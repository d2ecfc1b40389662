# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of `kernel.py` in shared memory, and the words by which the producer names items."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int32, cute

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.products import warpgroup_words
from jax_fastattn.kernels.device.shared_regions import SharedRegions
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.dbias.config import DbiasMemory
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS, padded_head_dim
from jax_fastattn.kernels.sums.tiles import KEYS


def product_parts(spec: KernelSpec, memory: DbiasMemory) -> tuple[list[tuple[int, int]], ...]:
    """Returns the parts of S and of dP in their order: which columns of the left and of the right factor each takes.

    Columns are counted in widths of a stage of the ring, over all terms of an operand.
    """
    terms, found = warpgroup_words(spec).terms, []
    for head_dim, columns in ((spec.head_dim, memory.head_dim), (spec.v_head_dim, memory.v_head_dim)):
        count = padded_head_dim(head_dim) // columns
        found.append([(i * count + chunk, j * count + chunk) for i, j in terms for chunk in range(count)])
    return tuple(found)


@dataclass(frozen=True, eq=False)
class DbiasShared:
    """Holds the tiles and barriers of a CTA.

    Attributes:
        memory: the table.
        regions: the rows of the table.
        query, dout: `[64, columns, tile]`: four tiles a stage, of which the first ones belong to the warpgroups.
        key, value: `[KEYS, columns, stage]`.
    """

    memory: DbiasMemory
    regions: SharedRegions
    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor

    @classmethod
    def of(cls, memory: DbiasMemory, dtype: Any) -> "DbiasShared":
        """Returns the tiles, of a dtype, and the barriers of a CTA."""
        regions, unit = SharedRegions.of(memory.table, wgmma.shared_memory()), memory.unit
        ring, stages = regions.base + memory.table.offset("ring"), memory.config.stages
        tiles = {}
        for columns, rows, keys in ((memory.head_dim, "query", "key"), (memory.v_head_dim, "dout", "value")):
            tiles[rows] = wgmma.staged_tile(ring, dtype, (WARPGROUP_ROWS, columns), 4 * stages, unit // 2)
            tiles[keys] = wgmma.staged_tile(ring + 2 * unit, dtype, (KEYS, columns), stages, 2 * unit)
        return cls(memory=memory, regions=regions, **tiles)

    def barrier(self, name: str) -> cute.Pointer:
        """Returns the first barrier of a row of the table."""
        return self.regions.barriers[name]

    @property
    def bias(self) -> Int32:
        """Address of the bias of a tile; 0 if it is one of rows, for which nothing is loaded."""
        return self.regions.stage(stages.NAME, Int32(0)) if self.memory.feature_rows else Int32(0)

    def ring(self) -> wgmma.Ring:
        """Returns one side's position in the ring."""
        return wgmma.Ring(self.barrier("ring_full"), self.barrier("ring_empty"), self.memory.config.stages)

    def items(self) -> "Items":
        """Returns one side's position among the items."""
        return Items(self, self.memory.table["item"].count, wgmma.Uniform(Int32(0), Int32(0)))

    def stats(self, stage: Int32, which: int) -> Int32:
        """Returns the address of the log-sum-exps (0) or delta (1) of an item."""
        return self.regions.stage("stats", 2 * stage + which)


class Item(NamedTuple):
    """Describes an item, or the end of the items of a tile.

    Attributes:
        stage: where its statistics and its names are.
        kind: kind of the tile, see `sums.schedule.HIDDEN`.
    """

    stage: Int32
    kind: Int32


@dataclass(frozen=True, eq=False)
class Items:
    """Holds one side's position among the items that the producer names, each with its statistics.

    Attributes:
        stages: their number.
        at: stage and phase.
    """

    shared: DbiasShared
    stages: int
    at: wgmma.Uniform

    def put(
        self,
        words: Sequence[Int32],
        nbytes: int = 0,
        copy: Callable[[Int32, cute.Pointer], None] | None = None,
    ) -> None:
        """Names an item by its kind and other words, and starts the copies of its statistics, in one warp."""
        stage, phase = self.at[0], self.at[1] ^ 1
        wgmma.advance(self.at, self.stages)
        full = self.shared.barrier("item_full") + stage
        wgmma.wait(self.shared.barrier("item_empty") + stage, phase)
        with cute.arch.elect_one():
            for i, word in enumerate(words):
                ptx.store_shared(self._address(stage) + 4 * i, word)
            cute.arch.mbarrier_arrive_and_expect_tx(full, nbytes)
        if copy is not None:
            copy(stage, full)

    def get(self) -> Item:
        """Waits for the next item."""
        stage, phase = self.at[0], self.at[1]
        wgmma.advance(self.at, self.stages)
        wgmma.wait(self.shared.barrier("item_full") + stage, phase)
        return Item(stage, cute.arch.make_warp_uniform(ptx.load_shared(self._address(stage))))

    def names(self, stage: Int32) -> list[Int32]:
        """Returns the words that tell an item from the others of its tile, see `sums.schedule.DbiasTile`."""
        return self._words(stage, 1, self.shared.memory.names)

    def told(self, stage: Int32) -> list[Int32]:
        """Returns what tells hidden pairs of an item, see `sums.schedule.DbiasSchedule.look`."""
        return self._words(stage, 1 + self.shared.memory.names, self.shared.memory.told)

    def _words(self, stage: Int32, first: int, count: int) -> list[Int32]:
        """Returns words of an item."""
        words = [ptx.load_shared(self._address(stage) + 4 * (first + i)) for i in range(count)]
        return [cute.arch.make_warp_uniform(word) for word in words]

    def last(self) -> Int32:
        """Returns the stage of the item that was got last."""
        stage = self.at[0]
        return ptx.where(stage == 0, Int32(self.stages - 1), stage - 1)

    def release(self, stage: Int32) -> None:
        """Gives an item back; every consumer warp calls it."""
        wgmma.release(self.shared.barrier("item_empty") + stage, ptx.thread_index() % 32 == 31)

    def _address(self, stage: Int32) -> Int32:
        return self.shared.regions.stage("item", stage)
