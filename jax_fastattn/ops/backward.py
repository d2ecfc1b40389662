# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The backward op: gradients of the operands from the cotangents.

It binds the operands, then output, log-sum-exp, the output's cotangent and, `with_dlse`, the log-sum-exp's. `linear.py`
batches and partitions it, `tangents.py` has its derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.interpreters import mlir

from jax_fastattn import _compat
from jax_fastattn.ops import abstract, dispatch, linear
from jax_fastattn.ops.cuda import ahead
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.linear import Names
from jax_fastattn.spec import DIFFERENTIABLE, QKV, AttentionSpec, Problem
from jax_fastattn.xla import passes as xla
from jax_fastattn.xla.chunks import ACCELERATOR, CPU, Tuning

Saved = Sequence[jax.Array]
Cotangents = tuple[jax.Array | None, jax.Array | None]


def gradient(
    spec: AttentionSpec, saved: Saved, cotangents: Cotangents, wanted: Collection[str]
) -> dict[str, jax.Array]:
    """Returns the gradients of query, key and value, and, in float32 or wider, of other operands in `wanted`.

    Args:
        saved: operands, output and log-sum-exp.
        cotangents: the cotangents of output and log-sum-exp; either may be None, which is zero.
    """
    arrays, names = cotangent_arrays(saved, cotangents), wanted_names(wanted)
    found = gradient_op.bind(*saved, *arrays, spec=spec, with_dlse=len(arrays) > 1, wanted=names)
    return dict(zip(names, found, strict=True))


def cotangent_arrays(saved: Saved, cotangents: Cotangents) -> list[jax.Array]:
    """Returns the cotangents as an op binds them: the log-sum-exp's only if it is not zero."""
    dout, dlse = cotangents
    dout = _compat.zeros_like(saved[-2]) if dout is None else dout
    return [dout] if dlse is None else [dout, dlse]


def wanted_names(wanted: Collection[str]) -> Names:
    return tuple(name for name in DIFFERENTIABLE if name in QKV or name in wanted)


def _abstract(*arrays: Any, spec: AttentionSpec, with_dlse: bool, wanted: Names) -> list[Any]:
    ahead.note(_launches, arrays, spec=spec, with_dlse=with_dlse, wanted=wanted)
    return abstract.backward_results(spec, arrays, wanted)


def note_gradient(spec: AttentionSpec, operands: Sequence[Any], wanted: Collection[str]) -> None:
    """Notes that the gradient of a call will be traced, before the forward pass is compiled.

    Args:
        operands: their abstract values.
        wanted: which gradients.
    """
    out, lse, *further = abstract.forward_results(spec, operands)
    spec = replace(spec, present=(*spec.present, *spec.further))
    arrays = [*operands, *further, out, lse, out]
    ahead.note(_launches, arrays, spec=spec, with_dlse=False, wanted=wanted_names(wanted))


def _launches(*arrays: Any, spec: AttentionSpec, wanted: Names, **params: Any) -> Any:
    """Traces the launches of a gradient that is lowered for CUDA, if it runs the kernels; see `ahead.note`."""
    problem = Problem.of(spec, spec.operands(arrays[: len(spec.present)]))
    has_kernels = dispatch.has_kernels(problem, wanted)
    return _gradients(cuda.backward, arrays, spec, wanted=wanted, **params) if has_kernels else ()


def _gradients(run: Any, arrays: Any, spec: AttentionSpec, with_dlse: bool, wanted: Names) -> list[jax.Array]:
    """Calls `run` on the bound arrays and returns the gradients that are wanted."""
    count = len(spec.present)
    found = run(spec, spec.operands(arrays[:count]), *arrays[count:], *(() if with_dlse else (None,)), wanted)
    return [getattr(found, name) for name in wanted]


def _xla(*arrays: jax.Array, tuning: Tuning = CPU, **params: Any) -> list[jax.Array]:
    return _gradients(functools.partial(xla.backward, tuning=tuning), arrays, **params)


def _cuda(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec, wanted: Names, **params: Any) -> Any:
    problem = Problem.of(spec, spec.operands(ctx.avals_in[: len(spec.present)]))
    params |= {"wanted": wanted}
    if not dispatch.takes_cuda(problem, wanted):
        return _lower_xla(ACCELERATOR, ctx, *values, spec=spec, **params)
    return abstract.lower_on_one_device(lambda *arrays: _gradients(cuda.backward, arrays, spec, **params), ctx, *values)


def _lower_xla(tuning: Tuning, ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    return abstract.lower_on_one_device(functools.partial(_xla, tuning=tuning, **params), ctx, *values)


gradient_op = linear.define("jax_fastattn_gradient", "jax_fastattn_backward", _abstract, _xla, _cuda)
