# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_fastattn.attention` in the attention layers of Keras 3 on the JAX backend.

    with keras.installed():        # or keras.install(), until keras.uninstall()
        model.fit(...)

Layers of Keras that have a rate of dropout never call `jax.nn`: they make all weights, also in inference. Installed,
the methods of `MultiHeadAttention` and `GroupQueryAttention` call `attention` instead, with the rate of the layer and
the next seed of its generator. The replacement holds for all threads and all models of the process, except for
functions that JAX traced earlier. Calls that return attention scores, and calls with several attention axes, stay
Keras's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

from jax_fastattn.api import attention
from jax_fastattn.keywords import explained

_LAYERS = ("MultiHeadAttention", "GroupQueryAttention")
_METHOD = "_compute_attention"
_replaced: dict[type, Callable[..., Any]] = {}


@explained
def install() -> None:
    """Puts `attention` into the layers of Keras, until `uninstall`. A second call changes nothing.

    Raises:
        ValueError: the backend of Keras is not JAX.
    """
    import keras  # takes seconds

    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(
            f'the backend of Keras is "{backend}", expected "jax"; set the environment variable `KERAS_BACKEND` to '
            '"jax" before Keras is imported'
        )
    for layer in (getattr(keras.layers, name) for name in _LAYERS):
        if layer not in _replaced:
            _replaced[layer] = vars(layer)[_METHOD]
            setattr(layer, _METHOD, _method(_replaced[layer]))


@explained
def uninstall() -> None:
    """Restores the methods that `install` replaced; does nothing if none is."""
    while _replaced:
        layer, method = _replaced.popitem()
        setattr(layer, _METHOD, method)


@contextlib.contextmanager
@explained
def installed() -> Generator[None, None, None]:
    """Installs the methods inside a `with` block, and restores the previous ones after the block."""
    is_outer = not _replaced
    install()
    try:
        yield
    finally:
        if is_outer:
            uninstall()


def _method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that computes what `original` does, with other weights dropped."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute_attention(layer: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(layer, *args, **kwargs).arguments
        returns_scores = given.get("return_attention_scores") or getattr(layer, "_return_attention_scores", False)
        if returns_scores or given["query"].ndim != 4:
            return original(layer, *args, **kwargs)
        mask = given.get("attention_mask")
        if mask is not None:
            mask = (mask[:, None] if mask.ndim == 3 else mask).astype(bool)
        dropout = layer._dropout_layer
        drops = bool(given.get("training")) and dropout.rate > 0
        out = attention(
            *(given[name] for name in ("query", "key", "value")),
            mask=mask,
            scale=_scale(layer),
            is_causal=given.get("use_causal_mask", False),
            dropout_rate=dropout.rate if drops else 0.0,
            dropout_key=dropout.seed_generator.next() if drops else None,
        )
        return out, None

    return compute_attention


def _scale(layer: Any) -> float:
    """Returns the factor on query . key, which each layer has under another name."""
    names = ("_inverse_sqrt_key_dim", "_inverse_sqrt_head_dim")
    return next(float(getattr(layer, name)) for name in names if hasattr(layer, name))
