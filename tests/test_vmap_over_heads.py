# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""vmap over heads: a mask, a bias or ids that the heads share are not repeated, not even in a vmap over the batch."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import attention

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

BATCH, HEADS, T, S = 2, 3, 5, 7
CASE = dataclasses.replace(
    calls.EVERYTHING,
    batch=1,
    num_kv_heads=1,
    group=1,
    segments=2,
    query_seq_lengths=(4,),
    key_value_seq_lengths=(6,),
    query_offset=(2,),
    scale_is_array=False,
)
# Arrays that are mapped with the heads, and with the batch; all others are shared.
QKV = ("query", "key", "value")
AXES = {
    "all-of-the-batch": (QKV, (*QKV, "bias", "mask", "segment_ids", "sinks")),
    "mask-of-the-batch": (QKV, (*QKV, "mask")),
    "bias-of-the-heads": ((*QKV, "bias", "sinks"), (*QKV, "mask", "segment_ids")),
    "shared": (QKV, QKV),
    # Not to be taken for heads: what has no axis of heads is mapped.
    "ids-of-the-inner": ((*QKV, "segment_ids"), (*QKV, "mask")),
    "query-shared-by-the-batch": (QKV, ("key", "value", "mask")),
}


def arrays_of(inner: tuple[str, ...], outer: tuple[str, ...]) -> calls.Arrays:
    """Arrays of `CASE`, different for each index of the axes that they have: outer, inner."""

    def stacked(name: str, x: jax.Array) -> jax.Array:
        for length, mapped in ((HEADS, inner), (BATCH, outer)):
            if name in mapped:
                x = jnp.stack([jnp.roll(x, i, axis=tuple(range(x.ndim))) for i in range(length)])
        return x

    arrays = calls.arrays_of(CASE.operands(jax.random.key(0)))
    return {name: jax.tree.map(functools.partial(stacked, name), x) for name, x in arrays.items()}


def nested(function: Any, inner: tuple[str, ...], outer: tuple[str, ...], arrays: calls.Arrays) -> Any:
    """Maps a function of arrays over heads, and that over the batch."""
    axes = [({name: 0 if name in mapped else None for name in arrays},) for mapped in (inner, outer)]
    return jax.vmap(jax.vmap(function, in_axes=axes[0]), in_axes=axes[1])


@pytest.mark.numbers
@pytest.mark.parametrize("name", AXES)
def test_gradients_are_those_of_a_loop(name: str) -> None:
    """Those of each example, and those of the sum."""
    inner, outer = AXES[name]
    arrays, loss = arrays_of(inner, outer), calls.loss_of(CASE)

    def each(loss: Any) -> Callable[[calls.Arrays], Any]:
        one = functools.partial(calls.gradients, loss)
        return calls.quick_jit(nested(one, inner, outer, arrays))

    def total(loss: Any) -> Callable[[calls.Arrays], Any]:
        return calls.quick_jit(lambda x: calls.gradients(lambda x: nested(loss, inner, outer, x)(x).sum(), x))

    reference = calls.loss_of(CASE, calls.attention_reference)
    calls.assert_same(each(loss)(arrays), each(reference)(arrays))
    calls.assert_same(total(loss)(arrays), total(reference)(arrays), tolerance=5e-5)


def test_query_heads_of_one_key_head_do_not_become_one() -> None:
    """The examples of a vmap over the batch have one key head, and more heads of queries, which share a mask."""
    draws = (jax.random.normal(jax.random.key(i), (HEADS, BATCH, n, h, 8)) for i, (n, h) in enumerate([(T, 4), (S, 1)]))
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (BATCH, 1, T, S))

    def gradients(query: jax.Array, key: jax.Array) -> Any:
        return jax.value_and_grad(lambda q, k: jnp.sin(attention(q, k, k, mask=mask)).sum(), (0, 1))(query, key)

    query, key = draws
    found = calls.quick_jit(jax.vmap(gradients))(query, key)
    for i in range(HEADS):
        calls.assert_same(jax.tree.map(lambda x, i=i: x[i], found), calls.quick_jit(gradients)(query[i], key[i]))


def test_tangents() -> None:
    """A bias that is shared, and whose tangent is not."""
    inner, outer = QKV, (*QKV, "mask")
    arrays = arrays_of(inner, outer)
    tangents = jax.random.normal(jax.random.key(7), (BATCH, HEADS, *arrays["bias"].shape))

    def found(function: Any) -> jax.Array:
        loss = calls.loss_of(CASE, function)

        def along(arrays: calls.Arrays, tangent: jax.Array) -> jax.Array:
            return jax.jvp(lambda bias: loss(arrays | {"bias": bias}), (arrays["bias"],), (tangent,))[1]

        axes = [{name: 0 if name in mapped else None for name in arrays} for mapped in (inner, outer)]
        mapped = jax.vmap(jax.vmap(along, in_axes=(axes[0], 0)), in_axes=(axes[1], 0))
        return calls.quick_jit(mapped)(arrays, tangents)

    calls.assert_same(found(calls.through_api), found(calls.attention_reference), tolerance=5e-5)


def heads(query: jax.Array, key: jax.Array, value: jax.Array, **shared: Any) -> jax.Array:
    """Attention `[T, N, H]` of one head after the other, as modules of equinox call it."""
    one = lambda q, k, v: attention(q[:, None], k[:, None], v[:, None], **shared)[:, 0]
    return jax.vmap(one, in_axes=1, out_axes=1)(query, key, value)


SHARED = {
    "mask": {"mask": jax.ShapeDtypeStruct((BATCH, T, S), jnp.bool)},
    "ids": {"segment_ids": tuple(jax.ShapeDtypeStruct((BATCH, rows), jnp.int32) for rows in (T, S))},
}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", SHARED)
def test_the_prepass_reads_it_once(name: str, gradient: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Queries reach the kernel as `[B, T, N, H]`."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    query, key = (jax.ShapeDtypeStruct((BATCH, rows, HEADS, 64), jnp.bfloat16) for rows in (T, S))

    def batch(query: jax.Array, key: jax.Array, value: jax.Array, shared: Any) -> jax.Array:
        if not gradient:
            return jax.vmap(lambda q, k, v, shared: heads(q, k, v, implementation="cuda", **shared))(
                query, key, value, shared
            )

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, shared: Any) -> jax.Array:
            return heads(q, k, v, implementation="cuda", **shared).astype(jnp.float32).sum()

        return jax.vmap(jax.grad(loss))(query, key, value, shared)

    text = calls.cuda_text(batch, query, key, key, SHARED[name])
    assert calls.count_launches(text) == (4 if gradient else 2)
    types = re.findall(r"custom_call @jax_fastattn_launch.* : (\(.*\)) -> (.*)", text)
    wanted = [f"{BATCH}x1x{T}x{S}xi1"] if name == "mask" else [f"{BATCH}x{T}xi32", f"{BATCH}x{S}xi32"]
    read = f"({', '.join(f'tensor<{x}>' for x in wanted)})"
    assert [operands for operands, results in types if "f" not in results] == [read] * (2 if gradient else 1)
    rows = f"tensor<{BATCH}x{T}x{HEADS}x64xbf16>"
    assert all(operands.startswith(f"({rows}") for operands, results in types if "f" in results)


@pytest.mark.parametrize(
    "kind",
    [
        AxisType.Auto,
        pytest.param(
            AxisType.Explicit,
            marks=pytest.mark.skipif(
                JAX_VERSION < (0, 9), reason="jax 0.8 fails on custom_partitioning under Explicit"
            ),
        ),
    ],
    ids=str,
)
def test_a_mesh_splits_batch_and_heads(kind: AxisType) -> None:
    """Nothing is gathered, and results are split as the query."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (2, rows, 4, 8)) for key, rows in zip(keys, (T, S, S), strict=False)]
    mask = jax.random.bernoulli(keys[3], 0.6, (2, T, S))

    def gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        def loss(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
            return jnp.sin(jax.vmap(lambda *x: heads(*x[:3], mask=x[3]))(query, key, value, mask)).sum()

        return jax.grad(loss, (0, 1, 2))(*arrays)

    expected = calls.quick_jit(gradients)(*arrays, mask)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    split = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    placed = [jax.device_put(x, split) for x in arrays]
    placed.append(jax.device_put(mask, NamedSharding(mesh, PartitionSpec("data"))))
    with jax.set_mesh(mesh):
        compiled = calls.quick_jit(gradients).lower(*placed).compile()
        found = compiled(*placed)
    assert all(x.sharding.is_equivalent_to(split, 4) for x in found)
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", compiled.as_text())
    calls.assert_same(jax.device_get(found), jax.device_get(expected))
