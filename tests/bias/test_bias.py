# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Values and dtypes of a bias: what counts as -inf, what nothing reads, and how its gradient is summed and rounded.

`test_api.py` has the shapes that broadcast and the errors, `test_vmap.py` and `test_sharding.py` the transformations of
each operand. Each test here runs at once and in chunks where that can make a difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import compare
from testing.combinations import in_chunks
from testing.poison import poison

from jax_fastattn import attention
from jax_fastattn.cases.case import Case
from jax_fastattn.reference import attention_reference, visible_pairs
from jax_fastattn.spec import AttentionSpec, Operands

# More rows and columns than a chunk has, and no multiple of it.
SIZES = Case(query_length=19, key_length=21, num_kv_heads=2, group=2, head_dim=8)
BROADCASTS = ["".join(axes) for n in range(5) for axes in itertools.combinations("bnts", n)]
FLOATS = ("bfloat16", "float16", "float32")


@pytest.fixture(params=["at-once", "chunks"])
def blocks(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_chunks() if request.param == "chunks" else contextlib.nullcontext():
        yield request.param


def least(dtype: Any, factor: float = 1.0) -> float:
    return factor * float(jnp.finfo(dtype).min)


# Dtype, value, and whether it counts as -inf. From -2.36e38 to -2.3e38 either may happen in kernels.
VALUES = {
    "float32-inf": ("float32", -np.inf, True),
    "float32-min": ("float32", least("float32"), True),
    "float32-of-jax-nn": ("float32", least("float32", 0.7), True),
    "float32-limit": ("float32", -2.3601e38, True),
    "float32-finite": ("float32", -2.3e38, False),
    "bfloat16-min": ("bfloat16", least("bfloat16"), True),
    "bfloat16-of-jax-nn": ("bfloat16", least("float32", 0.7), True),
    "bfloat16-finite": ("bfloat16", -2.3e38, False),
    "float16-inf": ("float16", -np.inf, True),
    "float16-min": ("float16", least("float16"), False),
    "float64-min": ("float64", least("float64"), True),
    "float64-limit": ("float64", -2.3601e38, True),
    "float64-finite": ("float64", -2.3e38, False),
}


@pytest.mark.parametrize("function", ["attention", "reference", "baseline"])
@pytest.mark.parametrize("name", VALUES)
def test_row_of_one_value_is_empty_if_it_counts_as_minus_infinity(name: str, function: str) -> None:
    dtype, value, is_hidden = VALUES[name]
    call = {
        "attention": calls.through_api,
        "reference": attention_reference,
        "baseline": compare.same_dtype_attention,
    }[function]
    with jax.enable_x64(dtype == "float64"):
        case = dataclasses.replace(SIZES, dtype="float64" if dtype == "float64" else "float32", group=1)
        operands = case.operands(jax.random.key(0))
        bias = jnp.zeros((19, 1), dtype).at[3].set(jnp.array(value, dtype))[None, None]
        operands = operands._replace(query=operands.query * 0.0, bias=bias)
        spec = dataclasses.replace(case.spec(), present=operands.present())
        out, lse = call(spec, operands)
        if is_hidden:
            np.testing.assert_array_equal(out[:, 3], 0.0)
            np.testing.assert_array_equal(lse[:, 3], -np.inf)
        else:
            np.testing.assert_allclose(out[:, 3], operands.value.mean(axis=1), atol=1e-6)
            np.testing.assert_allclose(lse[:, 3], float(bias[0, 0, 3, 0]), rtol=1e-4)
        np.testing.assert_allclose(lse[:, 4], np.log(21), rtol=1e-6)


def everything(spec: AttentionSpec, operands: Operands, directions: dict[str, Any], cotangents: Any) -> Any:
    """Returns results, gradients, tangents and a Hessian-vector product of the public call."""
    moved = {name: x for name, x in directions.items() if getattr(operands, name) is not None}
    given = {name: getattr(operands, name) for name in moved}

    def function(given: dict[str, Any]) -> Any:
        return calls.through_api(spec, operands._replace(**given))

    def loss(given: dict[str, Any]) -> jax.Array:
        out, lse = function(given)
        dout, dlse = cotangents
        return jnp.sum(out * dout) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse)

    results, tangents = jax.jvp(function, (given,), (moved,))
    gradients, products = jax.jvp(jax.grad(loss), (given,), (moved,))
    return {"results": results, "tangents": tangents, "gradients": gradients, "products": products}


@functools.cache
def compiled(spec: AttentionSpec, blocks: str) -> Any:
    """Returns `everything` of a call. Tests whose arrays differ in their values alone share a program."""
    del blocks  # part of the cache key
    return calls.quick_jit(functools.partial(everything, spec))


SPELLED = {
    "inf": -np.inf,
    "min": least("float32"),
    "jax-nn": least("float32", 0.7),
}


@pytest.mark.numbers
@pytest.mark.parametrize("value", SPELLED)
@pytest.mark.parametrize("sinks", [None, "n"], ids=["no-sinks", "sinks"])
def test_mask_that_a_bias_spells(blocks: str, value: str, sinks: str | None) -> None:
    """Every derivative is that of a call with the mask, whatever the tangent of a hidden entry is."""
    case = dataclasses.replace(SIZES, mask="bts", mask_density=0.3, bias="bnts", sinks=sinks, dlse=True, is_causal=True)
    operands, cotangents = case.operands(jax.random.key(3)), case.cotangents(jax.random.key(4))
    assert operands.mask is not None and operands.bias is not None
    mask = operands.mask.at[:, :, 5].set(False)
    masked = operands._replace(mask=mask)
    spelled = operands._replace(mask=None, bias=jnp.where(mask, operands.bias, SPELLED[value]))
    directions = {name: getattr(case.operands(jax.random.key(5)), name) for name in ("query", "key", "value", "bias")}
    poisoned = directions | {"bias": jnp.where(mask, directions["bias"], jnp.nan)}
    first, second = (
        compiled(dataclasses.replace(case.spec(), present=x.present()), blocks)(x, moved, cotangents)
        for x, moved in ((masked, directions), (spelled, poisoned))
    )
    assert np.isneginf(first["results"][1]).any() == (sinks is None)
    calls.assert_same(second, first, tolerance=1e-5)
    hidden = ~np.broadcast_to(mask, operands.bias.shape)
    assert not np.asarray(second["gradients"]["bias"])[hidden].any()


def test_bias_of_minus_infinity_is_at_minus_the_cap(blocks: str) -> None:
    """The cap comes after the bias, so such a pair is visible."""
    case = dataclasses.replace(SIZES, logits_soft_cap=2.0, bias="t", group=1)
    operands = case.operands(jax.random.key(0))
    assert operands.bias is not None
    operands = operands._replace(bias=operands.bias.at[:, :, 3].set(least("float32")))
    out, lse = jax.jit(functools.partial(calls.through_api, case.spec()))(operands)
    np.testing.assert_allclose(out[:, 3], operands.value.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(lse[:, 3], np.log(21) - 2.0, rtol=1e-6)


# In each of these, some rows and columns are hidden from some batch entries or heads, and others from all.
HIDING = {
    "causal-lengths": {"is_causal": True, "query_seq_lengths": (17, 9), "key_value_seq_lengths": (0, 15)},
    "mask-per-kv-head": {"mask": "bkts", "mask_density": 0.02},
    "mask": {"mask": "bnts", "mask_density": 0.1},
    "ids-window": {"segments": 4, "window": (5, 2)},
    "offset-cap": {"is_causal": True, "query_offset": (-9, -30), "logits_soft_cap": 1.5},
}


# Four shapes are enough for the loops.
UNREAD = [
    *itertools.product(("at-once", "chunks"), HIDING, ("bnts",)),
    *(("at-once", "mask-per-kv-head", axes) for axes in BROADCASTS[:-1]),
    *(("chunks", "mask-per-kv-head", axes) for axes in ("nts", "bt", "s")),
]


@pytest.mark.numbers
@pytest.mark.parametrize(("blocks", "name", "axes"), UNREAD, indirect=["blocks"])
def test_bias_that_no_visible_pair_reads(blocks: str, name: str, axes: str) -> None:
    """NaN and infinities there, and in tangents, reach nothing; the gradients there are 0."""
    case = dataclasses.replace(SIZES, bias=axes, dlse=True, **HIDING[name])
    spec, operands, cotangents = case.spec(), case.operands(jax.random.key(3)), case.cotangents(jax.random.key(4))
    names, drawn = ("query", "key", "value", "bias"), case.operands(jax.random.key(5))
    moved = {name: getattr(drawn, name) for name in names}
    hidden = ~np.asarray(visible_pairs(spec, operands))
    shared = tuple(axis for axis, letter in enumerate("bnts") if letter not in axes)
    hidden = hidden.all(axis=shared, keepdims=True)
    assert hidden.any() or set(axes) <= set("bn")
    poisoned, *bad = poison(spec, operands, *cotangents)
    bad_moved, *_ = poison(spec, operands._replace(**moved), *cotangents)
    run = compiled(spec, blocks)
    clean = run(operands, moved, cotangents)
    found = run(poisoned, {name: getattr(bad_moved, name) for name in names}, bad)
    calls.assert_same(found, clean, tolerance=0.0)
    for order in ("gradients", "products"):
        assert not np.asarray(found[order]["bias"])[hidden].any()


@pytest.mark.numbers
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_every_dtype_beside_every_dtype(dtype: str, bias_dtype: str) -> None:
    case = dataclasses.replace(SIZES, dtype=dtype, bias="nts", group=1, head_dim=32, dlse=True)
    operands, cotangents = case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    assert operands.bias is not None
    operands = operands._replace(bias=operands.bias.astype(bias_dtype))
    found = compare.check(calls.through_api, case.spec(), operands, *cotangents)
    assert operands.bias is not None and (found.dbias.shape, found.dbias.dtype) == (operands.bias.shape, bias_dtype)


def test_bias_of_float32_is_not_rounded_next_to_bfloat16() -> None:
    query, key, value = (x.astype(jnp.bfloat16) for x in SIZES.operands(jax.random.key(0))[:3])
    bias = 8.0 + jnp.linspace(0, 2**-8, 19)[:, None]  # less than half an ulp of bfloat16
    _, lse = attention(query * 0, key, value, bias=bias, return_residual=True)
    expected = np.broadcast_to(bias[None] + np.log(21), lse.shape)
    np.testing.assert_allclose(lse, expected, rtol=3e-7)
    assert len(np.unique(lse)) == 19


def test_gradient_of_a_bias_of_16_bits_is_summed_in_float32(blocks: str) -> None:
    """A sum of 4000 terms of one size in bfloat16 would end at 256 of them."""
    case = dataclasses.replace(SIZES, batch=20, num_kv_heads=10, group=1, dtype="bfloat16")
    query, key, value, *_ = case.operands(jax.random.key(0))
    value = jnp.zeros_like(value).at[:, 0].set(1.0)

    def loss(bias: jax.Array) -> jax.Array:
        return attention(query * 0, key, value, bias=bias).astype(jnp.float32).sum()

    found = jax.jit(jax.grad(loss))(jnp.zeros((21,), jnp.bfloat16))
    weight = 1 / 21
    exact = 20 * 10 * 19 * 8 * weight * (np.eye(21)[0] - weight)
    assert found.dtype == jnp.bfloat16
    # `out` is rounded, and what is left of the sum over keys is that rounding.
    np.testing.assert_allclose(found.astype(np.float32), exact, rtol=0.02)


@pytest.mark.numbers
@pytest.mark.parametrize("axes", ["", "s", "nts", "bnts"], ids=lambda axes: axes or "1")
def test_vmap_of_a_shared_bias_sums_its_gradient(blocks: str, axes: str) -> None:
    case = dataclasses.replace(SIZES, bias=axes)
    operands, dout = case.operands(jax.random.key(0)), jax.random.normal(jax.random.key(1), (3, 2, 19, 4, 8))
    queries = jnp.stack([operands.query * factor for factor in (1.0, -0.5, 2.0)])

    def one(query: jax.Array, bias: jax.Array) -> jax.Array:
        return attention(query, operands.key, operands.value, bias=bias)

    def mapped(bias: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(one, in_axes=(0, None))(queries, bias) * dout)

    def looped(bias: jax.Array) -> jax.Array:
        return sum(jnp.sum(one(queries[i], bias) * dout[i]) for i in range(3))  # pyright: ignore[reportReturnType]

    found, expected = (calls.quick_jit(jax.grad(f))(operands.bias) for f in (mapped, looped))
    calls.assert_same(found, expected)
    each = calls.quick_jit(jax.vmap(jax.grad(lambda bias, q, g: jnp.sum(one(q, bias) * g)), in_axes=(None, 0, 0)))
    calls.assert_same(each(operands.bias, queries, dout).sum(axis=0), expected)


def test_gradient_is_the_same_in_every_run(blocks: str) -> None:
    case = dataclasses.replace(SIZES, bias="ts", is_causal=True)
    spec, operands, cotangents = case.spec(), case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    run = calls.quick_jit(functools.partial(compare.evaluate, calls.through_api, spec))
    compare.assert_same_bits(run(operands, *cotangents), run(operands, *cotangents))
