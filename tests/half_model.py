# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A model of float32 calls by products of float16, exact results, and a model of TF32 products.

The model reads the operands that kernels read, and rounds what they round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from testing.poison import visible_rows

from jax_fastattn.ops.cuda.half import backward_half, forward_half, times_power
from jax_fastattn.spec import AttentionSpec, Gradients, Operands


class Results(NamedTuple):
    out: jax.Array
    lse: jax.Array
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


def _half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float16).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def model(spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: jax.Array | None = None) -> Results:
    """Returns what kernels make of a call."""
    out, lse = forward_model(spec, operands)
    found = backward_model(spec, operands, out, lse, dout, dlse)
    assert found.query is not None and found.key is not None and found.value is not None
    return Results(out, lse, found.query, found.key, found.value)


def forward_model(spec: AttentionSpec, operands: Operands, **_: Any) -> tuple[jax.Array, jax.Array]:
    """Returns output and log-sum-exp: kernels round P, and add up in float32."""
    with jax.default_matmul_precision("highest"):
        sees, seen, pairs = visible_rows(spec, operands)
        forward = forward_half(spec, operands)
        query, key, value = _by_heads(forward.operands, sees, seen)
        logits = jnp.where(pairs, forward.spec.scale * jnp.einsum("bnth,bnsh->bnts", query, key), -jnp.inf)
        top = logits.max(-1, keepdims=True)
        weights = jnp.exp(logits - jnp.where(jnp.isneginf(top), 0.0, top))
        rounded = _half(weights * 2.0**6) * 2.0**-6
        total = rounded.sum(-1, keepdims=True)
        out = jnp.where(total == 0, 0.0, jnp.einsum("bnts,bnsd->bntd", rounded, value) / total).swapaxes(1, 2)
        return times_power(out, forward.out[..., None]), (top + jnp.log(total))[..., 0].swapaxes(1, 2)


def backward_model(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *_: Any,
    **__: Any,
) -> Gradients:
    """Returns the gradients of query, key and value: kernels round P and dS, and add up in float32."""
    kv_heads = operands.key.shape[2]
    with jax.default_matmul_precision("highest"):
        sees, seen, pairs = visible_rows(spec, operands)
        backward = backward_half(spec, operands, out, lse, dout, dlse)
        query, key, value = _by_heads(backward.operands, sees, seen)
        logits = jnp.where(pairs, backward.spec.scale * jnp.einsum("bnth,bnsh->bnts", query, key), -jnp.inf)
        given = {name: jnp.asarray(x).astype(jnp.float32).swapaxes(1, 2) for name, x in backward.residuals.items()}
        # Kernels take no statistics of rows that see nothing, and zero what they hold.
        given["dout"] = jnp.where(sees.swapaxes(1, 2)[..., None], given["dout"], 0.0)
        given["delta"] = jnp.where(jnp.isneginf(given["lse"]), 0.0, given["delta"])
        p = jnp.exp(logits - jnp.where(jnp.isneginf(given["lse"]), jnp.inf, given["lse"])[..., None])
        ds = _half(p * (jnp.einsum("bntd,bnsd->bnts", given["dout"], value) - given["delta"][..., None]))
        found = (
            jnp.einsum("bnts,bnsh->btnh", ds, key) * backward.spec.scale,
            _groups(jnp.einsum("bnts,bnth->bsnh", ds, query) * backward.spec.scale, kv_heads),
            _groups(jnp.einsum("bnts,bntd->bsnd", _half(p), given["dout"]), kv_heads),
        )
        exponents = backward.query, backward.key, backward.value
        return Gradients(*(times_power(x, y[..., None]) for x, y in zip(found, exponents, strict=True)))


def _by_heads(operands: Operands, sees: jax.Array, seen: jax.Array) -> list[jax.Array]:
    """Returns queries, keys and values `[B, N, L, D]` in float32; kernels zero rows that see nothing or are hidden."""
    heads = operands.query.shape[2]
    assert {x.dtype for x in operands[:3]} == {jnp.dtype(jnp.float16)}
    found = []
    for x, rows in zip(operands[:3], (sees, seen, seen), strict=True):
        live = rows if rows.shape[2] in (1, x.shape[2]) else rows[:, :, :: rows.shape[2] // x.shape[2]]
        x = jnp.where(live[..., None], x.astype(jnp.float32), 0.0)
        found.append(jnp.repeat(x, heads // x.shape[2], axis=2).swapaxes(1, 2))
    return found


def _groups(x: jax.Array, kv_heads: int) -> jax.Array:
    """Adds up the heads `[B, S, N, D]` of each group."""
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).sum(3)


def exact(
    spec: AttentionSpec, operands: Operands, dout: jax.Array, product: Callable[..., Any] = np.einsum
) -> list[np.ndarray]:
    """Returns output and gradients in float64, of a call whose heads are all alone; `product` may round."""
    query, key, value, cotangent = (np.asarray(x, np.float64) for x in (*operands[:3], dout))
    pairs = np.asarray(visible_rows(spec, operands)[2])
    logits = np.where(pairs, product("btnh,bsnh->bnts", query, key) * spec.scale, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = product("btnd,bsnd->bnts", cotangent, value)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * spec.scale
    return [
        product("bnts,bsnd->btnd", p, value),
        product("bnts,bsnh->btnh", ds, key),
        product("bnts,btnh->bsnh", ds, query),
        product("bnts,btnd->bsnd", p, cotangent),
    ]


def tf32(equation: str, *factors: np.ndarray) -> np.ndarray:
    """Returns a product as `jax.nn` has it by default on a GPU."""

    def rounded(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)

    return np.einsum(equation, *(rounded(x) for x in factors), optimize=True).astype(np.float32)


def size(x: Any) -> float:
    return float(np.sqrt((np.asarray(x, np.float64) ** 2).mean()))


def row_errors(x: Any, exact: np.ndarray) -> np.ndarray:
    """Returns errors of rows over their sizes, of rows that are not 0."""
    error, size = (np.sqrt((y**2).mean((0, 2, 3))) for y in (np.asarray(x, np.float64) - exact, exact))
    return error[size > 0] / size[size > 0]
