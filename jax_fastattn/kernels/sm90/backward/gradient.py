# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The statistics (lse2, delta) of query rows as the Hopper backward kernels read them.

`sums/row_preprocess.py` makes them, `score.py` has the formulas. Where one kernel computes dq too, the products
subtract the statistics. The logit of a score is then a factor times the product q . k, and lse / scale takes the
place of lse2:

    P = 2^(log2(e) scale (q . k - lse / scale))        dS = P (dout . v - delta)

P may have a factor, by way of lse2: see `load_units`. With a soft cap or a score function, lse2 is subtracted from
logits in base 2, by a product of its own.

Statistics are float32 `[B, N, 2, padded_rows(T)]`, so that every tile of them starts at a multiple of 16 bytes. Where
one kernel computes dq too, they are bfloat16 `[B, N, 2, padded_rows(T), 8]`: minus the statistic in three parts, then
zeros. A product of [1, 1, 1, 0, ...] with them is as exact as float32. No thread loads them, because such a load would
wait in shared memory for the additions to dq.
"""

import cutlass
from cutlass import Float32, Int32

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.products import Native
from jax_fastattn.kernels.device.sequences import Span
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums import units
from jax_fastattn.kernels.sums.units import Units

# Where operands are bfloat16 and the weights in dS are float16, P has this factor. It is at most 1, so that it then is
# a normal number down to 2^-28.
_LOG2_P = 14


def load_units(spec: KernelSpec, buffers: Buffers, rows: Span, kv_heads: Int32, kv_head: Int32) -> Units:
    """Returns the units of a head of some queries or keys, see `sums/units.py`; of bfloat16 they are constants."""
    log2_p = _LOG2_P if spec.config.main.float16_weights else 0
    constants = Units(dp=1.0, over_dp=1.0, log2_p=float(log2_p), over_p=2.0**-log2_p)
    return units.load_units(buffers, rows, kv_heads, kv_head) or constants


def split_bf16x3(x: Float32, mean: Float32 | None = None) -> list[Int32]:
    """Returns eight bfloat16: three that add up to x, the largest first, and zeros.

    Args:
        x: the number.
        mean: the mean key of a row, which follows as a float32 whose both halves are finite as bfloat16. The product
            drops it, since it is times zeros there; consumers load it.
    """
    parts, words = [], Native("bfloat16")
    for _ in range(3):
        part = words.numbers(words.pair(x, Float32(0.0)))[0]
        # Nothing is left of an infinity.
        x = ptx.where(cutlass.max(part, -part) < Float32(float("inf")), x - part, Float32(0.0))
        parts.append(part)
    third = Int32(0) if mean is None else ptx.bits(mean) & ~0x80
    return [words.pair(parts[0], parts[1]), words.pair(parts[2], Float32(0.0)), third, Int32(0)]
