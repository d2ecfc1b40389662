# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias as kernels read it: kinds, planes and layouts, without a kernel."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import combinations

from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.ffi import call
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.scalars import BIAS_SCALARS
from jax_fastattn.kernels.bias_shapes import TILE_KEYS, BiasPlanes, bias_kind, bias_pitch
from jax_fastattn.kernels.choose import forward_spec, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda.bias import MIN_SCALE, bias_operands, with_usable_scale
from jax_fastattn.ops.cuda.launch import launch_scalars
from jax_fastattn.spec import AttentionSpec, Operands, Problem

B, T, S, N, K, H = 2, 5, 11, 6, 3, 64
SHAPES = list(itertools.product((1, B), (1, K, N), (1, T), (1, S)))


def problem_of(shape: tuple[int, ...], dtype: str = "bfloat16", **options: object) -> Problem:
    query, key = jnp.zeros((B, T, N, H), jnp.bfloat16), jnp.zeros((B, S, K, H), jnp.bfloat16)
    operands = Operands(query, key, key, bias=jnp.zeros(shape, dtype))
    return Problem.of(AttentionSpec(0.5, present=operands.present(), **options), operands)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_find_the_number_of_each_pair(shape: tuple[int, ...]) -> None:
    """By the scalars of a launch and the planes of a device, in the operand that the kind has."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from jax_fastattn.kernels.features.bias.planes import Planes
    from jax_fastattn.kernels.features.places import Head

    bias = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    problem = problem_of(shape, "float32")
    scalars = launch_scalars(problem, 132)
    pitch = scalars.bias_pitch
    wanted = np.broadcast_to(np.repeat(bias, N // shape[1] if shape[1] > 1 else 1, axis=1), (B, N, T, S))
    # Of Hopper's backward pass, which takes keys in float32, and its forward pass for the other kinds.
    op = "backward" if bias_kind(shape) == "keys" else "forward"
    ((name, array),) = bias_operands(kernel_spec(problem, op, "sm_90a"), bias, S, 0.5).items()
    array = np.asarray(array.astype(jnp.float32))
    for b, n, t, s in np.ndindex(B, N, T, S):
        plane = Planes(scalars, N // K).of_head(Head(b, n))
        assert 0 <= plane < scalars.bias_planes
        if name == "bias":
            found = array.reshape(2, scalars.bias_planes, T, pitch)[:, plane, t, s].sum()
        else:
            row = array.reshape(scalars.bias_planes, pitch)[plane]
            found = np.log(2.0) * row[s if name == "key_bias" else min(t, pitch - 1)]
        np.testing.assert_allclose(found, wanted[b, n, t, s], rtol=2.0**-17)


def test_a_shape_decides_the_kind_and_the_planes() -> None:
    kinds = {(shape[2] > 1, shape[3] > 1): bias_kind(shape) for shape in SHAPES}
    assert kinds == {(False, False): "rows", (True, False): "rows", (False, True): "keys", (True, True): "matrix"}
    planes = {(shape[0] > 1, shape[1]): BiasPlanes.of(shape, N) for shape in SHAPES}
    assert planes[False, 1] == BiasPlanes(0, 0, 0, 1) and planes[True, 1] == BiasPlanes(1, 0, 0, B)
    assert planes[False, N] == BiasPlanes(0, 1, 0, N) and planes[True, K] == BiasPlanes(K, 0, 1, B * K)


@pytest.mark.parametrize("length", [2, 127, 128, 129, 250])
@pytest.mark.parametrize("tile", [48, 64, 80, 96, 128])
def test_tiles_of_a_bias_of_keys_end_inside_of_its_planes(length: int, tile: int) -> None:
    assert tile <= TILE_KEYS and -(-length // tile) * tile <= bias_pitch((1, 1, 1, length), length)


def test_a_launch_without_a_bias_has_no_scalar_of_one() -> None:
    query = jnp.zeros((B, T, N, H), jnp.bfloat16)
    problem = Problem.of(AttentionSpec(0.5), Operands(query, query, query))
    assert {getattr(launch_scalars(problem, 132), name) for name in BIAS_SCALARS} == {None}


def keys_of(bias: np.ndarray, scale: float, **features: object) -> np.ndarray:
    """Returns the parts of a bias of keys, float32 `[keys, 8]`, compiled as in a program of a GPU."""
    spec = KernelSpec("forward", "sm_90a", "bfloat16", H, H, family="sm90", bias="keys", **features)  # pyright: ignore[reportArgumentType]
    made = jax.jit(lambda x: bias_operands(spec, x, x.shape[3], scale))(jnp.asarray(bias)[None, None, None])
    return np.asarray(made["key_bias_parts"].astype(jnp.float32))[0]


def test_parts_of_a_bias_of_keys_are_exact() -> None:
    bias = np.random.default_rng(0).standard_normal(200).astype(np.float32) * 100
    found = keys_of(bias, 0.25)
    np.testing.assert_array_equal(found[:200].sum(1), bias / 0.25)
    assert not found[200:].any() and not found[:, 3:].any()


def test_numbers_out_of_range_change_no_row_that_sees_another_one() -> None:
    """They count as the end of the range. Ends of it alone have equal weights."""
    random, scale = np.random.default_rng(0), 0.125
    limit = 2.0**127 * scale
    bias = (random.choice([-1.0, 1.0], 300) * 10.0 ** random.uniform(-2, 38.3, 300)).astype(np.float32)
    bias = np.concatenate([bias[bias < limit], np.linspace(-1, 1, 40, dtype=np.float32)])
    found = keys_of(bias, scale)[: bias.size].sum(1, dtype=np.float64) * scale
    assert (bias < -limit).sum() > 3 and (found[bias < -limit] == -limit).all()
    for most in (limit, 1e30, 1.0):
        seen = bias <= most
        weights, wanted = (np.exp(x - x.max()) for x in (found[seen], bias[seen].astype(np.float64)))
        np.testing.assert_array_equal(weights, wanted)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("cap", [False, True])
def test_a_bias_of_keys_keeps_its_sign(scale: float, cap: bool) -> None:
    """The forward kernel negates Q where a logit is a factor times a product; with a cap it multiplies by the scale."""
    bias = np.array([1.0, -np.inf, -3.4e38, -1e38, 1e38, np.inf], np.float32)
    sign = -1.0 if cap and scale < 0 else 1.0
    found = sign * keys_of(bias, scale, features=(codes.SOFT_CAP,) if cap else ())[:6].sum(1)
    np.testing.assert_allclose(found[0], 1 / 0.3, rtol=2.0**-20)
    assert np.isneginf(found[1]) and np.isneginf(found[2]) and np.isposinf(found[5])
    assert np.isfinite(found[3:5]).all() and found[3] < -1e38 and found[4] > 1e38


def test_what_hides_counts_as_infinite() -> None:
    """At or below -2.36e38, in each float32 layout; two terms of a matrix are no NaN there."""
    values = [-2.0, -np.inf, -3.4e38, -2.36e38, -2e38, 7.0]
    bias = jnp.asarray(np.tile(np.array(values, np.float32), (3, 1)))[None, None]
    spec = kernel_spec(problem_of((1, 1, T, S), "float32"), "forward", "sm_90a")
    terms = np.asarray(bias_operands(spec, bias, 6, 1.0)["bias"].astype(jnp.float32))
    np.testing.assert_array_equal(np.isneginf(terms.sum(0)[0, :, :6]), [[0, 1, 1, 1, 0, 0]] * 3)
    assert not np.isnan(terms).any()
    rows = kernel_spec(problem_of((1, 1, T, 1)), "forward", "sm_90a")
    found = bias_operands(rows, bias[:, :, 0, :, None], 1, 1.0)["row_bias"]
    np.testing.assert_array_equal(np.isneginf(found)[0], [0, 1, 1, 1, 0, 0])


def test_a_matrix_of_16_bits_is_passed_as_it_is() -> None:
    bias = jnp.asarray(np.random.default_rng(0).standard_normal((1, N, T, S)), jnp.float16)
    spec = kernel_spec(problem_of(bias.shape, "float16"), "forward", "sm_90a")
    found = bias_operands(spec, bias, S, 1.0)["bias"]
    assert found.shape == (1, N, T, 16) and found.dtype == jnp.float16
    np.testing.assert_array_equal(found[0, :, :, :S], bias[0])


def test_a_small_scale_is_part_of_the_query() -> None:
    """A bias of keys is divided by the scale."""
    query = jnp.full((B, T, N, H), 3.0, jnp.bfloat16)
    for shape, folded in (((1, 1, 1, S), True), ((1, 1, T, S), False), ((1, 1, T, 1), False)):
        operands = Operands(query, query, query, bias=jnp.zeros(shape))
        spec, found = with_usable_scale(AttentionSpec(MIN_SCALE / 2), operands)
        assert (spec.scale == 1.0) == folded
        assert float(found.query[0, 0, 0, 0]) == (3 * MIN_SCALE / 2 if folded else 3.0)
    spec, found = with_usable_scale(AttentionSpec(0.0), Operands(query, query, query, bias=jnp.zeros((1, 1, 1, S))))
    assert spec.scale == 1.0 and not found.query.any()


KEYS = {
    "matrix": {"bias": "nts", "bias_dtype": "bfloat16", "batch": 40},
    "matrix of two terms": {"bias": "bts", "head_dim": 192, "is_causal": True},
    "matrix and mask": {"bias": "ts", "bias_dtype": "float16", "mask": "bts", "dlse": True},
    "constant": {"bias": "bnts", "constant_bias": True},
    "keys": {"bias": "bs", "logits_soft_cap": 2.0, "deterministic": True},
    "rows": {"bias": "nt", "sinks": "n", "dlse": True, "mask": "bs"},
    "capped rows": {"bias": "t", "sinks": "n", "logits_soft_cap": 2.0},
    "constant capped rows": {"bias": "t", "logits_soft_cap": 2.0, "constant_bias": True},
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", KEYS)
def test_keys_of_cases_are_those_of_calls(
    name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `kernel_specs` says is compiled is what a call and its gradients ask for."""
    sizes = {"batch": 2, "query_length": 65, "key_length": 77, "num_kv_heads": 2, "group": 2, "head_dim": 64}
    case = Case("bfloat16", **{**sizes, **KEYS[name]})
    calls.lower_for_cuda(monkeypatch, tmp_path, arch)
    asked: list[KernelSpec] = []
    compile_kernel = call._compile
    monkeypatch.setattr(call, "_compile", lambda spec: asked.append(spec) or compile_kernel(spec))
    spec, operands, *cotangents = combinations.inputs(case)
    evaluate = functools.partial(combinations.evaluate, case, spec)
    jax.jit(evaluate).trace(operands, *cotangents).lower(lowering_platforms=("cuda",))
    assert set(asked) == set(kernel_specs([case], arch))


def test_few_queries_with_a_bias_take_the_forward_kernel() -> None:
    """The decoding kernel has none."""
    query, key = jnp.zeros((B, 1, N, H), jnp.bfloat16), jnp.zeros((B, 1024, K, H), jnp.bfloat16)
    for bias, op in ((None, "decode"), (jnp.zeros((1, 1, 1, 1024)), "forward")):
        operands = Operands(query, key, key, bias=bias)
        problem = Problem.of(AttentionSpec(0.5, present=operands.present()), operands)
        assert forward_spec(problem, "sm_90a").op == op
