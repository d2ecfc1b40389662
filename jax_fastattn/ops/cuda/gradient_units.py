# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The powers of two that P, dP and delta have in the backward kernels of float16, see `kernels/sums/units.py`.

A gradient of a logit is P (dP - delta), at most the weight of all keys of its row times |dout| (|v| + |out|). The
greatest bound of a batch entry and key/value head decides. It reads the cotangent and the values once, and makes
nothing of the size of logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fastattn.layouts.packed import PADDING_ID, padding_rows, token_ids
from jax_fastattn.ops.cuda.dropout import greatest_factors
from jax_fastattn.spec import Operands

# Bounds of gradients become at most 2^15, half of what float16 holds.
_TOP = 15
# P is at most 1. With this factor it is a normal number of float16 down to 2^-28.
_LOG2_P = 14
# V, or the cotangent, times the factor on dP has few digits below 2^-14. So P gets all of the factor that it can have
# only where the factor on dP remains this large: normal operands then have errors of 2^-16.
_LOG2_DP = -10
# Factors far from 1 are as good, and float32 holds what they make.
_LIMIT = 40


def gradient_units(
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    is_part: bool = False,
) -> jax.Array:
    """Returns units `[B, K, 4]`, or `[1, K, 4]` of packed sequences, in the order of `kernels.sums.units.Units`.

    Rows that see no key, and keys past the end, do not count, nor does what is not finite.

    Args:
        operands: the operands of the call.
        out, lse: the results of its rows.
        dout, dlse: their cotangents.
        is_part: whether the results are of more keys than the operands have. Else no output is greater than all values.
    """
    packed, group = operands.is_packed, operands.query.shape[2] // operands.key.shape[2]
    values = _greatest(_norms(operands.value, ~_hidden_keys(operands)), 1, packed)
    live = ~jnp.isneginf(lse)
    padding = padding_rows(operands)
    live = live if padding is None else live & ~padding[:, :, None]
    cotangents = _norms(dout, live)
    rows = jnp.repeat(values, group, axis=-1)[:, None]
    factors = greatest_factors(operands)
    if factors is not None:  # dropout multiplies what it keeps
        rows = rows * jnp.repeat(factors, group if factors.shape[1] > 1 else 1, axis=-1)[:, None]
    changes = cotangents * (rows + (_norms(out, live) if is_part else rows))
    if dlse is not None:
        changes = changes + _finite(jnp.abs(dlse), live)
    bounds = _finite(changes * row_weights(operands, lse), live)
    # On Hopper, P has the factor of dropout, too: less than 2 needs no room.
    room = None if factors is None else jnp.maximum(_exponent(factors) - 1, 0)
    if room is not None and packed:
        room = room.max(0, keepdims=True)
    return _units(_greatest(bounds, group, packed), _greatest(cotangents, group, packed), values, room)


def _units(bounds: jax.Array, cotangents: jax.Array, values: jax.Array, room: jax.Array | None) -> jax.Array:
    """Returns units, given the greatest gradients and norms `[B, K]`.

    Another factor on P takes `room`, a binary logarithm `[b, k]`; None for 0.
    """
    both = jnp.clip(_TOP - _exponent(bounds), -_LIMIT, _LIMIT)
    log2_p = jnp.clip(both - _LOG2_DP, 0, _LOG2_P)
    log2_p = log2_p if room is None else log2_p - room
    # Neither V nor the cotangent overflows.
    log2_dp = jnp.minimum(both - log2_p, _TOP - _exponent(jnp.maximum(cotangents, values)))
    # One fused loop writes all of them; a concatenation would be another one.
    place, one = jnp.arange(4)[None, None], jnp.ones((*bounds.shape, 4), bounds.dtype)
    log2_dp, log2_p = log2_dp[..., None], log2_p[..., None]
    exponents = jnp.where(place == 0, log2_dp, jnp.where(place == 1, -log2_dp, -log2_p))
    return jnp.where(place == 2, log2_p.astype(one.dtype), jnp.ldexp(one, exponents))


def _exponent(x: jax.Array) -> jax.Array:
    """Returns the least power of two that is greater than x, as an exponent."""
    return jnp.frexp(x)[1]


def _norms(x: jax.Array, live: jax.Array) -> jax.Array:
    """Returns the norms `[B, T, N]` of the rows of x `[B, T, N, D]` that are live and finite, and 0 for the others."""
    return _finite(jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)), live)


def _finite(x: jax.Array, live: jax.Array) -> jax.Array:
    return jnp.where(live & (x < jnp.inf), x, 0.0)


def _greatest(x: jax.Array, group: int, packed: bool) -> jax.Array:
    """Returns the greatest number of each batch entry and key/value head, of x `[B, T, N]`; of packed ones, of all."""
    greatest = x.max((0, 1), keepdims=True, initial=0.0)[0] if packed else x.max(1, initial=0.0)
    return greatest.reshape(greatest.shape[0], -1, group).max(-1)


def _hidden_keys(operands: Operands) -> jax.Array:
    """Returns which keys no query sees for their place alone, bool, broadcast to `[B, S, K]`."""
    length = operands.key.shape[1]
    if operands.sequences is not None:
        return (token_ids(operands.sequences, length, of_keys=True) == PADDING_ID - 1)[:, :, None]
    if operands.key_value_seq_lengths is None:
        return jnp.zeros((1, 1, 1), bool)
    return (jnp.arange(length)[None] >= operands.key_value_seq_lengths[:, None])[:, :, None]


def row_weights(operands: Operands, lse: jax.Array) -> jax.Array:
    """Returns a bound on the weights of a row, broadcast to `[B, T, N]`: what a sink leaves, or 1."""
    if operands.sinks is None:
        return jnp.ones((1, 1, 1), lse.dtype)
    left = -jnp.expm1(jnp.minimum(operands.sinks[:, None].astype(lse.dtype) - lse, 0.0))
    # The log-sum-exp has some roundings.
    return jnp.minimum(left + 2.0**-18 * (1.0 + jnp.abs(lse)), 1.0)
