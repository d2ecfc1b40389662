# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores and positions for tests, and attention that evaluates them pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.reference import by_query_head, padding_rows, visible_pairs
from jax_fastattn.spec import AttentionSpec, Operands

B, T, S, N, K, D = 2, 24, 35, 4, 2, 8

# Each makes a `score_mod` of an array, whose shape is next to it.
SCORES: dict[str, tuple[Callable[[Any], Callable[..., Any]], tuple[int, ...]]] = {
    "alibi": (lambda x: lambda s, b, h, q, k: s + x[h] * (k - q), (N,)),
    "t5": (lambda x: lambda s, b, h, q, k: s + x[jnp.clip(k - q, -8, 7) + 8, h], (16, N)),
    "both signs": (lambda x: lambda s, b, h, q, k: s + x[jnp.minimum(jnp.abs(k - q), 7) + 8 * (k > q), h], (16, N)),
    "temperature": (lambda x: lambda s, b, h, q, k: 3 * jnp.tanh(s * (1 + x[h]) / 3), (N,)),
    "rows": (lambda x: lambda s, b, h, q, k: s * (1 + x[b, q]), (B, T)),
    "keys": (lambda x: lambda s, b, h, q, k: s - jax.nn.softplus(x[h, k]) * x[0, k], (N, S)),
    "a number": (lambda x: lambda s, b, h, q, k: jnp.where(q >= k, s, s * x), ()),
    # These have no code.
    "pairs": (lambda x: lambda s, b, h, q, k: s * (1 + x[q, k] * x[0, h]), (T, S)),
    "erf": (lambda x: lambda s, b, h, q, k: 3 * jax.lax.erf(s + x[b, h]), (B, N)),
}
IDS = jnp.sort(jax.random.randint(jax.random.key(3), (B, S), 0, 4))
BLOCKS = jax.random.bernoulli(jax.random.key(4), 0.6, (B, N, T // 4, S // 5))
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q >= k),
    "heads": lambda b, h, q, k: (q - k < 3 * (h + 1)) & (k - q < 9) | (k < 2),
    "blocks": lambda b, h, q, k: BLOCKS[b, h, q // 4, k // 5],
    "dilated": lambda b, h, q, k: (q - k) % 3 == 0,
    # This has no code.
    "sorted": lambda b, h, q, k: jnp.sort(jnp.array([q + b, k]))[0] < 9,
}


def draw(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Returns query, key and value."""
    shapes = {"query": (B, T, N, D), "key": (B, S, K, D), "value": (B, S, K, D)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(x, shape, dtype) for x, (name, shape) in zip(keys, shapes.items(), strict=True)}


def array(name: str, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the array that a function of `SCORES` captures."""
    return jax.random.normal(jax.random.key(7), SCORES[name][1], dtype) / 4


def oracle(
    spec: AttentionSpec, operands: Operands, score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None
) -> tuple[jax.Array, jax.Array]:
    """Returns output and log-sum-exp. Hidden scores are 0, and a row that sees nothing has output 0."""
    num_heads = operands.query.shape[2]
    group = num_heads // operands.key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (operands.key, operands.value))
    scale = spec.scale if operands.scale is None else operands.scale[:, :, None, None]
    scores = scale * jnp.einsum("btnh,bsnh->bnts", operands.query, key)
    if operands.bias is not None:
        scores = scores + by_query_head(operands.bias, num_heads)
    visible = jnp.broadcast_to(visible_pairs(spec, operands), scores.shape)
    indices = [jnp.asarray(x) for x in np.indices(scores.shape, np.int32)]
    if mask_mod is not None:
        visible &= of_pairs(mask_mod)(*indices)
    scores = jnp.where(visible, scores, 0.0)
    if score_mod is not None:
        scores = of_pairs(score_mod)(scores, *indices)
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * jnp.tanh(scores / spec.logits_soft_cap)
    scores = jnp.where(visible, scores, -1e30)
    sinks = jnp.full((1, num_heads), -jnp.inf) if operands.sinks is None else operands.sinks
    sinks = jnp.broadcast_to(sinks[..., None, None], (*scores.shape[:3], 1))
    sinks = jnp.where(padding_rows(operands)[:, None, :, None], -jnp.inf, sinks)
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=3), axis=3)[..., :-1]
    lse = jax.nn.logsumexp(jnp.concatenate([scores, sinks], axis=3), axis=3)
    out = jnp.einsum("bnts,bsnd->btnd", jnp.where(visible, weights, 0.0), value)
    return out, jnp.moveaxis(lse, 1, 2)


def of_pairs(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns a function of numbers for arrays with four axes."""
    for _ in range(4):
        function = jax.vmap(function)
    return function
