# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The operand of dropout as kernels read it, see `kernels/arguments/dropout.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn import dropout
from jax_fastattn.kernels.arguments.dropout import DropoutNumbers
from jax_fastattn.spec import Operands


def dropout_numbers(operands: Operands) -> jax.Array:
    """Returns the numbers of each head, int32 `[B, N, 4]`, of a call with dropout.

    Kernels count rows from the first one of a batch entry or of a packed sequence. The first rows of a batch entry in
    the whole call are multiples of 16 (`kernels.support`), and so a number of words. The first rows of a packed
    sequence are added in the kernel, where batch entries lie one after the other.
    """
    assert operands.dropout is not None
    batch, query_length, num_heads = operands.query.shape[:3]
    numbers = lax.bitcast_convert_type(operands.dropout, jnp.uint32)
    if operands.is_packed:
        entry = jnp.arange(batch, dtype=jnp.uint32)[:, None]
        moved = [jnp.zeros_like(entry) - entry * length for length in (query_length, operands.key.shape[1])]
    else:
        moved = [numbers[..., i] >> 1 for i in (dropout.FIRST_QUERY, dropout.FIRST_KEY)]
    keeps = numbers[..., dropout.KEEPS]
    factor = jnp.where(keeps == 0, 1.0, dropout.factor(operands.dropout, jnp.float32))
    members = DropoutNumbers(
        query=numbers[..., dropout.QUERY_NUMBER] + moved[0],
        key=numbers[..., dropout.KEY_NUMBER] + moved[1],
        compared=keeps * 0x10001,
        factor=lax.bitcast_convert_type(factor, jnp.uint32),
    )
    # Kernels have no strides for a mask that batch entries or heads share.
    found = jnp.stack([jnp.broadcast_to(x, (batch, num_heads)) for x in members], axis=-1)
    return lax.bitcast_convert_type(found, jnp.int32)


def greatest_factors(operands: Operands) -> jax.Array | None:
    """Returns the greatest factor on weights of each key/value head, float32 `[b, K]`; None without dropout."""
    if operands.dropout is None:
        return None
    factors = dropout.factor(operands.dropout, jnp.float32)
    if factors.shape[1] == 1:
        return factors
    return factors.reshape(factors.shape[0], operands.key.shape[2], -1).max(-1)
