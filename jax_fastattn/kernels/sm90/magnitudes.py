# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The largest magnitudes of K and of V, head by head: what bounds dq, and with it the unit of its integer sums.

A pass over K and V would take as long as memory needs to read them. So they are found in the fused kernel, by warps
that wait for K and V of their own tile: those of the same keys of a head that is worked on later. Those of the
first heads, before which there is nobody, are found in the launch before it, by CTAs of `StatisticsKernel`.

Magnitudes are int32 `[B, K, 2, MAGNITUDE_PARTS]`: the 16 bits of the largest |x| of K, and then of V. Each part of
the first heads has a place of its own; of others what was found is added to the first place, and the rest is 0. Who
reads them takes the largest. Those of NaN are larger than all others.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.sm90.backward_config import MAGNITUDE_PARTS
from jax_fastattn.kernels.spec import KernelSpec

# Both values of a register without their signs.
UNSIGNED = 0x7FFF7FFF


def _address(magnitudes: Int64, head_index: Int32, which: int, part: Int32) -> Int64:
    """Of the magnitude of K (0) or V (1) in a part of a key/value head, counted over all batch entries."""
    return magnitudes + ((Int64(head_index) * 2 + which) * MAGNITUDE_PARTS + part) * 4


class Rows(NamedTuple):
    """K and V in memory.

    Attributes:
        key: `[B, S, K, H]`.
        value: `[B, S, K, D]`.
        key_value_seq_lengths: int32 `[B]` or None.
        key_length: S.
        kv_heads: K.
    """

    key: cute.Pointer
    value: cute.Pointer
    key_value_seq_lengths: cute.Pointer | None
    key_length: Int32
    kv_heads: Int32

    def end(self, head_index: Int32) -> Int32:
        """Keys of a key/value head, counted over all batch entries."""
        entry, length = head_index // self.kv_heads, self.key_length
        return tiles.load_entry(self.key_value_seq_lengths, entry, length, 0, length)


class Magnitudes:
    """Emits the code that finds them.

    Args:
        spec: the compile key.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        # Lanes that share a row.
        self.lanes = 8 if max(spec.head_dim, spec.v_head_dim) <= 8 * CHUNK else 16

    def of_rows(
        self, rows: Rows, head_index: Int32, span: tuple[Int32, Int32], who: tuple[Int32, int], unroll: int
    ) -> Int32:
        """Of the rows of a head that a warp reads.

        Args:
            rows: K and V.
            head_index: the key/value head, counted over all batch entries.
            span: first row, and end of the rows, of all warps together.
            who: the thread among those of all warps, and their number.
            unroll: rows that a lane reads at a time.

        Returns:
            the largest |x| of K in the upper half, of V in the lower one; the same in all lanes.
        """
        (begin, end), (thread, threads) = span, who
        step = threads // self.lanes
        entry, head, column = head_index // rows.kv_heads, head_index % rows.kv_heads, thread % self.lanes * CHUNK
        first = begin + thread // self.lanes
        operands = ((rows.key, self.spec.head_dim), (rows.value, self.spec.v_head_dim))
        found = cute.make_rmem_tensor((2,), Int32)
        found.fill(0)

        def read(i: Int32) -> None:
            chunks = []
            for row in [first + (i * unroll + j) * step for j in range(unroll)]:
                # Past the ends the last row and chunk are read once more.
                last = Int32(cutlass.min(row, end - 1))
                place = (Int64(entry) * rows.key_length + last) * rows.kv_heads + head
                for which, (operand, columns) in enumerate(operands):
                    offset = place * columns + Int32(cutlass.min(column, columns - CHUNK))
                    chunks.append((which, ptx.load_global_chunk(operand.toint() + 2 * offset)))
            for which, chunk in chunks:
                a, b, c, d = (x & UNSIGNED for x in chunk)
                largest = ptx.max_halves(ptx.max_halves(a, b), ptx.max_halves(c, d))
                found[which] = ptx.max_halves(found[which], largest)

        wgmma.loop((end - begin + (unroll * step - 1)) // (unroll * step), read)
        key, value = (ptx.max_halves(x, ptx.permute(x, x, 0x1032)) for x in (found[0], found[1]))
        return self.over_lanes(ptx.permute(value, key, 0x5410), 32)

    def over_lanes(self, x: Int32, lanes: int) -> Int32:
        """The largest halves among so many lanes of a warp."""
        for i in range(lanes.bit_length() - 1):
            x = ptx.max_halves(x, cute.arch.shuffle_sync_bfly(x, offset=1 << i))
        return x

    def over_warps(self, words: Int32, warps: int) -> Int32:
        """The largest halves among words in shared memory, one of each warp. Runs in a warp."""
        return self.over_lanes(ptx.load_shared(words + ptx.thread_index() % warps * 4), warps)

    def write_part(
        self, rows: Rows, magnitudes: cute.Pointer, place: tuple[Int32, Int32], thread: Int32, threads: int
    ) -> None:
        """Writes those of a part of a head; `place` has both. All threads of a CTA call it."""
        (head_index, part), end = place, rows.end(place[0])
        share = (end + (MAGNITUDE_PARTS - 1)) // MAGNITUDE_PARTS
        span = (part * share, Int32(cutlass.min((part + 1) * share, end)))
        found, shared = self.of_rows(rows, head_index, span, (thread, threads), 1), wgmma.shared_memory().toint()
        cutlass.if_generate(thread % 32 == 0, lambda: ptx.store_shared(shared + thread // 32 * 4, found))
        cute.arch.sync_threads()

        def store() -> None:
            both = self.over_warps(shared, threads // 32)
            for which, x in enumerate((both >> 16, both & 0xFFFF)):
                target = _address(magnitudes.toint(), head_index, which, part)
                cutlass.if_generate(thread == which, lambda x=x, target=target: ptx.store_global_int(target, x))

        cutlass.if_generate(thread < 32, store)

    def add(self, magnitudes: cute.Pointer, head_index: Int32, both: Int32) -> None:
        """Adds what was found of some rows of a head to its first part. Runs in a warp."""
        for which, x in enumerate((both >> 16, both & 0xFFFF)):
            target = _address(magnitudes.toint(), head_index, which, Int32(0))
            cutlass.if_generate(
                ptx.thread_index() % 32 == which, lambda x=x, target=target: ptx.max_global_int(target, x)
            )

    def of_head(self, magnitudes: Int64, head_index: Int32, lane: Int32) -> list[Float32]:
        """The largest |K| and |V| of a head, the same in all lanes of a warp; NaN where there is one."""
        # All parts of K, then all of V: one for each lane.
        x = ptx.load_global_int(_address(magnitudes, head_index, 0, lane))
        for i in range(MAGNITUDE_PARTS.bit_length() - 1):
            x = Int32(cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=1 << i)))
        largest = [cute.arch.shuffle_sync(x, offset=MAGNITUDE_PARTS * which) for which in range(2)]
        return [ptx.unpack(y, dtype=ptx.MMA_DTYPE[self.spec.dtype])[0] for y in largest]
