# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`attention` in the place of `jax.nn.dot_product_attention`: same signature, same results, same gradients.

Two differences are deliberate, and tested as such: a query that sees no key gives 0 where jax.nn gives the mean of all
values, and the log-sum-exp is float32 and differentiable where jax.nn rounds it to the dtype of the operands and stops
its gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention
from jax_fastattn.testing.cases import Case

JAX_NN = inspect.signature(jax.nn.dot_product_attention).parameters
HAS_RESIDUAL = "return_residual" in JAX_NN
theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")

SMALL = Case(query_length=11, key_length=13, num_kv_heads=3, head_dim=8)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gqa-2": ({"group": 2}, {}),
    "gqa-5": ({"group": 5}, {}),
    "mqa": ({"group": 4, "num_kv_heads": 1}, {}),
    "scale": ({}, {"scale": 0.7}),
    "causal": ({}, {"is_causal": True}),
    "causal-more-queries": ({"query_length": 17}, {"is_causal": True}),
    # With a mask that hides nothing: without any mask, jax.nn of jax 0.8 ignores the window.
    "window": ({"query_length": 13, "mask": ""}, {"local_window_size": (3, 2)}),
    "window-int": ({"query_length": 13, "mask": ""}, {"local_window_size": 2}),
    "window-causal": ({}, {"local_window_size": (3, 2), "is_causal": True}),
    "key-lengths": ({"key_value_seq_lengths": (5, 13)}, {}),
    "both-lengths": ({"query_seq_lengths": (6, 3), "key_value_seq_lengths": (4, 9)}, {}),
    "lengths-causal": ({"query_seq_lengths": (6, 3), "key_value_seq_lengths": (4, 9)}, {"is_causal": True}),
    "bias": ({"bias": "bnts"}, {}),
    "bias-broadcast": ({"bias": "ns", "group": 2}, {}),
    "bias-causal": ({"bias": "nts"}, {"is_causal": True}),
    "mask": ({"mask": "bnts"}, {}),
    "mask-broadcast": ({"mask": "s", "group": 2}, {}),
    "mask-lengths": ({"mask": "nts", "key_value_seq_lengths": (12, 9)}, {}),
    "bfloat16": ({"dtype": "bfloat16", "bias": "bnts"}, {"is_causal": True}),
    "bfloat16-lengths": ({"dtype": "bfloat16", "query_seq_lengths": (6, 3)}, {}),
}


@pytest.fixture(autouse=True)
def _as_jax_nn_likes_it() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make_arrays(case: Case) -> calls.Arrays:
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    if "mask" in arrays:  # every query sees some key
        arrays["mask"] = arrays["mask"].at[..., 0].set(True)
    if "bias" in arrays:
        arrays["bias"] = arrays["bias"].astype(case.dtype)
    return arrays


def everything(function: Any, arrays: calls.Arrays, options: dict[str, Any], dout: jax.Array) -> Any:
    """Output, log-sum-exp (where this jax.nn has it) and gradients from a cotangent of the output."""
    wanted = {name: x for name, x in arrays.items() if name in ("query", "key", "value", "bias")}

    @calls.quick_jit
    def run(arrays: calls.Arrays, wanted: calls.Arrays) -> Any:
        def results(wanted: calls.Arrays) -> Any:
            if not HAS_RESIDUAL:
                return function(**arrays | wanted, **options), jnp.zeros(dout.shape[:3])
            return function(**arrays | wanted, **options, return_residual=True)

        out, vjp, lse = jax.vjp(results, wanted, has_aux=True)
        return {"out": out, "lse": lse.astype(jnp.float32), "gradients": vjp(dout)[0]}

    return run(arrays, wanted)


@pytest.mark.parametrize("name", CASES)
def test_same_results_and_gradients(name: str) -> None:
    change, options = CASES[name]
    case = dataclasses.replace(SMALL, **change)
    arrays = make_arrays(case)
    dout = case.cotangents(jax.random.key(1))[0]
    found, expected = (everything(f, arrays, options, dout) for f in (attention, theirs))
    if case.query_seq_lengths is not None and HAS_RESIDUAL:  # log-sum-exps of padding rows: ours are -inf
        inside = jnp.arange(case.query_length)[None, :, None] < arrays["query_seq_lengths"][:, None, None]
        assert np.all(np.isneginf(found["lse"]) | inside)
        found["lse"], expected["lse"] = (jnp.where(inside, x["lse"], 0.0) for x in (found, expected))
    calls.assert_same(found, expected, tolerance=2e-5 if case.dtype == "float32" else 2e-2)


def test_every_parameter_and_default_is_there() -> None:
    ours = inspect.signature(attention).parameters
    assert {name: (p.kind, p.default) for name, p in JAX_NN.items()} == {
        name: (ours[name].kind, ours[name].default) for name in JAX_NN
    }
    assert list(ours)[: len(JAX_NN)] == list(JAX_NN)


def test_unbatched() -> None:
    query, key, value = (x[0] for x in make_arrays(SMALL).values())
    bias = jax.random.normal(jax.random.key(3), (3, 11, 13))
    found, expected = (f(query, key, value, bias) for f in (attention, theirs))
    calls.assert_same(found, expected)


@pytest.mark.parametrize("in_axes", [(0, 0, 0, None, None), (0, 0, 0, 0, None), (0, None, None, None, 0)], ids=str)
def test_vmap(in_axes: tuple[Any, ...]) -> None:
    case = dataclasses.replace(SMALL, bias="bnts", mask="bnts", batch=5, group=2)
    arrays = [x if axis == 0 else x[0] for x, axis in zip(make_arrays(case).values(), in_axes, strict=True)]

    def both(function: Any) -> Any:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = jax.vmap(function, in_axes=in_axes)(*arrays)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)

    calls.assert_same(both(attention), both(theirs))


def test_window_without_a_mask_changes_the_result() -> None:
    query, key, value = make_arrays(SMALL).values()
    wide, narrow = (attention(query, key, value, mask=None, local_window_size=(n, n)) for n in (8, 1))
    assert not np.allclose(wide, narrow)


def test_float64_mask_under_debug_infs() -> None:
    """No infinity is in a result where every query sees a key."""
    with jax.enable_x64(True), jax.debug_infs(True):
        query, key = jnp.zeros((5, 6, 11)), jnp.zeros((7, 3, 11))
        out = attention(query, key, key, mask=jnp.arange(7) <= 3)
    assert out.dtype == jnp.float64


def test_difference_a_query_that_sees_no_key() -> None:
    query, key, value = make_arrays(SMALL).values()
    mask = jnp.ones((1, 1, 11, 13), bool).at[:, :, 4].set(False)
    ours, others = (f(query, key, value, mask=mask) for f in (attention, theirs))
    assert not np.any(ours[:, 4])
    np.testing.assert_allclose(others[:, 4], jnp.mean(value, axis=1), atol=1e-5)
    rest = jnp.array([row for row in range(11) if row != 4])
    calls.assert_same(ours[:, rest], others[:, rest])


@pytest.mark.skipif(not HAS_RESIDUAL, reason="this jax.nn has no return_residual")
def test_difference_the_log_sum_exp() -> None:
    query, key, value = (x.astype(jnp.bfloat16) for x in make_arrays(SMALL).values())

    def gradient(function: Any) -> jax.Array:
        return jax.grad(lambda query: function(query, key, value, return_residual=True)[1].astype(jnp.float32).sum())(
            query
        )

    assert attention(query, key, value, return_residual=True)[1].dtype == jnp.float32
    assert theirs(query, key, value, return_residual=True)[1].dtype == jnp.bfloat16
    assert np.any(gradient(attention))
    assert not np.any(gradient(theirs))
