# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores in the decoding kernels of both families; emulated.

A warp has rows of several queries and query heads. What no pair reads is poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from testing.poison import poison

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.choose import forward_spec, kernel_spec
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV, Problem

Mod = Callable[..., Any]

# Ten rows, so that lanes have two.
B, T, S, N, K = 2, 5, 300, 4, 2
ARCHS = ("sm_80", "sm_90a")

_random = np.random.default_rng(9)
SLOPES = jnp.asarray(_random.standard_normal(32) / 8, jnp.float32)
TABLE = jnp.asarray(_random.standard_normal((2000, 8)), jnp.float32)
ROWS = jnp.asarray(_random.standard_normal((B, 40)), jnp.float32)
COLUMNS = jnp.asarray(_random.standard_normal((8, 1000)), jnp.float32)
COUNTS = jnp.asarray(_random.integers(0, 9, (B, 32)), jnp.int32)
OFFSET, LENGTHS = jnp.array([250, 17]), jnp.array([290, 18])
CACHE = {"is_causal": True, "query_offset": OFFSET, "key_value_seq_lengths": LENGTHS}


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - SLOPES[h] * (q + OFFSET[b] - k)


def every_plane(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Numbers of heads, queries, keys and distances, integers of heads, and a slope that differs from pair to pair."""
    term = TABLE[k - q + 310, h] * COLUMNS[h, k] - SLOPES[h] * jnp.abs(q + COUNTS[b, h] - k)
    return s * (1 + 0.5 * jnp.tanh(ROWS[b, q])) + term


# By name: a function, sizes T, S, N, K and H, and other arguments.
CASES: dict[str, tuple[Mod, tuple[int, ...], dict[str, Any]]] = {
    "alibi": (alibi, (1, S, 4, 2, 128), CACHE),
    "window-sinks-cap": (
        alibi,
        (2, S, 8, 1, 64),
        CACHE | {"local_window_size": (90, None), "sinks": SLOPES[:8], "logits_soft_cap": 5.0},
    ),
    "cap": (lambda s, b, h, q, k: 3 * jnp.tanh(s / 3), (1, 700, 2, 1, 64), {}),
    # Rows of a block that do not exist, and a second block of rows.
    "every-plane-20-rows": (every_plane, (5, S, 8, 2, 64), CACHE),
    "every-plane-64-rows-d256": (every_plane, (8, S, 8, 1, 256), CACHE),
    "mask-function": (every_plane, (T, S, N, K, 64), CACHE | {"mask_mod": lambda b, h, q, k: (q + k + h) % 3 != 0}),
    "negative-scale": (every_plane, (T, S, N, K, 64), CACHE | {"scale": -0.2}),
    "deterministic": (alibi, (1, 2500, 2, 1, 64), {"deterministic": True}),
    "float16": (every_plane, (T, S, N, K, 72), CACHE | {"dtype": jnp.float16}),
    # Rows of the second head see nothing.
    "hides": (
        lambda s, b, h, q, k: jnp.where(k <= 120 * (1 - h) + q - h, s, -jnp.inf),
        (T, S, 2, 1, 64),
        {},
    ),
}


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def check(arch: str, patch: pytest.MonkeyPatch, mod: Mod, sizes: tuple[int, ...], **options: Any) -> None:
    """Compares a poisoned call on an emulated GPU with the float32 reference."""
    queries, keys, heads, kv_heads, head_dim = sizes
    random, dtype = np.random.default_rng(0), options.pop("dtype", jnp.bfloat16)
    shapes = ((B, queries, heads, head_dim), (B, keys, kv_heads, head_dim), (B, keys, kv_heads, head_dim))
    spec, operands = canonicalize(
        *(jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes), score_mod=mod, **options
    )
    problem = Problem.of(spec, operands)
    assert not unsupported_reasons(problem, arch) and forward_spec(problem, arch).op == "decode"
    emulated_ops.emulate(patch, arch)
    poisoned, *_ = poison(spec, operands, jnp.zeros(shapes[0], dtype))
    out, lse = cuda.forward(spec, poisoned)
    single = {name: getattr(operands, name).astype(jnp.float32) for name in QKV}
    expected, expected_lse = attention_reference(spec, operands._replace(**single))
    np.testing.assert_allclose(np.asarray(lse), np.asarray(expected_lse), atol=1e-3, rtol=1e-4)
    expected = np.asarray(expected)
    found = np.asarray(out.astype(jnp.float32))
    np.testing.assert_allclose(found, expected, atol=2**-7 * np.abs(expected).max() + 1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_all_kinds_of_planes(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(arch, monkeypatch, every_plane, (T, S, N, K, 64), **CACHE)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_calls(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mod, sizes, options = CASES[name]
    check(arch, monkeypatch, mod, sizes, **options)


def test_the_backward_pass_takes_ordinary_kernels() -> None:
    x, y = (jnp.zeros((B, rows, N, 64), jnp.bfloat16) for rows in (1, S))
    problem = Problem.of(*canonicalize(x, y, y, score_mod=alibi))
    assert forward_spec(problem, "sm_90a").op == "decode"
    assert kernel_spec(problem, "backward", "sm_90a").op == "backward"
