# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`attention` in the place of `jax.nn.dot_product_attention`: same signature, same results, same gradients.

docs/semantics.md lists the differences. They are tested as such, and `as_jax_nn` undoes them: through it, all that
JAX's own tests of its function check holds for ours, in sizes of our own.
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
from jax_fastattn.cases.case import Case

JAX_NN = inspect.signature(jax.nn.dot_product_attention).parameters
HAS_RESIDUAL = "return_residual" in JAX_NN

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
    "bfloat16-gqa-2": ({"dtype": "bfloat16", "group": 2}, {}),
    "bfloat16-gqa-4": ({"dtype": "bfloat16", "group": 4}, {}),
    "float16": ({"dtype": "float16", "bias": "bnts"}, {"is_causal": True}),
    "float16-gqa-2": ({"dtype": "float16", "group": 2}, {}),
    "float16-gqa-4": ({"dtype": "float16", "group": 4}, {}),
}


def theirs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    **options: Any,
) -> Any:
    """`jax.nn` on its XLA path; float16 in float32 and rounded, since a CPU lacks the dot algorithm that it wants."""
    if query.dtype != jnp.float16:
        return jax.nn.dot_product_attention(query, key, value, bias, mask, implementation="xla", **options)
    query, key, value, bias = jax.tree.map(lambda x: x.astype(jnp.float32), (query, key, value, bias))
    return jax.tree.map(lambda x: x.astype(jnp.float16), theirs(query, key, value, bias, mask, **options))


def as_jax_nn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    implementation: str | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """`attention` without its differences from `jax.nn`: rows that see nothing, the log-sum-exp, `implementation`."""
    assert implementation in (None, "xla", "cudnn")
    out, lse = attention(query, key, value, bias, mask, return_residual=True, **options)
    batch = (query.shape[:-3] or (1,))[0]
    lengths = options.get("query_seq_lengths")
    lengths = jnp.full(batch, query.shape[-3]) if lengths is None else lengths
    sees_none = jnp.isneginf(jax.lax.stop_gradient(lse))
    inside = (jnp.arange(query.shape[-3]) < lengths[:, None])[..., None].reshape((*query.shape[:-2], 1))
    mean = jnp.repeat(jnp.mean(value, axis=-3, keepdims=True), query.shape[-2] // key.shape[-2], axis=-2)
    out = jnp.where((sees_none & inside)[..., None], mean, out)
    # jax.nn has a large negative number in the place of a logit that is hidden.
    hidden = -0.7 * jnp.finfo(jnp.float32).max
    lse = jax.lax.stop_gradient(jnp.where(sees_none, hidden, lse)).astype(query.dtype)
    return (out, lse) if return_residual else out


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


@pytest.mark.numbers
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


def written_out(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    visible: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """What `jax.nn` says it computes, in float32: softmax over whole rows, with 0 in rows of padding."""
    group = query.shape[2] // key.shape[2]
    query, key, value = (x.astype(jnp.float32) for x in (query, jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    logits = logits if bias is None else logits + bias
    weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnd->btnd", weights, value) * rows


# Which keys a query sees in each of JAX's own tests of masks, by the names that those have.
MASKS = {
    name: tuple(name.split("-"))
    for name in (
        "none",
        "bias",
        "causal",
        "padding",
        "custom",
        "causal-padding",
        "custom-padding",
        "bias-causal",
        "causal-window",
        "window",
    )
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_of_jax_against_a_softmax_that_is_written_out(name: str, dtype: str) -> None:
    """Output and gradients of query, key, value and bias, of grouped heads; some rows see nothing (padding)."""
    modes, case = MASKS[name], dataclasses.replace(SMALL, dtype=dtype, query_length=16, key_length=16, group=2)
    query, key, value = make_arrays(case).values()
    i, j = jnp.arange(16)[:, None], jnp.arange(16)[None, :]
    visible, rows = jnp.ones((2, 1, 16, 16), bool), jnp.ones((2, 16, 1, 1))
    arrays: calls.Arrays = {"query": query, "key": key, "value": value}
    options: dict[str, Any] = {}
    if "bias" in modes:
        arrays["bias"] = jax.random.normal(jax.random.key(4), (1, 6, 16, 16), dtype)
    if "causal" in modes:
        options["is_causal"], visible = True, visible & (j <= i)
    if "custom" in modes:
        options["mask"], visible = (j <= i)[None, None], visible & (j <= i)
    if "window" in modes:
        options["local_window_size"] = (3, 2)
        options["mask"] = jnp.ones((1, 1, 16, 16), bool)  # without any mask, jax.nn of jax 0.8 ignores the window
        visible = visible & (j >= i - 3) & (j <= i + 2)
    if "padding" in modes:
        lengths = {"query_seq_lengths": jnp.array([8, 4]), "key_value_seq_lengths": jnp.array([0, 8])}
        options |= {name: x.astype(jnp.int32) for name, x in lengths.items()}
        rows = (jnp.arange(16) < lengths["query_seq_lengths"][:, None])[..., None, None]
        visible = visible & (jnp.arange(16) < lengths["key_value_seq_lengths"][:, None])[:, None, None, :]

    def expected(arrays: calls.Arrays) -> jax.Array:
        return written_out(*(arrays.get(name) for name in ("query", "key", "value", "bias")), visible, rows)

    def found(function: Any) -> Any:
        out, vjp = jax.vjp(lambda arrays: function(arrays).astype(jnp.float32), arrays)
        dout = jax.random.normal(jax.random.key(5), out.shape)
        return jax.tree.map(lambda x: x.astype(jnp.float32), (out, vjp(dout)[0]))

    tolerance = 2e-5 if dtype == "float32" else 2e-2
    results = [found(functools.partial(_call, f, options)) for f in (as_jax_nn, theirs)]
    for result in results:  # that theirs passes says that these are its checks
        calls.assert_same(result, found(expected), tolerance)


def _call(function: Any, options: dict[str, Any], arrays: calls.Arrays) -> jax.Array:
    return function(**arrays, **options)


@pytest.mark.numbers
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["", "vmap"])
def test_gradient_of_a_bias_with_one_array_as_query_key_and_value(batch: int, is_mapped: bool) -> None:
    """As in JAX's own test: a bias of all axes, and a mask of three that hides nothing."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (batch, 16, 3, 8), jnp.bfloat16)
    bias, mask = jax.random.normal(keys[1], (batch, 3, 16, 16), jnp.bfloat16), jnp.ones((1, 1, 16), bool)

    def gradients(function: Any) -> Any:
        call = lambda x, bias: function(x, x, x, bias, mask)
        out, vjp = jax.vjp(jax.vmap(call) if is_mapped else call, x, bias)
        return out, vjp(x)

    calls.assert_same(jax.jit(gradients, static_argnums=0)(as_jax_nn), gradients(theirs), tolerance=3e-2)


@pytest.mark.numbers
@pytest.mark.skipif(not HAS_RESIDUAL, reason="this jax.nn has no return_residual")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("unbatched", [False, True], ids=["", "unbatched"])
def test_residual_as_jax_nn_has_it(dtype: str, unbatched: bool) -> None:
    """Shape, dtype and value, for rows that see nothing as well, and no gradient."""
    arrays = make_arrays(dataclasses.replace(SMALL, dtype=dtype, group=2))
    query, key, value = (x[0] if unbatched else x for x in arrays.values())
    mask = jnp.ones((1, 1, 11, 13), bool).at[:, :, 4].set(False)
    ours, others = (f(query, key, value, mask=mask, return_residual=True) for f in (as_jax_nn, theirs))
    calls.assert_same(ours, others, tolerance=2e-5 if dtype == "float32" else 2e-2)
    gradient = jax.grad(lambda query: as_jax_nn(query, key, value, return_residual=True)[1].astype(jnp.float32).sum())
    assert not np.any(gradient(query))


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_implementations_of_jax_nn_through_the_wrapper(implementation: str | None) -> None:
    query, key, value = make_arrays(SMALL).values()
    calls.assert_same(as_jax_nn(query, key, value, implementation=implementation), theirs(query, key, value))


def test_difference_implementation_cudnn_raises() -> None:
    query, key, value = make_arrays(SMALL).values()
    with pytest.raises(ValueError, match="cuDNN is reached through"):
        attention(query, key, value, implementation="cudnn")  # pyright: ignore


def test_difference_third_derivatives_raise() -> None:
    query, key, value = make_arrays(SMALL).values()

    def third(function: Any) -> jax.Array:
        def loss(query: jax.Array) -> jax.Array:
            return function(query, key, value).sum()

        def second(query: jax.Array) -> jax.Array:
            return jax.jvp(jax.grad(loss), (query,), (query,))[1].sum()

        return jax.grad(second)(query)

    third(theirs)
    with pytest.raises(NotImplementedError, match="no third derivative"):
        third(attention)


def test_difference_softmax_of_float64_is_float64() -> None:
    """`jax.nn` rounds logits to float32."""
    with jax.enable_x64(True):
        query, key, value = (x.astype(jnp.float64) for x in make_arrays(SMALL).values())
        rows, visible = jnp.ones((2, 11, 1, 1)), jnp.ones((2, 1, 11, 13), bool)
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
        expected = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(jnp.where(visible, logits, 0.0)), value) * rows
        errors = [float(jnp.abs(f(query, key, value) - expected).max()) for f in (attention, theirs)]
    assert errors[0] < 1e-13 < 1e-9 < errors[1]


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


@pytest.mark.numbers
@pytest.mark.parametrize("in_axes", [(0, 0, 0, None, None), (0, 0, 0, 0, None), (0, None, None, None, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_vmap(in_axes: tuple[Any, ...], dtype: str) -> None:
    case = dataclasses.replace(SMALL, dtype=dtype, bias="bnts", mask="bnts", batch=5, group=2)
    arrays = [x if axis == 0 else x[0] for x, axis in zip(make_arrays(case).values(), in_axes, strict=True)]

    def both(function: Any) -> Any:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = jax.vmap(function, in_axes=in_axes)(*arrays)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)

    calls.assert_same(both(attention), both(theirs), tolerance=2e-5 if dtype == "float32" else 2e-2)


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


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_nan_under_debug_nans(transform: Any) -> None:
    query, key, value = make_arrays(SMALL).values()
    query = query.at[0, 0, 0, 0].set(jnp.nan)
    call = transform(lambda x: attention(x, key, value).sum())
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan or inf\) encountered in jax_fastattn"):
        call(query)


def test_row_without_keys_under_debug_infs() -> None:
    """A log-sum-exp of -inf is a result of an eager call, and of a jitted one only if it is requested."""
    query, key, value = make_arrays(SMALL).values()
    mask = jnp.ones((1, 1, 11, 13), bool).at[:, :, 4].set(False)
    with jax.debug_infs(True):
        with pytest.raises(FloatingPointError, match="encountered in jax_fastattn"):
            attention(query, key, value, mask=mask)
        assert not np.any(jax.jit(attention)(query, key, value, mask=mask)[:, 4])


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
