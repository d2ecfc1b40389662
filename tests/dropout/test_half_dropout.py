# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""float32 by products of float16 next to dropout: P and dS have room for the factor on what is kept.

A model of the backward kernels rounds what they round. `tests/kernels/test_dropout_emulated.py` runs the kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import dropout
from jax_fastattn.ops.cuda.half import backward_half, times_power
from jax_fastattn.spec import QKV, AttentionSpec, Operands
from jax_fastattn.xla import passes as xla

B, T, S, N, K, H = 2, 21, 34, 4, 2, 16


def _half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float16).astype(jnp.float32)


def _wide(x: jax.Array) -> jax.Array:
    """Returns an operand for each query head, `[B, N, L, H]`."""
    return jnp.repeat(x.astype(jnp.float32), N // x.shape[2], axis=2).swapaxes(1, 2)


def _passes(operands: Operands, dout: jax.Array, *, factor_on_p: bool) -> tuple[list[Any], list[Any], list[jax.Array]]:
    """Returns the gradients of the XLA path, those of a model of the kernels, and its P and dS."""
    spec, numbers = AttentionSpec(H**-0.5, present=operands.present()), operands.dropout
    assert numbers is not None
    out, lse = xla.forward(spec, operands)
    wanted = xla.backward(spec, operands, out, lse, dout, None, QKV)
    half = backward_half(spec, operands, out, lse, dout, None)
    query, key, value, cotangent = (_wide(x) for x in (*half.operands[:3], half.residuals["dout"]))
    lse, delta = (half.residuals[x].swapaxes(1, 2)[..., None] for x in ("lse", "delta"))
    # Kernels take 1 where nothing is kept.
    survival = dropout.factor(numbers, jnp.float32)[..., None, None]
    survival = jnp.where(survival == 0, 1.0, survival)
    on_p, on_dp = (survival, 1.0) if factor_on_p else (1.0, survival)
    keep = dropout.kept(numbers, jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32))
    logits = half.spec.scale * jnp.einsum("bnth,bnsh->bnts", query, key)
    p, dp = on_p * jnp.exp(logits - lse), jnp.einsum("bnth,bnsh->bnts", cotangent, value)
    ds = _half(p * (on_dp * jnp.where(keep, dp, 0.0) - delta / on_p))
    p = jnp.where(keep, _half(p), 0.0)
    grouped = lambda x: x.reshape(B, S, K, N // K, H).sum(3)
    found = (
        jnp.einsum("bnts,bnsh->btnh", ds, key) * half.spec.scale,
        grouped(jnp.einsum("bnts,bnth->bsnh", ds, query) * half.spec.scale),
        grouped(jnp.einsum("bnts,bnth->bsnh", on_dp * p, cotangent)),  # portable kernels store dv times the factor
    )
    exponents = half.query, half.key, half.value
    found = [times_power(x, y[..., None]) for x, y in zip(found, exponents, strict=True)]
    return [getattr(wanted, name) for name in QKV], found, [p, ds]


@pytest.mark.parametrize("factor_on_p", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("rates", [(0.2, 0.5, 0.9, 0.99), (1.0,)], ids=["rates", "none-kept"])
def test_gradients_have_the_errors_of_float16(rates: tuple[float, ...], factor_on_p: bool) -> None:
    random = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    *arrays, dout = (jnp.asarray(random.standard_normal(x), jnp.float32) for x in shapes)
    # Some weights are near 1, and rows of values and cotangents have one direction, so that bounds are reached.
    arrays[0], arrays[2], dout = 6 * arrays[0], 1 + 0.1 * arrays[2], 1 + 0.1 * dout
    # With this key a weight over 0.8 is kept at the greatest rate.
    numbers = [dropout.numbers(jnp.array([1, 5], jnp.uint32), rate, B, N) for rate in rates]
    numbers = jnp.stack([numbers[n % len(rates)][:, n] for n in range(N)], axis=1)
    call = calls.quick_jit(functools.partial(_passes, factor_on_p=factor_on_p))
    wanted, found, rounded = call(Operands(*arrays, dropout=numbers), dout)
    assert all(jnp.isfinite(x).all() for x in rounded)
    for exact, x in zip(wanted, found, strict=True):
        np.testing.assert_allclose(x, exact, atol=2**-8 * np.abs(exact).max())
