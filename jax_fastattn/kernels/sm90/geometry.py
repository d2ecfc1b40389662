# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What both passes of the Hopper family know about the machine: rows of a warpgroup, memory, registers, tile columns.

Pure Python, no import of the DSL.
"""

from __future__ import annotations

from typing import NamedTuple

from jax_fastattn.kernels.device.layout import padded

# Query rows of a warpgroup: the M of wgmma.
WARPGROUP_ROWS = 64

# Bytes of shared memory available to one CTA, and to all CTAs of an SM; the system reserves 1 KB per CTA.
SHARED_MEMORY = 227 * 1024
SM_SHARED_MEMORY = 228 * 1024

# Every tile in shared memory starts at a whole repetition of the 128-byte swizzle.
TILE_ALIGNMENT = 1024


class Registers(NamedTuple):
    """Registers of a thread after setmaxnreg: of consumers, of the producer's warpgroup, of that which adds dq up."""

    consumer: int
    producer: int
    dq: int = 0


class TwoConsumers:
    """The warpgroups of a CTA: two that compute, and that of the warp that loads."""

    @property
    def consumer_threads(self) -> int:
        """Threads that compute; those of the producer's warpgroup follow them."""
        return 256

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.consumer_threads + 128

    @property
    def registers(self) -> Registers:
        """Registers of a thread."""
        return Registers(240, 24)


def padded_head_dim(head_dim: int) -> int:
    """Returns the columns of a tile: whole swizzle atoms of 32, or 64 if that adds none. TMA fills in zeros."""
    return padded(head_dim, 32)
