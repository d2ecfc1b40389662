# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls with a bias, from canonical operands to output and log-sum-exp, with emulated custom calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax.numpy as jnp
import numpy as np
from testing.poison import poison

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.bias_shapes import bias_kind
from jax_fastattn.kernels.choose import configured, forward_spec
from jax_fastattn.kernels.sm90.forward import schedule
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec, Operands, Problem

pytestmark = pytest.mark.slow

B, T, S, N, K = 2, 141, 201, 4, 2

# Shapes of a bias, and other arguments. "holes" is the share of -inf in it, and "spelled" what is hidden by `hole`.
CASES: dict[str, dict[str, Any]] = {
    "1nts": {"bias": (1, N, T, S)},
    "b1ts-d128": {"bias": (B, 1, T, S), "head_dim": 128},
    "bkts": {"bias": (B, K, T, S)},
    "11ts-d192v128": {"bias": (1, 1, T, S), "head_dim": 192, "v_head_dim": 128},
    "bnts-d256": {"bias": (B, N, T, S), "head_dim": 256},
    "1nts-d40v72-f16": {"bias": (1, N, T, S), "head_dim": 40, "v_head_dim": 72, "dtype": "float16"},
    "f32-d96": {"bias": (1, N, T, S), "bias_dtype": "float32", "head_dim": 96, "size": 20.0},
    "f32-d128": {"bias": (1, N, T, S), "bias_dtype": "float32", "head_dim": 128, "size": 20.0},
    "causal-sinks": {"bias": (1, N, T, S), "is_causal": True, "sinks": True},
    "window-offset": {"bias": (1, N, T, S), "local_window_size": (50, 30), "query_offset": (40, -30)},
    "lengths-cap": {
        "bias": (B, 1, T, S),
        "query_seq_lengths": (T, 70),
        "key_value_seq_lengths": (100, S),
        "logits_soft_cap": 2.0,
    },
    "mask": {"bias": (1, N, T, S), "mask": (B, 1, T, S)},
    "mask-holes-d128": {"bias": (1, N, T, S), "mask": (1, N, T, S), "holes": 0.9, "head_dim": 128},
    "ids": {"bias": (1, N, T, S), "ids": 3},
    "holes": {"bias": (1, N, T, S), "holes": 0.98},
    "spelled-causal": {"bias": (1, N, T, S), "spelled": "causal"},
    "spelled-causal-finite": {"bias": (1, N, T, S), "spelled": "causal", "hole": -1e9},
    "spelled-rows": {"bias": (1, N, T, S), "spelled": "rows", "hole": -3.4e38, "bias_dtype": "float32"},
    "b11s": {"bias": (B, 1, 1, S)},
    "1n1s-f32-d128": {"bias": (1, N, 1, S), "bias_dtype": "float32", "head_dim": 128, "size": 20.0},
    "bk1s-holes-d192": {"bias": (B, K, 1, S), "holes": 0.95, "head_dim": 192},
    "b11s-causal-cap": {"bias": (B, 1, 1, S), "is_causal": True, "logits_soft_cap": 2.0},
    "b11s-mask-negative": {"bias": (B, 1, 1, S), "mask": (B, 1, T, S), "scale": -0.1, "dtype": "float16"},
    "b11s-no-scale": {"bias": (B, 1, 1, S), "scale": 0.0},
    "b1t1-holes": {"bias": (B, 1, T, 1), "holes": 0.3},
    "1nt1-sinks-d128": {"bias": (1, N, T, 1), "sinks": True, "head_dim": 128},
    "bnt1-cap": {"bias": (B, N, T, 1), "logits_soft_cap": 2.0},
    "1n11-sinks-causal": {"bias": (1, N, 1, 1), "sinks": True, "is_causal": True},
}


def draw(case: dict[str, Any], sizes: tuple[int, int, int, int, int] = (B, T, S, N, K)) -> tuple[Any, Operands]:
    """Returns specification and canonical operands, in which a bias may have a row for each key/value head."""
    (b, t, s, n, k), random, case = sizes, np.random.default_rng(0), dict(case)
    head_dim, dtype = case.pop("head_dim", 64), case.pop("dtype", "bfloat16")
    shapes = ((b, t, n, head_dim), (b, s, k, head_dim), (b, s, k, case.pop("v_head_dim", head_dim)))
    query, key, value = (jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)
    bias = _bias(random, case, dtype)
    if shape := case.pop("mask", None):
        case["mask"] = jnp.asarray(random.random(shape) < 0.4)
    if documents := case.pop("ids", None):
        case["segment_ids"] = tuple(jnp.asarray(np.sort(random.integers(0, documents, (b, x)), 1)) for x in (t, s))
    if case.pop("sinks", False):
        case["sinks"] = jnp.asarray(random.standard_normal(n), jnp.float32)
    integers = ("query_offset", "query_seq_lengths", "key_value_seq_lengths")
    case = {name: jnp.asarray(x, jnp.int32) if name in integers else x for name, x in case.items()}
    spec, operands = canonicalize(query, key, value, **case)
    operands = operands._replace(bias=bias)
    return replace(spec, present=operands.present()), operands


def _bias(random: np.random.Generator, case: dict[str, Any], dtype: str) -> jnp.ndarray:
    """Draws the bias of a case, whose arguments it takes."""
    shape, hole = case.pop("bias"), case.pop("hole", -np.inf)
    drawn = case.pop("size", 1.0) * random.standard_normal(shape)
    drawn[random.random(shape) < case.pop("holes", 0.0)] = -np.inf
    spelled = case.pop("spelled", "")
    if spelled == "causal":
        drawn[..., np.arange(shape[3]) > np.arange(shape[2])[:, None]] = hole
    if spelled == "rows":
        drawn[..., 20:90, :] = hole
    return jnp.asarray(drawn, jnp.float32).astype(case.pop("bias_dtype", dtype))


def poisoned(spec: AttentionSpec, operands: Operands) -> Operands:
    """Returns operands with NaN in entries of a bias of pairs that no window lets through."""
    bias, (left, right) = operands.bias, spec.bounds
    assert bias is not None
    if bias_kind(bias.shape) != "matrix" or operands.query_offset is not None or (left, right) == (None, None):
        return operands
    distance = np.arange(bias.shape[3]) - np.arange(bias.shape[2])[:, None]
    seen = (distance >= -(S if left is None else left)) & (distance <= (S if right is None else right))
    return operands._replace(bias=jnp.where(seen, bias, jnp.nan))


def compare(spec: AttentionSpec, operands: Operands, **options: Any) -> None:
    """Compares a call with the float32 reference, in which what is at most -2.36e38 is -inf."""
    out, lse = cuda.forward(spec, poisoned(spec, operands), **options)
    bias = operands.bias
    assert bias is not None
    bias = jnp.where(bias.astype(jnp.float32) <= -2.36e38, -jnp.inf, bias.astype(jnp.float32))
    if 1 < bias.shape[1] < N:
        bias = jnp.repeat(bias, N // bias.shape[1], axis=1)
    single = {name: getattr(operands, name).astype(jnp.float32) for name in ("query", "key", "value")}
    wanted = [np.asarray(x) for x in attention_reference(spec, operands._replace(**single, bias=bias))]
    tolerance = 2**-7 if operands.query.dtype == jnp.bfloat16 else 2**-10
    found = np.asarray(out.astype(jnp.float32))
    np.testing.assert_allclose(found, wanted[0], atol=tolerance * np.nanmax(np.abs(wanted[0])))
    np.testing.assert_allclose(np.asarray(lse), wanted[1], atol=1e-4 if bias.dtype == jnp.bfloat16 else 1e-3, rtol=1e-4)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_ops.emulate(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_outputs_match_the_reference(name: str) -> None:
    compare(*draw(CASES[name]))


@pytest.mark.parametrize("name", ["causal-sinks", "window-offset", "mask", "spelled-causal"])
def test_forward_as_of_long_calls(name: str) -> None:
    """Emulated lengths are short, and at head dims up to 64 such calls have a variant of their own."""
    spec, operands = draw(CASES[name])
    kernel = configured(forward_spec(Problem.of(spec, operands), "sm_90a"), short=False)
    compare(spec, operands, kernel=kernel)


PORTABLE = ("bkts", "f32-d128", "mask", "spelled-causal", "bk1s-holes-d192", "b1t1-holes", "bnt1-cap")


@pytest.mark.parametrize(
    ("arch", "name"), [*(("sm_80", name) for name in PORTABLE), ("sm_86", "f32-d128"), ("sm_86", "bk1s-holes-d192")]
)
def test_portable_forward(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_ops.emulate(monkeypatch, arch)
    compare(*draw(CASES[name]))


# By name: another case, and what is put where into its bias. Python 3.11 has no hash of a slice.
SPOILED: dict[str, tuple[dict[str, Any], list[tuple[Any, float]]]] = {
    "one-pair": ({"bias": (1, N, T, S)}, [(np.s_[0, 0, 16:32], -np.inf), ((0, 0, 20, 70), np.nan)]),
    "one-key": ({"bias": (B, 1, 1, S)}, [(np.s_[..., 64:], -np.inf), ((0, 0, 0, 70), np.nan)]),
    "rows": (
        {"bias": (1, N, T, 1), "key_value_seq_lengths": (0, S)},
        [((0, 0, 20), np.nan), ((0, 0, 30), np.inf), ((0, 0, 40), -np.inf)],
    ),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", SPOILED)
def test_nan_of_a_visible_pair_reaches_its_row_alone(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima of numbers alone lost it where all other logits were -inf. A row that sees no key reads no number.

    A full tile of the portable kernel whose logits are -inf made NaN of rows that had seen no key before.
    """
    emulated_ops.emulate(monkeypatch, arch)
    case, numbers = SPOILED[name]
    spec, operands = draw(case)
    bias = np.array(operands.bias, np.float32)
    for index, number in numbers:
        bias[index] = number
    compare(spec, operands._replace(bias=jnp.asarray(bias, "bfloat16")))


def test_nan_in_the_bias_of_a_row_that_sees_nothing_reaches_no_result() -> None:
    spec, operands = draw({"bias": (B, 1, T, 1), "key_value_seq_lengths": (0, S)})
    hidden, *_ = poison(spec, operands, jnp.zeros(operands.query.shape, jnp.bfloat16))
    assert hidden.bias is not None and jnp.isnan(hidden.bias[0]).all()
    for found, wanted in zip(cuda.forward(spec, hidden), cuda.forward(spec, operands), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_terms_of_a_float32_bias_with_several_planes() -> None:
    """The low term of a plane is as many planes further as there are. TMA loads both."""
    compare(*draw({"bias": (1, N, 20, 40), "bias_dtype": "float32", "size": 20.0}, (1, 20, 40, N, K)))


@pytest.mark.parametrize("shape", [(1, N), (1, K), (3, 1)], ids=str)
def test_heads_that_share_a_large_bias_come_together(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile is computed once in any order; here three heads begin a position together."""
    spec, operands = draw({"bias": (*shape, T, S)}, (3, T, S, N, K))
    monkeypatch.setattr(schedule, "_RESIDENT_BIAS", 1 << 12)
    monkeypatch.setattr(schedule, "_RESIDENT_KEYS", 3 * S * 256)
    kernel = forward_spec(Problem.of(spec, operands), "sm_90a")
    for config in (ForwardConfig(2, 64, 4), ForwardConfig(1, 64, 4, persistent=True)):
        compare(spec, operands, kernel=replace(kernel, config=replace(config, shares_bias=True)))


@pytest.mark.parametrize(
    ("shape", "number"), [((B, 1, 1, S), -3e9), ((B, 1, 1, S), -2e38), ((B, 1, T, S), -1e10)], ids=str
)
def test_rows_of_large_negative_numbers_average_values(shape: tuple[int, ...], number: float) -> None:
    """Float32 cannot tell their logits apart. A full tile would weigh such a row by 2^-73 or 2^440."""
    spec, operands = draw({"bias": shape, "bias_dtype": "float32"})
    out, lse = cuda.forward(spec, operands._replace(bias=jnp.full(shape, number, jnp.float32)))
    assert jnp.isfinite(lse).all()
    mean = operands.value.astype(jnp.float32).mean(1, keepdims=True).repeat(N // K, 2)
    np.testing.assert_allclose(out.astype(jnp.float32), np.broadcast_to(mean, out.shape), atol=0.01)
