# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""NaN where nothing may read: whatever is multiplied by 0 instead of being left out shows up in the results."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fastattn.spec import Operands


def poison_rows(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """x `[B, L, ...]` with NaN in the rows from `lengths` `[B]` on."""
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    inside = inside.reshape(inside.shape + (1,) * (x.ndim - 2))
    return jnp.where(inside, x, jnp.full((), jnp.nan, x.dtype))


def poison(operands: Operands) -> Operands:
    """The operands with NaN past their sequence lengths."""
    return operands._replace(
        query=poison_rows(operands.query, operands.query_seq_lengths),
        key=poison_rows(operands.key, operands.key_value_seq_lengths),
        value=poison_rows(operands.value, operands.key_value_seq_lengths),
    )
