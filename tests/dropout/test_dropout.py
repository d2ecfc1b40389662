# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention weights on one device: results and derivatives against a formula with `dropout_mask`."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.combinations import in_chunks

import jax_fastattn
from jax_fastattn import attention, attention_varlen, dropout_mask, explain, paged_attention
from jax_fastattn.api import eager
from jax_fastattn.canonical import dropout as arguments

B, T, S, N, K, H = 2, 37, 53, 4, 2, 8
RATE = 0.3
KEY = jax.random.key(7)
ROUNDED = 1 - round(RATE * 2**15) / 2**15


def draw(seed: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


X, U = draw(0), draw(1)
BIAS = jax.random.normal(jax.random.key(3), (N, T, S))
SLOPES = jnp.linspace(0.7, 1.3, N)
SINKS = jax.random.normal(jax.random.key(4), (N,))
COTANGENT = jax.random.normal(jax.random.key(5), (B, T, N, H))

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 5},
    "broadcast": {"broadcast_dropout": True},
    "window-cap-sinks": {"local_window_size": (9, 3), "logits_soft_cap": 2.0, "sinks": SINKS},
    "bias-mask-lengths": {
        "bias": BIAS,
        "mask": jax.random.bernoulli(jax.random.key(6), 0.7, (B, 1, T, S)),
        "key_value_seq_lengths": jnp.array([53, 20]),
        "query_seq_lengths": jnp.array([30, 37]),
    },
    "ids-scale": {
        "segment_ids": (jnp.arange(B * T).reshape(B, T) // 12, jnp.arange(B * S).reshape(B, S) // 17),
        "scale": jnp.float32(0.7),
    },
    "programs": {
        "score_mod": lambda score, b, h, q, k: score * SLOPES[h] + BIAS[h, q, k],
        "mask_mod": lambda b, h, q, k: (q + k) % 3 != 0,
    },
}


def with_dropout(*x: jax.Array, rate: Any = RATE, key: Any = KEY, **options: Any) -> jax.Array:
    return attention(*x, dropout_rate=rate, dropout_key=key, **options)


def formula(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """The weights come from calls without dropout: the output for a value of zeros and one 1 is a weight."""
    broadcast = options.pop("broadcast_dropout", False)
    ones = jnp.broadcast_to(jnp.eye(S, dtype=value.dtype)[None, :, None], (B, S, K, S))
    weights = attention(query, key, ones, **options)  # [B, T, N, S]
    keep = dropout_mask(KEY, RATE, (B, N, T, S), broadcast=broadcast)
    weights = jnp.where(jnp.moveaxis(keep, 1, 2), weights / ROUNDED, 0)
    return jnp.einsum("btns,bsnd->btnd", weights, jnp.repeat(value, N // K, axis=2))


def loss(function: Callable[..., jax.Array], *x: jax.Array, **options: Any) -> jax.Array:
    return jnp.sum(jnp.sin(function(*x, **options)) * COTANGENT)


@pytest.mark.numbers
@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "in-chunks"])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_derivatives_are_as_the_formula_has_them(name: str, at_once: bool) -> None:
    options = OPTIONS[name]

    def everything(function: Callable[..., jax.Array], x: Any, u: Any) -> Any:
        def of(*x: jax.Array) -> jax.Array:
            return loss(function, *x, **options)

        gradient = jax.grad(of, (0, 1, 2))
        out, dout = jax.jvp(functools.partial(function, **options), x, u)
        return out, dout, *jax.jvp(gradient, x, u)

    expected = calls.quick_jit(functools.partial(everything, formula))(X, U)
    if at_once:
        found = calls.quick_jit(functools.partial(everything, with_dropout))(X, U)
    else:
        with in_chunks():
            found = calls.quick_jit(functools.partial(everything, with_dropout))(X, U)
    calls.assert_same(found, expected, 1e-4)


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "in-chunks"])
def test_gradients_of_captured_arrays(at_once: bool) -> None:
    """With those of the query, and with slopes of both signs."""
    slopes = jnp.linspace(-1.0, 1.3, N)

    def of(function: Callable[..., jax.Array], query: jax.Array, slopes: jax.Array, table: jax.Array) -> jax.Array:
        mod = lambda score, b, h, q, k: score * slopes[h] + table[k - q + T]
        return loss(function, query, *X[1:], score_mod=mod)

    def gradients(function: Callable[..., jax.Array]) -> Any:
        call = calls.quick_jit(jax.grad(functools.partial(of, function), (0, 1, 2)))
        return call(X[0], slopes, jnp.sin(jnp.arange(T + S, dtype=jnp.float32)))

    expected = gradients(formula)
    with contextlib.nullcontext() if at_once else in_chunks():
        calls.assert_same(gradients(with_dropout), expected, 1e-4)


def test_gradients_and_tangents_at_once_and_in_chunks() -> None:
    """Of the plain call alone, at every commit."""

    def both(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        def call(*x: jax.Array) -> Any:
            gradients = jax.grad(functools.partial(loss, function), (0, 1, 2))(*x)
            return jax.jvp(function, x, U), gradients

        return calls.quick_jit(call)

    expected = both(formula)(*X)
    calls.assert_same(both(with_dropout)(*X), expected, 2e-5)
    with in_chunks():
        calls.assert_same(both(with_dropout)(*X), expected, 2e-5)


def test_the_mask_shows_in_values_that_are_an_identity() -> None:
    """In chunks, too, and with the log-sum-exp of a call without dropout."""
    value = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, K, S))
    keep = np.asarray(dropout_mask(KEY, RATE, (B, N, T, S)))
    lse = attention(*X[:2], value, return_residual=True)[1]
    for broadcast in (False, True):
        call = functools.partial(with_dropout, broadcast_dropout=broadcast, return_residual=True)
        with in_chunks():
            chunks = calls.quick_jit(lambda *x, call=call: call(*x))(*X[:2], value)
        for out, found_lse in (call(*X[:2], value), chunks):
            kept = np.moveaxis(np.asarray(out), 2, 1) != 0
            np.testing.assert_array_equal(kept, np.broadcast_to(keep[:1, :1], keep.shape) if broadcast else keep)
            np.testing.assert_allclose(found_lse, lse, rtol=1e-6)


@pytest.mark.numbers
def test_weights_are_unbiased_and_a_rate_of_one_leaves_nothing() -> None:
    value = jnp.ones((1, 512, 1, 4))
    query, key = (jax.random.normal(jax.random.key(i), (1, 512, 1, 4)) for i in range(2))
    out = with_dropout(query, key, value, rate=0.25)
    assert abs(float(out.mean()) - 1) < 0.01
    outs, gradients = jax.value_and_grad(lambda *x: with_dropout(*x, rate=1.0).sum(), (0, 1, 2))(query, key, value)
    assert outs == 0 and all(not np.any(x) for x in gradients)


@pytest.mark.numbers
def test_float64_has_exact_factors() -> None:
    with jax.enable_x64(True):
        x = tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in X)
        found = jax.jit(with_dropout)(*x)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, jax.jit(formula)(*x), rtol=1e-12, atol=1e-12)


@pytest.mark.numbers
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype: str) -> None:
    """The mask is the same; weights are rounded once the factor is on them."""
    x = draw(0, dtype)
    found = with_dropout(*x).astype(jnp.float32)
    wide = tuple(y.astype(jnp.float32) for y in x)
    np.testing.assert_allclose(found, formula(*wide), atol=0.03)


# Transformations.


@pytest.mark.numbers
@pytest.mark.parametrize("mapped", ["qk", "q", "qr", "kr"])
def test_vmap_equals_a_loop(mapped: str) -> None:
    """Over queries, keys of dropout and rates."""

    def gradient(query: jax.Array, key: Any, rate: Any) -> Any:
        return jax.value_and_grad(lambda q: loss(functools.partial(with_dropout, key=key, rate=rate), q, *X[1:]))(query)

    many = jnp.stack([X[0], U[0], -X[0]]), jax.random.split(KEY, 3), jnp.array([0.0, 0.5, 1.0])
    axes = [0 if name in mapped else None for name in "qkr"]
    given = [x if axis == 0 else one for x, axis, one in zip(many, axes, (X[0], KEY, jnp.float32(RATE)), strict=True)]
    run = calls.quick_jit(gradient)
    examples = [[x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)] for i in range(3)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *(run(*x) for x in examples))
    calls.assert_same(calls.quick_jit(jax.vmap(gradient, axes))(*given), expected, 2e-5)


@pytest.mark.numbers
def test_vmap_over_heads_that_share_a_mask() -> None:
    """As equinox maps: heads inside, examples outside, a key for each; and in the other order."""
    mask = jnp.tril(jnp.ones((T, T), bool))
    x = jax.random.normal(KEY, (B, N, T, H))
    keys = jax.random.split(KEY, (B, N))

    def head(x: jax.Array, key: Any) -> jax.Array:
        return with_dropout(*[x[:, None]] * 3, key=key, mask=mask[None])[:, 0]

    expected = jnp.stack([jnp.stack([jax.jit(head)(x[b, n], keys[b, n]) for n in range(N)]) for b in range(B)])
    for axis in range(2):
        calls.assert_same(jax.jit(jax.vmap(jax.vmap(head), axis, axis))(x, keys), expected, 2e-6)


@pytest.mark.numbers
def test_remat_and_scan() -> None:
    keys = jax.random.split(KEY, 2)

    def layer(x: jax.Array, key: Any) -> jax.Array:
        return x + with_dropout(x, x[:, :, :K], x[:, :, N - K :], key=key)

    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum(layer(layer(x, keys[0]), keys[1]) ** 2)

    def scanned(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, key: (jax.checkpoint(layer)(x, key), None), x, keys)[0] ** 2)

    calls.assert_same(jax.jit(jax.grad(scanned))(X[0]), jax.jit(jax.grad(plain))(X[0]), 2e-5)


@pytest.mark.parametrize("name", ["cu_seqlens", "offsets"])
def test_packed_sequences(name: str) -> None:
    """Each sequence has the weights of a call of its own, and the mask of packed rows."""
    starts_q, starts_k = jnp.array([2, 14, 14, 35]), jnp.array([0, 21, 30, 50])
    query, key, value = X[0][0], X[1][0], X[2][0]
    options = {"is_causal": True, "query_offset": "bottom_right"} if name == "offsets" else {}
    packed = functools.partial(attention_varlen, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **options)
    keep = dropout_mask(KEY, RATE, (1, N, T, S), cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)[0]

    def ours(*x: jax.Array) -> jax.Array:
        return packed(*x, dropout_rate=RATE, dropout_key=KEY)

    def theirs(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        weights = packed(query, key, jnp.broadcast_to(jnp.eye(S)[:, None], (S, K, S)))
        weights = jnp.where(jnp.moveaxis(keep, 0, 1), weights / ROUNDED, 0)
        return jnp.einsum("tns,snd->tnd", weights, jnp.repeat(value, N // K, axis=1))

    both = [
        calls.quick_jit(jax.value_and_grad(lambda *x, f=f: jnp.sum(f(*x) * COTANGENT[0]), (0, 1, 2)))(query, key, value)
        for f in (ours, theirs)
    ]
    calls.assert_same(both[0], both[1], 2e-5)
    with in_chunks():
        calls.assert_same(calls.quick_jit(ours)(query, key, value), ours(query, key, value), 2e-5)


# Arguments, programs and keys.


def test_a_known_rate_of_0_compiles_to_the_program_without() -> None:
    def text(**options: Any) -> str:
        def call(*x: jax.Array) -> jax.Array:
            return jnp.sum(attention(*x, is_causal=True, **options))

        lowered = jax.jit(jax.value_and_grad(call, (0, 1, 2))).lower(*X)
        return re.sub(r"0x[0-9a-f]+|\"\d{6,}\"", "", lowered.as_text())

    assert text(dropout_rate=0.0, dropout_key=KEY, broadcast_dropout=True) == text()
    assert text(dropout_rate=RATE, dropout_key=KEY) != text()


@pytest.mark.numbers
@pytest.mark.parametrize("at", ["forward", "gradient"])
def test_memory_is_linear(at: str) -> None:
    """A mask would take 1 GiB as bools."""
    length = 1 << 15
    x = [jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)] * 3
    call = functools.partial(with_dropout, is_causal=True)
    function = call if at == "forward" else jax.grad(lambda *x: call(*x).sum(), (0, 1, 2))
    program = jax.jit(function).lower(*x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 128 << 20


def test_keys_and_rates_are_data_of_a_kept_program() -> None:
    """A new key or rate of an eager call compiles nothing, and counts."""
    outs = [with_dropout(*X)]
    size = eager._program.cache_info().currsize
    outs += [
        with_dropout(*X, key=jax.random.key(8)),
        with_dropout(*X, rate=0.5),
        with_dropout(*X, rate=np.float32(0.2)),
    ]
    assert eager._program.cache_info().currsize == size
    for i, x in enumerate(outs):
        assert all(np.any(x != y) for y in outs[i + 1 :])
    calls.assert_same(outs[0], jax.jit(with_dropout)(*X), 1e-6)


@pytest.mark.numbers
def test_traced_rates_compile_once() -> None:
    call = jax.jit(lambda rate: with_dropout(*X, rate=rate))
    found = [call(jnp.float32(rate)) for rate in (0.0, RATE, 1.0)]
    assert call._cache_size() == 1
    calls.assert_same(found, [attention(*X), with_dropout(*X), jnp.zeros_like(X[0])], 1e-6)


def test_the_rate_has_no_gradient() -> None:
    assert jax.grad(lambda rate: with_dropout(*X, rate=rate).sum())(jnp.float32(RATE)) == 0


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"`dropout_key` is None and `dropout_rate` is 0.1, expected a key .*flax"):
        attention(*X, dropout_rate=0.1)
    with pytest.raises(ValueError, match=r"`dropout_key` is None and `dropout_rate` is an array"):
        attention(*X, dropout_rate=jnp.float32(0.1))
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="`dropout_rate` is"):
            with_dropout(*X, rate=rate)
    with pytest.raises(TypeError, match="`dropout_rate` is str"):
        with_dropout(*X, rate="0.1")
    with pytest.raises(ValueError, match=r"`dropout_rate` has shape \(2,\)"):
        with_dropout(*X, rate=jnp.zeros(2))
    with pytest.raises(TypeError, match=r"`dropout_key` has dtype int32, expected a key .*`jax.random.key\(seed\)`"):
        with_dropout(*X, key=3)
    with pytest.raises(ValueError, match=r"`dropout_key` has shape \(2,\), expected one key"):
        with_dropout(*X, key=jax.random.split(KEY))
    with pytest.raises(TypeError, match="`broadcast_dropout` is str"):
        with_dropout(*X, broadcast_dropout="yes")
    with pytest.raises(TypeError, match="`attention`"):
        paged_attention(X[0], X[1], X[2], jnp.zeros((B, 4), jnp.int32), jnp.array([3, 4]), dropout_rate=0.1)  # pyright: ignore


def test_explain_finds_kernels() -> None:
    shapes = [jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)] * 3
    for arch in ("sm_80", "sm_90a"):
        assert explain(*shapes, dropout_rate=0.1, dropout_key=KEY, arch=arch).implementation == "cuda"
        for mod in (lambda s, b, h, q, k: s - SLOPES[h], lambda s, b, h, q, k: -SLOPES[h] * jnp.tanh(s)):
            found = explain(*shapes, score_mod=mod, dropout_rate=0.1, dropout_key=KEY, arch=arch)
            assert found.implementation == "cuda", found.reasons
    assert explain(*shapes, dropout_rate=0.0, dropout_key=KEY, arch="sm_90a").reasons == ()


@pytest.mark.numbers
def test_symbolic_batch_and_lengths() -> None:
    b, t = jax.export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((b, t, 2, 8), jnp.float32)] * 3
    exported = jax.export.export(jax.jit(with_dropout))(*shapes)
    x = [x[:, :20, :2] for x in (X[0], *X[1:])]
    calls.assert_same(exported.call(*x), with_dropout(*x), 2e-6)


class TestUseOfKeys:
    """`jax.debug_key_reuse` raises if a key is used twice, and only then."""

    @staticmethod
    def twice(query: jax.Array, key: Any) -> jax.Array:
        def call(x: jax.Array) -> jax.Array:
            return with_dropout(x, *X[1:], key=key)

        return call(call(query))

    @staticmethod
    def also(query: jax.Array, key: Any) -> jax.Array:
        return with_dropout(query, *X[1:], key=key) + jax.random.normal(key, query.shape)

    @pytest.mark.parametrize("name", ["twice", "also"])
    def test_raises(self, name: str) -> None:
        from jax.errors import KeyReuseError

        with jax.debug_key_reuse(True), pytest.raises(KeyReuseError):
            jax.jit(getattr(self, name))(X[0], jax.random.key(1))

    def test_raises_in_eager_calls(self) -> None:
        from jax.errors import KeyReuseError

        with jax.debug_key_reuse(True):
            key = jax.random.key(1)
            with_dropout(*X, key=key)
            with pytest.raises(KeyReuseError):
                with_dropout(*X, key=key)

    def test_remat_and_gradients_do_not(self) -> None:
        def call(query: jax.Array, key: Any) -> jax.Array:
            return jnp.sum(jax.checkpoint(lambda q: with_dropout(q, *X[1:], key=key))(query) ** 2)

        with jax.debug_key_reuse(True):
            key = jax.random.key(1)
            dropout_mask(key, RATE, (1, 1, 4, 4))  # a test may look at the mask
            jax.jit(jax.grad(call))(X[0], key)
            jax.grad(call)(X[0], jax.random.key(2))


def test_public_names() -> None:
    assert jax_fastattn.dropout_mask is dropout_mask
    assert arguments.operand(0.0, None, False, (2, 3)) is None
