# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A table of shared memory on the device: pointers to its barriers, its tiles, and the initialization of barriers."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.regions import SharedTable
from jax_fastattn.kernels.device.tma import Tma


@dataclass(frozen=True, eq=False)
class SharedRegions:
    """Regions and barriers in the shared memory of a CTA.

    Attributes:
        table: its rows.
        base: pointer to the first byte.
        address: the address of the first byte.
        barriers: the first barrier of each row by name.
    """

    table: SharedTable
    base: cute.Pointer
    address: Int32
    barriers: dict[str, cute.Pointer]

    @classmethod
    def of(cls, table: SharedTable, base: cute.Pointer) -> "SharedRegions":
        """Returns the rows of a table that starts at a pointer to bytes."""
        offsets = {row.name: table.offset(row.name) for row in table.barriers}
        barriers = {name: cute.recast_ptr(base + offset, dtype=Int64) for name, offset in offsets.items()}
        return cls(table, base, base.toint(), barriers)

    def tiles(
        self, name: str, dtype: Any, shape: tuple[int, int], count: int | None = None, *, shift: int = 0
    ) -> cute.Tensor:
        """Returns tiles `[rows, columns, stage]` of 16-bit elements in a region.

        Args:
            name: the name of the region.
            dtype: the dtype of the elements.
            shape: rows and columns.
            count: number of tiles, which then follow each other without padding; by default each stage has one.
            shift: at which byte of a stage the tile begins, a multiple of what a swizzle atom takes.
        """
        row = self.table[name]
        pitch = row.pitch // 2 if count is None else shape[0] * shape[1]
        pointer = self.base + (self.table.offset(name) + shift)
        return wgmma.staged_tile(pointer, dtype, shape, row.count if count is None else count, pitch)

    def operand(self, name: str, dtype: Any, shape: tuple[int, int], terms: int) -> list[cute.Tensor]:
        """Returns what `tiles` does for each term of an operand: the terms of a stage follow each other."""
        nbytes = shape[0] * shape[1] * 2
        return [self.tiles(name, dtype, shape, shift=i * nbytes) for i in range(terms)]

    def terms(self, name: str, index: Any, shape: tuple[int, int], terms: int) -> list[tuple[Int32, int]]:
        """Returns the address and the columns of each term's tile of that shape in a stage of a region."""
        first, nbytes = self.stage(name, index), shape[0] * shape[1] * 2
        return [(first, shape[1]), *((first + i * nbytes, shape[1]) for i in range(1, terms))]

    def stage(self, name: str, index: Int32) -> Int32:
        """Returns the address of a stage of a region."""
        return self.address + self.table.offset(name) + index * self.table[name].pitch

    def initialize(self, warp_index: Int32, tma: Tma) -> None:
        """Initializes the barriers, and makes them visible to all threads and to TMA. All warps call it."""

        def initialize() -> None:
            tma.prefetch_descriptors()
            with cute.arch.elect_one():
                for name, index, arrive_count in self.table.arrive_counts():
                    cute.arch.mbarrier_init(self.barriers[name] + index, arrive_count)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()
