# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`jax.linear_transpose` with respect to values, in which alone attention is linear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import test_sharding
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention, attention_varlen, ring_attention

KEYS = jax.random.split(jax.random.key(0), 4)
QUERY, DOUT = (jax.random.normal(key, (4, 6, 4, 8)) for key in KEYS[:2])
KEY, VALUE = (jax.random.normal(key, (4, 6, 2, 8)) for key in KEYS[2:])

NEW_JAX = pytest.mark.skipif(
    test_sharding.JAX_VERSION < (0, 9), reason="jax 0.8 itself fails on custom_partitioning under AxisType.Explicit"
)


def ours(*x: jax.Array) -> jax.Array:
    return attention(*x, is_causal=True)


def plain(*x: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(*x, is_causal=True)


def transposed(f: Any, query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> jax.Array:
    """The transpose with respect to values, of which it takes the shape alone."""
    return jax.linear_transpose(lambda value: f(query, key, value), value)(dout)[0]


ARGUMENTS = QUERY, KEY, VALUE, DOUT
QUERIES, DOUTS = (jnp.stack([x, x[::-1], 2 * x]) for x in (QUERY, DOUT))

# Each takes an attention function of three arrays.
CASES: dict[str, Any] = {
    "eager": lambda f: transposed(f, *ARGUMENTS),
    "of-jit": lambda f: transposed(jax.jit(f), *ARGUMENTS),
    "of-checkpoint": lambda f: transposed(jax.checkpoint(f), *ARGUMENTS),
    "of-vmap-of-all": lambda f: transposed(
        jax.vmap(f), *(jnp.stack([x, x[::-1]]) for x in (QUERY, KEY, VALUE)), DOUTS[:2]
    ),
    # The mapped axis becomes query heads in the forward pass.
    "of-vmap-of-queries": lambda f: transposed(jax.vmap(f, in_axes=(0, None, None)), QUERIES, KEY, VALUE, DOUTS),
    "vmap-of-cotangents": lambda f: jax.vmap(lambda c: transposed(f, *ARGUMENTS[:3], c))(DOUTS),
    "vmap-of-queries": lambda f: jax.vmap(lambda q, c: transposed(f, q, KEY, VALUE, c))(QUERIES, DOUTS),
    "gradient-of-the-transpose": lambda f: jax.grad(
        lambda query, dout: jnp.sum(jnp.sin(transposed(f, query, KEY, VALUE, dout))), (0, 1)
    )(QUERY, DOUT),
    "twice": lambda f: jax.linear_transpose(lambda c: transposed(f, *ARGUMENTS[:3], c), DOUT)(VALUE)[0],
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_transposed_as_by_jax_nn(case: str) -> None:
    found = CASES[case](ours) if case == "eager" else calls.quick_jit(lambda: CASES[case](ours))()
    calls.assert_same(found, calls.quick_jit(lambda: CASES[case](plain))(), 5e-5)


@pytest.fixture(scope="module")
def expected() -> Any:
    return jax.device_get(calls.quick_jit(lambda: transposed(plain, *ARGUMENTS))())


def test_values_need_not_be_numbers(expected: Any) -> None:
    shape = jax.ShapeDtypeStruct(VALUE.shape, VALUE.dtype)
    found = transposed(ours, QUERY, KEY, shape, DOUT)
    calls.assert_same(found, expected)


def test_the_log_sum_exp_has_no_values(expected: Any) -> None:
    def both(value: jax.Array) -> Any:
        return attention(QUERY, KEY, value, is_causal=True, return_residual=True)

    found = jax.linear_transpose(both, VALUE)((DOUT, jnp.ones(DOUT.shape[:3])))[0]
    calls.assert_same(found, expected)


def test_packed_sequences() -> None:
    starts = jnp.array([0, 2, 6]), jnp.array([0, 1, 6])

    def packed(value: jax.Array) -> jax.Array:
        return attention_varlen(QUERY[0], KEY[0], value, *starts)

    found = jax.linear_transpose(packed, VALUE[0])(DOUT[0])
    calls.assert_same(found, jax.vjp(packed, VALUE[0])[1](DOUT[0]))


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=NEW_JAX)], ids=str)
def test_meshes(kind: AxisType, expected: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        split = jax.device_put(ARGUMENTS, NamedSharding(mesh, P("data", None, "model")))
        found = calls.quick_jit(lambda *x: transposed(ours, *x))(*split)
    assert found.sharding.spec[0] == "data"
    calls.assert_same(jax.device_get(found), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_rings_and_shard_map(check_vma: bool, expected: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "rows"), axis_types=(AxisType.Auto,) * 2)

    def ring(*x: jax.Array) -> jax.Array:
        return ring_attention(*x, axis_name="rows", is_causal=True)

    run = jax.shard_map(
        lambda *x: transposed(ring, *x),
        mesh=mesh,
        in_specs=P("data", "rows"),
        out_specs=P("data", "rows"),
        check_vma=check_vma,
    )
    calls.assert_same(jax.device_get(calls.quick_jit(run)(*ARGUMENTS)), expected)


@pytest.mark.parametrize("names", [("query",), ("key", "value")], ids=" and ".join)
def test_others_are_refused_by_name(names: tuple[str, ...]) -> None:
    given = dict(query=QUERY, key=KEY, value=VALUE)
    moved = {name: given.pop(name) for name in names}
    transpose = jax.linear_transpose(lambda moved: attention(**given, **moved), moved)
    with pytest.raises(NotImplementedError, match=f"linear in `value` alone.*{'.*'.join(names)}.*jax.vjp"):
        transpose(DOUT)


def test_nothing_asked_for_is_nothing_computed() -> None:
    """The cotangent of the output is a zero that JAX knows."""

    def log_sum_exp(value: jax.Array) -> jax.Array:
        return attention(QUERY, KEY, value, return_residual=True)[1] + 0 * value.sum()

    text = str(jax.make_jaxpr(jax.linear_transpose(log_sum_exp, VALUE))(jnp.ones(DOUT.shape[:3])))
    assert "gradient" not in text


def test_a_gpu_runs_the_kernels_of_both_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    text = calls.cuda_text(lambda *x: transposed(ours, *x), *(x.astype(jnp.bfloat16) for x in ARGUMENTS))
    assert calls.count_launches(text) == 2
