# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of query, key, value, bias, sinks and scale, from cotangents of the output and of the log-sum-exp."""

from __future__ import annotations

import dataclasses
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from testing.poison import poison

from jax_fastattn import attention, attention_varlen

QKV = tuple(calls.EVERYTHING.operands(jax.random.key(0))[:3])


@pytest.mark.parametrize("seed", [0, 1])
def test_everything_at_once(seed: int) -> None:
    calls.check(calls.EVERYTHING, seed=seed)


def test_finite_differences() -> None:
    with jax.enable_x64(True):
        case = dataclasses.replace(calls.EVERYTHING, dtype="float64", query_length=3, num_kv_heads=2, head_dim=4)
        case = dataclasses.replace(case, query_seq_lengths=(3, 2), key_length=4, key_value_seq_lengths=(4, 3))
        arrays = calls.arrays_of(case.operands(jax.random.key(0)))
        wanted = {n: arrays[n].astype(jnp.float64) for n in calls.DIFFERENTIABLE}

        def results(wanted: Any) -> Any:
            given = arrays | wanted
            out, lse = attention(**given, **calls.options_of(case.spec()), return_residual=True)
            return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

        # Canonical sinks are float32 for these operands unless given as float64: differences must not round them.
        check_grads(jax.jit(results), (wanted,), order=1, modes=["rev"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("which", ["out", "lse"])
def test_cotangent_of_one_result_alone(which: str) -> None:
    index = ("out", "lse").index(which)

    def ours(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention(*qkv, return_residual=True)[index]))

    def by_hand(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        logits = jnp.einsum("btnh,bsnh->btns", query, key) / np.sqrt(8)
        out = jnp.einsum("btns,bsnd->btnd", jax.nn.softmax(logits, axis=-1), value)
        return jnp.sum(jnp.sin((out, jax.nn.logsumexp(logits, axis=-1))[index]))

    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*QKV) for f in (ours, by_hand))
    calls.assert_same(found, expected)
    assert np.any(found[2]) == (which == "out")


@pytest.mark.parametrize("name", calls.DIFFERENTIABLE)
def test_gradient_of_one_array_alone(name: str) -> None:
    arrays = calls.arrays_of(calls.EVERYTHING.operands(jax.random.key(0)))
    loss = calls.loss_of(calls.EVERYTHING)
    found = jax.jit(jax.grad(lambda x: loss(arrays | {name: x})))(arrays[name])
    expected = calls.expected_gradients(calls.EVERYTHING)(arrays)[name]
    assert np.any(expected)
    calls.assert_same(found, expected)


@pytest.mark.numbers
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_have_the_dtype_and_shape_of_their_array(dtype: str, transform: Any) -> None:
    case = dataclasses.replace(calls.EVERYTHING, dtype=dtype, bias="ns")
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    arrays |= {name: arrays[name].astype(dtype) for name in ("bias", "sinks", "scale")}
    found = transform(lambda arrays: calls.gradients(calls.loss_of(case), arrays))(arrays)
    for name in calls.DIFFERENTIABLE:
        assert (found[name].shape, found[name].dtype) == (arrays[name].shape, jnp.dtype(dtype)), name
        assert np.any(found[name]), name


def test_bias_of_another_dtype_than_query() -> None:
    query, key, value = (x.astype(jnp.bfloat16) for x in QKV)
    bias = jnp.ones((6, 1, 7))
    gradient = jax.jit(jax.grad(lambda bias: attention(query, key, value, bias).astype(jnp.float32).sum()))(bias)
    assert (gradient.shape, gradient.dtype) == (bias.shape, jnp.float32)


def test_padding_is_not_read() -> None:
    case = dataclasses.replace(calls.EVERYTHING, segments=0, query_seq_lengths=(3, 4), key_value_seq_lengths=(5, 2))
    operands = case.operands(jax.random.key(0))
    loss = calls.loss_of(case)
    run = jax.jit(lambda arrays: calls.gradients(loss, arrays))
    poisoned, *_ = poison(case.spec(), operands, *case.cotangents(jax.random.key(0)))
    clean, poisoned = run(calls.arrays_of(operands)), run(calls.arrays_of(poisoned))
    calls.assert_same(poisoned, clean, tolerance=0)
    assert np.isfinite(clean["scale"])
    assert not np.any(clean["query"][0, 3:])
    assert not np.any(clean["key"][1, 2:])
    assert not np.any(clean["value"][0, 5:])


def test_nan_cotangents_of_padding_rows_are_not_read() -> None:
    query, key, value = QKV
    lengths = jnp.array([3, 5])
    (out, lse), vjp = jax.vjp(
        lambda *x: attention(*x, query_seq_lengths=lengths, return_residual=True), query, key, value
    )
    padding = jnp.arange(5)[None, :, None] >= lengths[:, None, None]
    dlse = jnp.where(padding, jnp.nan, jnp.ones_like(lse))
    dout = jnp.where(padding[..., None], jnp.nan, jnp.ones_like(out))
    calls.assert_same(vjp((dout, dlse)), vjp((jnp.ones_like(out), jnp.ones_like(lse))), tolerance=0)


def test_nan_cotangents_of_rows_that_see_a_sink_alone_are_not_read() -> None:
    """Of the output's; that of the log-sum-exp reaches the gradient of sinks."""
    lengths, sinks = jnp.array([0, 7]), jnp.linspace(-1.0, 2.0, 6)
    (out, lse), vjp = jax.vjp(
        lambda *x: attention(*x[:3], key_value_seq_lengths=lengths, sinks=x[3], return_residual=True), *QKV, sinks
    )
    dout, dlse = jnp.ones_like(out), jnp.ones_like(lse)
    expected = vjp((dout, dlse))
    calls.assert_same(vjp((dout.at[0].set(jnp.nan), dlse)), expected, tolerance=0)
    calls.assert_same(
        jax.tree.map(lambda x, y: x - y, vjp((dout, dlse.at[0].set(0.0))), expected)[3], jnp.full(6, -5.0)
    )


def test_integer_arrays_have_no_gradient() -> None:
    lengths = jnp.array([3, 6])
    _, vjp = jax.vjp(lambda q, n: attention(q, *QKV[1:], key_value_seq_lengths=n), QKV[0], lengths)
    _, found = vjp(jnp.ones((2, 5, 6, 4)))
    assert found.dtype == jax.dtypes.float0


def test_gradient_through_packed_sinks() -> None:
    query, key, value = (x[0] for x in QKV)
    starts_q, starts_k = jnp.array([0, 2, 5]), jnp.array([0, 4, 7])

    def packed(sinks: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention_varlen(query, key, value, starts_q, starts_k, sinks=sinks)))

    def apart(sinks: jax.Array) -> jax.Array:
        first = attention(query[:2], key[:4], value[:4], sinks=sinks)
        second = attention(query[2:], key[4:], value[4:], sinks=sinks)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(second))

    sinks = jnp.linspace(-1.0, 2.0, 6)
    calls.assert_same(jax.jit(jax.grad(packed))(sinks), jax.jit(jax.grad(apart))(sinks))
