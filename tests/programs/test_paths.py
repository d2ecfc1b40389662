# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A function gives the same bits on each path, and a thousand equal functions leave nothing in any cache."""

from __future__ import annotations

import collections
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from testing.combinations import in_chunks

from jax_fastattn import attention, ring_attention
from jax_fastattn.canonical import programs
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.ops.forward import attend_op
from jax_fastattn.programs import lower, planes
from jax_fastattn.reference import attention_reference

B, T, N, D = 2, 48, 4, 8
Mod = Callable[..., Any]


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def as_it_stands(mod: Mod) -> Mod:
    """Returns a function of the same numbers that has no code."""
    return lambda *at: jnp.sort(jnp.stack([mod(*at), jnp.inf]))[0]


def by_reference(given: Any, **options: Any) -> jax.Array:
    return attention_reference(*canonicalize(**given, **options))[1]


def at_once(given: Any, **options: Any) -> jax.Array:
    return attention(**given, return_residual=True, **options)[1]


def in_parts(given: Any, **options: Any) -> jax.Array:
    with in_chunks():
        return at_once(given, **options)


def in_a_ring(given: Any, **options: Any) -> jax.Array:
    rows = P(None, "seq")
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    local = functools.partial(ring_attention, axis_name="seq", return_residual=True, **options)
    share = jax.shard_map(lambda given: local(**given)[1], mesh=mesh, in_specs=(rows,), out_specs=rows, check_vma=False)
    return jax.jit(share)(given)


# Slopes by name, and a number that multiplies them.
CAPTURED: dict[str, tuple[Any, Any, bool]] = {
    "bfloat16": (jnp.bfloat16, 0.75, False),
    "bfloat16-x64": (jnp.bfloat16, np.float64(0.7), True),
    "float64": (np.float64, np.float64(0.7), True),
    "numpy": (np.float32, np.float32(0.7), False),
}
PATHS = {"at once": at_once, "reference": by_reference, "chunks": in_parts, "ring": in_a_ring}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x == "bfloat16-x64" else pytest.mark.slow) for x in CAPTURED]
)
def test_paths_have_the_same_bits(name: str) -> None:
    """A query sees one key, so its log-sum-exp is the score, which NumPy computes in float32.

    Products of query and key are small integers. Absolute values keep compilers from fusing products and sums.
    """
    dtype, factor, x64 = CAPTURED[name]
    random = np.random.default_rng(0)
    numbers = random.standard_normal(N)
    arrays = {x: random.integers(-3, 4, (B, T, N, D)).astype(np.float32) for x in ("query", "key", "value")}
    with jax.enable_x64(x64):
        slopes, given = jnp.asarray(numbers, dtype), {x: jnp.asarray(y) for x, y in arrays.items()}
        options: dict[str, Any] = {"scale": 1.0, "mask_mod": lambda b, h, q, k: k == (7 * q + h) % T}

        def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + abs(factor * abs(slopes[h] * (260 + q - k)))

        found = {path: run(given, score_mod=mod, **options) for path, run in PATHS.items()}
        found["as it stands"] = at_once(given, score_mod=as_it_stands(mod), **options)
    rows, heads = np.arange(T)[:, None], np.arange(N)
    keys = (7 * rows + heads) % T
    products = (arrays["query"] * arrays["key"][:, keys, heads]).sum(-1, dtype=np.float32)
    distances = (260 + rows - keys).astype(np.float32)
    wanted = products + np.float32(factor) * abs(np.asarray(slopes.astype(jnp.float32)) * distances)
    for path, x in found.items():
        assert x.dtype == wanted.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(x), wanted, err_msg=path)


@pytest.mark.slow
@pytest.mark.whole
def test_a_thousand_equal_functions_leave_nothing_in_any_cache() -> None:
    """Neither in ours nor in those of JAX: no object of any type stays."""
    x = jnp.ones((1, 4, 2, 8))

    def call(number: int) -> None:
        slopes, widths = jnp.full(2, float(number)), jnp.full(2, number)
        score = lambda s, b, h, q, k: s - slopes[h] * (q - k) * 1.2345
        attention(x, x, x, score_mod=score, mask_mod=lambda b, h, q, k: (q - k < widths[h]) & (q * 3 + k != 12345))

    def entries() -> list[int]:
        caches = (programs._lowered, lower._with_derivatives, attend_op.jitted)
        return [*(cache.cache_info().currsize for cache in caches), planes._jitted._cache_size()]

    def objects() -> collections.Counter[str]:
        gc.collect()
        return collections.Counter(type(x).__name__ for x in gc.get_objects())

    before = entries()
    call(0)
    assert [x - y for x, y in zip(entries(), before, strict=True)] == [2, 1, 1, 2]
    call(1)
    kept, before = entries(), objects()
    for number in range(1000):
        call(number)
    assert entries() == kept
    grown = {name: n for name, n in (objects() - before).items() if n > 50}
    assert not grown
