# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which products stand for products of float32: one table by the setting of `jax.default_matmul_precision`.

Imports no DSL: tools and the support table read it on any machine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from jax_fastattn.kernels.key import Products

# Settings of `jax.default_matmul_precision` with which kernels multiply float32, and how. Other settings ask for more.
# Products of float16 have the mantissa of TF32, which is what JAX's default has on a GPU. Their range is smaller: only
# settings that name such a mantissa have them.
PRECISIONS: Mapping[str, Products] = {
    **dict.fromkeys(("default", "high", "BF16_BF16_F32_X3"), "bf16x3"),
    **dict.fromkeys(
        (
            "tensorfloat32",
            "bfloat16",
            "TF32_TF32_F32",
            "BF16_BF16_F32",
            "F16_F16_F16",
            "F16_F16_F32",
            "BF16_BF16_BF16",
        ),
        "half",
    ),
}

# In two terms, tiles of wider heads do not fit the shared memory of GPUs that have 99 KB of it.
NARROW_HEAD_DIM = 160

# The products of kernels in float32 and their class of errors, where users read of them.
PRODUCTS_IN_WORDS: Mapping[Products, str] = {
    "half": "products of float32 in float16 times powers of two, 10 bits of mantissa as in TF32",
    "bf16x3": "three bfloat16 products for one of float32, 16 bits of mantissa",
}


def products_of(dtype: str, precision: str, *, takes_terms: bool = False) -> Products | None:
    """Returns how kernels multiply operands of a dtype under a precision; None if they do not.

    Args:
        dtype: the dtype of the operands.
        precision: the setting.
        takes_terms: whether the call has what products of float16 do not: see `takes_terms` in `choose.py`.
    """
    if dtype in ("bfloat16", "float16"):
        return "native"
    products = PRECISIONS.get(precision) if dtype == "float32" else None
    return "bf16x3" if products == "half" and takes_terms else products


@functools.cache
def forbids_tf32() -> bool:
    """Returns whether the environment forbids TF32. It is read once, as NVIDIA's libraries read it."""
    return os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"


def rule(precision: str) -> str:
    """Says what has chosen the precision of a call in float32."""
    if precision == "highest" and forbids_tf32():
        return "NVIDIA_TF32_OVERRIDE is 0 in the environment"
    return f'`jax.default_matmul_precision` is "{precision}"'


def head_dim_multiple(dtype: str) -> int:
    """Returns what head dims of operands of a dtype are padded to a multiple of.

    Copies of 16 bytes need rows that are a multiple of 16 bytes apart. Of two terms each, the columns of a term are
    shared by two warps, in steps of 16.
    """
    return 32 if dtype == "float32" else 8
