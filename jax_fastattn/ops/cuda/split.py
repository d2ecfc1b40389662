# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""float32 operands in two bfloat16 terms, as kernels with `KernelSpec.products` "bf16x3" read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.spec import QKV

# These operands have two terms.
SPLIT = (*QKV, *(f"{name}_tangent" for name in QKV), "dout")

# bfloat16 has these bits of exponent and mantissa.
EXPONENT, MANTISSA = 8, 7


def bfloat16_terms(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns float32 arrays, numbers of bfloat16, that add up to x: two have 16 bits of it, three all."""
    terms, rest = [], x
    for _ in range(count):
        # A cast there and back might be dropped by XLA.
        terms.append(lax.reduce_precision(rest, EXPONENT, MANTISSA))
        rest = jnp.where(jnp.isfinite(terms[-1]), rest - terms[-1], 0.0)
    return terms


def side_by_side(x: jax.Array) -> jax.Array:
    """Returns the two terms of x `[..., H]` in bfloat16, `[..., 2 H]`."""
    return jnp.concatenate(bfloat16_terms(x, 2), axis=-1).astype(jnp.bfloat16)
