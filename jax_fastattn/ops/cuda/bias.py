# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias as kernels read it: the layouts of `kernels/bias_shapes.py`, in which -inf stands for `HIDDEN_BIAS` and below.

Its axes of batch entries and heads are joined to one axis, the planes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_fastattn.kernels.arguments.present import present_buffers
from jax_fastattn.kernels.bias_shapes import KEY_PARTS, bias_kind, bias_pitch
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.abstract import statistics_dtype
from jax_fastattn.ops.cuda.split import bfloat16_terms
from jax_fastattn.spec import HIDDEN_BIAS, AttentionSpec, Operands

# Below it a scale is multiplied into the query where a bias of keys is divided by it, so that the quotient of a number
# like -1e30 stays in its range.
MIN_SCALE = 2.0**-20

_LOG2_E = math.log2(math.e)
# Larger quotients count as this one: its parts in bfloat16 are finite, and so are its sums with products.
_LARGEST = 2.0**127


def bias_operands(kernel: KernelSpec, bias: jax.Array | None, key_length: int, scale: float) -> dict[str, jax.Array]:
    """Returns the operands of a launch that stand for a bias `[b, n, t, s]`, by name; none without a bias.

    Args:
        key_length: S.
        scale: the scalar of the launch.
    """
    if bias is None:
        return {}
    planes, pitch = bias.shape[0] * bias.shape[1], bias_pitch(bias.shape, key_length)
    found = {}
    for name, buffer in present_buffers(kernel).items():
        if buffer is not None and name in _LAYOUTS:
            found[name] = _LAYOUTS[name](kernel, bias.reshape(planes, *bias.shape[2:]), pitch, scale)
    return found


def with_usable_scale(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns a call whose scale a bias of keys may be divided by: one that is too small is part of the query."""
    bias = operands.bias
    if bias is None or bias_kind(bias.shape) != "keys" or abs(spec.scale) >= MIN_SCALE:
        return spec, operands
    query = (operands.query.astype(jnp.float32) * spec.scale).astype(operands.query.dtype)
    return replace(spec, scale=1.0), operands._replace(query=query)


def _matrix(kernel: KernelSpec, bias: jax.Array, pitch: int, scale: float) -> jax.Array:
    """Returns a bias `[planes, T, S]` as `[terms, planes, T, pitch]`."""
    del scale
    missing = pitch - bias.shape[2]
    x = jnp.pad(bias, [(0, 0), (0, 0), (0, missing)]) if missing else bias
    terms = [x] if kernel.bias_terms == 1 else _hidden_terms(x, kernel.bias_terms)
    return jnp.stack([term.astype(kernel.bias_storage) for term in terms])


def _keys(kernel: KernelSpec, bias: jax.Array, pitch: int, scale: float) -> jax.Array:
    """Returns a bias `[planes, 1, S]` as `[planes, pitch]`, times log2(e)."""
    del kernel, scale
    return _padded_keys(_hidden(bias)[:, 0] * _LOG2_E, pitch)


def _key_parts(kernel: KernelSpec, bias: jax.Array, pitch: int, scale: float) -> jax.Array:
    """Returns a bias `[planes, 1, S]` as `[planes, pitch, 8]`, over the scale as far as the kernel multiplies by it."""
    x, divisor = _hidden(bias)[:, 0], abs(scale) if kernel.is_affine else scale
    x = jnp.where(jnp.isinf(x), x * math.copysign(1.0, divisor), jnp.clip(x / divisor, -_LARGEST, _LARGEST))
    terms = [_padded_keys(term, pitch) for term in bfloat16_terms(x, 3)]
    return jnp.stack([*terms, *[jnp.zeros_like(terms[0])] * (KEY_PARTS - 3)], axis=-1).astype(jnp.bfloat16)


def _rows(kernel: KernelSpec, bias: jax.Array, pitch: int, scale: float) -> jax.Array:
    """Returns a bias `[planes, t, 1]` as `[planes, t]`, times log2(e)."""
    del kernel, pitch, scale
    return _hidden(bias)[..., 0] * _LOG2_E


# Each name has a function of the compile key, the bias `[planes, t, s]`, the pitch and the scale.
_LAYOUTS = {"bias": _matrix, "key_bias": _keys, "key_bias_parts": _key_parts, "row_bias": _rows}


def _hidden(bias: jax.Array) -> jax.Array:
    """Returns a bias in float32, with -inf for what hides."""
    wide = bias.astype(statistics_dtype(bias.dtype))
    return jnp.where(wide <= HIDDEN_BIAS, -jnp.inf, wide).astype(jnp.float32)


def _hidden_terms(bias: jax.Array, count: int) -> list[jax.Array]:
    """Returns `bfloat16_terms` of `_hidden`.

    No two of them share a comparison: XLA for GPUs would write down its results, a byte for each pair.
    """
    wide = bias.astype(statistics_dtype(bias.dtype))
    first, *others = bfloat16_terms(wide.astype(jnp.float32), count)
    return [
        jnp.where(wide <= HIDDEN_BIAS, -jnp.inf, first),
        *(jnp.where(wide > HIDDEN_BIAS, term, 0.0) for term in others),
    ]


def _padded_keys(x: jax.Array, pitch: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, pitch - x.shape[1])])
