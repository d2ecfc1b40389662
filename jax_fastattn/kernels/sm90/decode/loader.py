# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The warp of the Hopper decoding kernel that loads K and V, segment after segment, without a pause in between."""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.line import Line, Segment
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.decode.shared import DecodeShared


@dataclass(frozen=True)
class _KeySpan:
    """The keys of a batch entry from the first one that some query sees. TMA needs no alignment of rows.

    Attributes:
        batch: the batch entry.
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
        line: of the launch.
        shared: tiles and barriers.
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
