# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The forward op: output and log-sum-exp of canonical operands. Its rules, in order, are all of its rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.interpreters import mlir

from jax_fastattn import portable
from jax_fastattn._compat import Primitive
from jax_fastattn.ops import abstract, batching, cuda, dispatch, sharding
from jax_fastattn.spec import AttentionSpec, Operands, Problem

# What one device computes of its share.
forward_p = Primitive("jax_fastattn_forward")
forward_p.multiple_results = True


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """The output `[B, T, N, D]` and the log-sum-exp `[B, T, N]`."""
    out, lse = _op(spec)(*operands.arrays())
    return out, lse


@forward_p.def_abstract_eval
def _abstract(*arrays: Any, spec: AttentionSpec) -> list[Any]:
    return abstract.forward_results(spec, arrays)


@forward_p.def_impl
def _portable(*arrays: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    return portable.forward(spec, spec.operands(arrays))


def _cuda(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec) -> Any:
    takes_cuda = dispatch.takes_cuda(Problem.of(spec, spec.operands(ctx.avals_in)))
    run = cuda.forward if takes_cuda else functools.partial(portable.forward, barriers=False)
    return abstract.lower_on_one_device(lambda *arrays: run(spec, spec.operands(arrays)), ctx, *values)


def _default(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec) -> Any:
    dispatch.refuse_platform(Problem.of(spec, spec.operands(ctx.avals_in)))
    return abstract.lower_on_one_device(functools.partial(_portable, spec=spec), ctx, *values)


mlir.register_lowering(forward_p, _cuda, platform="cuda")
mlir.register_lowering(forward_p, _default)


@functools.lru_cache(maxsize=batching.CACHED_OPS)
def _op(spec: AttentionSpec) -> Callable[..., Any]:
    """The primitive with its sharding rule around it, and its batching rule around that."""
    one_device = functools.partial(forward_p.bind, spec=spec)
    operand_axes = [sharding.OPERAND_AXES[name] for name in spec.present]
    op = custom_vmap(sharding.partitioned(one_device, operand_axes, ["BTND", "BTN"]))

    @op.def_vmap
    def batch(size: int, mapped: list[bool], *arrays: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        inner = batching.inner_batch(arrays[0], mapped[0])
        folded = [
            batching.fold(x, is_mapped, size, inner, may_broadcast=name in batching.BROADCAST)
            for name, x, is_mapped in zip(spec.present, arrays, mapped, strict=True)
        ]
        results = [batching.unfold(x, size) for x in _op(spec)(*folded)]
        return results, [True] * len(results)

    return jax.jit(op, inline=True)
