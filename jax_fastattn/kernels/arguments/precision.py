# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which products stand for products of float32: one table by the setting of `jax.default_matmul_precision`.

Imports no DSL: tools and the support table read it on any machine.
"""

from __future__ import annotations

from jax_fastattn.kernels.key import Products

# These settings ask for products that three bfloat16 products are at least as accurate as: the precision of JAX's
# default on a GPU, which is TF32, or less.
SPLIT_PRECISIONS = frozenset(
    (
        "default",
        "high",
        "tensorfloat32",
        "bfloat16",
        "TF32_TF32_F32",
        "BF16_BF16_F32",
        "BF16_BF16_F32_X3",
        "F16_F16_F16",
        "F16_F16_F32",
        "BF16_BF16_BF16",
    )
)

# In two terms, tiles of wider heads do not fit the shared memory of GPUs that have 99 KB of it.
NARROW_HEAD_DIM = 160

# The products of kernels in float32 and their class of errors, where users read of them.
SPLIT_PRECISION = "three bfloat16 products for one of float32, 16 bits of mantissa"


def products_of(dtype: str, precision: str) -> Products | None:
    """Returns how kernels multiply operands of a dtype under a precision; None if they do not."""
    if dtype in ("bfloat16", "float16"):
        return "native"
    return "bf16x3" if dtype == "float32" and precision in SPLIT_PRECISIONS else None


def head_dim_multiple(dtype: str) -> int:
    """Returns what head dims of operands of a dtype are padded to a multiple of.

    Copies of 16 bytes need rows that are a multiple of 16 bytes apart. Of two terms each, the columns of a term are
    shared by two warps, in steps of 16.
    """
    return 32 if dtype == "float32" else 8
