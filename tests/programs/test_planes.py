# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Planes of programs against the functions themselves, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn.canonical import programs
from jax_fastattn.programs import planes
from jax_fastattn.programs.evaluation import evaluate_code
from jax_fastattn.programs.lower import lower_mask, lower_score
from jax_fastattn.programs.trace import MASK_ARGUMENTS, SCORE_ARGUMENTS, trace_call

B, N, T, S = SIZES = 2, 3, 5, 7
OF_HEADS, OF_ENTRIES = jnp.arange(1.0, N + 1), jnp.arange(B * N).reshape(B, N)
OF_QUERIES, OF_KEYS = jnp.sin(jnp.arange(B * T)).reshape(B, T), jnp.cos(jnp.arange(N * S)).reshape(N, S)
BUCKETS, BLOCKS = jnp.arange(12.0).reshape(4, N), jnp.arange(B * 3 * 2 * N).reshape(B, 3, 2, N) % 5 == 0


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# Each function is `score + f(b, h, q, k)` or a mask, with the shapes of its planes.
SCORES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "a number times keys": (lambda b, h, q, k: OF_HEADS[0] * k, [(1, 1, S)]),
    "heads": (lambda b, h, q, k: OF_HEADS[h] * (k - q), [(1, N, 1)]),
    "heads of entries": (lambda b, h, q, k: OF_ENTRIES[b, h] * 0.5 * (k - q), [(B, N, 1)]),
    "queries of entries": (lambda b, h, q, k: OF_QUERIES[b, q], [(B, 1, T)]),
    "keys of heads": (lambda b, h, q, k: jnp.exp(OF_KEYS[h, k]), [(1, N, S)]),
    "queries times keys": (lambda b, h, q, k: OF_QUERIES[0, q] * OF_KEYS[0, k], [(1, 1, T), (1, 1, S)]),
    "buckets of distances": (
        lambda b, h, q, k: BUCKETS[jnp.clip(jnp.log2(jnp.abs(k - q) + 1.0).astype(jnp.int32), 0, 3), h],
        [(1, N, T + S)],
    ),
    "a distance by another route": (
        lambda b, h, q, k: BUCKETS[jnp.abs((k + 3) - (q - 1) - 4) // 4, 0],
        [(1, 1, T + S)],
    ),
    "a plane without an array": (lambda b, h, q, k: (q // 2) * 1.0 - k % 3, [(1, 1, T), (1, 1, S)]),
}
MASKS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "blocks of pairs": (lambda b, h, q, k: BLOCKS[b, q // 2, k // 4, h], [(1, 1, T), (1, 1, S), (B, N, 6)]),
    "blocks of one entry": (lambda b, h, q, k: BLOCKS[1, q // 2, k // 4, 0], [(1, 1, T), (1, 1, S), (1, 1, 6)]),
    "rows of blocks": (lambda b, h, q, k: BLOCKS[0][q // 2, k % 2, h], [(1, 1, T), (1, 1, S), (1, N, 6)]),
}


@pytest.mark.parametrize("name", SCORES)
def test_planes_and_code_of_a_score_mod_give_the_function(name: str) -> None:
    function, shapes = SCORES[name]
    dtypes = {x: np.float32 if x == "score" else np.int32 for x in SCORE_ARGUMENTS}
    graph, captured = trace_call("score_mod", lambda s, *indices: s + function(*indices), dtypes)
    code, cuts = lower_score(graph, np.float32)
    arrays = planes.arrays(graph, cuts, captured, SIZES, np.float32)
    assert sorted(x.shape for x in arrays) == sorted(shapes)
    found = by_brute_force(code, arrays, {"score": np.float32(0.25)})
    np.testing.assert_allclose(found, 0.25 + of_all_pairs(function), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_planes_and_code_of_a_mask_mod_give_the_function(name: str) -> None:
    function, shapes = MASKS[name]
    graph, captured = trace_call("mask_mod", function, dict.fromkeys(MASK_ARGUMENTS, np.int32))
    code, cuts = lower_mask(graph)
    arrays = planes.arrays(graph, cuts, captured, SIZES, np.float32)
    assert sorted(x.shape for x in arrays) == sorted(shapes)
    np.testing.assert_array_equal(by_brute_force(code, arrays, {}), of_all_pairs(function))


def by_brute_force(code: Any, arrays: list[jax.Array], leaves: dict[str, Any]) -> np.ndarray:
    """Returns the first result of a code, pair by pair, with numbers read off the planes."""

    def read(plane: Any, x: np.ndarray, b: int, h: int, q: int, k: int) -> Any:
        row = x[b if plane.per_batch else 0, h if plane.per_head else 0]
        index = {"head": 0, "query": q, "key": k, "distance": k - q + T}
        return (lambda i: row[int(i)]) if plane.kind == "table" else row[index[plane.kind]]

    numbers, found = [np.asarray(x) for x in arrays], []
    for place in itertools.product(*map(range, SIZES)):
        values = [read(plane, x, *place) for plane, x in zip(code.planes, numbers, strict=True)]
        given = leaves | {"query": np.int32(place[2]), "key": np.int32(place[3])}
        found.append(evaluate_code(code, given, values, 1)[0])
    return np.asarray(found).reshape(SIZES)


def of_all_pairs(function: Callable[..., Any]) -> np.ndarray:
    indices = np.indices(SIZES, np.int32).reshape(4, -1)
    return np.asarray(jax.vmap(function)(*indices)).reshape(SIZES)


def test_equal_functions_share_the_program_of_their_planes() -> None:
    """Each new lambda would compile another one otherwise."""
    before = planes._jitted._cache_size()

    def call(slopes: jax.Array) -> jax.Array:
        dtypes = {x: np.float32 if x == "score" else np.int32 for x in SCORE_ARGUMENTS}
        graph, captured = trace_call("score_mod", lambda s, b, h, q, k: s + slopes[h] * (k - q), dtypes)
        _, cuts = lower_score(graph, np.float32)
        return planes.arrays(graph, cuts, captured, SIZES, np.float32)[0]

    for i in range(10):
        assert call(jnp.full(N, float(i)))[0, 0, 0] == i
    assert planes._jitted._cache_size() <= before + 1


def test_a_thousand_equal_functions_add_one_entry_to_each_cache() -> None:
    sizes: Any = {"B": B, "N": N, "T": T, "S": S}

    def entries() -> list[int]:
        return [programs._lowered.cache_info().currsize, planes._jitted._cache_size()]

    def convert(width: int) -> None:
        widths = jnp.full(N, width)
        programs.mask_planes(sizes, "float32", lambda b, h, q, k: (q - k < widths[h]) & (q * 3 + k != 12345))

    before = entries()
    for width in range(1000):
        convert(width)
    assert [x - y for x, y in zip(entries(), before, strict=True)] == [1, 1]
