# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random functions of scores, which calls take as `score_mod` in addition to their other arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Mod = Callable[..., Any]

# Functions of functions, up to this depth.
_DEPTH = 2

_UNARY: list[Callable[[Any], Any]] = [
    jnp.tanh,
    jnp.abs,
    jax.nn.sigmoid,
    jnp.negative,
    lambda x: jnp.minimum(x, 0.5),
    lambda x: x * x * 0.1,
]
_BINARY: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: jnp.tanh(x) * y,
    lambda x, y: jnp.tanh(x) + jax.nn.sigmoid(y),
    jnp.maximum,
    lambda x, y: jnp.where(x < y, 0.5 * x, y),
]


def random_score(random: np.random.Generator, sizes: dict[str, int]) -> Mod:
    """Returns a random function, given the sizes of a call by axis letter. Half of them add a term to the score."""
    leaves = _leaves(random, sizes)
    term, factor = (_function(random, leaves, _DEPTH) for _ in range(2))
    kind = int(random.integers(4))

    def score(s: Any, *at: Any) -> Any:
        if kind == 0:
            return 3 * jnp.tanh((s + jnp.tanh(term(*at))) / 3)
        if kind == 1:
            return s * (1 + 0.4 * jnp.tanh(factor(*at))) + 2 * jnp.tanh(term(*at))
        return s + 2 * jnp.tanh(term(*at)) if kind == 2 else s - leaves[-1](*at) + leaves[0](*at)

    return score


def _function(random: np.random.Generator, leaves: list[Mod], depth: int) -> Mod:
    if depth == 0:
        return leaves[int(random.integers(len(leaves)))]
    parts = [_function(random, leaves, depth - 1) for _ in range(int(random.integers(1, 3)))]
    operations = _UNARY if len(parts) == 1 else _BINARY
    operation = operations[int(random.integers(len(operations)))]
    return lambda *at: operation(*(part(*at) for part in parts))


def _leaves(random: np.random.Generator, sizes: dict[str, int]) -> list[Mod]:
    """Returns numbers of positions, and of each kind of plane."""
    batch, heads, rows, columns = (sizes[name] for name in "BNTS")
    period, factors = int(random.integers(2, 9)), [float(x) for x in random.normal(size=3) / 16]

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    of_head, of_row, of_key = normal(batch, heads), normal(heads, rows), normal(batch, columns)
    of_distance, shift = normal(rows + columns, heads), jnp.int32(random.integers(20))
    return [
        lambda b, h, q, k: of_distance[k - q + rows, h],
        lambda b, h, q, k: factors[0] * jnp.abs(q + shift - k),
        lambda b, h, q, k: of_row[h, q],
        lambda b, h, q, k: of_key[b, k] * factors[1],
        lambda b, h, q, k: jnp.where(k > q, of_key[b, k], (q + k) % period * factors[2]),
        lambda b, h, q, k: of_head[b, h] / 32 * (q - k),
    ]
