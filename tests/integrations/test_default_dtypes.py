# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of Flax, Keras and equinox in float32, the dtype that they have by default, run kernels in both passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest

import jax_fastattn
from jax_fastattn import explain
from jax_fastattn.integrations import flax as flax_integration
from jax_fastattn.integrations import keras as keras_integration

X = jnp.linspace(-1, 1, 2 * 96 * 64).reshape(2, 96, 64)


def flax_nnx() -> Callable[[jax.Array], jax.Array]:
    nnx = pytest.importorskip("flax.nnx")
    options = {"attention_fn": flax_integration.attention_fn, "decode": False, "rngs": nnx.Rngs(0)}
    return nnx.MultiHeadAttention(4, 64, **options)


def flax_linen() -> Callable[[jax.Array], jax.Array]:
    linen = pytest.importorskip("flax.linen")
    layer = linen.MultiHeadDotProductAttention(4, attention_fn=flax_integration.attention_fn)
    parameters = layer.init(jax.random.key(0), X)
    return lambda x: layer.apply(parameters, x)


def keras() -> Callable[[jax.Array], jax.Array]:
    pytest.importorskip("keras")
    import keras

    layer = keras.layers.MultiHeadAttention(4, 16)

    def call(x: jax.Array) -> jax.Array:
        with keras_integration.installed():
            return layer(x, x)

    return call


def equinox() -> Callable[[jax.Array], jax.Array]:
    eqx = pytest.importorskip("equinox")
    project = eqx.nn.Linear(64, 3 * 64, key=jax.random.key(1))

    def layer(x: jax.Array) -> jax.Array:
        heads = jax.vmap(jax.vmap(project))(x).reshape(*x.shape[:2], 12, 16)
        return jax_fastattn.attention(*jnp.split(heads, 3, axis=2))

    return layer


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keras promotes dtypes and ranks, and reads its backend when it is imported."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    keras_integration.uninstall()


@pytest.mark.parametrize("layer", [flax_nnx, flax_linen, keras, equinox])
def test_a_layer_runs_kernels(layer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Any] = []

    def seen(*arrays: Any, **options: Any) -> Any:
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        found.append(explain(*shapes, **options))
        return ours(*arrays, **options)

    call = layer()
    call(X)  # makes the variables of Keras
    calls.lower_for_cuda(monkeypatch, tmp_path)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ours = jax_fastattn.attention
    for module in (flax_integration, keras_integration, jax_fastattn):
        monkeypatch.setattr(module, "attention", seen)
    text = calls.cuda_text(jax.grad(lambda x: jnp.sum(jnp.sin(call(x)))), X)
    assert calls.count_launches(text) == 2
    assert found[0].kernel == "sm90 forward, sm90 backward"
