# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine for both passes of the Hopper family: rows of a warpgroup, memory, registers, tile columns.

Pure Python, no import of the DSL.
"""

from __future__ import annotations

from typing import NamedTuple

from jax_fastattn.kernels.device.layout import padded

# A warpgroup has this many query rows, the M of wgmma.
WARPGROUP_ROWS = 64

# One CTA, and all CTAs of an SM, have this many bytes of shared memory; the system reserves 1 KB per CTA.
SHARED_MEMORY = 227 * 1024
SM_SHARED_MEMORY = 228 * 1024

# Every tile in shared memory starts at a whole repetition of the 128-byte swizzle.
TILE_ALIGNMENT = 1024


class Registers(NamedTuple):
    """Holds a thread's registers after setmaxnreg, for each kind of warpgroup; `dq` is for the one that adds up dq."""

    consumer: int
    producer: int
    dq: int = 0


class TwoConsumers:
    """Describes the warpgroups of a CTA: two compute, and the third has the warp that loads."""

    @property
    def consumer_threads(self) -> int:
        """Returns how many threads compute; the producer's warpgroup follows them."""
        return 256

    @property
    def threads(self) -> int:
        """Returns how many threads a CTA has."""
        return self.consumer_threads + 128

    @property
    def registers(self) -> Registers:
        """Returns the registers of a thread."""
        return Registers(240, 24)


def padded_head_dim(head_dim: int) -> int:
    """Returns the columns of a tile: whole swizzle atoms of 32, or 64 if that adds none. TMA fills in zeros."""
    return padded(head_dim, 32)


def split_obstacle(head_dim: int, v_head_dim: int) -> str:
    """Returns why no kernel of attention takes operands in two terms with these head dims; empty if there is one."""
    if max(head_dim, v_head_dim) > 128:
        return "sums of tiles take too many registers for head dims over 128"
    return ""
