# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout on meshes: each device keeps the weights that one device keeps."""

from __future__ import annotations

import functools
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fastattn import (
    all_to_all_attention,
    attention,
    attention_varlen,
    dropout_mask,
    ring_attention,
    unzigzag,
    zigzag,
)

B, T, N, K, H = 2, 40, 4, 2, 8
KEY = jax.random.key(11)
RATE = 0.25
DROPOUT: dict[str, Any] = {"dropout_rate": RATE, "dropout_key": KEY}


def draw(length: int = T) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    heads = N, K, K, N
    return tuple(jax.random.normal(key, (B, length, n, H)) for key, n in zip(keys, heads, strict=True))


def mesh_of(**sizes: int) -> Mesh:
    count = int(np.prod([*sizes.values()]))
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count])


def both(call: Any, query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
    """Output and gradients."""
    out, pullback = jax.vjp(call, query, key, value)
    return out, *pullback(dout)


@functools.cache
def on_one_device(length: int = T, **options: Any) -> Any:
    run = calls.quick_jit(functools.partial(both, functools.partial(attention, **DROPOUT, **options)))
    return jax.device_get(run(*draw(length)))


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ({"b": 2}, P("b")),
        ({"h": 2}, P(None, None, "h")),
        ({"t": 2}, P(None, "t")),
        ({"t": 8}, P(None, "t")),
        ({"b": 2, "t": 2, "h": 2}, P("b", "t", "h")),
    ],
    ids=["batch", "heads", "rows", "rows-of-8", "all"],
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "broadcast_dropout": True}], ids=["each", "broadcast"])
@pytest.mark.numbers
def test_jit_under_a_mesh(sizes: dict[str, int], spec: P, options: dict[str, Any]) -> None:
    """The rows of a device begin anywhere: 40 rows on 8 devices are 5 each."""
    mesh = mesh_of(**sizes)
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in draw()]
    run = calls.quick_jit(functools.partial(both, functools.partial(attention, **DROPOUT, **options)))
    compiled = run.lower(*arrays).compile()
    assert "all-gather" not in compiled.as_text()
    calls.assert_same(jax.device_get(compiled(*arrays)), on_one_device(**options), 2e-5)


def test_rows_that_devices_do_not_divide() -> None:
    mesh = mesh_of(t=4)
    arrays = [jax.device_put(x, NamedSharding(mesh, P())) for x in draw(37)]

    def call(*x: jax.Array) -> jax.Array:
        x = tuple(jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, "t"))) for y in x)
        return attention(*x, is_causal=True, **DROPOUT)

    found = calls.quick_jit(functools.partial(both, call))(*arrays)
    calls.assert_same(jax.device_get(found), on_one_device(37, is_causal=True), 2e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.numbers
def test_ring_attention(layout: Any, options: dict[str, Any]) -> None:
    check_split(functools.partial(ring_attention, layout=layout), layout, **options)


@pytest.mark.numbers
@pytest.mark.parametrize("broadcast", [False, True])
def test_all_to_all_attention(broadcast: bool) -> None:
    check_split(all_to_all_attention, is_causal=True, broadcast_dropout=broadcast)


def check_split(function: Any, layout: str = "contiguous", **options: Any) -> None:
    found = calls.quick_jit(functools.partial(both, split_rows(function, layout, **options)))(*draw())
    calls.assert_same(jax.device_get(found), on_one_device(**options), 2e-5)


def split_rows(function: Any, layout: str = "contiguous", size: int = 4, **options: Any) -> Any:
    """A call of whole arrays by shares of devices."""
    mesh = mesh_of(seq=size)

    def local(*x: jax.Array) -> jax.Array:
        return function(*x, axis_name="seq", **DROPOUT, **options)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))

    def whole(*x: jax.Array) -> jax.Array:
        if layout == "contiguous":
            return mapped(*x)
        return unzigzag(mapped(*(zigzag(y, size) for y in x)), size)

    return whole


RINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ring": (ring_attention, {}),
    "causal-ring": (ring_attention, {"is_causal": True, "broadcast_dropout": True}),
    "zigzag": (functools.partial(ring_attention, layout="zigzag"), {"layout": "zigzag", "size": 2, "is_causal": True}),
    "all-to-all": (all_to_all_attention, {}),
    "all-to-all-broadcast": (all_to_all_attention, {"broadcast_dropout": True}),
}


@pytest.mark.parametrize("name", RINGS)
def test_masks_of_split_rows_are_exact(name: str) -> None:
    """Values that are an identity show every decision: none differs from `dropout_mask`."""
    function, options = RINGS[name]
    out = calls.quick_jit(split_rows(function, **options))(*draw()[:2], identity())
    assert_mask(out, is_causal="is_causal" in options, broadcast="broadcast_dropout" in options)


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [({"t": 8}, P(None, "t")), ({"b": 2, "t": 2, "h": 2}, P("b", "t", "h"))],
    ids=["rows-of-8", "all"],
)
def test_masks_under_a_mesh_are_exact(sizes: dict[str, int], spec: P) -> None:
    mesh = mesh_of(**sizes)
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (*draw()[:2], identity())]
    assert_mask(calls.quick_jit(functools.partial(attention, **DROPOUT))(*arrays))


def identity() -> jax.Array:
    return jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, K, T))


def assert_mask(out: jax.Array, *, is_causal: bool = False, broadcast: bool = False) -> None:
    """A weight is 0 where it is dropped or hidden, and there alone."""
    expected = np.asarray(dropout_mask(KEY, RATE, (B, N, T, T), broadcast=broadcast))
    expected = np.broadcast_to(np.tril(expected) if is_causal else expected, (B, N, T, T))
    np.testing.assert_array_equal(np.moveaxis(np.asarray(out), 2, 1) != 0, expected)


def test_a_share_of_a_shard_map_folds_its_index_into_the_key() -> None:
    """Inside of `shard_map` b and n are indices of the share."""
    mesh, x = mesh_of(b=2), draw()[:3]

    def local(*x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(KEY, jax.lax.axis_index("b"))
        return attention(*x, dropout_rate=RATE, dropout_key=key)

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("b"), out_specs=P("b")))(*x)
    for i in range(2):
        own = [y[i : i + 1] for y in x]
        one = attention(*own, dropout_rate=RATE, dropout_key=jax.random.fold_in(KEY, i))
        calls.assert_same(jax.device_get(found[i : i + 1]), jax.device_get(one), 2e-6)


@pytest.mark.numbers
def test_packed_rows_on_a_mesh_are_gathered() -> None:
    query, key, value = (x[0] for x in draw()[:3])
    starts = jnp.array([0, 13, 30])
    call = functools.partial(attention_varlen, cu_seqlens_q=starts, cu_seqlens_k=starts, **DROPOUT)
    arrays = [jax.device_put(x, NamedSharding(mesh_of(t=2), P("t"))) for x in (query, key, value)]
    calls.assert_same(jax.device_get(jax.jit(call)(*arrays)), jax.device_get(call(query, key, value)), 2e-6)


def test_boundaries_in_a_ring_are_refused_and_exchanged_heads_take_them() -> None:
    starts = jnp.array([[0, 13, 30], [3, 20, 40]])
    mesh, x = mesh_of(seq=2), draw()[:3]

    def mapped(function: Any) -> Any:
        def local(*x: jax.Array) -> jax.Array:
            return function(*x, axis_name="seq", boundaries=starts, **DROPOUT)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq")))

    with pytest.raises(
        NotImplementedError, match=r"`boundaries` and `dropout_rate` .*`segment_ids`.*`all_to_all_attent"
    ):
        mapped(ring_attention)(*x)
    found = mapped(all_to_all_attention)(*x)
    one = attention_varlen(*(y[0] for y in x), starts[0], starts[0], **DROPOUT)
    calls.assert_same(jax.device_get(found[0]), jax.device_get(one), 2e-6)
