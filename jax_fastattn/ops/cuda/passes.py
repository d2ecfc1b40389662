# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention by CUDA kernels: from sizes to launches. Head dims that no kernel takes are padded only here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn import ffi
from jax_fastattn.kernels.arguments.precision import head_dim_multiple
from jax_fastattn.kernels.choose import forward_spec, kernel_spec
from jax_fastattn.kernels.decode.config import decode_scratch
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import config as sm80
from jax_fastattn.kernels.sm90.backward import config as sm90
from jax_fastattn.kernels.sm90.forward.config import forward_scratch
from jax_fastattn.kernels.support import summed_plane
from jax_fastattn.layouts.heads import reduce_to, scale_gradient
from jax_fastattn.layouts.packed_masks import RowsCall, is_row_masked
from jax_fastattn.layouts.paged import PagedOperands
from jax_fastattn.ops.cuda.bias import with_usable_scale
from jax_fastattn.ops.cuda.bias_gradient import (
    LEFT_TO_XLA,
    XlaRowBias,
    bias_gradient,
    is_of_rows_alone,
    result_shapes,
    row_products,
    with_parts,
    without_rows,
)
from jax_fastattn.ops.cuda.gradient_units import gradient_units
from jax_fastattn.ops.cuda.half import HalfBackward, backward_half, forward_half, times_power
from jax_fastattn.ops.cuda.launch_plan import LaunchPlan, launched_problem
from jax_fastattn.ops.cuda.prepass import TileLists
from jax_fastattn.ops.cuda.score_planes import plane_gradient
from jax_fastattn.spec import DIFFERENTIABLE, AttentionSpec, Gradients, Operands, Problem


def pad_head_dim(x: jax.Array) -> jax.Array:
    """Pads x with zero columns up to the next head dim that kernels take; returns x itself if it has one."""
    missing = -x.shape[-1] % head_dim_multiple(str(x.dtype))
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def cut_head_dim(x: jax.Array, head_dim: int) -> jax.Array:
    """Inverts `pad_head_dim`."""
    return x[..., :head_dim] if x.shape[-1] != head_dim else x


def _padded(operands: Operands) -> Operands:
    q, k, v = (pad_head_dim(x) for x in operands[:3])
    return operands._replace(query=q, key=k, value=v)


def scaled(x: jax.Array, operands: Operands | PagedOperands) -> jax.Array:
    """Multiplies x `[B, T, N, H]` by a scale that is an operand, and rounds once."""
    if operands.scale is None:
        return x
    return (x.astype(operands.scale.dtype) * operands.scale[:, :, None, None]).astype(x.dtype)


def for_kernels(operands: Operands) -> Operands:
    """Returns operands for kernels, sinks unchanged. Kernels take no scale operand; it is multiplied into the query."""
    return _padded(operands._replace(query=scaled(operands.query, operands), scale=None))


def forward(
    spec: AttentionSpec, operands: Operands, kernel: KernelSpec | None = None, kept: Sequence[TileLists] = ()
) -> tuple[jax.Array, ...]:
    """Returns the output `[B, T, N, D]` and the log-sum-exp `[B, T, N]`, and what `AttentionSpec.further` names.

    They come from one custom call. A mask or segment ids take another one before it, the prepass, unless lists for the
    kernel's tiles are kept.

    Args:
        kernel: the compile key; by default the one that `forward_spec` chooses.
        kept: see `tile_lists`.
    """
    if is_row_masked(spec):
        call = RowsCall.of(spec, operands)
        return call.results(*forward(call.spec, call.operands, kernel, kept))
    spec, padded = with_usable_scale(spec, for_kernels(operands))
    problem = launched_problem(spec, padded)
    kernel = kernel or forward_spec(problem, ffi.arch())
    half = forward_half(spec, padded) if kernel.products == "half" else None
    if half is not None:
        problem, padded = replace(problem, spec=half.spec), half.operands
    found = LaunchPlan.of(kernel, problem, padded, _forward_shapes(kernel, problem), kept).bind()
    rows = padded.query.shape[:3]
    out = found["out"].reshape(*rows, padded.value.shape[3])
    out = out if half is None else times_power(out, half.out[..., None])
    lse = found["lse"].reshape(rows)
    value_columns = operands.value.shape[3]
    further = (_further(name, found, out, lse) for name in spec.further)
    further = (x if x.ndim == lse.ndim else cut_head_dim(x, value_columns) for x in further)
    return cut_head_dim(out, value_columns), lse, *further


def _further(name: str, found: dict[str, jax.Array], out: jax.Array, lse: jax.Array) -> jax.Array:
    """Returns a result that `AttentionSpec.further` names, given output and log-sum-exp; zeros if it is not found."""
    shape, dtype = {"row_means": (lse.shape, lse.dtype), "out_rests": (out.shape, jnp.int8)}[name]
    return found[name].reshape(shape) if name in found else jnp.zeros(shape, dtype)


def paged_forward(
    spec: AttentionSpec, operands: PagedOperands, kernel: KernelSpec | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns what `forward` does, from one custom call that reads the pages, which `reads_pages` has to admit."""
    problem = operands.problem(spec)
    kernel = kernel or forward_spec(problem, ffi.arch())
    arrays = operands._replace(query=scaled(operands.query, operands), scale=None)._asdict()
    arrays |= {"key": arrays.pop("key_pages"), "value": arrays.pop("value_pages")}
    found = LaunchPlan(kernel, problem, arrays, _forward_shapes(kernel, problem)).bind()
    return found["out"], found["lse"]


def _forward_shapes(kernel: KernelSpec, problem: Problem) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of results and scratch of a forward launch by name."""
    rows = problem.batch, problem.query_length, problem.num_heads
    results: dict[str, tuple[int, ...]] = {"out": (*rows, problem.v_head_dim), "lse": rows}
    results |= {"row_means": rows} if kernel.has_row_means else {}
    results |= {"out_rests": results["out"]} if kernel.out_rests else {}
    if kernel.op == "decode":
        units, rows_of_unit = problem.batch * problem.num_kv_heads, problem.query_length * problem.group
        return results | decode_scratch(kernel, ffi.multiprocessors(), rows_of_unit, units, problem.key_length)
    return results | forward_scratch(kernel)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Collection[str] = DIFFERENTIABLE,
    kernel: KernelSpec | None = None,
    kept: Sequence[TileLists] = (),
) -> Gradients:
    """Returns the gradients from one custom call, which launches every kernel of the backward pass.

    A mask or segment ids take other calls before it, the prepasses: two where dq has a kernel of its own, else one. A
    prepass whose lists are kept is left out. Packed sequences of which a plane is summed are a call by rows, too. See
    `xla.passes.backward` for `wanted`, `forward` for `kernel` and `kept`.
    """
    sums_plane = summed_plane(Problem.of(spec, operands), wanted) is not None
    if is_row_masked(spec) or (operands.is_packed and sums_plane):
        call = RowsCall.of(spec, operands)
        residuals = call.residuals(out, lse, dout, dlse)
        return call.gradients(backward(call.spec, call.operands, *residuals, wanted, kernel, kept))
    sinks = operands.sinks if "sinks" in wanted else None
    padded = for_kernels(operands)._replace(sinks=sinks)
    problem = launched_problem(spec, padded)
    asked: dict[str, Any] = {"dlse": dlse is not None, "dsinks": sinks is not None}
    asked |= {"dbias": "bias" in {*wanted} & {*spec.present}, "dplane": summed_plane(problem, wanted)}
    kernel = kernel or kernel_spec(problem, "backward", ffi.arch(), **asked)
    if is_of_rows_alone(kernel):
        rows = XlaRowBias(operands, out, lse)
        others = [name for name in wanted if name not in LEFT_TO_XLA]
        found = backward(*without_rows(spec, operands), out, rows.lse(), dout, dlse, others, kept=kept)
        return found._replace(**rows.gradients(spec, out, dout, dlse, wanted))
    sums_bias = (kernel.dbias and kernel.dplane is None) or kernel.dkey_bias
    padded = padded._replace(row_means=padded.row_means if kernel.has_row_means else None, out_rests=None)
    bias_shapes = result_shapes(kernel, problem, ffi.multiprocessors())
    kernel = with_parts(kernel, bias_shapes)
    shapes = _backward_shapes(kernel, problem) | bias_shapes
    residuals = {"out": pad_head_dim(out), "lse": lse, "dout": pad_head_dim(dout), "dlse": dlse}
    if kernel.out_rests and operands.out_rests is not None:
        residuals["out_rests"] = pad_head_dim(operands.out_rests)
    half = None
    if kernel.products == "half":
        given = pad_head_dim(out), lse, pad_head_dim(dout), dlse
        half = backward_half(spec, padded._replace(sinks=operands.sinks), *given)
        problem = replace(problem, spec=half.spec)
        padded, residuals = half.operands._replace(sinks=sinks), half.residuals
    if kernel.has_gradient_units:
        residuals["gradient_units"] = gradient_units(operands, out, lse, dout, dlse, is_part=spec.is_part)
    found = LaunchPlan.of(kernel, problem, padded, shapes, kept, **residuals).bind()
    dq, dk, dv = (found[name].reshape(x.shape) for name, x in zip(("dq", "dk", "dv"), padded[:3], strict=True))
    if half is not None:
        exponents = half.query, half.key, half.value
        dq, dk, dv = (times_power(x, y[..., None]) for x, y in zip((dq, dk, dv), exponents, strict=True))
    dscaled = cut_head_dim(dq, operands.query.shape[3])
    products = row_products(out, dout, lse.dtype) if spec.is_part and kernel.sums_rows else None
    return Gradients(
        query=scaled(dscaled, operands),
        key=cut_head_dim(dk, operands.key.shape[3]),
        value=cut_head_dim(dv, operands.value.shape[3]),
        bias=bias_gradient(problem.bias_shape, found, dlse, products) if sums_bias and problem.bias_shape else None,
        sinks=None if sinks is None else sinks_gradient(sinks, _sink_terms(found, half), operands.query.shape[0]),
        scale=scale_gradient(operands, dscaled) if "scale" in wanted else None,
        **({} if kernel.summed_plane is None else plane_gradient(kernel, operands, found, dlse, products)),
    )


def _sink_terms(found: dict[str, jax.Array], half: HalfBackward | None) -> jax.Array:
    """Returns what rows add to the gradient of sinks, `[B, N, T]`."""
    terms = found["dsinks_terms"]
    if half is None:
        return terms
    exponents = half.sinks.swapaxes(1, 2)
    if exponents.shape[2] > 1:  # packed sequences, which a launch joins
        exponents = jnp.moveaxis(exponents, 1, 0).reshape(1, terms.shape[1], -1)
    return times_power(terms, exponents)


def _backward_shapes(kernel: KernelSpec, problem: Problem) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of results and scratch of a backward launch by name, except for the gradient of a bias."""
    rows = problem.batch, problem.query_length, problem.num_heads
    keys = problem.batch, problem.key_length, problem.num_kv_heads
    results: dict[str, tuple[int, ...]] = {
        "dq": (*rows, problem.head_dim),
        "dk": (*keys, problem.head_dim),
        "dv": (*keys, problem.v_head_dim),
    }
    if kernel.dsinks:
        results["dsinks_terms"] = (problem.batch, problem.num_heads, problem.query_length)
    scratch = {"sm80": sm80.backward_scratch, "sm90": sm90.backward_scratch}[kernel.family]
    entries = problem.num_sequences or problem.batch
    return results | scratch(kernel, entries, problem.query_length, problem.num_heads)


def sinks_gradient(sinks: jax.Array, terms: jax.Array, batch: int) -> jax.Array:
    """Sums the terms of rows to the gradient of sinks `[1 or B, N]`.

    Args:
        terms: `[B, N, T]`, or `[1, N, B T]` if a launch has joined batch entries.
        batch: B.
    """
    launched, heads, rows = terms.shape
    joined = batch // launched
    by_entry = jnp.moveaxis(terms.reshape(launched, heads, joined, rows // joined), 2, 1)
    return reduce_to((*sinks.shape, 1), by_entry.reshape(batch, heads, rows // joined))[..., 0]
