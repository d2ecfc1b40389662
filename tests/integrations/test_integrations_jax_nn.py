# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`integrations.jax_nn`: libraries that call `jax.nn.dot_product_attention` call ours, and get theirs back."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention
from jax_fastattn.integrations import jax_nn

THEIRS = jax.nn.dot_product_attention
X = jax.random.normal(jax.random.key(0), (2, 11, 3, 8))


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    jax.nn.dot_product_attention = THEIRS
    jax_nn._replaced.clear()


def shows_nothing(**options: Any) -> bool:
    """Whether a query that sees no key gets 0, as in ours alone."""
    out = jax.nn.dot_product_attention(X, X, X, mask=jnp.zeros((11, 11), bool)[None, None], **options)
    return not np.any(out)


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_every_implementation_of_jax_nn_is_ours(implementation: Any) -> None:
    """On a GPU, "cudnn" raised in ours, libraries tried "xla" next, and the kernels never ran."""
    with jax_nn.installed():
        assert shows_nothing(implementation=implementation)


def test_gradient_of_a_bias_is_that_of_jax_nn() -> None:
    def gradient(bias: jax.Array) -> jax.Array:
        return jax.grad(lambda bias: jnp.sin(jax.nn.dot_product_attention(X, X, X, bias=bias)).sum())(bias)

    bias = jnp.linspace(-1.0, 1.0, 3 * 11 * 11).reshape(1, 3, 11, 11)
    theirs = gradient(bias)
    with jax_nn.installed():
        calls.assert_same(gradient(bias), theirs)


def test_the_kernels_run_for_cudnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    x = jax.ShapeDtypeStruct((2, 129, 6, 32), jnp.bfloat16)
    with jax_nn.installed():
        for implementation in ("cudnn", "xla"):
            function = lambda *x, name=implementation: jax.nn.dot_product_attention(*x, implementation=name)
            assert calls.count_launches(calls.cuda_text(function, x, x, x)) == 1


def test_other_implementations_are_those_of_attention() -> None:
    with jax_nn.installed():
        with pytest.raises(ValueError, match="`implementation` is 'flash'"):
            jax.nn.dot_product_attention(X, X, X, implementation="flash")
        with pytest.raises(NotImplementedError, match="the platform is not CUDA"):
            jax.nn.dot_product_attention(X, X, X, implementation="cuda")


def test_what_was_there_is_restored() -> None:
    with pytest.raises(KeyError), jax_nn.installed(), jax_nn.installed():
        raise KeyError
    assert jax.nn.dot_product_attention is THEIRS
    jax_nn.uninstall()  # nothing to do
    jax_nn.install()
    jax_nn.install()
    with jax_nn.installed():
        pass
    assert shows_nothing()  # the block leaves the installed one alone
    jax_nn.uninstall()
    assert jax.nn.dot_product_attention is THEIRS


def test_signature_is_that_of_jax_nn() -> None:
    with jax_nn.installed():
        assert inspect.signature(jax.nn.dot_product_attention) == inspect.signature(THEIRS)


def test_nnx_modules_call_it() -> None:
    with warnings.catch_warnings():
        # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates.
        warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
        from flax import nnx
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        layer = nnx.MultiHeadAttention(3, 24, decode=False, rngs=nnx.Rngs(0))
        x, mask = (
            jax.random.normal(jax.random.key(1), (2, 11, 24)),
            jnp.ones((2, 1, 11, 11), bool).at[:, :, 4].set(False),
        )
        with jax_nn.installed():
            ours = layer(x, mask=mask)
        theirs = layer(x, mask=mask)
    assert not np.any(ours[:, 4])  # the output's bias is 0 at first
    rest = np.delete(np.arange(11), 4)
    np.testing.assert_allclose(ours[:, rest], theirs[:, rest], atol=1e-5)
    assert np.any(np.abs(theirs[:, 4] - ours[:, 4]) > 1e-3)


KERAS = """
import jax, keras, numpy as np
from jax_fastattn.integrations import jax_nn
layer = keras.layers.MultiHeadAttention(num_heads=3, key_dim=8)
x = np.random.default_rng(0).normal(size=(2, 11, 24)).astype("float32")
mask = np.ones((2, 11, 11), bool)
mask[:, 4] = False
theirs = np.asarray(layer(x, x, attention_mask=mask))
causal = np.asarray(layer(x, x, use_causal_mask=True))
with jax_nn.installed():
    ours = np.asarray(layer(x, x, attention_mask=mask))
    np.testing.assert_allclose(np.asarray(layer(x, x, use_causal_mask=True)), causal, atol=1e-5)
np.testing.assert_allclose(np.asarray(layer(x, x, attention_mask=mask)), theirs, atol=1e-6)
rest = np.delete(np.arange(11), 4)
np.testing.assert_allclose(ours[:, rest], theirs[:, rest], atol=1e-5)
np.testing.assert_allclose(ours[:, 4], 0, atol=1e-6)
assert np.abs(theirs[:, 4]).max() > 1e-3
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
def test_keras_calls_it() -> None:
    """In a process of its own: Keras reads its backend when it is imported. Its output bias is 0 at first."""
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    subprocess.run([sys.executable, "-c", KERAS], env=environment, check=True)


def test_attention_itself_stays_strict() -> None:
    with pytest.raises(ValueError, match=r"cuDNN is reached through jax\.nn"):
        attention(X, X, X, implementation="cudnn")  # pyright: ignore
