# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper forward kernel: one frozen config each, checked against shared memory and registers.

Pure Python, no import of the DSL: tests and the support table read it on any machine. What each row compiles to and how
fast it was measured is in docs/kernels/sm90.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.device.layout import padded
from jax_fastattn.kernels.spec import KernelSpec

# Query rows of a warpgroup: the M of wgmma.
WARPGROUP_ROWS = 64

# What a CTA may ask for, and what an SM has for its CTAs, of which each takes 1 KB more for the system.
SHARED_MEMORY = 227 * 1024
_SM_SHARED_MEMORY = 228 * 1024

# SMs of an H100 or H200 (SXM). Where there are fewer, the CTAs beyond them run after the others.
SMS = 132

# Registers of a consumer and of a producer thread after setmaxnreg, by consumer warpgroups: 64 K of them per SM.
_REGISTERS = {2: (240, 24), 3: (160, 32)}

# Every shared-memory tile starts at a whole repetition of the 128-byte swizzle.
_TILE_ALIGNMENT = 1024


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile: whole swizzle atoms of 32 columns, of 64 where that adds nothing. TMA fills in zeros."""
    return padded(head_dim, 32)


@dataclass(frozen=True)
class ForwardConfig:
    """One variant of the forward kernel.

    Attributes:
        warpgroups: consumer warpgroups of 64 query rows each, 1 to 3.
        keys: keys of a tile, a multiple of 16.
        slots: tiles of K or V in the ring, at least 2 (3 with overlap).
        overlap: whether Q K^T of the next tile is issued before P V of this one. Costs a second score accumulator.
        ping_pong: whether named barriers make the warpgroups issue their products in turns.
        blocks: CTAs that must fit on an SM together. Above 1 a single producer warp and no setmaxnreg.
        ctas: CTAs that walk through all the work, as many as the GPU has SMs; 0: one CTA per query tile.
        own_out: whether the output tile has shared memory of its own, else it lies where Q was. Walking CTAs with it
            load the next Q before the output has been stored.
        trim: whether a warpgroup that sees at most the left half of the first tile leaves out the right half (the upper
            rows of a causal diagonal). `keys` is then a multiple of 32.
    """

    warpgroups: int
    keys: int
    slots: int
    overlap: bool = True
    ping_pong: bool = False
    blocks: int = 1
    ctas: int = 0
    own_out: bool = False
    trim: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a CTA."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def consumer_threads(self) -> int:
        """Threads that compute; the producer's follow them."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.consumer_threads + (128 if self.moves_registers else 32)

    @property
    def moves_registers(self) -> bool:
        """Whether producer warps give registers to consumers; it takes whole warpgroups."""
        return self.blocks == 1 and self.warpgroups > 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer and a producer thread where `moves_registers` holds."""
        return _REGISTERS[self.warpgroups]


@dataclass(frozen=True)
class SharedMemory:
    """Byte offsets in dynamic shared memory: Q of each warpgroup, outputs, the ring, mbarriers.

    Attributes:
        config: the variant.
        head_dim: columns of Q and K in shared memory, padded.
        v_head_dim: columns of V and the output in shared memory, padded.
    """

    config: ForwardConfig
    head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, spec: KernelSpec, config: ForwardConfig) -> SharedMemory:
        """The layout of a compile key."""
        return cls(config, padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))

    @property
    def query_nbytes(self) -> int:
        """Bytes from the Q of one warpgroup to the next."""
        columns = self.head_dim if self.config.own_out else max(self.head_dim, self.v_head_dim)
        return WARPGROUP_ROWS * columns * 2

    @property
    def out_nbytes(self) -> int:
        """Bytes from the output of one warpgroup to the next."""
        return WARPGROUP_ROWS * self.v_head_dim * 2 if self.config.own_out else self.query_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Bytes from one slot of the ring to the next."""
        return padded(self.config.keys * max(self.head_dim, self.v_head_dim) * 2, _TILE_ALIGNMENT)

    @property
    def out_start(self) -> int:
        """Offset of the outputs."""
        return self.config.warpgroups * self.query_nbytes if self.config.own_out else 0

    @property
    def ring_start(self) -> int:
        """Offset of the ring."""
        return self.out_start + self.config.warpgroups * self.out_nbytes

    @property
    def barrier_start(self) -> int:
        """Offset of the mbarriers: full and empty ones of the slots, then of each warpgroup's Q."""
        return self.ring_start + self.config.slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return self.barrier_start + 8 * 2 * (self.config.slots + self.config.warpgroups)

    @property
    def fits(self) -> bool:
        """Whether `blocks` CTAs fit an SM together."""
        return self.nbytes <= SHARED_MEMORY and self.config.blocks * (self.nbytes + 1024) <= _SM_SHARED_MEMORY


def forward_config(spec: KernelSpec) -> ForwardConfig:
    """The variant for a compile key."""
    for config in _candidates(spec):
        if SharedMemory.of(spec, config).fits:
            return config
    raise AssertionError(f"no forward variant fits {spec}")


def _candidates(spec: KernelSpec) -> tuple[ForwardConfig, ...]:
    """Best first, over causal and full masks at lengths of 1k to 16k (docs/kernels/sm90.md has the sweep).

    One variant for all lengths, so that a new length compiles nothing.
    """
    columns = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))
    if columns <= 64:
        return (ForwardConfig(3, 128, 8, ping_pong=True, ctas=SMS, own_out=True),)
    if columns <= 128:
        return (ForwardConfig(2, 128, 5, ping_pong=True, ctas=SMS, own_out=True, trim=True),)
    if columns <= 192:
        return (ForwardConfig(2, 96, 4, trim=True),)
    return (ForwardConfig(2, 64, 5, ctas=SMS),)
