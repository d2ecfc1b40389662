# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias from what the kernels write, and what they leave to XLA of a bias of rows.

A bias of rows changes no weight of a key if there is no soft cap. So the kernels of the backward pass do not read it:
it is taken off the log-sum-exps. Its gradient is the sum of dS over the keys, which is the cotangent of the row's
log-sum-exp, less what the sink takes of it. With a soft cap, which gives each key a slope, kernels read the bias, and
one of them writes three sums for each row that make its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.kernels.bias_shapes import VAGUE_LSE, bias_pitch
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.tiles import COLUMN_WARPS, KEYS, ROW_SUMS, dbias_parts
from jax_fastattn.layouts.heads import reduce_to
from jax_fastattn.ops.cuda.score_planes import diagonal_shape
from jax_fastattn.ops.cuda.summed import row_gradient
from jax_fastattn.spec import HIDDEN_BIAS, AttentionSpec, Operands, Problem

# Kernels do not read these operands if a bias of rows is left to XLA: the sum of dS is what a sink leaves.
LEFT_TO_XLA = ("bias", "sinks")

# This is four roundings of float32, relative to a sink.
SINK_ROUNDING = 2.0**-22


def is_of_rows_alone(kernel: KernelSpec) -> bool:
    """Returns whether a bias of rows is left to XLA."""
    return kernel.bias == "rows" and not kernel.row_bias


def backward_spec(
    problem: Problem, arch: str, *, dlse: bool, dsinks: bool, dbias: bool, multiprocessors: int
) -> KernelSpec:
    """Returns the compile key of the launch that `ops/cuda/passes.py` makes for gradients that kernels compute.

    Args:
        dlse, dsinks, dbias: as for `kernel_spec`.
        multiprocessors: the number that the GPU has.
    """
    kernel = kernel_spec(problem, "backward", arch, dlse=dlse, dsinks=dsinks, dbias=dbias)
    if is_of_rows_alone(kernel):
        others = replace(problem, spec=_spec_without_rows(problem.spec), bias_shape=None, bias_dtype=None)
        return kernel_spec(others, "backward", arch, dlse=dlse)
    return with_parts(kernel, result_shapes(kernel, problem, multiprocessors))


def without_rows(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns the part of a call with a bias of rows that kernels compute; `XlaRowBias` has the rest."""
    return _spec_without_rows(spec), operands._replace(**dict.fromkeys(LEFT_TO_XLA))


def _spec_without_rows(spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec without operands in `LEFT_TO_XLA`. A sink has a share of the log-sum-exps all the same."""
    present = tuple(name for name in spec.present if name not in LEFT_TO_XLA)
    return replace(spec, present=present, is_part=spec.is_part or "sinks" in spec.present)


def with_parts(kernel: KernelSpec, shapes: Mapping[str, tuple[int, ...]]) -> KernelSpec:
    """Returns a compile key that says whether a gradient of `result_shapes` has parts."""
    return replace(kernel, splits_dbias=shapes["dbias"][0] > 1) if kernel.dmatrix_bias else kernel


def result_shapes(kernel: KernelSpec, problem: Problem, multiprocessors: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of what a launch writes of the gradient of a bias, by name; none if it is not asked for."""
    shape = problem.bias_shape
    found: dict[str, tuple[int, ...]] = {}
    if kernel.dkey_bias:
        warps = kernel.config.column_warps if kernel.family == "sm80" else 1
        found["dkey_bias"] = problem.batch, problem.num_heads * warps, problem.key_length
    queries, keys, heads = problem.query_length, problem.key_length, problem.batch * problem.num_heads
    if kernel.sums_rows:
        parts = dbias_parts((heads, queries, 1), -(-keys // KEYS), multiprocessors)
        rows = problem.batch, problem.num_heads, COLUMN_WARPS[kernel.family], ROW_SUMS, queries
        return found | {"dbias": (parts, *rows)}
    if kernel.sums_diagonals:
        return found | {"dbias": diagonal_shape(kernel, problem, multiprocessors)}
    if not kernel.sums_dbias or shape is None:
        return found
    planes = shape[0] * shape[1]
    parts = dbias_parts((planes, queries, keys), heads // planes, multiprocessors)
    return {"dbias": (parts, planes, queries, bias_pitch(shape, keys))}


def bias_gradient(
    shape: tuple[int, ...],
    found: Mapping[str, jax.Array],
    dlse: jax.Array | None,
    products: jax.Array | None = None,
) -> jax.Array:
    """Returns the gradient of a bias `[b, n, t, s]` in float32, from what a launch has written.

    Args:
        shape: the shape of the bias.
        found: the arrays by name.
        dlse: the cotangent of the log-sum-exps `[B, T, N]`, or None for 0.
        products: the sums of output times cotangent `[B, T, N]`, if the launch has a part of the keys of its rows.
    """
    if "dkey_bias" in found:
        return _reduced(found["dkey_bias"][:, :, None], shape)
    if shape[3] == 1:
        return _reduced(row_gradient(found["dbias"], dlse, products)[..., None], shape)
    parts = found["dbias"].astype(jnp.float32)
    total = parts[0] if parts.shape[0] == 1 else jnp.sum(parts, axis=0)
    return total[..., : shape[3]].reshape(shape)


class XlaRowBias:
    """A bias of rows that is left to XLA.

    Args:
        out: the output `[B, T, N, D]`.
        lse: the log-sum-exps `[B, T, N]`.
    """

    def __init__(self, operands: Operands, out: jax.Array, lse: jax.Array):
        bias, sinks = operands.bias, operands.sinks
        assert bias is not None
        self._shape, self._lse, self._sinks = bias.shape, lse, sinks
        rows = bias[..., 0].astype(lse.dtype).swapaxes(1, 2)
        self._rows = rows if rows.shape[2] == 1 else jnp.repeat(rows, lse.shape[2] // rows.shape[2], axis=2)
        self._is_dead = _sees_nothing(sinks, out, lse) | (self._rows <= HIDDEN_BIAS)

    def lse(self) -> jax.Array:
        """Returns the log-sum-exps without the bias, -inf of rows that see nothing; see `row_preprocess.weighable`."""
        told = jnp.where(self._lse >= VAGUE_LSE, jnp.nan, self._lse - self._rows)
        return jnp.where(self._is_dead | (self._lse <= -VAGUE_LSE), -jnp.inf, told)

    def sink_terms(self, out: jax.Array, dout: jax.Array, dlse: jax.Array | None) -> jax.Array | None:
        """Returns what each row adds to the gradient of its sink, `[B, N, T]`; None without sinks."""
        if self._sinks is None:
            return None
        dtype = self._lse.dtype
        products = jnp.where(self._is_dead, 0.0, row_products(out, dout, dtype))
        delta = products if dlse is None else products - dlse
        weight = jnp.exp(self._sinks[:, None].astype(dtype) - self._lse)
        return jnp.where(jnp.isneginf(self._lse), 0.0, -weight * delta).swapaxes(1, 2)

    def gradient(self, dlse: jax.Array | None, sink_terms: jax.Array | None) -> jax.Array:
        """Returns the gradient of the bias in the dtype of log-sum-exps."""
        total = jnp.zeros_like(self._lse) if dlse is None else dlse
        if sink_terms is not None:
            total = total - sink_terms.swapaxes(1, 2)
        return _reduced(jnp.where(self._is_dead, 0.0, total).swapaxes(1, 2)[..., None], self._shape)

    def gradients(
        self, spec: AttentionSpec, out: jax.Array, dout: jax.Array, dlse: jax.Array | None, wanted: Collection[str]
    ) -> dict[str, jax.Array]:
        """Returns the gradients of operands in `LEFT_TO_XLA` that are wanted and present, by name."""
        # A part of the keys says nothing of this gradient: `ring/gradient.py` computes it.
        assert not spec.is_part or "bias" not in wanted
        found: dict[str, jax.Array] = {}
        terms = None if {*LEFT_TO_XLA}.isdisjoint(wanted) else self.sink_terms(out, dout, dlse)
        if "bias" in wanted:
            found["bias"] = self.gradient(dlse, terms)
        if "sinks" in wanted and self._sinks is not None and terms is not None:
            found["sinks"] = reduce_to((*self._sinks.shape, 1), terms)[..., 0]
        return found


def row_products(out: jax.Array, dout: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sums of output times cotangent `[B, T, N]` in a dtype."""
    return jnp.sum(out.astype(dtype) * dout.astype(dtype), axis=3)


def _sees_nothing(sinks: jax.Array | None, out: jax.Array, lse: jax.Array) -> jax.Array:
    """Returns which rows see no key, `[B, T, N]`: their log-sum-exp is -inf or their sink, and their output is 0."""
    if sinks is None:
        return jnp.isneginf(lse)
    sink = sinks[:, None].astype(lse.dtype)
    # Kernels compute it in base 2, so it may lie some roundings above the sink.
    nearby = jnp.maximum(sink * (1 - SINK_ROUNDING), sink * (1 + SINK_ROUNDING))
    return jnp.isneginf(lse) | ((lse <= nearby) & jnp.all(out == 0, axis=3))


def _reduced(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns x `[B, N, t, s]` summed over what a bias broadcasts, whose heads may be key/value heads."""
    members = x.shape[1] // shape[1] if shape[1] > 1 else 1
    by_head = x.reshape(x.shape[0], x.shape[1] // members, members, *x.shape[2:])
    return reduce_to(shape, by_head[:, :, 0] if members == 1 else jnp.sum(by_head, axis=2))
