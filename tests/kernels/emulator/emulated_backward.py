# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of emulated backward kernels, poisoned, and their gradients in float64."""

from __future__ import annotations

import functools
import pkgutil
from dataclasses import dataclass
from typing import Any

import cutlass
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from testing.poison import full, visible_rows

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.scalars import BIAS_SCALARS
from jax_fastattn.kernels.bias_shapes import BiasPlanes, bias_pitch
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.tiles import COLUMN_WARPS, ROW_SUMS
from jax_fastattn.ops.cuda.bias import bias_operands
from jax_fastattn.ops.cuda.bias_gradient import bias_gradient
from jax_fastattn.ops.cuda.gradient_units import gradient_units
from jax_fastattn.spec import AttentionSpec, Operands

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int32": np.int32, "float32": np.float32}
DEVICE_DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "int32": cutlass.Int32,
    "float32": cutlass.Float32,
}


# Errors of these shares of the largest result are roundings of P, dS and the output, in each pass, by `result_dtype`.
FORWARD_TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-14}
BACKWARD_TOLERANCE = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-13}

# A key with every bound that `Sizes` has numbers for.
BOUNDED = {
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
}


@dataclass(frozen=True)
class Sizes:
    """Run-time side of a case: distinct sizes, no multiple of a tile. Operands that the spec lacks are unused.

    With these offsets and lengths some rows see no key, some rows and keys are padding, and one sequence is empty. A
    `shift` is added to queries and taken off keys, which makes all scores about -shift^2 * head_dim * scale.
    `bias` is the shape of a bias `[b, n, t, s]`, of which a share of `bias_holes` is -inf. `factor` multiplies queries
    and keys, `cotangents` those of each key/value head, and `sink` is added to sinks. A `value_mean` is added to
    values, which are then numbers of bfloat16 with a spread of 8: delta is nearly as large as what it is taken off.
    """

    batch: int = 3
    queries: int = 133
    keys: int = 201
    kv_heads: int = 1
    left: int = 37
    right: int = 5
    cap: float = 1.5
    scale: float = 0.2
    query_lengths: tuple[int, ...] = (133, 70, -1)
    key_lengths: tuple[int, ...] = (999, 0, 77)
    offsets: tuple[int, ...] = (60, -140, 1 << 30)
    shift: float = 0.0
    value_mean: float = 0.0
    bias: tuple[int, int, int, int] | None = None
    bias_holes: float = 0.0
    bias_parts: int = 1
    factor: float = 1.0
    cotangents: tuple[float, ...] = ()
    sink: float = 0.0


def reference(spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes out, lse, delta and the gradients in float64; with `spec.dsinks` what rows add to that of their sink."""
    _, _, pairs = visibility(spec, sizes)
    return gradients(spec, sizes, arrays, pairs[:, None], stored_queries(spec, sizes))


def gradients(
    spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray], seen: np.ndarray, inside: np.ndarray
) -> dict[str, np.ndarray]:
    """Computes what `reference` does.

    Args:
        spec: the compile key.
        sizes: its scale and cap are read.
        arrays: the operands.
        seen: which query sees which key, `[B, 1 or N, T, S]`.
        inside: which queries are no padding, `[B, T]`.
    """
    query, key, value, dout = (arrays[name].astype(np.float64) for name in ("query", "key", "value", "dout"))
    batch, queries, heads, _ = query.shape
    result = {
        "out": np.zeros(dout.shape),
        "lse": np.full((batch, queries, heads), -np.inf),
        "delta": np.zeros((batch, queries, heads)),
        "dq": np.zeros(query.shape),
        "dk": np.zeros(key.shape),
        "dv": np.zeros(value.shape),
    }
    if spec.dsinks:
        result["dsinks_terms"] = np.zeros((batch, queries, heads))
    if spec.dbias:
        result["dbias"] = np.zeros(arrays["whole_bias"].shape)
    pairs = np.broadcast_to(seen, (batch, heads, *seen.shape[2:]))
    for b, n in np.ndindex(batch, heads):
        seen, kv = pairs[b, n], n // spec.group
        logits, slope = sizes.scale * query[b, :, n] @ key[b, :, kv].T, 1.0
        if sizes.bias is not None:
            logits = logits + bias_of(arrays, b, n, heads)
        for feature in foreign_features(spec):
            logits, seen = feature.reference(logits, seen, n, arrays)
        if {codes.SOFT_CAP, codes.EXACT_SOFT_CAP} & {*spec.features}:
            tanh = np.tanh(logits / sizes.cap)
            logits, slope = sizes.cap * tanh, 1 - tanh**2
        lse = np.logaddexp.reduce(np.where(seen, logits, -np.inf), axis=1)
        some = np.isfinite(lse)
        if spec.dsinks:
            lse = np.logaddexp(lse, np.where(inside[b], arrays["sinks"][b, n], -np.inf))
        p = np.where(seen, np.exp(logits - np.where(some, lse, 0)[:, None]), 0)
        out = p @ value[b, :, kv]
        dlse = arrays["dlse"][b, :, n] if spec.dlse else 0.0
        product = (out * dout[b, :, n]).sum(1)
        delta = np.where(some, product - dlse, 0)
        if spec.dsinks:
            weight = np.exp(arrays["sinks"][b, n] - np.where(np.isneginf(lse), np.inf, lse))
            result["dsinks_terms"][b, :, n] = weight * (dlse - product)
        ds = p * (dout[b, :, n] @ value[b, :, kv].T - delta[:, None]) * slope
        if spec.dbias:
            axes = tuple(axis for axis in range(2) if result["dbias"].shape[2 + axis] == 1)
            result["dbias"][bias_plane(result["dbias"], b, n, heads)] += ds.sum(axes, keepdims=True)
        ds = ds * sizes.scale
        result["out"][b, :, n], result["lse"][b, :, n], result["delta"][b, :, n] = out, lse, delta
        result["dq"][b, :, n] = ds @ key[b, :, kv]
        result["dk"][b, :, kv] += ds.T @ query[b, :, n]
        result["dv"][b, :, kv] += p.T @ dout[b, :, n]
    return result


def foreign_features(spec: KernelSpec) -> list[Any]:
    """Returns classes of features that tests add, which say what they compute by `draw` and `reference`."""
    return [
        pkgutil.resolve_name(code.feature) for code in spec.features if not code.feature.startswith("jax_fastattn.")
    ]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _visible(spec: AttentionSpec, queries: int, keys: int, **optional: jax.Array) -> tuple[jax.Array, ...]:
    batch = next((len(x) for x in optional.values()), 1)
    query, key = (jnp.zeros((batch, length, 1, 1)) for length in (queries, keys))
    return visible_rows(spec, Operands(query, key, key, **optional))


def visibility(spec: KernelSpec, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns which queries see a key, bool `[batch, queries]`, which keys a query sees, and which query sees which."""
    scalars = {
        "query_seq_lengths": sizes.query_lengths,
        "key_value_seq_lengths": sizes.key_lengths,
        "query_offset": sizes.offsets,
    }
    optional = {name: np.array(x[: sizes.batch], np.int32) for name, x in scalars.items() if getattr(spec, name)}
    window = sizes.left if spec.window_left else None, sizes.right if spec.window_right else None
    call = AttentionSpec(1.0, window=window, present=("query", "key", "value", *optional))
    sees, seen, pairs = (np.asarray(x) for x in _visible(call, sizes.queries, sizes.keys, **optional))
    shape = sizes.batch, sizes.queries, sizes.keys
    return (
        np.broadcast_to(sees[..., 0], shape[:2]),
        np.broadcast_to(seen[..., 0], shape[::2]),
        np.broadcast_to(pairs[:, 0], shape),
    )


def stored_queries(spec: KernelSpec, sizes: Sizes) -> np.ndarray:
    """Returns which queries are no padding, bool `[batch, queries]`."""
    lengths = np.array(sizes.query_lengths)[: sizes.batch, None] if spec.query_seq_lengths else sizes.queries
    return np.broadcast_to(np.arange(sizes.queries) < lengths, (sizes.batch, sizes.queries))


def draw_sinks(spec: KernelSpec, sizes: Sizes) -> np.ndarray:
    """Draws sinks, float32 `[batch, heads]`."""
    shape = sizes.batch, sizes.kv_heads * spec.group
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32) + np.float32(sizes.sink)


def draw_bias(spec: KernelSpec, sizes: Sizes, random: np.random.Generator, pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Draws a bias: `whole_bias` `[b, n, t, s]` in float64, and what kernels read; none if there is none.

    Kernels read poison where none of the visible `pairs` `[B, 1 or N, T, S]` does.
    """
    if sizes.bias is None:
        return {}
    drawn = 2.0 * random.standard_normal(sizes.bias)
    drawn[random.random(sizes.bias) < sizes.bias_holes] = -np.inf
    bias = drawn.astype(DTYPES[spec.bias_dtype or "float32"])
    poisoned = fill(bias, ~read_bias(sizes, pairs), axis=3)
    operands = bias_operands(spec, jnp.asarray(poisoned), sizes.keys, sizes.scale)
    return {"whole_bias": bias.astype(np.float64)} | {name: np.asarray(x) for name, x in operands.items()}


def read_bias(sizes: Sizes, pairs: np.ndarray) -> np.ndarray:
    """Returns which entries of a bias visible pairs `[B, 1 or N, T, S]` read, bool `[b, n, t, s]`."""
    assert sizes.bias is not None
    heads = sizes.bias[1]
    if 1 < heads < pairs.shape[1]:
        pairs = pairs.reshape(pairs.shape[0], heads, -1, *pairs.shape[2:]).any(2)
    shared = tuple(axis for axis, size in enumerate(sizes.bias) if size == 1)
    return np.broadcast_to(pairs.any(shared, keepdims=True), sizes.bias)


def bias_plane(bias: np.ndarray, b: int, n: int, heads: int) -> tuple[int, int]:
    """Returns the index of the plane of a query head in a bias `[b, n, t, s]`."""
    return min(b, bias.shape[0] - 1), n * bias.shape[1] // heads


def bias_of(arrays: dict[str, np.ndarray], b: int, n: int, heads: int) -> np.ndarray:
    """Returns the bias of a query head, `[t, s]`."""
    return arrays["whole_bias"][bias_plane(arrays["whole_bias"], b, n, heads)]


def bias_scalars(spec: KernelSpec, sizes: Sizes) -> dict[str, int | None]:
    """Returns the scalars of a bias by name."""
    if sizes.bias is None:
        return dict.fromkeys(BIAS_SCALARS)
    planes = BiasPlanes.of(sizes.bias, sizes.kv_heads * spec.group)
    numbers = (planes.batch, planes.head, planes.kv_head, planes.count, bias_pitch(sizes.bias, sizes.keys))
    return dict(zip(BIAS_SCALARS, numbers, strict=True))


def fill(x: np.ndarray, hidden: np.ndarray, axis: int = 1) -> np.ndarray:
    """As `poison.fill`, which JAX compiles for each shape."""
    return np.where(hidden.reshape(hidden.shape + (1,) * (x.ndim - hidden.ndim)), full(x.shape, x.dtype, axis), x)


def is_poison(x: np.ndarray) -> np.ndarray:
    """Returns which elements `fill` has put into an array that was drawn, whose own are far smaller."""
    return ~(np.abs(x.astype(np.float32)) < 1e4)


def draw_operands(spec: KernelSpec, sizes: Sizes, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws operands, poisoned, and their results. Residuals of rows that see nothing are poisoned as well."""
    random = np.random.default_rng(seed)
    heads = sizes.kv_heads * spec.group
    shapes = {
        "query": (sizes.batch, sizes.queries, heads, spec.head_dim),
        "key": (sizes.batch, sizes.keys, sizes.kv_heads, spec.head_dim),
        "value": (sizes.batch, sizes.keys, sizes.kv_heads, spec.v_head_dim),
        "dout": (sizes.batch, sizes.queries, heads, spec.v_head_dim),
        "dlse": (sizes.batch, sizes.queries, heads),
    }
    dtypes = {name: np.dtype(DTYPES[spec.result_dtype if name != "dlse" else "float32"]) for name in shapes}
    shifts = {"query": sizes.shift, "key": -sizes.shift}
    drawn = {name: random.standard_normal(shape) + shifts.get(name, 0.0) for name, shape in shapes.items()}
    drawn |= {name: drawn[name] * sizes.factor for name in shifts}
    if sizes.cotangents:
        drawn["dout"] *= np.repeat(sizes.cotangents, spec.group)[:, None]
    if sizes.value_mean:
        drawn["value"] = (sizes.value_mean + 8 * drawn["value"]).astype(DTYPES["bfloat16"])
    arrays = {name: x.astype(dtypes[name]) for name, x in drawn.items()}
    for feature in foreign_features(spec):
        arrays |= feature.draw(random, heads, sizes.queries, sizes.keys)
    arrays |= draw_bias(spec, sizes, random, visibility(spec, sizes)[2][:, None])
    if spec.dsinks:
        arrays["sinks"] = draw_sinks(spec, sizes)
        arrays["sinks"][0, 1:2] = sizes.sink or -np.inf
    wanted = reference(spec, sizes, arrays)
    arrays |= {"out": wanted["out"].astype(dtypes["dout"]), "lse": wanted["lse"].astype(np.float32)}
    sees, seen, _ = visibility(spec, sizes)
    rows = dict.fromkeys(("query", "dout", "dlse", "out", "lse"), sees) | dict.fromkeys(("key", "value"), seen)
    if spec.dsinks:  # a log-sum-exp that is a sink alone has a cotangent; that of padding is -inf
        rows |= {"lse": np.ones_like(sees), "dlse": stored_queries(spec, sizes)}
    arrays |= {name: fill(arrays[name], ~hidden) for name, hidden in rows.items()}
    arrays |= draw_units(spec, arrays)
    arrays |= {
        "query_seq_lengths": np.array(sizes.query_lengths, np.int32),
        "key_value_seq_lengths": np.array(sizes.key_lengths, np.int32),
        "query_offset": np.array(sizes.offsets, np.int32),
    }
    return arrays, wanted


@jax.jit
def _units(query: jax.Array, key: jax.Array, value: jax.Array, *results: jax.Array | None) -> jax.Array:
    out, lse, dout, dlse, sinks = results
    assert out is not None and lse is not None and dout is not None
    return gradient_units(Operands(query, key, value, sinks=sinks), out, lse, dout, dlse)


def draw_units(spec: KernelSpec, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the units of P and dS that operands and results have, as ops compute them; none if there are none."""
    if not spec.has_gradient_units:
        return {}
    given = [arrays[name] for name in ("query", "key", "value", "out", "lse", "dout")]
    optional = [arrays["dlse"] if spec.dlse else None, arrays["sinks"] if spec.dsinks else None]
    return {"gradient_units": np.asarray(_units(*given, *optional))}


def dsinks_buffer(spec: KernelSpec, sizes: Sizes) -> dict[str, np.ndarray]:
    """Returns a buffer of NaN, `[batch, heads, queries]`, for what rows add to the gradient of their sink, by name."""
    if not spec.dsinks:
        return {}
    return {"dsinks_terms": np.full((sizes.batch, sizes.kv_heads * spec.group, sizes.queries), np.nan, np.float32)}


def dbias_buffers(spec: KernelSpec, sizes: Sizes) -> dict[str, np.ndarray]:
    """Returns buffers of NaN for what kernels write of the gradient of a bias, by name."""
    found = {}
    if spec.sums_dbias:
        assert sizes.bias is not None
        shape: tuple[int, ...] = sizes.bias[0] * sizes.bias[1], sizes.queries, bias_pitch(sizes.bias, sizes.keys)
        if spec.drow_bias:
            shape = sizes.batch, sizes.kv_heads * spec.group, COLUMN_WARPS[spec.family], ROW_SUMS, sizes.queries
        found["dbias"] = np.full((sizes.bias_parts, *shape), np.nan, DTYPES[spec.dbias_dtype])
    if spec.dkey_bias:
        warps = spec.config.column_warps if spec.family == "sm80" else 1
        shape = sizes.batch, sizes.kv_heads * spec.group * warps, sizes.keys
        found["dkey_bias"] = np.full(shape, np.nan, np.float32)
    return found


def compare_dbias(
    spec: KernelSpec,
    sizes: Sizes,
    found: dict[str, np.ndarray],
    arrays: dict[str, np.ndarray],
    wanted: np.ndarray,
    pairs: np.ndarray,
    tolerance: float,
) -> None:
    """Raises an `AssertionError` if the gradient of a bias is wrong, or not 0 where none of the visible pairs reads it.

    Args:
        spec: the compile key.
        sizes: of the call.
        found: what kernels have written.
        arrays: the operands.
        wanted: the gradient, `[b, n, t, s]`.
        pairs: the visible ones, `[B, 1 or N, T, S]`.
        tolerance: relative to the largest number.
    """
    batch, heads, queries, keys = wanted.shape
    if spec.dmatrix_bias:
        got = found["dbias"].sum(0)[..., :keys].reshape(wanted.shape)
    elif spec.drow_bias:
        dlse = jnp.asarray(arrays["dlse"]) if spec.dlse else None
        got = np.asarray(bias_gradient(wanted.shape, {"dbias": jnp.asarray(found["dbias"], jnp.float32)}, dlse))
    else:
        members = found["dkey_bias"].shape[1] // heads
        got = found["dkey_bias"].reshape(sizes.batch // batch, batch, heads, members, queries, keys)
        got = got.sum((0, 3)) if batch == 1 else got[0].sum(2)
    largest = np.abs(wanted).max()
    assert largest > 0
    np.testing.assert_allclose(got, wanted, atol=tolerance * largest, rtol=0, err_msg="dbias")
    assert not got[~read_bias(sizes, pairs)].any(), "a bias that no visible pair reads has a gradient"


def compare_dsinks_terms(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """Raises an `AssertionError` if what rows `[batch, heads, queries]` add is not `[batch, queries, heads]`."""
    assert np.abs(wanted).max() > 0
    atol = tolerance * np.abs(wanted).max()
    np.testing.assert_allclose(found.swapaxes(1, 2), wanted, atol=atol, rtol=0, err_msg="dsinks_terms")
    assert not found.swapaxes(1, 2)[wanted == 0].any(), "padding adds to the gradient of sinks"


def with_sinks(spec: KernelSpec, sizes: Sizes, wanted: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns sinks of `draw_sinks`, and the output and the log-sum-exp that they give."""
    sinks, inside = draw_sinks(spec, sizes), stored_queries(spec, sizes)
    lse = np.logaddexp(wanted["lse"], np.where(inside[..., None], sinks[:, None], -np.inf))
    share = np.exp(wanted["lse"] - np.where(np.isneginf(lse), 0, lse))
    return sinks, wanted["out"] * share[..., None], lse
