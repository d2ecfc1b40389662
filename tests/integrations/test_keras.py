# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`integrations.keras`: attention layers of Keras call ours, with dropout and without, and get theirs back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import dropout_mask
from jax_fastattn.integrations import jax_nn
from jax_fastattn.integrations import keras as integration

RATE, HEADS, DIM = 0.3, 4, 8
X = np.random.default_rng(0).standard_normal((2, 20, 32)).astype(np.float32)
MASK = np.random.default_rng(1).random((2, 20, 20)) < 0.7
LAYERS = {"MultiHeadAttention": (HEADS, DIM), "GroupQueryAttention": (DIM, HEADS, 2)}


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package; its operations promote dtypes and ranks."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras")
    import keras

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield keras
    integration.uninstall()


def outputs(layer: Any, **call: Any) -> np.ndarray:
    return np.asarray(layer(X, X, **call))


@pytest.mark.numbers
@pytest.mark.parametrize("name", LAYERS)
def test_layers_without_dropout_compute_the_same(keras: Any, name: str) -> None:
    layer = getattr(keras.layers, name)(*LAYERS[name])
    calls: list[dict[str, Any]] = [{}, {"attention_mask": MASK}, {"use_causal_mask": True}]
    theirs = [outputs(layer, **call) for call in calls]
    with integration.installed(), mock.patch.object(integration, "attention", wraps=integration.attention) as ours:
        for call, want in zip(calls, theirs, strict=True):
            np.testing.assert_allclose(outputs(layer, **call), want, atol=2e-5)
        assert ours.call_count == len(calls)
        scores = layer(X, X, return_attention_scores=True)[1]
        assert scores.shape == (2, HEADS, 20, 20) and ours.call_count == len(calls)
    outputs(layer)
    assert ours.call_count == len(calls)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_drop_what_the_next_seed_says(keras: Any, name: str) -> None:
    layer = getattr(keras.layers, name)(*LAYERS[name], dropout=RATE, seed=3)
    theirs = outputs(layer, training=False)
    found: list[dict[str, Any]] = []

    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        found.append(options | {"query": query, "key": key, "value": value, "out": real(query, key, value, **options)})
        return found[-1]["out"]

    real = integration.attention
    with integration.installed(), mock.patch.object(integration, "attention", attention):
        np.testing.assert_allclose(outputs(layer), theirs, atol=2e-5)
        assert found[0]["dropout_rate"] == 0
        first, second = outputs(layer, training=True), outputs(layer, training=True)
    assert np.any(first != second)
    call = found[1]
    query, key, value = (jnp.asarray(call[name]) for name in ("query", "key", "value"))
    key, value = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (key, value))
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) * DIM**-0.5)
    keep = dropout_mask(call["dropout_key"], RATE, weights.shape)
    kept = jnp.where(keep, weights / (1 - round(RATE * 2**15) / 2**15), 0)
    np.testing.assert_allclose(call["out"], jnp.einsum("bnts,bsnd->btnd", kept, value), atol=2e-5)


@pytest.mark.slow
def test_a_model_trains(keras: Any) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((20, 32))
    outputs = keras.layers.MultiHeadAttention(HEADS, DIM, dropout=RATE)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    with integration.installed():
        losses = model.fit(X, np.ones((2, 20, 1), np.float32), epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_another_backend_is_refused(keras: Any) -> None:
    with (
        mock.patch.object(keras.backend, "backend", lambda: "torch"),
        pytest.raises(ValueError, match=r'the backend of Keras is "torch", expected "jax"; set .* `KERAS_BACKEND`'),
    ):
        integration.install()


def test_an_installation_inside_another_ends_with_the_outer_one(keras: Any) -> None:
    layer = keras.layers.MultiHeadAttention
    before = layer._compute_attention
    with integration.installed():
        inner = layer._compute_attention
        with integration.installed():
            assert layer._compute_attention is inner
        assert layer._compute_attention is inner is not before
    assert layer._compute_attention is before


def test_the_general_installation_names_this_one_once() -> None:
    jax_nn._warn_of_keras.cache_clear()
    with mock.patch.dict(sys.modules, {"keras": sys.modules.get("keras", os)}):
        with pytest.warns(UserWarning, match=r"never call jax.nn.*jax_fastattn.integrations.keras.installed\(\)"):
            jax_nn.install()
        jax_nn.uninstall()
        with jax_nn.installed():  # no second warning
            pass
