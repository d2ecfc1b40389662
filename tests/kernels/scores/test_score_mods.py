# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores in the kernels of both families, in both passes; emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.support import gradient_reasons
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV, AttentionSpec, Operands, Problem

Mod = Callable[..., Any]

B, T, S, N, K = 2, 40, 72, 2, 1
ARCHS = ("sm_80", "sm_90a")

_random = np.random.default_rng(5)
SLOPES = jnp.asarray([0.3, -0.02, 0.05, 0.7], jnp.float32)
TABLE = jnp.asarray(_random.standard_normal((1000, 4)), jnp.float32)
ROWS = jnp.asarray(_random.standard_normal((B, 300)), jnp.float32)
COLUMNS = jnp.asarray(_random.standard_normal((4, 400)), jnp.float32)
IDS = jnp.asarray(np.sort(_random.integers(0, 3, (B, 200)), 1), jnp.int32)
COUNTS = jnp.asarray(_random.integers(0, 5, (B, 4)), jnp.int32)
# Factors of queries that a fold into the scale might lose: others have both signs.
FACTORS = jnp.asarray(_random.standard_normal((4, 150)), jnp.float32).at[0, ::9].set(0.0).at[1].multiply(-3.0)
STRANGE = FACTORS.at[0, 5].set(jnp.nan).at[1, 70].set(-jnp.inf).at[0, 71].set(jnp.inf).at[1, 72].set(1e30)


def every_plane(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Numbers of heads, queries, keys and distances, integers of heads, and a slope that differs from pair to pair."""
    term = TABLE[k - q + 300, h] * COLUMNS[h, k] - SLOPES[h] * jnp.abs(q + COUNTS[b, h] - k)
    return s * (1 + 0.5 * jnp.tanh(ROWS[b, q])) + term


# By name: a function, and head dim with other arguments.
CASES: dict[str, tuple[Mod, int, dict[str, Any]]] = {
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), 64, {"is_causal": True}),
    "alibi-d128-window-sinks": (
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k),
        128,
        {"is_causal": True, "local_window_size": (70, None), "sinks": jnp.array([0.3, -1.0, 0.0, 2.0])},
    ),
    "terms-d256-lengths": (
        lambda s, b, h, q, k: s + TABLE[k - q + 300, h] * ROWS[b, q] - SLOPES[h] * (q - k) + COLUMNS[h, k],
        256,
        {"key_value_seq_lengths": jnp.array([170, 31]), "query_seq_lengths": jnp.array([133, 97])},
    ),
    "factors-of-queries": (lambda s, b, h, q, k: s * FACTORS[h, q] + SLOPES[h] * jnp.abs(q - k), 128, {}),
    "cap-and-cap": (lambda s, b, h, q, k: 3 * jnp.tanh(s / 3), 128, {"logits_soft_cap": 2.0, "is_causal": True}),
    "temperature-bias": (
        lambda s, b, h, q, k: s * (1 + SLOPES[h]),
        64,
        {"bias": jnp.asarray(_random.standard_normal((1, 4, 150, 170)), jnp.bfloat16)},
    ),
    "table-ids": (
        lambda s, b, h, q, k: s + TABLE[k - q + 300, h],
        64,
        {"segment_ids": tuple(jnp.sort(jnp.asarray(_random.integers(0, 3, (B, n)))) for n in (150, 170))},
    ),
    "functions-d192-mask-function": (
        lambda s, b, h, q, k: (
            s + jnp.log1p(jnp.abs(q - k)) - jnp.exp(-jnp.abs(s)) + jax.nn.sigmoid(s) / jnp.sqrt(1.0 + q) + (q // 7 % 3)
        ),
        192,
        {"mask_mod": lambda b, h, q, k: (q >= k) | (ROWS[b, k] > 0)},
    ),
    "float16": (lambda s, b, h, q, k: 5 * jnp.tanh(s / 5) - SLOPES[h] * (q - k), 64, {"dtype": jnp.float16}),
    "float32": (lambda s, b, h, q, k: 5 * jnp.tanh(s / 5) + TABLE[k - q + 300, h], 64, {"dtype": jnp.float32}),
}


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def check(
    arch: str, patch: pytest.MonkeyPatch, mod: Mod | None, sizes: tuple[int, ...] = (T, S, N, K, 64), **options: Any
) -> None:
    """Compares a call and its gradients on an emulated GPU with the float32 reference."""
    emulated_ops.emulate(patch, arch)
    queries, keys, heads, kv_heads, head_dim = sizes
    random, dtype = np.random.default_rng(0), options.pop("dtype", jnp.bfloat16)
    shapes = ((B, queries, heads, head_dim), (B, keys, kv_heads, head_dim), (B, keys, kv_heads, head_dim))
    arrays = [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]
    spec, operands = canonicalize(*arrays, score_mod=mod, **options)
    dout = jnp.asarray(random.standard_normal(shapes[0]), dtype)
    names = [*QKV, *(x for x in ("bias", "sinks") if getattr(operands, x) is not None)]
    out, lse = cuda.forward(spec, operands)
    found = cuda.backward(spec, operands, out, lse, dout, None, names)
    (wanted, wanted_lse), gradients = reference(spec, operands, names, dout)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(wanted_lse), atol=1e-3, rtol=1e-4)
    results = {"out": (out, wanted, 2**-7)}
    results |= {x: (getattr(found, x), y, 2**-6) for x, y in zip(names, gradients, strict=True)}
    for name, (got, expected, tolerance) in results.items():
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
        np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max() + 1e-5, err_msg=name)


def reference(spec: AttentionSpec, operands: Operands, names: list[str], dout: jax.Array) -> Any:
    """Returns output and log-sum-exp in float32, and the gradients of operands."""

    def loss(*given: jax.Array) -> Any:
        results = attention_reference(spec, operands._replace(**dict(zip(names, given, strict=True))))
        return (results[0] * dout.astype(jnp.float32)).sum(), results

    single = [getattr(operands, x).astype(jnp.float32) for x in names]
    gradients, results = jax.grad(loss, argnums=tuple(range(len(single))), has_aux=True)(*single)
    return results, gradients


@pytest.mark.parametrize("arch", ARCHS)
def test_all_kinds_of_planes(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(arch, monkeypatch, every_plane, is_causal=True, query_offset=jnp.array([20, 33]))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_calls(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mod, head_dim, options = CASES[name]
    # See `analysis.is_wild`.
    queries = 128 if name.startswith("functions") else 150
    check(arch, monkeypatch, mod, (queries, 170, 4, 2, head_dim), **options)


# By name: the GPU, the dtype of the operands, and the function.
PAST_THE_END: dict[str, tuple[str, Any, Mod | None]] = {
    "portable": ("sm_80", jnp.bfloat16, None),
    "portable-function": ("sm_80", jnp.bfloat16, lambda s, b, h, q, k: s * (2 + jnp.tanh(ROWS[b, q]))),
    "float32-on-hopper": ("sm_90a", jnp.float32, lambda s, b, h, q, k: s * (2 + jnp.tanh(ROWS[b, q]))),
}


@pytest.mark.parametrize("name", PAST_THE_END)
def test_rows_past_the_end_of_a_full_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the bias of the last row, whose exponential is infinite, and a factor of 0 where the bias is -inf."""
    arch, dtype, mod = PAST_THE_END[name]
    sizes = (70, 130, 1, 1, 64)
    bias = jnp.full((1, 1, *sizes[:2]), 200.0).at[:, :, -1, 3:].set(-jnp.inf)
    mask = jnp.ones(sizes[:2], bool).at[3, 5].set(False)
    check(arch, monkeypatch, mod, sizes, bias=bias, mask=mask, dtype=dtype)


@pytest.mark.parametrize("arch", ARCHS)
def test_factors_of_queries_keep_their_meaning(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN or an infinite factor reaches its own row alone. Rows have tiles without an edge."""
    emulated_ops.emulate(monkeypatch, arch)
    random = np.random.default_rng(2)
    shapes = ((1, 150, N, 64), (1, 300, K, 64), (1, 300, K, 64))
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    spec, operands = canonicalize(*arrays, score_mod=lambda s, b, h, q, k: s * STRANGE[h, q] - SLOPES[h] * (k % 5))
    found, lse = cuda.forward(spec, operands)
    (wanted, wanted_lse), _ = reference(spec, operands, [*QKV], jnp.zeros_like(found))
    rows = jnp.isnan(wanted).all((0, 3)).T
    assert rows[0, 5] and rows[1, 70] and rows[0, 71] and rows.sum() == 3
    np.testing.assert_allclose(np.asarray(lse), np.asarray(wanted_lse), atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(found.astype(jnp.float32)), np.asarray(wanted), atol=2**-7 * 4)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_function_hides_pairs(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the second head see nothing, others see no key of the last tiles, which the kernels visit first."""
    bounds = jnp.array([30, -1])
    check(arch, monkeypatch, lambda s, b, h, q, k: jnp.where(k <= q % 8 + bounds[h], s, -jnp.inf), (T, 200, N, K, 64))


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 128), pytest.param("sm_90a", 64, marks=pytest.mark.slow)])
def test_a_steep_function(arch: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in dS have its slope as a factor, and would be infinite in float16."""
    check(arch, monkeypatch, lambda s, *at: 2.0**20 * s, (T, S, N, K, head_dim), scale=2.0**-20 / head_dim**0.5)


@pytest.mark.parametrize(("factor", "count"), [(2.0, 1), (1.0, 0)])
def test_gradients_of_a_steep_function_in_float16_take_the_xla_path(factor: float, count: int) -> None:
    x = jnp.zeros((B, T, N, 64), jnp.float16)
    spec, operands = canonicalize(x, x, x, score_mod=lambda s, b, h, q, k: factor * s - SLOPES[h])
    problem = Problem.of(spec, operands)
    assert not gradient_reasons(problem, ())
    found = gradient_reasons(problem, ("query",))
    assert len(found) == count and all("infinite in float16" in x.text for x in found)


# By name: a function, and an array that it captures. Slopes have both signs, so that some heads attend far away.
CAPTURED: dict[str, tuple[Callable[[Any], Mod], Any]] = {
    "slopes": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), SLOPES[:N] * jnp.array([1.0, -10.0])),
    "slopes-alone": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), SLOPES[:N] * jnp.array([1.0, -10.0])),
    "temperature-alone": (lambda x: lambda s, b, h, q, k: s * x[h], jnp.array([1.3, -0.6])),
    "scalar": (lambda x: lambda s, b, h, q, k: x * jnp.tanh(s / x), jnp.float32(1.5)),
    "keys": (lambda x: lambda s, b, h, q, k: s - SLOPES[h] * (q - k) + x[h, k], COLUMNS[:N, :S]),
    "table": (lambda x: lambda s, b, h, q, k: s + x[k - q + T, h], TABLE[: T + 128, :N]),
    "table-times-score": (lambda x: lambda s, b, h, q, k: s * (1 + 0.5 * jnp.tanh(x[k - q + T])), TABLE[: T + 200, 0]),
    "temperature-of-tokens": (lambda x: lambda s, b, h, q, k: s * x[b, q], 1 + 0.3 * ROWS[:, :T]),
    "factor": (
        lambda x: lambda s, b, h, q, k: s * x[h, q] - SLOPES[h] * (q - k) + 0.5 * jnp.tanh(s),
        FACTORS[:N, :T],
    ),
}
CALLS = [("slopes", "sm_90a", 64), ("slopes", "sm_80", 64), ("scalar", "sm_90a", 128)]
CALLS += [(name, arch, 128) for name in ("slopes-alone", "temperature-alone") for arch in ("sm_90a", "sm_80")]
CALLS += [("temperature-of-tokens", "sm_90a", 192), ("temperature-of-tokens", "sm_80", 64)]
CALLS += [(name, arch, 64) for name in ("table", "table-times-score", "keys", "factor") for arch in ("sm_90a", "sm_80")]
# These run at every commit.
ALWAYS = [("slopes", "sm_80", 64), ("table", "sm_80", 64), ("factor", "sm_80", 64)]


@pytest.mark.parametrize(
    ("name", "arch", "head_dim"),
    [pytest.param(*x, marks=[] if x in ALWAYS else pytest.mark.slow) for x in CALLS],
)
def test_gradients_of_captured_arrays(name: str, arch: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 % of float32."""
    emulated_ops.emulate(monkeypatch, arch)
    make, captured = CAPTURED[name]
    random = np.random.default_rng(0)
    keys, options = S, {"segment_ids": (IDS[:, :T], IDS[:, :S])}
    if name == "table":  # one batch entry has a full tile in its lists, with rows past the last query
        keys, options = 128, {"segment_ids": (IDS[:, :T], IDS[:, :128].at[0].set(0))}
    if name.endswith("-alone"):  # no ids, and far keys
        keys, options = 400, {}
    if name.startswith("table-"):  # without lists, and with two diagonals of tiles
        keys, options = 200, {"query_seq_lengths": jnp.array([T, 23]), "local_window_size": (None, 90)}
    shapes = ((B, T, N, head_dim), (B, keys, K, head_dim), (B, keys, K, head_dim), (B, T, N, head_dim))
    *arrays, dout = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    spec, operands = canonicalize(*arrays, score_mod=make(captured), **options)
    *_, plane = (x for x in spec.present if x.endswith("_numbers"))
    out, lse = cuda.forward(spec, operands)
    found = getattr(cuda.backward(spec, operands, out, lse, dout, None, [*QKV, plane]), plane)
    _, (wanted,) = reference(spec, operands, [plane], dout)
    assert found.shape == wanted.shape and found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=0.01 * float(jnp.abs(wanted).max()))
