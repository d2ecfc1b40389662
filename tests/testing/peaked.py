# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls whose logits have a spread of 11, and the errors of dq and dk, with and without `precise_gradients`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical import batched, packed
from jax_fastattn.kernels.sums.out_rests import keeps_rests
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV, AttentionSpec, Operands
from testing.poison import poison

# Errors with the argument are at most this times the errors without it. A NumPy model of the roundings predicts 0.38 on
# Hopper and 0.54 in the portable family, whose rows keep lower maxima.
SHARE = 0.7


@dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
        arch: the GPU that is emulated.
        head_dims: of keys and of values.
        lengths: of queries and of keys.
        options: other arguments, except boundaries.
    """

    arch: str = "sm_90a"
    head_dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int] = (96, 256)
    heads: int = 1
    batch: int = 1
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    boundaries: tuple[tuple[int, ...], ...] | None = None


def _mask(queries: int, keys: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).random((1, 1, queries, keys)) < 0.7)


PACKED: dict[str, Any] = {"lengths": (150, 300), "boundaries": ((0, 70, 71, 140), (0, 130, 140, 290))}
CALLS = {
    "sm90-d64": Call(),
    "sm80-d64": Call("sm_80"),
    "sm90-d36": Call(head_dims=(36, 36)),
    "sm90-d72-d40-causal": Call(head_dims=(72, 40), lengths=(150, 300), options={"is_causal": True}),
    "sm90-d128-float16": Call(head_dims=(128, 128), dtype="float16"),
    "sm90-d256-sinks": Call(head_dims=(256, 256), heads=2, options={"sinks": jnp.array([0.5, 3.0])}),
    "sm90-d64-lengths": Call(
        lengths=(130, 300),
        heads=3,
        batch=2,
        options={"query_seq_lengths": jnp.array([101, 130]), "key_value_seq_lengths": jnp.array([217, 300])},
    ),
    "sm90-d128-mask": Call(head_dims=(128, 128), lengths=(130, 300), options={"mask": _mask(130, 300)}),
    "sm90-d64-few": Call(lengths=(4, 600)),
    "sm90-d64-dropout": Call(options={"dropout_rate": 0.25, "dropout_key": jax.random.key(3)}),
    "sm90-d64-packed": Call(**PACKED),
    "sm90-d64-packed-distances": Call(
        **PACKED, options={"mask_mod": lambda b, h, q, k: _mask(1, 900)[0, 0, 0, k - q + 400]}
    ),
    "sm80-d128-float16-causal": Call("sm_80", (128, 128), dtype="float16", options={"is_causal": True}),
    "sm80-d192-d40-sinks": Call("sm_80", (192, 40), heads=2, options={"sinks": jnp.array([0.5, 3.0])}),
    "sm80-d36-mask": Call("sm_80", (36, 36), (130, 300), heads=2, batch=2, options={"mask": _mask(130, 300)}),
    "sm120-d256": Call("sm_120a", (256, 256)),
    "sm80-d64-packed": Call("sm_80", **PACKED),
}


def errors(
    call: Call, spec: AttentionSpec, operands: Operands, dout: jax.Array, *, on_gpu: bool = False
) -> list[list[float]]:
    """Returns the relative errors of dq and dk by the kernels, without `precise_gradients` and with it."""
    expected, (given, given_dout, _) = _reference(spec, operands, dout), poison(spec, operands, dout, None)
    by_kernels = jax.jit(_by_kernels, static_argnums=0) if on_gpu else _by_kernels
    found = []
    for asks in (False, True):
        asked = replace(spec, precise_gradients=asks)
        gradients = by_kernels(replace(asked, keeps_rests=keeps_rests(asked, call.dtype)), given, given_dout)
        found.append([_error(x, y) for x, y in zip(gradients, expected, strict=True)])
    return found


def _by_kernels(spec: AttentionSpec, operands: Operands, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, lse, *rests = cuda.forward(spec, operands)
    assert len(rests) == spec.precise_gradients and all(x.dtype == jnp.int8 and x.shape == out.shape for x in rests)
    taken = operands._replace(out_rests=rests[0]) if rests else operands
    found = cuda.backward(replace(spec, present=taken.present()), taken, out, lse, dout, None, QKV)
    return found.query, found.key


def draw(call: Call) -> tuple[AttentionSpec, Operands, jax.Array]:
    """Returns a call whose logits have a spread of 11, and a cotangent."""
    random, (queries, keys), (head_dim, v_head_dim) = np.random.default_rng(0), call.lengths, call.head_dims
    rows = (call.batch, queries, call.heads), (call.batch, keys, 1)
    shapes = (*rows[0], head_dim), (*rows[1], head_dim), (*rows[1], v_head_dim), (*rows[0], v_head_dim)
    query, key, value, dout = (jnp.asarray(random.standard_normal(shape), call.dtype) for shape in shapes)
    options = {"scale": 11 / head_dim**0.5, **call.options}
    if call.boundaries is not None:
        boundaries = (jnp.asarray(x, jnp.int32) for x in call.boundaries)
        return *packed.canonicalize(query[0], key[0], value[0], *boundaries, **options), dout
    return *batched.canonicalize(query, key, value, **options), dout


def _reference(spec: AttentionSpec, operands: Operands, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(query: jax.Array, key: jax.Array) -> jax.Array:
        single = operands._replace(query=query, key=key, value=operands.value.astype(jnp.float32))
        return (attention_reference(spec, single)[0] * dout.astype(jnp.float32)).sum()

    return jax.grad(loss, (0, 1))(operands.query.astype(jnp.float32), operands.key.astype(jnp.float32))


def _error(found: jax.Array, expected: jax.Array) -> float:
    """Returns the relative error, in root mean square."""
    x, y = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.sqrt(((x - y) ** 2).mean() / (y**2).mean()))
