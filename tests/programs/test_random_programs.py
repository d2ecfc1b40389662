# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random functions of scores and positions, beside random other arguments, against the functions pair by pair."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import mods
import numpy as np
import pytest
from calls import assert_same, quick_jit
from mods import B, D, N, S, T
from testing.combinations import in_chunks

from jax_fastattn import attention
from jax_fastattn.canonical.batched import canonicalize

DEPTH = 4
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.numbers) for seed in range(1, 24))]
Mod = Callable[..., Any]

# The five kinds of captured arrays, and how a function reads them.
SHAPES = {"number": (), "head": (N,), "query": (B, T), "key": (N, S), "distance": (16, N)}
READS: dict[str, Callable[..., Any]] = {
    "number": lambda x, b, h, q, k: x,
    "head": lambda x, b, h, q, k: x[h],
    "query": lambda x, b, h, q, k: x[b, q],
    "key": lambda x, b, h, q, k: x[h, k],
    "distance": lambda x, b, h, q, k: x[jnp.clip(k - q, -8, 7) + 8, h],
}
UNARY: list[Callable[[Any], Any]] = [
    jnp.tanh,
    jnp.abs,
    jax.nn.sigmoid,
    jnp.negative,
    lambda x: jnp.exp(-jnp.abs(x)),
    lambda x: jnp.log1p(x * x),
    lambda x: jnp.sqrt(1 + x * x),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: jnp.tanh(x) * y,
    lambda x, y: x / (1 + jnp.abs(y)),
    jnp.maximum,
    jnp.minimum,
    lambda x, y: jnp.where(x < y, 0.5 * x, y),
]


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def random_number(random: np.random.Generator, depth: int) -> Callable[..., Mod]:
    """Returns a random function of a dictionary of arrays, which returns a function of score and indices."""
    if depth == 0 or random.random() < 0.1:
        kind = str(random.choice([*SHAPES, "score", "positions", "constant"]))
        factors = [float(x) for x in random.normal(size=3) / 4]
        if kind == "score":
            return lambda x: lambda s, *at: s
        if kind == "positions":
            return lambda x: lambda s, b, h, q, k: factors[0] * (k - q) + factors[1] * (q % 3) + factors[2] * (h + b)
        if kind == "constant":
            return lambda x: lambda s, *at: factors[0]
        return lambda x: lambda s, *at: READS[kind](x[kind], *at)
    parts = [random_number(random, depth - 1) for _ in range(int(random.integers(1, 3)))]
    operation = (UNARY if len(parts) == 1 else BINARY)[int(random.integers(7))]
    return lambda x: lambda *args: operation(*(part(x)(*args) for part in parts))


def random_mask(random: np.random.Generator, depth: int) -> Mod:
    if depth == 0:
        low, high, period = (int(x) for x in random.integers(1, 9, 3))
        leaves: list[Mod] = [
            lambda b, h, q, k: k <= q + low,
            lambda b, h, q, k: q - k < high,
            lambda b, h, q, k: mods.IDS[b, q] == mods.IDS[b, k],
            lambda b, h, q, k: (q + k + h) % period == 0,
            lambda b, h, q, k: mods.BLOCKS[b, h, q // 4, k // 5],
            lambda b, h, q, k: k < low,
        ]
        return leaves[int(random.integers(len(leaves)))]
    parts = [random_mask(random, depth - 1) for _ in range(2)]
    kind = int(random.integers(3))

    def mask(*at: Any) -> Any:
        x, y = (part(*at) for part in parts)
        return [x & y, x | y, x | ~y][kind]

    return mask


def other_arguments(random: np.random.Generator) -> dict[str, Any]:
    """Returns arguments of which each is there half of the time."""
    key = jax.random.key(int(random.integers(1 << 30)))
    found: dict[str, Any] = {
        "bias": jax.random.normal(key, (1, N, T, S)),
        "mask": jax.random.bernoulli(key, 0.8, (B, 1, T, S)),
        "is_causal": True,
        "local_window_size": (9, 20),
        "query_offset": jnp.array([3, -1]),
        "query_seq_lengths": jnp.array([T, 17]),
        "key_value_seq_lengths": jnp.array([20, S]),
        "segment_ids": (mods.IDS[:, :T] // 2, mods.IDS // 2),
        "logits_soft_cap": 4.0,
        "sinks": jax.random.normal(key, (N,)),
        "scale": jnp.float32(0.4),
    }
    return {name: x for name, x in found.items() if random.integers(2)}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_functions(seed: int) -> None:
    random = np.random.default_rng(seed)
    expression, mask = random_number(random, DEPTH), random_mask(random, 2)
    options, weights = other_arguments(random), jax.random.normal(jax.random.key(1), (B, T, N, D))
    keys = jax.random.split(jax.random.key(2), len(SHAPES))
    arrays = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}

    def score(arrays: Any) -> Mod:
        return lambda s, *at: s + 2 * jnp.tanh(expression(arrays)(s, *at))

    def ours(given: Any, arrays: Any) -> jax.Array:
        return jnp.sum(weights * attention(**given, **options, score_mod=score(arrays), mask_mod=mask))

    def theirs(given: Any, arrays: Any) -> jax.Array:
        spec, operands = canonicalize(**given, **options)
        return jnp.sum(weights * mods.oracle(spec, operands, score(arrays), mask)[0])

    def derivatives(loss: Any) -> Any:
        gradient = jax.value_and_grad(loss, argnums=(0, 1))
        return lambda *primals: jax.jvp(gradient, primals, jax.tree.map(jnp.cos, primals))

    given = mods.draw()
    with in_chunks() if seed % 2 else contextlib.nullcontext():
        found = quick_jit(derivatives(ours))(given, arrays)
    assert_same(found, quick_jit(derivatives(theirs))(given, arrays), 2e-4)
