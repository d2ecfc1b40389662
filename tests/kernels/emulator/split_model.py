# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A model of `jax.nn` with the preset BF16_BF16_F32_X3: three products each, the softmax in float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def attention(scale: float, query: np.ndarray, key: np.ndarray, value: np.ndarray, dout: np.ndarray) -> dict[str, Any]:
    """Returns output and gradients of one head as `jax.nn` and its gradient compute them."""
    logits = np.float32(scale) * _product(query, key.T)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights = weights / weights.sum(1, keepdims=True, dtype=np.float32)
    change = _product(dout, value.T)
    dlogits = np.float32(scale) * weights * (change - (weights * change).sum(1, keepdims=True, dtype=np.float32))
    return {
        "out": _product(weights, value),
        "dq": _product(dlogits, key),
        "dk": _product(dlogits.T, query),
        "dv": _product(weights.T, dout),
    }


def assert_as_small(found: dict[str, np.ndarray], model: dict[str, Any], exact: dict[str, np.ndarray]) -> None:
    """Asserts that errors of results of one head, as far as the model has them, are about as small as its errors."""
    for name in found.keys() & model.keys():
        errors = [np.sqrt(np.mean((y - exact[name]) ** 2)) for y in (found[name], model[name])]
        assert errors[0] <= 1.3 * errors[1], (name, errors)


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns a product of float32 matrices by three products of their bfloat16 terms."""
    (x_high, x_low), (y_high, y_low) = _terms(x), _terms(y)
    return (x_low @ y_high + x_high @ y_low + x_high @ y_high).astype(np.float32)


def _terms(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    low = (x - high).astype(ml_dtypes.bfloat16)
    return high.astype(np.float64), low.astype(np.float64)
