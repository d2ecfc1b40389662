# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and barriers of the key-stationary kernels in shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.tile_counter import TakenTile
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.backward.config import BLOCK, SLOTS, BackwardMemory
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS

# Columns of a step of a product.
STEP = 16
# 1 in bfloat16.
ONE = 0x3F80


@dataclass(frozen=True, eq=False)
class BackwardShared:
    """What both key-stationary kernels have.

    Attributes:
        memory: the offsets, with the config.
        address: of the first byte.
        key: K, `[64, columns, tile of 64 keys]`.
        value: V, likewise.
        query: the ring of Q, `[queries, columns, stage]`.
        dout: the ring of dO, likewise.
        key_full: barrier of K.
        value_full: barrier of V.
        query_full: barriers of the stages of Q that TMA completes.
        query_empty: barriers of the stages of Q on which every consumer warp arrives.
        dout_full: likewise of dO.
        dout_empty: likewise of dO.
    """

    memory: BackwardMemory
    address: Int32
    key: cute.Tensor
    value: cute.Tensor
    query: cute.Tensor
    dout: cute.Tensor
    key_full: cute.Pointer
    value_full: cute.Pointer
    query_full: cute.Pointer
    query_empty: cute.Pointer
    dout_full: cute.Pointer
    dout_empty: cute.Pointer

    def initialize(self, thread: Int32, warp_index: Int32, tma: Tma) -> None:
        """Writes constants, initializes the barriers, and makes both visible to all threads and to TMA.

        Args:
            thread: index of this thread in the CTA; all of them call it.
            warp_index: of its warp.
            tma: the operands that TMA loads.
        """
        self._write_constants(thread)

        def initialize() -> None:
            tma.prefetch_descriptors()
            with cute.arch.elect_one():
                self._initialize_barriers()
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    def _write_constants(self, thread: Int32) -> None:
        """Does nothing: there are none."""
        del thread

    def _initialize_barriers(self) -> None:
        config = self.memory.config
        cute.arch.mbarrier_init(self.key_full, 1)
        cute.arch.mbarrier_init(self.value_full, 1)
        for stage in range(config.stages):
            for full, empty in ((self.query_full, self.query_empty), (self.dout_full, self.dout_empty)):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, config.consumer_threads // 32)


@dataclass(frozen=True, eq=False)
class FusedShared(BackwardShared):
    """What the kernel has that computes dq.

    Attributes:
        dscore: two buffers of dS, `[64, 64, tile]`.
        stats: the ring of statistics as factors of products in bfloat16, whatever the operands are,
            `[queries, 16, 2 stage + which]`.
        ones: their left factor; None if it is in registers.
        dscore_full: barriers of the buffers of dS on which the consumers arrive.
        dscore_empty: barriers of the buffers of dS on which the third warpgroup arrives.
        added: barriers of the slots of `dq_atomic.py`: the third warpgroup has added.
        counted: barriers of the slots of `dq_atomic.py`: the tile has been counted.
        keys_empty: barrier on which every warp arrives that uses K.
        taken: the tile of keys that is taken by a counter.
        key_columns: K once more, of as many columns as dq is computed of at a time: atoms of 64 columns follow each
            other.
    """

    dscore: cute.Tensor
    stats: cute.Tensor
    ones: cute.Tensor | None
    dscore_full: cute.Pointer
    dscore_empty: cute.Pointer
    added: cute.Pointer
    counted: cute.Pointer
    keys_empty: cute.Pointer
    taken: TakenTile
    key_columns: cute.Tensor

    def _initialize_barriers(self) -> None:
        super()._initialize_barriers()
        config = self.memory.config
        for buffer in range(2):
            cute.arch.mbarrier_init(self.dscore_full + buffer, config.consumer_threads // 32)
            cute.arch.mbarrier_init(self.dscore_empty + buffer, 4)
        for slot in range(SLOTS):
            cute.arch.mbarrier_init(self.added + slot, 4)
            cute.arch.mbarrier_init(self.counted + slot, 1)
        cute.arch.mbarrier_init(self.keys_empty, config.consumer_threads // 32 + 4)
        self.taken.initialize(config.threads // 32)

    def _write_constants(self, thread: Int32) -> None:
        """Writes the zeros that follow statistics as factors of products, and, if it is shared, the factor of ones."""
        memory, config = self.memory, self.memory.config
        if config.shared_ones:
            chunk = ptx.where(thread < WARPGROUP_ROWS, Int32(ONE), Int32(0))
            target = self.address + memory.ones_start + thread * 16
            values = [chunk << 16 | chunk, chunk, Int32(0), Int32(0)]
            cutlass.if_generate(thread < 2 * WARPGROUP_ROWS, lambda: ptx.store_shared_chunk(target, values))
        for i in range(2 * config.stages):
            zeros = self.address + memory.stats_start + i * memory.stats_pitch + memory.stats_nbytes
            all_rows = Int32(0), Int32(config.queries)
            wgmma.zero_rows(zeros, (config.queries, 8), all_rows, thread=thread, threads=config.threads)
        cute.arch.fence_proxy("async.shared", space="cta")


def backward_shared(memory: BackwardMemory, dtype: Any) -> BackwardShared:
    """Returns the tiles, of a dtype, and the barriers of a CTA: a `FusedShared` if it computes dq."""
    config, stages = memory.config, memory.config.stages
    base = wgmma.shared_memory()

    def staged(start: int, rows: int, columns: int, count: int, dtype: Any = dtype) -> cute.Tensor:
        return wgmma.staged_tile(base + start, dtype, (rows, columns), count, rows * columns)

    barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
    both: dict[str, Any] = {
        "memory": memory,
        "address": base.toint(),
        "key": staged(0, WARPGROUP_ROWS, memory.head_dim, config.keys // WARPGROUP_ROWS),
        "value": staged(memory.value_start, WARPGROUP_ROWS, memory.v_head_dim, config.keys // WARPGROUP_ROWS),
        "query": staged(memory.query_start, config.queries, memory.head_dim, stages),
        "dout": staged(memory.dout_start, config.queries, memory.v_head_dim, stages),
        "key_full": barriers,
        "value_full": barriers + 1,
        "query_full": barriers + 2,
        "query_empty": barriers + (2 + stages),
        "dout_full": barriers + (2 + 2 * stages),
        "dout_empty": barriers + (2 + 3 * stages),
    }
    if not config.adds_dq:
        return BackwardShared(**both)
    dscores = 2 * config.keys * config.queries // (BLOCK * BLOCK)
    count = 2 + 4 * stages
    taken_full = barriers + (count + 5 + 2 * SLOTS)
    return FusedShared(
        **both,
        dscore=staged(memory.dscore_start, BLOCK, BLOCK, dscores),
        stats=staged(memory.stats_start, config.queries, STEP, 2 * stages, cutlass.BFloat16),
        ones=staged(memory.ones_start, WARPGROUP_ROWS, STEP, 1, cutlass.BFloat16) if config.shared_ones else None,
        dscore_full=barriers + count,
        dscore_empty=barriers + (count + 2),
        added=barriers + (count + 4),
        counted=barriers + (count + 4 + SLOTS),
        keys_empty=barriers + (count + 4 + 2 * SLOTS),
        taken=TakenTile(both["address"], memory.index_start, 1, taken_full, taken_full + 1),
        key_columns=staged(0, WARPGROUP_ROWS, memory.dq_columns, 2 * memory.head_dim // memory.dq_columns),
    )
