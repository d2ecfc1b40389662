# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""vmap over any subset of the arrays, in both orders with grad: what one call for each example gives."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention, attention_varlen

# Neither a size of the case nor a multiple of one.
EXAMPLES = 9

NAMES = (
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_offset",
    "segment_ids",
    "sinks",
    "scale",
)
SUBSETS = {
    **{name: (name,) for name in NAMES},
    "query-key-value": NAMES[:3],
    "key-bias-sinks": ("key", "bias", "sinks"),
    "query-bias-mask-sinks": ("query", "bias", "mask", "sinks"),
    "query-mask-segments": ("query", "mask", "segment_ids"),
    "all-but-query": NAMES[1:],
    "all": NAMES,
}


def make_arrays(case: calls.Case, mapped: tuple[str, ...], examples: int = EXAMPLES) -> calls.Arrays:
    """The arrays of `case`; those that are mapped are different for each example, and have a leading axis."""
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))

    def shifted(name: str, x: jax.Array, i: int) -> jax.Array:
        if name in ("query_seq_lengths", "key_value_seq_lengths"):
            return (x + i) % (case.query_length if name == "query_seq_lengths" else case.key_length) + 1
        if name == "query_offset":
            return x - i % 4
        if name == "scale":
            return x + 0.2 * i
        return jnp.roll(x, i, axis=tuple(range(x.ndim)))

    def stack(name: str, x: Any) -> Any:
        return jax.tree.map(lambda x: jnp.stack([shifted(name, x, i) for i in range(examples)]), x)

    return {name: stack(name, x) if name in mapped else x for name, x in arrays.items()}


def example(arrays: calls.Arrays, mapped: tuple[str, ...], i: int) -> calls.Arrays:
    return {name: jax.tree.map(lambda x: x[i], x) if name in mapped else x for name, x in arrays.items()}


@functools.cache
def expected_gradients(case: calls.Case) -> Any:
    return calls.expected_gradients(case)


def check_against_a_loop(case: calls.Case, mapped: tuple[str, ...]) -> None:
    """The gradients of each example, and those of the sum over all examples."""
    arrays = make_arrays(case, mapped)
    each = [expected_gradients(case)(example(arrays, mapped, i)) for i in range(EXAMPLES)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    summed = {name: x if name in mapped else x.sum(axis=0) for name, x in stacked.items()}
    axes = ({name: 0 if name in mapped else None for name in arrays},)
    loss = calls.loss_of(case)

    @calls.quick_jit
    def both_orders(arrays: calls.Arrays) -> Any:
        vmap_of_grad = jax.vmap(functools.partial(calls.gradients, loss), in_axes=axes)(arrays)
        grad_of_vmap = calls.gradients(lambda arrays: jnp.sum(jax.vmap(loss, in_axes=axes)(arrays)), arrays)
        return vmap_of_grad, grad_of_vmap

    vmap_of_grad, grad_of_vmap = both_orders(arrays)
    calls.assert_same(vmap_of_grad, stacked)
    calls.assert_same(grad_of_vmap, summed, tolerance=5e-5)


@pytest.mark.numbers
@pytest.mark.parametrize("subset", SUBSETS)
def test_vmap_over(subset: str) -> None:
    check_against_a_loop(calls.EVERYTHING, SUBSETS[subset])


BROADCAST = dataclasses.replace(calls.EVERYTHING, bias="ns", mask="t")


@pytest.mark.numbers
@pytest.mark.parametrize(
    "subset", ["query", "query-bias-mask-sinks", "bias", "mask", "sinks", "scale", "key-bias-sinks", "all"]
)
def test_vmap_over_with_a_bias_that_serves_the_whole_batch(subset: str) -> None:
    check_against_a_loop(BROADCAST, SUBSETS[subset])


def test_tangents_that_examples_share_are_added_up_in_float32() -> None:
    """The transpose of a tangent that all examples have is a sum over the examples."""
    query, key, value = calls.Case(query_length=5, key_length=7, head_dim=8, dtype="bfloat16").operands(
        jax.random.key(0)
    )[:3]
    queries = jnp.stack([query, -query, 2 * query, query + 1])

    def total(tangent: jax.Array) -> jax.Array:
        def along(query: jax.Array) -> jax.Array:
            return jax.jvp(lambda key: calls.attention(query, key, value), (key,), (tangent,))[1]

        return jax.vmap(along)(queries).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(total)).lower(key).as_text()
    shape = "x".join(map(str, (len(queries), *key.shape)))
    sums = re.findall(rf"stablehlo\.reduce\(.*across dimensions = \[0\] : \(tensor<{shape}x(\w+)>", text)
    assert sums == ["f32"]


def test_vmap_of_vmap() -> None:
    """Two mapped axes of different sizes, not on the same arrays.

    Logits stay moderate: the slope of a soft cap far from 0 is a difference of nearly equal numbers.
    """
    outer, inner = 3, 4
    case = calls.EVERYTHING
    arrays = make_arrays(case, ("query", "bias"), outer)
    arrays["key"], arrays["query"] = (
        jnp.stack([arrays["key"] * (1 + 0.2 * i) for i in range(inner)]),
        jnp.stack([arrays["query"] * (1 + 0.2 * i) for i in range(inner)], axis=1),
    )
    loss = calls.loss_of(case)
    axes = [
        {name: 0 if name in mapped else None for name in arrays} for mapped in (("query", "bias"), ("query", "key"))
    ]
    one = functools.partial(calls.gradients, loss)
    found = jax.jit(jax.vmap(jax.vmap(one, in_axes=axes[1:]), in_axes=axes[:1]))(arrays)
    for i in range(outer):
        for j in range(inner):
            own = arrays | {"query": arrays["query"][i, j], "bias": arrays["bias"][i], "key": arrays["key"][j]}
            got = jax.tree.map(lambda x, i=i, j=j: x[i, j], found)
            calls.assert_same(got, expected_gradients(case)(own))


def repeats_keys(text: str, case: calls.Case) -> bool:
    """Whether a program holds an array of more elements than the keys, with the axes S and H."""
    size = case.batch * case.key_length * case.num_kv_heads * case.head_dim
    shapes = [[int(n) for n in found.split("x")[:-1]] for found in re.findall(r"tensor<((?:[0-9]+x)+)", text)]
    return any({case.key_length, case.head_dim} <= set(shape) and math.prod(shape) > size for shape in shapes)


@pytest.mark.parametrize("levels", [1, 2], ids=["vmap", "vmap-of-vmap"])
def test_vmap_over_the_query_does_not_repeat_keys_and_values(
    levels: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On CUDA it is one launch with a larger group of query heads."""
    case = calls.Case(
        query_length=5, key_length=17, num_kv_heads=3, group=2, head_dim=8, is_causal=True, dtype="bfloat16"
    )
    query, key, value = case.operands(jax.random.key(0))[:3]
    query = jnp.broadcast_to(query, (2, 4)[:levels] + query.shape)

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, is_causal=True)

    for _ in range(levels):
        run = jax.vmap(run, in_axes=(0, None, None))
    calls.lower_for_cuda(monkeypatch, tmp_path)
    for text in (jax.jit(run).lower(query, key, value).as_text(), calls.cuda_text(run, query, key, value)):
        assert not repeats_keys(text, case)
    assert calls.count_launches(text) == 1
    everything = jax.jit(jax.vmap(run, in_axes=0))
    assert repeats_keys(everything.lower(*(jnp.stack([x] * 2) for x in (query, key, value))).as_text(), case)


def test_vmap_over_a_query_whose_bias_serves_the_batch_does_not_repeat_the_bias() -> None:
    """A bias of heads and keys can be larger than the keys: the mapped axis goes into the batch then.

    A bias of the whole batch is repeated either way: the mapped axis goes into the heads, which repeats no key.
    """
    query, key, value = calls.EVERYTHING.operands(jax.random.key(0))[:3]
    for bias, is_repeated in ((jnp.zeros((1, 6, 5, 7)), False), (jnp.zeros((2, 6, 5, 7)), True)):
        run = jax.jit(jax.vmap(functools.partial(attention, bias=bias), in_axes=(0, None, None)))
        text = run.lower(jnp.stack([query] * 4), key, value).as_text()
        assert (f"tensor<4x{len(bias)}x6x5x7xf32>" in text) == is_repeated
        for x in (key, value):
            assert (f"tensor<4x{'x'.join(map(str, x.shape))}xf32>" in text) != is_repeated


@pytest.mark.parametrize("outer", ["query", "key", "bias"])
def test_vmap_around_vmap_over_the_query(outer: str) -> None:
    """The inner mapped axis becomes query heads; the outer one joins it, or goes into the batch."""
    case = dataclasses.replace(calls.EVERYTHING, bias="ns")
    spec = case.spec()
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    arrays["query"] = jnp.stack([arrays["query"] * i for i in range(EXAMPLES)])
    arrays["bias"] = jnp.stack([arrays["bias"] + i for i in range(EXAMPLES)])
    names = ("query", "bias") if outer == "query" else (outer,)
    arrays |= {name: jnp.stack([arrays[name], arrays[name][..., ::-1]]) for name in names}

    def call(arrays: calls.Arrays) -> Any:
        return calls.attention(**arrays, **calls.options_of(spec), return_residual=True)

    inner_axes, outer_axes = (
        ({name: 0 if name in mapped else None for name in arrays},) for mapped in (("query", "bias"), names)
    )
    found = calls.quick_jit(jax.vmap(jax.vmap(call, in_axes=inner_axes), in_axes=outer_axes))(arrays)
    one = jax.jit(call)
    for i in range(2):
        for j in range(EXAMPLES):
            own = {name: x[i] if name in names else x for name, x in arrays.items()}
            own |= {name: own[name][j] for name in ("query", "bias")}
            calls.assert_same(jax.tree.map(lambda x, i=i, j=j: x[i, j], found), one(own))


def test_vmap_over_other_axes_than_the_first() -> None:
    case = dataclasses.replace(calls.EVERYTHING, is_causal=False, bias=None, mask=None, segments=0)
    query, key, value = case.operands(jax.random.key(0))[:3]
    query = jnp.stack([query * i for i in range(EXAMPLES)], axis=2)
    key = jnp.stack([key - i for i in range(EXAMPLES)], axis=4)
    out = jax.vmap(attention, in_axes=(2, 4, None), out_axes=3)(query, key, value)
    assert out.shape == (2, 5, 6, EXAMPLES, 4)
    for i in range(EXAMPLES):
        calls.assert_same(out[..., i, :], attention(query[:, :, i], key[..., i], value))


@pytest.mark.numbers
@pytest.mark.parametrize("shared", [False, True], ids=["all", "query alone"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("empty", ["", "T", "H", "D", "S"])
def test_vmap_over_no_example_and_over_empty_arrays(empty: str, shape: tuple[int, int], shared: bool) -> None:
    """Sizes were divided by that of the axis."""
    sizes = {"T": 5, "S": 6, "H": 8, "D": 7} | ({empty: 0} if empty else {})
    batch, (queries, keys, head_dim, v_head_dim) = 2, sizes.values()
    query = jnp.ones((*shape, batch, queries, 4, head_dim))
    key, value = (jnp.ones((batch, keys, 2, size)) for size in (head_dim, v_head_dim))
    axes: Any = (0, None, None) if shared else 0
    if not shared:
        key, value = (jnp.broadcast_to(x, (*shape, *x.shape)) for x in (key, value))

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, gradients = jax.vjp(lambda *x: attention(*x), *arrays)
        return out, *gradients(jnp.ones_like(out))

    found = jax.vmap(jax.vmap(run, axes), axes)(query, key, value)
    wanted = [(batch, queries, 4, v_head_dim), query.shape[2:], *((batch, keys, 2, x) for x in (head_dim, v_head_dim))]
    assert [x.shape for x in found] == [(*shape, *x) for x in wanted]
    assert all(np.isfinite(x).all() for x in found)


def test_vmap_of_unbatched_is_batched() -> None:
    query, key, value = calls.EVERYTHING.operands(jax.random.key(0))[:3]
    for axes in [(0, 0, 0), (0, None, None), (None, 0, 0)]:
        arrays = [x if axis == 0 else x[0] for x, axis in zip((query, key, value), axes, strict=True)]
        batched = [x if x.ndim == 4 else jnp.broadcast_to(x, (2, *x.shape)) for x in arrays]
        calls.assert_same(jax.vmap(attention, in_axes=axes)(*arrays), attention(*batched))


def test_vmap_of_packed() -> None:
    """Each example has its own boundaries."""
    query, key, value = (x[0] for x in calls.EVERYTHING.operands(jax.random.key(0))[:3])
    starts_q = jnp.array([[0, 2, 5], [0, 5, 5], [0, 1, 4]], jnp.int32)
    starts_k = jnp.array([[0, 3, 7], [0, 0, 7], [0, 6, 7]], jnp.int32)
    queries = jnp.stack([query, 2 * query, -query])

    def loss(query: jax.Array, starts_q: jax.Array, starts_k: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention_varlen(query, key, value, starts_q, starts_k, is_causal=True)))

    found = jax.jit(jax.vmap(jax.value_and_grad(loss)))(queries, starts_q, starts_k)
    one = jax.jit(jax.value_and_grad(loss))
    for i in range(3):
        calls.assert_same(jax.tree.map(lambda x, i=i: x[i], found), one(queries[i], starts_q[i], starts_k[i]))


def test_jacobian() -> None:
    """jacrev maps the backward pass alone: operands unmapped, cotangents mapped."""
    query, key, value = (x[:, :3, :1, :2] for x in calls.EVERYTHING.operands(jax.random.key(0))[:3])
    found = jax.jit(jax.jacrev(attention, argnums=(0, 1, 2)))(query, key, value)

    def by_hand(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(2)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1), value)

    calls.assert_same(found, jax.jit(jax.jacrev(by_hand, argnums=(0, 1, 2)))(query, key, value))
