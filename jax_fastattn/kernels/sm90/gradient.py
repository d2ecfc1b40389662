# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the Hopper backward kernels share: the score gradient in registers, its mask, stores.

With s = scale * q . k, capped or not, and the statistics (lse2, delta) of a query row, lse2 in base 2:

    P = 2^(log2(e) s - lse2)        dS = P (dP - delta) [(1 - tanh^2)]        dP = dout . v

dS is the gradient of s before the factor `scale`, which dq and dk receive once, when they are stored. A row without a
visible key, or past its sequence, has lse2 = +inf and delta = 0, so that its P and dS vanish without a mask as long as
its scores are numbers.

Where a fused kernel computes dq, lse / scale takes the place of lse2, and products start from minus the statistics:

    P = 2^(log2(e) scale (q . k - lse / scale))        dS = P (dout . v - delta)

Statistics are float32 `[B, N, 2, padded_rows(T)]`, so that every tile of them starts at a multiple of 16 bytes. Where a
fused kernel computes dq they are bfloat16 `[B, N, 2, padded_rows(T), 8]`: minus the statistic in three parts, then
zeros. A product of [1, 1, 1, 0, ...] with them is what the others start from, as exact as float32, and no thread loads
them: shared memory would let it wait, behind the additions to dq.

Where dq is added up in integers, every row has a `resolution`: what its sums are counted in is 2^-22 / resolution.
Without the factor `scale` a row of dq, and every sum on the way to it, is at most

    |sum_k dS_jk K_k| <= max |K| sum_k P_jk (|dP_jk| + |delta_j|) <= max |K| (max |V| rowsum |dout_j| + |delta_j|)

Resolutions are powers of two, exact in bfloat16, and lie as one lane of an accumulator needs them: those of two rows 8
apart in one word.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels import plan
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.softmax import Limits, Transform, cap_score


def nonzero(scale: Float32) -> Float32:
    """The scale, or one as good as 0 that a log-sum-exp can be divided by."""
    tiny = Float32(1e-30)
    return ptx.where(cutlass.max(scale, -scale) < tiny, tiny, scale)


def resolution(dscores: Float32, keys: Float32) -> Float32:
    """By what a row of dq is multiplied before it is added up in integers: a power of two, 0 where none will do.

    Whatever is added to a sum, and every sum on the way, stays below 2^29 units of 2^-22: a quarter of the range of
    int32, for roundings.

    Args:
        dscores: a bound of the sum of a row's |dS|.
        keys: a bound of |K|.
    """
    # The smallest normal number, for what products flush to 0.
    found = cutlass.max(ptx.bits(dscores) & Int32(0x7FFFFFFF), Int32(1 << 23))
    exponent = ptx.bits(ptx.from_bits(Int32(found)) * keys) >> 23
    field = Int32(cutlass.min(Int32(2 * 127 + 29 - 22 - 1) - exponent, Int32(253 - 22)))
    return ptx.from_bits(ptx.where(exponent == 255, Int32(0), field) << 23)


def resolution_offset(row: Int32) -> Int32:
    """Bytes from a head's first resolution to that of a row."""
    return (row // 16 * 8 + row % 8) * 4 + row // 8 % 2 * 2


def unit(resolution: Float32) -> Float32:
    """2^-22 / `resolution`, exactly; NaN where that is 0."""
    bits = Int32((254 - 22) << 23) - ptx.bits(resolution)
    return ptx.from_bits(ptx.where(resolution == Float32(0.0), Int32(0x7FFFFFFF), bits))


def thirds(x: Float32) -> list[Int32]:
    """Eight bfloat16: three that add up to x, the largest first, and zeros."""
    parts = []
    for _ in range(3):
        part = ptx.unpack(ptx.pack(x, Float32(0.0)))[0]
        # Nothing is left of an infinity.
        x = ptx.where(cutlass.max(part, -part) < Float32(float("inf")), x - part, Float32(0.0))
        parts.append(part)
    return [ptx.pack(parts[0], parts[1]), ptx.pack(parts[2], Float32(0.0)), Int32(0), Int32(0)]


class Visibility(NamedTuple):
    """What one accumulator row sees, counted from the lane's first column of a tile.

    Attributes:
        limits: the columns seen.
        check_low: whether their lower end can lie inside of a tile.
        check_high: whether their upper end can.
    """

    limits: Limits
    check_low: bool
    check_high: bool

    @classmethod
    def of(cls, limits: Limits, column: Int32, check_low: bool, check_high: bool = True) -> "Visibility":
        """`column` is the number of the lane's first column in the whole matrix."""
        return cls(Limits(limits.low - column, limits.high - column), check_low, check_high)

    def select(self, x: Float32, at: int) -> Float32:
        """x where column `at` is seen, else 0. A select, not a product: what is hidden may be no number."""
        if self.check_high:
            x = ptx.where(Int32(at) < self.limits.high, x, Float32(0.0))
        return ptx.where(Int32(at) >= self.limits.low, x, Float32(0.0)) if self.check_low else x


def exponentiate(
    score: Float32, lse2: Float32 | None, transform: Transform, visibility: Visibility | None = None, at: int = 0
) -> tuple[Float32, Float32]:
    """P of a score q . k, and the factor of (dP - delta) in dS, which is P without a soft cap.

    Args:
        score: q . k, or q . k - lse / scale without a soft cap.
        lse2: of its query row; None where the score has it.
        transform: the factors of the launch.
        visibility: of the accumulator row; None where the whole tile is seen.
        at: column of the score, counted as `visibility` does.
    """
    capped = score if transform.inner is None else cap_score(score, transform.inner)
    logit = capped * transform.factor if lse2 is None else ptx.fma(capped, transform.factor, -lse2)
    probability = ptx.exp2(logit)
    weight = probability
    if transform.inner is not None:
        weight = probability * ptx.fma(-capped, capped, Float32(1.0))
    if visibility is None:
        return probability, weight
    seen = visibility.select(probability, at)
    return seen, seen if transform.inner is None else visibility.select(weight, at)


def uniform(visit: plan.TileRange) -> plan.TileRange:
    """The compiler has to know that all lanes take the same turns through loops around wgmma."""
    return plan.TileRange(*[cute.arch.make_warp_uniform(Int32(end)) for end in visit])


def store_rows(
    acc: cute.Tensor,
    head_dim: int,
    target: Int64,
    stride: Int64,
    *,
    row: Int32,
    quad_lane: Int32,
    live_rows: Int32,
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
        live_rows: rows from there on are stored as 0, whatever the accumulator holds.
        stored_rows: rows from there on are not stored.
        mma_dtype: "bf16" or "f16".
        factor: multiplies what is stored.
    """
    blocks = head_dim // 8
    for i in range(2):
        at = row + 8 * i
        live = at < live_rows
        address = target + Int64(at) * stride + quad_lane * 16
        for block in range(0, blocks, 4):
            chunk = []
            for j in range(block, block + 4):
                pair = [acc[4 * j + 2 * i + e] for e in range(2)]
                pair = pair if factor is None else [x * factor for x in pair]
                chunk.append(ptx.pack(*[ptx.where(live, x, Float32(0.0)) for x in pair], dtype=mma_dtype))
            chunk = ptx.transpose_quad(chunk, quad_lane)
            stores = at < stored_rows
            if block + 4 > blocks:
                stores = Boolean(stores & (quad_lane < blocks - block))

            def store(address: Int64 = address + block * 16, chunk: list = chunk) -> None:
                ptx.store_global_chunk(address, chunk)

            cutlass.if_generate(stores, store)


def zero_rows(
    tile: Int32, shape: tuple[int, int], row_nbytes: int, first: Int32, *, thread: Int32, threads: int
) -> None:
    """Zeroes the rows from `first` on of a swizzled tile; the caller fences and synchronises.

    Args:
        tile: address of the tile.
        shape: its (rows, columns).
        row_nbytes: bytes of a row of its swizzle atoms: rows of an atom's columns follow each other.
        first: first row to zero, not negative.
        thread: index of this thread among those that call.
        threads: their number.
    """
    rows, columns = shape
    block_nbytes = rows * row_nbytes
    start = first * row_nbytes + thread * 16
    for block in range(2 * columns // row_nbytes):
        for offset in range(0, block_nbytes, 16 * threads):
            position = start + offset

            def clear(address: Int32 = tile + block * block_nbytes + position) -> None:
                ptx.store_shared_chunk(address, [Int32(0)] * 4)

            cutlass.if_generate(position < block_nbytes, clear)
