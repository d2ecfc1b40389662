# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls whose rows are split over forced host devices, and the same calls on one device."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import calls
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_fastattn
from jax_fastattn import attention, attention_varlen, ring_attention

# How arrays of a call, apart from query, key and value, are split: by batch, or by rows.
ROWS, BATCH, WHOLE = P("data", "seq"), P("data"), P()
SPECS = {
    "bias": P("data", None, "seq"),
    "mask": P("data", None, "seq"),
    "segment_ids": ROWS,
    "query_seq_lengths": BATCH,
    "key_value_seq_lengths": BATCH,
    "query_offset": BATCH,
    "boundaries": BATCH,
    "sinks": WHOLE,
    "scale": WHOLE,
}
# Which axis of an array has rows, and so is in zigzag order.
ROW_AXIS = {"bias": 2, "mask": 2, "segment_ids": 1}
MOVED = ("query", "key", "value", "bias", "sinks", "scale")


def make_mesh(size: int, data: int = 1) -> Mesh:
    devices = jax.devices()[: size * data]
    return jax.make_mesh((data, size), ("data", "seq"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def draw(
    length: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (8, 8),
    keys: int | None = None,
    dtype: Any = jnp.float32,
) -> calls.Arrays:
    """Query, key, value and a cotangent of the output under "dout"."""
    (num_heads, kv_heads), (dim, v_dim), keys = heads, head_dims, length if keys is None else keys
    shapes = {
        "query": (batch, length, num_heads, dim),
        "key": (batch, keys, kv_heads, dim),
        "value": (batch, keys, kv_heads, v_dim),
        "dout": (batch, length, num_heads, v_dim),
    }
    draws = jax.random.split(jax.random.key(7), len(shapes))
    return {
        name: jax.random.normal(key, shape, dtype) for key, (name, shape) in zip(draws, shapes.items(), strict=True)
    }


def draw_every_operand(keys: int = 16) -> calls.Arrays:
    """Returns a call of 24 queries over so many keys with every array that unpacked rows take but segment ids."""
    arrays = draw(24, heads=(6, 3), head_dims=(8, 4), keys=keys)
    return arrays | {
        "sinks": jnp.linspace(-1.0, 1.0, 6),
        "scale": jnp.float32(0.4),
        "bias": jax.random.normal(jax.random.key(1), (2, 6, 24, keys)),
        "mask": jax.random.bernoulli(jax.random.key(2), 0.8, (1, 6, 24, 1)),
        "query_offset": jnp.array([-4, -9]),
        "query_seq_lengths": jnp.array([22, 19]),
        "key_value_seq_lengths": jnp.array([15, 12]),
    }


def split(
    size: int, arrays: calls.Arrays, *, layout: str = "contiguous", data: int = 1, attend: Any = None, **options: Any
) -> Callable[..., Any]:
    """Returns a function of query, key, value and the other arrays, whole and in order, that `size` devices compute."""
    names = [name for name in arrays if name != "dout"]
    mapped = functools.partial(attend or ring_attention, axis_name="seq", **options)
    if attend is None:
        mapped = functools.partial(mapped, layout=layout)

    def fits(x: Any, spec: P) -> P:
        return P(*(None if n == 1 else e for e, n in zip(spec, x.shape, strict=False)))

    specs = {name: fits(arrays[name], SPECS.get(name, ROWS)) for name in names}
    sharded = jax.shard_map(
        lambda arrays: mapped(**arrays), mesh=make_mesh(size, data), in_specs=(specs,), out_specs=ROWS
    )

    def order(name: str, x: jax.Array, function: Any) -> jax.Array:
        axis = ROW_AXIS.get(name, 1 if name in ("query", "key", "value", "out") else None)
        if layout == "contiguous" or axis is None or x.shape[axis] == 1:
            return x
        return function(x, size, axis)

    def run(arrays: calls.Arrays) -> Any:
        found = sharded({name: order(name, x, jax_fastattn.zigzag) for name, x in arrays.items()})
        return jax.tree.map(lambda x: order("out", x, jax_fastattn.unzigzag), found)

    return run


def whole(**options: Any) -> Callable[..., Any]:
    """Returns a function of the same arrays that one device computes."""

    def run(arrays: calls.Arrays) -> Any:
        if "boundaries" not in arrays:
            return attention(**arrays, **options)
        packed = functools.partial(attention_varlen, **options)
        q, k, v, ends = (arrays[name] for name in ("query", "key", "value", "boundaries"))
        return jax.vmap(packed, in_axes=(0, 0, 0, 0, 0))(q, k, v, ends, ends)

    return run


def gradients(function: Callable[..., Any], arrays: calls.Arrays, dlse: jax.Array | None = None) -> Any:
    """Results and gradients by name."""

    def run(arrays: calls.Arrays) -> Any:
        given = {name: x for name, x in arrays.items() if name != "dout"}
        moved = {name: x for name, x in given.items() if name in MOVED}
        results, pullback = jax.vjp(lambda moved: function(given | moved), moved)
        dout = arrays["dout"]
        return results, pullback(dout if dlse is None else (dout, dlse))[0]

    return calls.quick_jit(run)(arrays)


def check(
    size: int,
    arrays: calls.Arrays,
    *,
    layouts: Sequence[str] = ("contiguous", "zigzag"),
    dlse: jax.Array | None = None,
    data: int = 1,
    balance: bool = False,
    **options: Any,
) -> None:
    """Asserts that devices compute what one does, gradients included."""
    expected = gradients(whole(**options), arrays, dlse)
    for layout in layouts:
        found = gradients(split(size, arrays, layout=layout, data=data, balance=balance, **options), arrays, dlse)
        calls.assert_same(jax.device_get(found), jax.device_get(expected))


def permutes(text: str) -> list[int]:
    """Bytes of each collective permute of a lowered program (StableHLO), in order."""
    sizes = {"ui8": 1, "ui16": 2, "ui32": 4, "bf16": 2, "f32": 4, "i32": 4}
    found = re.findall(r"stablehlo\.collective_permute.*?-> tensor<([0-9x]+)x([a-z0-9]+)>", text, re.DOTALL)
    return [sizes[dtype] * functools.reduce(lambda a, b: a * int(b), shape.split("x"), 1) for shape, dtype in found]
