# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The largest magnitudes of K and of V, head by head: what bounds dq, and with it the unit of its integer sums.

It is bound by memory: every thread reads 64 bytes at a time. Each part of a head's keys has its own result, so that
nothing has to be set before; who reads them takes the largest.
"""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.sm90.backward_config import MAGNITUDE_PARTS
from jax_fastattn.kernels.spec import KernelSpec

THREADS = 256
SHARED_NBYTES = THREADS // 32 * 4

# Rows that a thread reads at a time.
_UNROLL = 4


class MagnitudesKernel:
    """Writes the largest |x| of every part of the keys of every head; NaN where there is one.

    Args:
        spec: the compile key.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        # Lanes that share a row.
        self.lanes = 8 if max(spec.head_dim, spec.v_head_dim) <= 8 * CHUNK else 16
        self.rows = THREADS // self.lanes

    def blocks(self, batch: Int32, kv_heads: Int32) -> Int32:
        """CTAs of the grid: one for each part of each of K and V."""
        return batch * kv_heads * (2 * MAGNITUDE_PARTS)

    @cute.kernel
    def kernel(
        self,
        key: cute.Pointer,
        value: cute.Pointer,
        key_value_seq_lengths: cute.Pointer | None,
        magnitudes: cute.Pointer,
        key_length: Int32,
        kv_heads: Int32,
    ):
        """Writes `magnitudes`, float32 `[B, K, 2, MAGNITUDE_PARTS]`; see `BackwardKernel` for the other arguments.

        CTAs in the order [B, part, 2, K], so that those which run together read what lies together.
        """
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        head, which = block % kv_heads, block // kv_heads % 2
        part = block // (2 * kv_heads) % MAGNITUDE_PARTS
        entry = block // (2 * kv_heads * MAGNITUDE_PARTS)
        end = tiles.load_entry(key_value_seq_lengths, entry, key_length, 0, key_length)
        share = (end + (MAGNITUDE_PARTS - 1)) // MAGNITUDE_PARTS
        begin, end = part * share, Int32(cutlass.min((part + 1) * share, end))

        columns = ptx.where(which == 1, Int32(self.spec.v_head_dim), Int32(self.spec.head_dim))
        column = thread % self.lanes * CHUNK
        source = key.toint() + (value.toint() - key.toint()) * which
        largest = cute.make_rmem_tensor((1,), Int32)
        largest[0] = Int32(0)

        def read(i: Int32) -> None:
            first = begin + i * (_UNROLL * self.rows) + thread // self.lanes
            chunks = []
            for row in [first + j * self.rows for j in range(_UNROLL)]:
                reads = Boolean((row < end) & (column < columns))
                place = ((Int64(entry) * key_length + row) * kv_heads + head) * columns + column
                # Elsewhere the first chunk is read, which always exists, and dropped.
                chunk = ptx.load_global_chunk(source + ptx.where(reads, place, Int64(0)) * 2)
                chunks += [ptx.where(reads, pair, Int32(0)) for pair in chunk]
            for pair in chunks:
                for x in ptx.unpack(pair, dtype=ptx.MMA_DTYPE[self.spec.dtype]):
                    largest[0] = Int32(cutlass.max(largest[0], ptx.bits(x) & Int32(0x7FFFFFFF)))

        wgmma.loop((end - begin + (_UNROLL * self.rows - 1)) // (_UNROLL * self.rows), read)
        target = (((Int64(entry) * kv_heads + head) * 2 + which) * MAGNITUDE_PARTS + part) * 4
        self._store(self._largest(largest[0], 32), thread, magnitudes.toint() + target)

    def _largest(self, x: Int32, lanes: int) -> Int32:
        """The largest value among so many lanes of a warp."""
        for i in range(lanes.bit_length() - 1):
            x = Int32(cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=1 << i)))
        return x

    def _store(self, largest: Int32, thread: Int32, target: Int64) -> None:
        """Stores the largest value of all warps."""
        shared, warps = wgmma.shared_memory().toint(), THREADS // 32
        cutlass.if_generate(thread % 32 == 0, lambda: ptx.store_shared(shared + thread // 32 * 4, largest))
        cute.arch.sync_threads()

        def store() -> None:
            found = self._largest(ptx.load_shared(shared + thread % warps * 4), warps)
            cutlass.if_generate(thread == 0, lambda: ptx.store_global_int(target, found))

        cutlass.if_generate(thread < 32, store)
