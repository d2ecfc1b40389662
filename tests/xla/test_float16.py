# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients in float16 where most weights are so small that the gradients of their logits would underflow."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention


class Draw(NamedTuple):
    """Normal operands, with sinks that take weight from the keys, and cotangents of a size."""

    queries: int
    keys: int
    sinks: float | None = None
    cotangents: float = 1.0
    large_row: bool = False
    bias: bool = False
    is_causal: bool = False


# Keys decide whether a call is computed at once or in chunks. Cotangents of 2^-10 get weights of at least 2^-10: with
# smaller ones the gradients themselves are subnormal.
CASES = {
    "short": Draw(48, 128),
    "at-once": Draw(40, 4096),
    "chunks": Draw(72, 32768),
    "sinks": Draw(56, 1024, sinks=12.0),
    "small": Draw(24, 512, cotangents=2.0**-10),
    "large": Draw(88, 2048, cotangents=2.0**9),
    "large-row-sinks": Draw(80, 1536, sinks=12.0, large_row=True),
    "bias": Draw(64, 3072, bias=True),
    "causal": Draw(1280, 1280, is_causal=True),
}


def by_hand(draw: Draw, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    """Attention as its formula has it; weights are rounded, and gradients of logits are not."""
    dtype = np.promote_types(query.dtype, np.float32)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=dtype) * query.shape[-1] ** -0.5
    logits = logits + bias if draw.bias else logits
    if draw.is_causal:
        logits = jnp.where(jnp.tri(draw.queries, draw.keys, dtype=bool), logits, -jnp.inf)
    sinks = [] if draw.sinks is None else [jnp.full((*logits.shape[:3], 1), draw.sinks, dtype)]
    weights = jax.nn.softmax(jnp.concatenate([logits, *sinks], axis=-1), axis=-1)[..., : draw.keys]
    out = jnp.einsum("bnts,bsnd->btnd", weights.astype(value.dtype), value, preferred_element_type=dtype)
    return out.astype(query.dtype)


def ours(draw: Draw, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    sinks = None if draw.sinks is None else jnp.full(query.shape[2], draw.sinks, jnp.float32)
    given = bias if draw.bias else None
    return attention(query, key, value, given, sinks=sinks, is_causal=draw.is_causal, implementation="xla")


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(function: object, draw: Draw, operands: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(functools.partial(function, draw), *operands)[1](dout)  # pyright: ignore[reportArgumentType]


def errors(found: tuple[jax.Array, ...], exact: tuple[np.ndarray, ...]) -> np.ndarray:
    """The errors of arrays, as root mean squares over those of the arrays."""
    pairs = zip(found, exact, strict=True)
    return np.array([np.sqrt(((np.asarray(x, np.float64) - y) ** 2).mean() / (y**2).mean()) for x, y in pairs])


@pytest.mark.parametrize("draw", CASES.values(), ids=CASES)
def test_gradients_have_the_error_of_attention_by_hand(draw: Draw) -> None:
    rng, rows, keys = np.random.default_rng(7), (1, draw.queries, 2, 32), (1, draw.keys, 2, 32)
    query, key, value, dout = (jnp.asarray(rng.normal(size=x), jnp.float16) for x in (rows, keys, keys, rows))
    dout = dout * jnp.float16(draw.cotangents)
    dout = dout.at[:, 3].multiply(1000) if draw.large_row else dout
    operands = query, key, value, jnp.asarray(rng.normal(size=(1, 2, draw.queries, draw.keys)), jnp.float32)
    with jax.enable_x64(True):
        wide = (x.astype(jnp.float64) for x in (*operands, dout))
        *wide_operands, wide_dout = wide
        exact = tuple(np.asarray(x) for x in gradients(by_hand, draw, tuple(wide_operands), wide_dout))
    count = 4 if draw.bias else 3
    expected, found = (gradients(function, draw, operands, dout) for function in (by_hand, ours))
    # A single row has few numbers, so their roundings differ by chance.
    limit = 1.3 if draw.large_row else 1.2
    assert (errors(found[:count], exact[:count]) < limit * errors(expected[:count], exact[:count])).all()


def test_a_row_that_is_not_finite_reaches_no_other_row() -> None:
    rng = np.random.default_rng(0)
    query, key, value, dout = (jnp.asarray(rng.normal(size=(1, 32, 2, 16)), jnp.float16) for _ in range(4))
    is_large = jnp.arange(32)[None, :, None, None] == 31

    def dquery(last: float) -> jax.Array:
        operands = query, key, value, jnp.zeros((1, 2, 32, 32), jnp.float32)
        return gradients(ours, Draw(32, 32, is_causal=True), operands, jnp.where(is_large, last, dout))[0][:, :31]

    for last in (jnp.nan, jnp.inf):
        np.testing.assert_array_equal(dquery(last), dquery(1.0))


def test_second_derivatives_of_large_moves_are_finite() -> None:
    """The unit of float16 has room for gradients, and not for their tangents."""
    rng = np.random.default_rng(0)
    query, key, value, dout = (jnp.asarray(rng.normal(size=(1, 16, 2, 16)), jnp.float16) for _ in range(4))

    def dquery(query: jax.Array) -> jax.Array:
        return gradients(ours, Draw(16, 16), (query, key, value, jnp.zeros((1, 2, 16, 16), jnp.float32)), dout)[0]

    tangent = jax.jvp(dquery, (query,), (query * 64,))[1]
    assert jnp.isfinite(tangent).all()
