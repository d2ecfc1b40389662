# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The forward op: output and log-sum-exp of canonical operands. All of its rules are here, except that `vjp.py` has the
derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching as jax_batching
from jax.interpreters import mlir

from jax_fastattn.ops import abstract, batching, dispatch
from jax_fastattn.ops.cuda import ahead
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.partitioned import Axes, Op
from jax_fastattn.spec import OPERANDS, AttentionSpec, Operands, Problem
from jax_fastattn.xla import passes as xla
from jax_fastattn.xla.chunks import ACCELERATOR, CPU, Tuning


def _abstract(*arrays: Any, spec: AttentionSpec, mapped: tuple[bool, ...]) -> list[Any]:
    ahead.note(_launches, arrays, spec=spec, mapped=mapped)
    return abstract.forward_results(spec, arrays)


def _axes(spec: AttentionSpec, mapped: tuple[bool, ...]) -> Axes:
    axis = "V" if any(mapped) else ""
    operands = ["V" * m + OPERANDS[name].letters for name, m in zip(spec.present, mapped, strict=True)]
    further = [axis + OPERANDS[name].letters for name in spec.further]
    return Axes(operands, [axis + "BTND", axis + "BTN", *further])


# `mapped` says which operands have a vmapped axis before their own axes; it becomes query heads.
attend_op = Op("jax_fastattn_attend", "jax_fastattn_forward", _abstract, _axes)
attend_p, forward_p = attend_op.primitive, attend_op.share


def forward(spec: AttentionSpec, arrays: Sequence[jax.Array], mapped: Sequence[bool] = ()) -> list[jax.Array]:
    """Returns the output `[B, T, N, D]` and the log-sum-exp `[B, T, N]` of the operands that are present.

    What `AttentionSpec.further` names follows: the mean keys of rows `[B, T, N]`, and what rounding takes from the
    output, int8 `[B, T, N, D]`.
    """
    return attend_op.bind(*arrays, spec=spec, mapped=tuple(mapped) or (False,) * len(arrays))


def results(run: Any, arrays: Any, spec: AttentionSpec, mapped: tuple[bool, ...]) -> Any:
    """Calls `run` on the bound arrays, with a mapped axis folded into query heads."""
    if not any(mapped):
        return run(spec, spec.operands(arrays))
    (size, _, _, heads, _), kv_heads = arrays[0].shape, arrays[1].shape[2]
    folded = batching.fold_heads(spec.present, mapped, arrays)
    return tuple(batching.unfold_heads(x, size, heads, kv_heads) for x in run(spec, spec.operands(folded)))


def _problem(avals: Any, spec: AttentionSpec, mapped: tuple[bool, ...]) -> Problem:
    if any(mapped):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        avals = jax.eval_shape(functools.partial(batching.fold_heads, spec.present, mapped), shapes)
    return Problem.of(spec, spec.operands(avals))


@forward_p.def_impl
def _xla(*arrays: jax.Array, tuning: Tuning = CPU, **params: Any) -> tuple[jax.Array, ...]:
    def run(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, ...]:
        return with_zeros(spec, *xla.forward(spec, operands, tuning=tuning))

    return results(run, arrays, **params)


def with_zeros(spec: AttentionSpec, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, ...]:
    """Returns output and log-sum-exp, and zeros for what else the spec asks for."""
    further = {"row_means": (lse, lse.dtype), "out_rests": (out, jnp.int8)}
    return (out, lse, *(jnp.zeros_like(x, dtype) for x, dtype in (further[name] for name in spec.further)))


def _launches(*arrays: Any, **params: Any) -> Any:
    """Traces the launches of a call that is lowered for CUDA, if it runs the kernels; see `ahead.note`."""
    return results(cuda.forward, arrays, **params) if dispatch.has_kernels(_problem(arrays, **params)) else ()


def _cuda(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    if not dispatch.takes_cuda(_problem(ctx.avals_in, **params)):
        return _lower_xla(ACCELERATOR, ctx, *values, **params)
    return abstract.lower_on_one_device(lambda *arrays: results(cuda.forward, arrays, **params), ctx, *values)


def _lower_xla(tuning: Tuning, ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    return abstract.lower_on_one_device(functools.partial(_xla, tuning=tuning, **params), ctx, *values)


def _elsewhere(tuning: Tuning, ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    dispatch.refuse_platform(_problem(ctx.avals_in, **params))
    return _lower_xla(tuning, ctx, *values, **params)


# It is not inlined: the layers of a model share one function, on every path.
mlir.register_lowering(forward_p, _cuda, platform="cuda", inline=False)
mlir.register_lowering(forward_p, functools.partial(_elsewhere, CPU), platform="cpu", inline=False)
mlir.register_lowering(forward_p, functools.partial(_elsewhere, ACCELERATOR), inline=False)


def _batch(
    arrays: Any, dims: Any, *, needs_devices: Any, spec: AttentionSpec, mapped: tuple[bool, ...]
) -> tuple[list[jax.Array], list[int]]:
    del needs_devices
    ahead, (size, mapped, arrays) = mapped, batching.leading(arrays, dims)
    axes = batching.axes_of(spec.present)
    if any(ahead) and mapped == ahead:  # two mapped axes become one
        both = batching.Fold.of(arrays[0], True, size, batch_axis=1)
        merged = [both.fold(x, True) if m else x for x, m in zip(arrays, mapped, strict=True)]
        results = [both.unfold(x) for x in forward(spec, merged, ahead)]
    elif not any(ahead) and batching.becomes_heads(spec.present, mapped, [x.shape for x in arrays]):
        results = forward(spec, arrays, mapped)
    elif not any(ahead) and batching.IntoHeads.fits(axes, len(arrays), mapped, arrays):
        heads = batching.IntoHeads(size)
        folded = [heads.fold(*x, may_broadcast=True) for x in zip(arrays, mapped, axes, strict=True)]
        results = [heads.unfold(x, "BTN") for x in forward(spec, folded)]
    else:
        results = _into_batch(spec, ahead, size, mapped, arrays)
    return results, [0] * len(results)


def _into_batch(
    spec: AttentionSpec, ahead: tuple[bool, ...], size: int, mapped: tuple[bool, ...], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    into = batching.Fold.of(arrays[0], mapped[0], size, batch_axis=mapped[0] + ahead[0])

    def fold(axes: str, x: jax.Array, is_mapped: bool, is_ahead: bool) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            return into.fold(x, is_mapped, axes, may_broadcast=True)

        return jax.vmap(one, in_axes=int(is_mapped))(x) if is_ahead else one(x)

    folded = [fold(*x) for x in zip(batching.axes_of(spec.present), arrays, mapped, ahead, strict=True)]
    unfold = jax.vmap(into.unfold, out_axes=1) if any(ahead) else into.unfold
    return [unfold(x) for x in forward(spec, folded, ahead)]


jax_batching.primitive_batchers[attend_p] = _batch
