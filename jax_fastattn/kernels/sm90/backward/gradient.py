# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the Hopper backward kernels share: the score gradient in registers, its mask, stores.

With s = scale * q . k, capped or not, and the statistics (lse2, delta) of a query row, lse2 in base 2:

    P = 2^(log2(e) s - lse2)        dS = P (dP - delta) [(1 - tanh^2)]        dP = dout . v

with the tanh of the forward pass (`KernelSpec.exact_cap`), so that every row of P adds up to 1 at most. dS is the
gradient of s before the factor `scale`, which dq and dk receive once, when they are stored. A row that sees no key has
lse2 = +inf and delta = 0, so that its P and dS vanish without a mask as long as its scores are numbers.

Where one kernel computes dq too, the products subtract the statistics, and lse / scale takes the place of lse2,

    P = 2^(log2(e) scale (q . k - lse / scale))        dS = P (dout . v - delta)

but for soft caps: there the product with minus lse2 is added to capped scores in base 2.

Statistics are float32 `[B, N, 2, padded_rows(T)]`, so that every tile of them starts at a multiple of 16 bytes. Where
one kernel computes dq too, they are bfloat16 `[B, N, 2, padded_rows(T), 8]`: minus the statistic in three parts, then
zeros. A product of [1, 1, 1, 0, ...] with them is as exact as float32, and no thread loads them: shared memory would
let it wait, behind the additions to dq.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import copies, ptx


def nonzero(scale: Float32) -> Float32:
    """The scale, or one as good as 0 that a log-sum-exp can be divided by."""
    tiny = Float32(1e-30)
    return ptx.where(cutlass.max(scale, -scale) < tiny, tiny, scale)


def thirds(x: Float32) -> list[Int32]:
    """Eight bfloat16: three that add up to x, the largest first, and zeros."""
    parts = []
    for _ in range(3):
        part = ptx.unpack(ptx.pack(x, Float32(0.0)))[0]
        # Nothing is left of an infinity.
        x = ptx.where(cutlass.max(part, -part) < Float32(float("inf")), x - part, Float32(0.0))
        parts.append(part)
    return [ptx.pack(parts[0], parts[1]), ptx.pack(parts[2], Float32(0.0)), Int32(0), Int32(0)]


def store_rows(
    acc: cute.Tensor,
    head_dim: int,
    target: Int64,
    stride: Int64,
    *,
    row: Int32,
    quad_lane: Int32,
    live: copies.Rows,
    stored_rows: Int32,
    mma_dtype: str,
    factor: Float32 | None = None,
) -> None:
    """Stores a warpgroup's accumulator `[64, padded head dim]` in 16 bits, 16 bytes a lane; all lanes call it.

    Args:
        acc: the accumulator.
        head_dim: columns to store, a multiple of 8.
        target: byte address of row 0.
        stride: bytes from one row to the next.
        row: the lane's first row; its other one is 8 below.
        quad_lane: lane % 4.
        live: other rows are stored as 0, whatever the accumulator holds.
        stored_rows: rows from there on are not stored.
        mma_dtype: "bf16" or "f16".
        factor: multiplies what is stored.
    """
    blocks = head_dim // 8
    for i in range(2):
        at = row + 8 * i
        is_live = at < live.end
        if live.begin is not None:
            is_live = Boolean(is_live & (at >= live.begin))
        address = target + Int64(at) * stride + quad_lane * 16
        for block in range(0, blocks, 4):
            chunk = []
            for j in range(block, block + 4):
                pair = [acc[4 * j + 2 * i + e] for e in range(2)]
                pair = pair if factor is None else [x * factor for x in pair]
                chunk.append(ptx.pack(*[ptx.where(is_live, x, Float32(0.0)) for x in pair], dtype=mma_dtype))
            chunk = ptx.transpose_quad(chunk, quad_lane)
            stores = at < stored_rows
            if block + 4 > blocks:
                stores = Boolean(stores & (quad_lane < blocks - block))

            def store(address: Int64 = address + block * 16, chunk: list = chunk) -> None:
                ptx.store_global_chunk(address, chunk)

            cutlass.if_generate(stores, store)
