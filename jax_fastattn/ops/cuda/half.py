# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""float32 operands as float16 times powers of two, as kernels with `KernelSpec.products` "half" read them.

Each sequence, a batch entry or a packed one, and key/value head has powers of its own. They depend on the largest
finite element of rows that take part, see `live_rows.py`, and never on what is hidden.

- Q and K have one power each, whose product is the scale of the call but for a factor in [1/2, 1), which is the scalar
  of the launch. Products of large elements have the same size on both sides. Where all logits are tiny, both operands
  are larger than that, so that neither underflows: the weights hardly change.
- V has its largest element at 2^15 in the forward pass.
- In the backward pass dP (dO V^T) and P have powers as in `gradient_units.py`: a bound on dS, by norms of rows, becomes
  2^15. V and dO share what P leaves of it.
- Dropout multiplies what it keeps: the bound on dS has that factor, and P leaves room for it.

XLA undoes the powers of results. Products with them are exact unless a result leaves the range of float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.layouts.packed import token_ids
from jax_fastattn.ops.cuda.dropout import greatest_factors
from jax_fastattn.ops.cuda.gradient_units import row_weights
from jax_fastattn.ops.cuda.live_rows import LiveRows, live_rows
from jax_fastattn.spec import AttentionSpec, Operands

# Values, and bounds on dS, are below 2 to this power: float16 ends at 2^16.
_TOP = 15
# The largest elements of Q and of K have a product of at least 2 to this power: with 2^-10 each, elements of 2^-14 of
# the largest one are 0, and no logit is above 2^-12 at head dim 256.
_LEAST = -20
# P is at most 2 to this power, and 0 below 2^-35.
_LOG2_P = 10
# The largest element of dO is at least 2 to this power, so that dv is right where dlse alone makes dS large.
_LEAST_DOUT = -10
# The exponents of float32.
_RANGE = (-126, 127)


class Largest(NamedTuple):
    """The largest finite elements and norms of rows `[B, L, N]`, 0 in rows that do not take part."""

    element: jax.Array
    norm: jax.Array

    @classmethod
    def of(cls, x: jax.Array, live: jax.Array | None) -> Largest:
        """Returns those of x `[B, L, N, D]`, of which `live` `[b, L, n]` rows take part; None is all."""
        size = jnp.abs(x)
        element = jnp.max(jnp.where(size < jnp.inf, size, 0.0), axis=-1, initial=0.0)
        square = jnp.sum(jnp.square(x), axis=-1)
        # Squares may leave the range of float32.
        fits = (square < 2.0**120) & (square > 2.0**-100)
        norm = jnp.where(fits, jnp.sqrt(square), element * math.sqrt(x.shape[-1]))
        return cls(*(y if live is None else jnp.where(live, y, 0.0) for y in (element, norm)))


@dataclass(frozen=True, eq=False)
class Groups:
    """The rows that share powers of two: of a sequence, in the heads of a group.

    Attributes:
        kv_heads: how many key/value heads there are.
        ids: of packed sequences, the sequence of each query and of each key, `[B, T]` and `[B, S]`; else None.
        count: sequences of a batch entry.
    """

    kv_heads: int
    ids: tuple[jax.Array, jax.Array] | None
    count: int

    @classmethod
    def of(cls, operands: Operands) -> Groups:
        """Returns the groups of a call."""
        lengths, sequences = (operands.query.shape[1], operands.key.shape[1]), operands.sequences
        if sequences is None:
            return cls(operands.key.shape[2], None, 1)
        ids = tuple(token_ids(sequences, x, of_keys=bool(side)) for side, x in enumerate(lengths))
        return cls(operands.key.shape[2], (ids[0], ids[1]), sequences.shape[1])

    def greatest(self, x: jax.Array, *, of_keys: bool) -> jax.Array:
        """Returns the greatest number of each group, `[B, M, K]`, of x `[B, L, N]`, which is not negative."""
        batch, length, heads = x.shape
        x = x.reshape(batch, length, self.kv_heads, heads // self.kv_heads).max(-1)
        if self.ids is None:
            return x.max(1, keepdims=True)
        # Rows of no sequence do not count.
        found = jax.vmap(lambda y, i: jax.ops.segment_max(y, i, self.count))(x, self.ids[of_keys])
        return jnp.maximum(found, 0.0)

    def of_rows(self, x: jax.Array, heads: int, *, of_keys: bool) -> jax.Array:
        """Returns numbers of groups `[B, M, K]` for rows, `[B, L or 1, heads]`."""
        if self.ids is not None:
            x = jnp.take_along_axis(x, jnp.maximum(self.ids[of_keys], 0)[..., None], axis=1)
        return jnp.repeat(x, heads // self.kv_heads, axis=2)


def times_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns x times 2 to the power of an exponent, in float32."""
    half = exponent // 2
    return x * _power(half) * _power(exponent - half)


def _power(exponent: jax.Array) -> jax.Array:
    bits = (jnp.clip(exponent, *_RANGE) + 127) << 23
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def _exponent(x: jax.Array) -> jax.Array:
    """Returns the exponent of the power of two above x; 0 of 0."""
    return jnp.where(x > 0, jnp.clip(jnp.frexp(x)[1], _RANGE[0]), 0)


class LogitPowers(NamedTuple):
    """The exponents of Q and of K, `[B, M, K]`, and what is left of the scale.

    Attributes:
        scale: the scalar of the launch.
        log2_scale: the exponent of the scale over that.
    """

    query: jax.Array
    key: jax.Array
    scale: float
    log2_scale: int

    @classmethod
    def of(cls, scale: float, query: jax.Array, key: jax.Array) -> LogitPowers:
        """Returns the exponents, given the scale of the call and the largest elements of groups."""
        rest, log2_scale = math.frexp(scale)
        first, second = _exponent(query), _exponent(key)
        both = jnp.where((query > 0) & (key > 0), first + second + log2_scale, _LEAST)
        both = jnp.maximum(both, _LEAST)
        return cls(both // 2 - first, both - both // 2 - second, rest, log2_scale)


class DscorePowers(NamedTuple):
    """The exponents of P, of dO and of V in a backward pass, `[B, M, K]`."""

    p: jax.Array
    dout: jax.Array
    value: jax.Array

    @property
    def dp(self) -> jax.Array:
        """The exponent of dP and delta."""
        return self.dout + self.value

    @property
    def ds(self) -> jax.Array:
        """The exponent of dS."""
        return self.p + self.dp


class HalfForward(NamedTuple):
    """What a forward launch takes, and the exponents `[B, L or 1, N]` that its output is multiplied by."""

    spec: AttentionSpec
    operands: Operands
    out: jax.Array


def forward_half(spec: AttentionSpec, operands: Operands) -> HalfForward:
    """Returns the launch of a call."""
    live, groups = live_rows(spec, operands), Groups.of(operands)
    powers, value = _logit_powers(spec, operands, live, groups), _largest(operands.value, live.keys, groups)
    shift = _TOP - _exponent(value)
    halves = _halves(operands, groups, powers, shift)
    out = groups.of_rows(-shift, operands.query.shape[2], of_keys=False)
    return HalfForward(replace(spec, scale=powers.scale), halves, out)


class HalfBackward(NamedTuple):
    """What a backward launch takes, and exponents `[B, L or 1, heads]` that its results are multiplied by.

    Attributes:
        residuals: log-sum-exp, dO and delta, by name.
        query, key, value: exponents of the gradients.
        sinks: the exponent of what each row adds to the gradient of its sink.
    """

    spec: AttentionSpec
    operands: Operands
    residuals: dict[str, jax.Array | None]
    query: jax.Array
    key: jax.Array
    value: jax.Array
    sinks: jax.Array


def backward_half(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> HalfBackward:
    """Returns the launch of a backward pass, given the results of its call and their cotangents."""
    live, groups, heads = live_rows(spec, operands), Groups.of(operands), operands.query.shape[2]
    logits = _logit_powers(spec, operands, live, groups)
    powers = _dscore_powers(spec, operands, (out, lse, dout, dlse), live, groups)
    halves = _halves(operands, groups, logits, powers.value)
    log2_p, dp, of_dout, of_value = (
        groups.of_rows(x, heads, of_keys=False) for x in (powers.p, powers.dp, powers.dout, powers.value)
    )
    rounded = times_power(dout, of_dout[..., None]).astype(jnp.float16)
    # Of the cotangent that products have: rows of dS then add up to 0.
    delta = times_power(jnp.sum(out * rounded.astype(jnp.float32), axis=-1), of_value)
    if live.queries is not None:
        delta = jnp.where(live.queries, delta, 0.0)
    if dlse is not None:
        delta = delta - times_power(dlse, dp)
    kv_heads = operands.key.shape[2]
    # A gradient is the scale times dS times an operand, and the product of both powers of logits is the scale.
    query = logits.log2_scale - logits.key - powers.ds
    key = logits.log2_scale - logits.query - powers.ds
    return HalfBackward(
        replace(spec, scale=logits.scale),
        halves,
        {"lse": lse - log2_p.astype(lse.dtype) * math.log(2), "dout": rounded, "delta": delta},
        groups.of_rows(query, heads, of_keys=False),
        groups.of_rows(key, kv_heads, of_keys=True),
        groups.of_rows(-powers.p - powers.dout, kv_heads, of_keys=True),
        groups.of_rows(-powers.ds, heads, of_keys=False),
    )


def _largest(x: jax.Array, live: jax.Array | None, groups: Groups, *, of_keys: bool = True) -> jax.Array:
    return groups.greatest(Largest.of(x, live).element, of_keys=of_keys)


def _logit_powers(spec: AttentionSpec, operands: Operands, live: LiveRows, groups: Groups) -> LogitPowers:
    query = _largest(operands.query, live.queries, groups, of_keys=False)
    return LogitPowers.of(spec.scale, query, _largest(operands.key, live.keys, groups))


def _halves(operands: Operands, groups: Groups, powers: LogitPowers, value: jax.Array) -> Operands:
    """Returns the operands in float16, given the exponents of V."""
    exponents = {"query": powers.query, "key": powers.key, "value": value}
    found = {}
    for name, exponent in exponents.items():
        x, of_keys = getattr(operands, name), name != "query"
        rows = groups.of_rows(exponent, x.shape[2], of_keys=of_keys)[..., None]
        found[name] = times_power(x, rows).astype(jnp.float16)
    return operands._replace(**found)


def _dscore_powers(
    spec: AttentionSpec,
    operands: Operands,
    results: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    live: LiveRows,
    groups: Groups,
) -> DscorePowers:
    """Returns the exponents of P, dO and V: a gradient of a logit is P (dP - delta), at most |dO| (|v| + |out|)."""
    out, lse, dout, dlse = results
    heads = operands.query.shape[2]
    values, cotangents = Largest.of(operands.value, live.keys), Largest.of(dout, live.queries)
    value = _exponent(groups.greatest(values.element, of_keys=True))
    cotangent = _exponent(groups.greatest(cotangents.element, of_keys=False))
    of_value, of_dout = (groups.of_rows(x, heads, of_keys=False) for x in (value, cotangent))
    longest = groups.of_rows(groups.greatest(values.norm, of_keys=True), heads, of_keys=False)
    others = Largest.of(out, live.queries).norm if spec.is_part else longest
    factors = _dropout_factors(operands, heads)
    if factors is not None:
        longest = longest * factors
        others = others if spec.is_part else longest
    # No output is longer than the longest value times that, unless the row has values of other devices.
    lengths = times_power(longest, -of_value) + times_power(others, -of_value)
    changes = times_power(cotangents.norm, -of_dout) * lengths
    if dlse is not None:
        given = jnp.where(jnp.isfinite(dlse), jnp.abs(dlse), 0.0)
        given = given if live.queries is None else jnp.where(live.queries, given, 0.0)
        changes = changes + times_power(given, -of_value - of_dout)
    bounds = jnp.minimum(changes * row_weights(operands, lse), jnp.finfo(jnp.float32).max)
    bounds = jnp.where(jnp.isneginf(lse) | jnp.isnan(bounds), 0.0, bounds)
    left = _TOP - _exponent(groups.greatest(bounds, of_keys=False))
    log2_p = jnp.clip(left - 2 * _LEAST_DOUT, 0, _LOG2_P)
    if factors is not None:  # on Hopper, P has the factor of dropout, too
        log2_p = log2_p - jnp.maximum(_exponent(factors[:, :, :: heads // groups.kv_heads]) - 1, 0)
    left = left - log2_p
    of_dout = jnp.clip(left // 2, _LEAST_DOUT, _TOP)
    return DscorePowers(log2_p, of_dout - cotangent, jnp.minimum(left - of_dout, _TOP) - value)


def _dropout_factors(operands: Operands, heads: int) -> jax.Array | None:
    """Returns the greatest factor of dropout on a weight of each group, `[b, 1, heads]`; None without dropout."""
    factors = greatest_factors(operands)
    return None if factors is None else jnp.repeat(factors, heads // factors.shape[1], axis=1)[:, None]
