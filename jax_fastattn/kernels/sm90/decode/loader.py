# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The warp of the Hopper decoding kernel that loads K and V, segment after segment, without a pause in between.

Keys and values are dense arrays or lie in pages; there is a loader for each.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.decode.line import Line, Segment
from jax_fastattn.kernels.device import copies, wgmma
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.decode.shared import DecodeShared


@dataclass(frozen=True)
class _KeySpan:
    """Finds the keys of a batch entry from the first one that some query sees. TMA needs no alignment of rows.

    Attributes:
        batch: index of the batch entry.
        first: the first key; None if that is the first one of the entry.
    """

    batch: Int32
    first: Int32 | None

    def tma_rows(self, coordinates: cute.Tensor, head: Int32) -> Any:
        """Returns the rows of a head: `[rows, columns, heads, batch]` to `[rows, columns]`."""
        rows = coordinates[None, None, head, self.batch]
        return rows if self.first is None else cute.domain_offset((self.first, 0), rows)


@dataclass(frozen=True, eq=False)
class DenseLoader:
    """Emits the warp's code.

    Attributes:
        tma: what is loaded.
        ring: the warp's position in the ring.
    """

    line: Line
    shared: DecodeShared
    tma: Tma
    ring: wgmma.Ring

    @classmethod
    def start(cls, line: Line, shared: DecodeShared, tma: Tma) -> "DenseLoader":
        """Returns the role with its registers."""
        return cls(line, shared, tma, shared.ring())

    def load(self, segment: Segment) -> None:
        """Loads the tiles of a segment; TMA completes a stage when K and V are there."""
        hides_first = self.line.spec.bounds_kind.hides_first_keys
        span = _KeySpan(segment.batch, segment.entry.first if hides_first else None)
        copy_key = self.tma.key.copy(self.shared.key, segment.kv_head, span)
        copy_value = self.tma.value.copy(self.shared.value, segment.kv_head, span)

        def copy(tile: Int32, stage: Int32, barrier: cute.Pointer) -> None:
            copy_key(tile, stage, barrier)
            copy_value(tile, stage, barrier)

        nbytes = self.shared.memory.key_nbytes + self.shared.memory.value_nbytes
        self.ring.make_uniform()
        wgmma.loop(segment.count, lambda i: self.ring.producer_load(copy, segment.tile + i, nbytes))


# The lanes of a warp hold the pages of this many boxes.
_LANES = 32


@dataclass(frozen=True, eq=False)
class PagedLoader:
    """Emits the warp's code. A box of rows lies in one page, and boxes past the last key are not loaded.

    Each lane has the page of one box; the pages of the next boxes are on their way meanwhile.

    Attributes:
        tma: what is loaded.
        ring: the warp's position in the ring.
        pages: the lane's page of these boxes, and its page of the next ones, `[2]`.
    """

    line: Line
    shared: DecodeShared
    tma: Tma
    ring: wgmma.Ring
    pages: cute.Tensor

    @classmethod
    def start(cls, line: Line, shared: DecodeShared, tma: Tma) -> "PagedLoader":
        """Returns the role with its registers."""
        return cls(line, shared, tma, shared.ring(), cute.make_rmem_tensor((2,), Int32))

    @property
    def together(self) -> int:
        """Returns how many tiles the lanes hold the pages of."""
        return _LANES // self.shared.memory.boxes

    def load(self, segment: Segment) -> None:
        """Loads the tiles of a segment; TMA completes a stage when the boxes of K and V are there."""
        copy_key = self.tma.key.copy_pages(self.shared.key, segment.kv_head)
        copy_value = self.tma.value.copy_pages(self.shared.value, segment.kv_head)
        self.pages[1] = self._page(segment, Int32(0))

        def load(i: Int32) -> None:
            cutlass.if_generate(i % self.together == 0, lambda: self._turn(segment, i))
            self._load_tile(segment, i, (copy_key, copy_value))

        self.ring.make_uniform()
        wgmma.loop(segment.count, load)

    def _turn(self, segment: Segment, i: Int32) -> None:
        """Takes the pages of the i-th and later tiles of a segment, and asks for the next ones."""
        self.pages[0] = self.pages[1]
        self.pages[1] = self._page(segment, i + self.together)

    def _page(self, segment: Segment, i: Int32) -> Int32:
        """Returns the lane's page of the boxes from the i-th tile of a segment on; any page past the last key."""
        key = self._key(segment, i) + self.line.lane * self.shared.memory.box_rows
        return self.line.page(segment.batch, key, Boolean(key < segment.entry.end))

    def _key(self, segment: Segment, i: Int32) -> Int32:
        """Returns the first key of the i-th tile of a segment."""
        return segment.entry.first + (segment.tile + i) * self.line.keys

    def _load_tile(self, segment: Segment, i: Int32, copies_of: Any) -> None:
        """Loads the i-th tile of a segment, as far as it has keys."""
        memory, page_rows = self.shared.memory, self.line.spec.page
        key, boxes, first = self._key(segment, i), memory.boxes, i % self.together * memory.boxes
        count = Int32(cutlass.min(copies.count(segment.entry.end - key, memory.box_rows), boxes))

        def copy(key: Int32, stage: Int32, barrier: cute.Pointer) -> None:
            for box in range(boxes):
                page = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(self.pages[0], first + box))
                row_box = (key + box * memory.box_rows) % page_rows // memory.box_rows

                def copy_box(box: int = box, page: Int32 = page, row_box: Int32 = row_box) -> None:
                    for copy_rows in copies_of:
                        copy_rows(page, row_box, stage * boxes + box, barrier)

                cutlass.if_generate(box < count, copy_box)

        nbytes = count * (memory.box_rows * 2 * (memory.head_dim + memory.v_head_dim))
        self.ring.producer_load(copy, key, nbytes)
