# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The paged op: output and log-sum-exp of keys and values in pages. It has no derivative; all of its rules are here.

Where a kernel reads pages, one device's share is a launch of it. Elsewhere the share gathers its pages into dense keys
and values and runs the forward op on them. Nothing outside of this share knows that: batching, partitioning and the
public function see pages alone.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.core
from jax.interpreters import ad, mlir
from jax.interpreters import batching as jax_batching
from jax.sharding import NamedSharding

from jax_fastattn.kernels.choose import reads_pages
from jax_fastattn.layouts.paged import PAGED_OPERANDS, PAGES, PagedOperands
from jax_fastattn.ops import abstract, batching, dispatch
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.forward import forward_p
from jax_fastattn.ops.partitioned import Axes, Op
from jax_fastattn.ops.sharding import refuse_split
from jax_fastattn.spec import AttentionSpec


def refuse_split_pages(**pages: Any) -> None:
    """Raises ValueError if an axis of the pages other than K is split, as far as that is known before compilation.

    It is called with the arguments of the public function: the sharding of an array is not known while it is traced.
    `partitioned` refuses split pages otherwise.
    """
    for name, x in pages.items():
        if not isinstance(x, jax.Array):
            continue
        sharding: Any = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
        split = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
        if any(names is not None for axis, names in enumerate(split) if axis != PAGED_OPERANDS[name].axes.index("K")):
            refuse_split(name, sharding.spec)


def attend(spec: AttentionSpec, operands: PagedOperands, return_residual: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output `[B, T, N, D]` and, if asked for, the log-sum-exp `[B, T, N]`, else None."""
    out, lse = paged_op.bind(*operands.arrays(), spec=spec)
    return out, lse if return_residual else None


def _abstract(*arrays: Any, spec: AttentionSpec) -> list[Any]:
    return abstract.forward_results(spec, arrays)


def _axes(spec: AttentionSpec) -> Axes:
    operands = [PAGED_OPERANDS[name].letters for name in spec.present]
    resident = tuple((spec.present.index(name), name) for name in PAGES)
    return Axes(operands, ["BTND", "BTN"], resident)


paged_op = Op("jax_fastattn_paged", "jax_fastattn_paged_forward", _abstract, _axes)


@paged_op.share.def_impl
def _gather_and_attend(*arrays: jax.Array, spec: AttentionSpec) -> list[jax.Array]:
    operands = PagedOperands.of(spec, arrays)
    dense = operands.gathered().arrays()
    return forward_p.bind(*dense, spec=operands.dense_spec(spec), mapped=(False,) * len(dense))


def _read_pages(*arrays: jax.Array, spec: AttentionSpec) -> list[jax.Array]:
    return list(cuda.paged_forward(spec, PagedOperands.of(spec, arrays)))


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec) -> Any:
    return abstract.lower_on_one_device(functools.partial(_gather_and_attend, spec=spec), ctx, *values)


def _cuda(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec) -> Any:
    problem = PagedOperands.of(spec, ctx.avals_in).problem(spec)
    if not (reads_pages(problem) and dispatch.takes_cuda(problem)):
        return _lower(ctx, *values, spec=spec)
    return abstract.lower_on_one_device(functools.partial(_read_pages, spec=spec), ctx, *values)


mlir.register_lowering(paged_op.share, _cuda, platform="cuda", inline=False)
mlir.register_lowering(paged_op.share, _lower, inline=False)


def _batch(arrays: Any, dims: Any, *, needs_devices: Any, spec: AttentionSpec) -> tuple[list[jax.Array], list[int]]:
    """Folds a mapped axis into the batch; all examples share the pages."""
    del needs_devices
    for name, dim in zip(spec.present, dims, strict=True):
        if name in PAGES and dim is not None:
            raise NotImplementedError(
                f"`{name}` is mapped by vmap, expected one array of pages for all examples; put all pages into one "
                "array, map `page_table` alone, and pass in_axes=None for the pages"
            )
    size, mapped, arrays = batching.leading(arrays, dims)
    into = batching.Fold.of(arrays[0], mapped[0], size, batch_axis=int(mapped[0]))
    folded = [
        x if name in PAGES else into.fold(x, is_mapped, PAGED_OPERANDS[name].axes, may_broadcast=True)
        for name, x, is_mapped in zip(spec.present, arrays, mapped, strict=True)
    ]
    results = [into.unfold(x) for x in paged_op.bind(*folded, spec=spec)]
    return results, [0] * len(results)


def _refuse_derivative(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "`paged_attention` is differentiated, expected a call without derivatives; call `attention` with dense keys "
        "and values, or apply `jax.lax.stop_gradient` to the floating arguments of `paged_attention`"
    )


jax_batching.primitive_batchers[paged_op.primitive] = _batch
ad.primitive_jvps[paged_op.primitive] = _refuse_derivative
