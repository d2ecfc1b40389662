# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents of attention by CUDA kernels, in one custom call, or two with a mask or segment ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_fastattn import ffi
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.layouts.packed_masks import RowsCall, is_row_masked
from jax_fastattn.ops.cuda.launch_plan import LaunchPlan, launched_problem
from jax_fastattn.ops.cuda.passes import cut_head_dim, for_kernels, pad_head_dim, scaled
from jax_fastattn.spec import QKV, AttentionSpec, Operands


def tangent(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    moved: Mapping[str, jax.Array],
    kernel: KernelSpec | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the tangents of output `[B, T, N, D]` and log-sum-exp `[B, T, N]`.

    Args:
        out, lse: the results of the forward pass.
        moved: tangents of operands by name, in their shapes, at least one.
        kernel: the compile key; by default the one that `kernel_spec` chooses.
    """
    if is_row_masked(spec):
        return _by_rows(RowsCall.of(spec, operands), out, lse, moved, kernel)
    tangents = {name: pad_head_dim(x) for name, x in _of_products(operands, moved).items()}
    sinks_tangent = moved.get("sinks")
    if not tangents:  # the sinks alone move
        dout, dlse = jnp.zeros_like(out), jnp.zeros_like(lse)
        return _with_sinks(operands, out, lse, dout, dlse, sinks_tangent)
    padded = for_kernels(operands._replace(out_rests=None))
    problem = launched_problem(spec, padded)
    kernel = kernel or kernel_spec(problem, "tangent", ffi.arch(), moved=tuple(tangents))
    rows = problem.batch, problem.query_length, problem.num_heads
    shapes = {"out_tangent": (*rows, problem.v_head_dim), "lse_tangent": rows}
    residuals = {"out": pad_head_dim(out), "lse": lse} | {f"{name}_tangent": x for name, x in tangents.items()}
    found = LaunchPlan.of(kernel, problem, padded, shapes, (), **residuals).bind()
    dout = found["out_tangent"].reshape(*lse.shape, problem.v_head_dim)
    dout, dlse = cut_head_dim(dout, out.shape[3]), found["lse_tangent"].reshape(lse.shape)
    return _with_sinks(operands, out, lse, dout, dlse, sinks_tangent)


def _by_rows(
    call: RowsCall, out: jax.Array, lse: jax.Array, moved: Mapping[str, jax.Array], kernel: KernelSpec | None
) -> tuple[jax.Array, jax.Array]:
    """Computes the tangents of packed sequences by a call without sequences."""
    order = call.order
    if order is None:
        return tangent(call.spec, call.operands, out, lse, moved, kernel)
    moves = {name: x for name, x in moved.items() if name in QKV}
    aligned = replace(order, given=call.packed._replace(**moves)).operands()
    moved = {**moved, **{name: getattr(aligned, name) for name in moves}}
    dout, dlse = tangent(call.spec, call.operands, order.rows(out), order.rows(lse, -jnp.inf), moved, kernel)
    return order.results(dout), order.results(dlse)


def _of_products(operands: Operands, moved: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the tangents of query, key and value as kernels take them, with the tangent of a scale in the query's."""
    found = {name: moved[name] for name in QKV if name in moved}
    if "query" in found:
        found["query"] = scaled(found["query"], operands)
    if "scale" in moved:
        of_scale = operands.query.astype(moved["scale"].dtype) * moved["scale"][:, :, None, None]
        of_query = found.get("query", jnp.zeros_like(operands.query))
        found = {"query": (of_query.astype(of_scale.dtype) + of_scale).astype(operands.query.dtype)} | {
            name: x for name, x in found.items() if name != "query"
        }
    return found


def _with_sinks(
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    sinks_tangent: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Adds the weight of a sink times its tangent to dlse, and subtracts the output times this product from dout."""
    if sinks_tangent is None or operands.sinks is None:
        return dout, dlse
    is_padding = lse == -jnp.inf
    weights = jnp.where(is_padding, 0.0, jnp.exp(operands.sinks[:, None] - jnp.where(is_padding, 0.0, lse)))
    moved = weights * sinks_tangent[:, None].astype(lse.dtype)
    change = moved[..., None] * jnp.where(is_padding[..., None], 0, out).astype(lse.dtype)
    return (dout.astype(lse.dtype) - change).astype(dout.dtype), dlse + moved
