# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The backward op: gradients of the operands from the cotangents. Its rules, in order, are all of its rules.

The primitive binds the operands, then output, log-sum-exp, the output's cotangent and, `with_dlse`, the log-sum-exp's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.interpreters import mlir

from jax_fastattn import portable
from jax_fastattn._compat import Primitive
from jax_fastattn.chunks import ACCELERATOR, CPU, Tuning
from jax_fastattn.ops import abstract, batching, cuda, dispatch, sharding
from jax_fastattn.spec import DIFFERENTIABLE, OPERANDS, QKV, AttentionSpec, Gradients, Operands, Problem

# What one device computes of its share.
backward_p = Primitive("jax_fastattn_backward")
backward_p.multiple_results = True


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Collection[str],
) -> Gradients:
    """Returns the gradients of query, key and value, and those of other operands in `wanted` in float32 or wider."""
    names = tuple(name for name in DIFFERENTIABLE if name in QKV or name in wanted)
    cotangents = [out, lse, dout] + ([] if dlse is None else [dlse])
    found = _op(spec, dlse is not None, names)(*operands.arrays(), *cotangents)
    return Gradients(**dict(zip(names, found, strict=True)))


@backward_p.def_abstract_eval
def _abstract(*arrays: Any, spec: AttentionSpec, with_dlse: bool, wanted: tuple[str, ...]) -> list[Any]:
    del with_dlse
    return abstract.backward_results(spec, arrays, wanted)


def _gradients(run: Any, arrays: Any, spec: AttentionSpec, with_dlse: bool, wanted: tuple[str, ...]) -> list[jax.Array]:
    """Calls `run` on the bound arrays and returns the gradients that are wanted."""
    count = len(spec.present)
    found = run(spec, spec.operands(arrays[:count]), *arrays[count:], *(() if with_dlse else (None,)), wanted)
    return [getattr(found, name) for name in wanted]


@backward_p.def_impl
def _portable(*arrays: jax.Array, tuning: Tuning = CPU, **params: Any) -> list[jax.Array]:
    return _gradients(functools.partial(portable.backward, tuning=tuning), arrays, **params)


def _cuda(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec, **params: Any) -> Any:
    if not dispatch.takes_cuda(Problem.of(spec, spec.operands(ctx.avals_in[: len(spec.present)]))):
        return _lower_portable(ACCELERATOR, ctx, *values, spec=spec, **params)
    return abstract.lower_on_one_device(lambda *arrays: _gradients(cuda.backward, arrays, spec, **params), ctx, *values)


def _lower_portable(tuning: Tuning, ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    return abstract.lower_on_one_device(functools.partial(_portable, tuning=tuning, **params), ctx, *values)


# Not inlined: the layers of a model share one function, on every path.
mlir.register_lowering(backward_p, _cuda, platform="cuda", inline=False)
mlir.register_lowering(backward_p, functools.partial(_lower_portable, CPU), platform="cpu", inline=False)
mlir.register_lowering(backward_p, functools.partial(_lower_portable, ACCELERATOR), inline=False)


@functools.lru_cache(maxsize=batching.CACHED_OPS)
def _op(spec: AttentionSpec, with_dlse: bool, wanted: tuple[str, ...]) -> Callable[..., Any]:
    """Wraps the primitive in its sharding rule, and that in its batching rule."""
    params = {"spec": spec, "with_dlse": with_dlse, "wanted": wanted}
    operand_axes = [OPERANDS[name].letters for name in spec.present]
    cotangent_axes = ["BTND", "BTN", "BTND", "BTN"][: 3 + with_dlse]
    differentiable = [spec.present.index(name) for name in wanted]
    result_axes = [operand_axes[i] for i in differentiable]
    # Each example's own gradient is asked for: a shared bias or sink is repeated, its gradient summed over B alone.
    stays_shared = [name in batching.BROADCAST and name not in DIFFERENTIABLE for name in spec.present]
    stays_shared += [False] * len(cotangent_axes)
    op = custom_vmap(sharding.partitioned(backward_p, params, operand_axes + cotangent_axes, result_axes))

    @op.def_vmap
    def batch(size: int, mapped: list[bool], *arrays: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        into = batching.Fold.of(arrays[0], mapped[0], size, batch_axis=int(mapped[0]))
        folded = [
            into.fold(x, is_mapped, may_broadcast=stays)
            for x, is_mapped, stays in zip(arrays, mapped, stays_shared, strict=True)
        ]
        found = [into.unfold(x) for x in _op(spec, with_dlse, wanted)(*folded)]
        own_batches = [batching.inner_batch(arrays[i], mapped[i]) for i in differentiable]
        results = [x.sum(axis=1, keepdims=True) if own == 1 else x for x, own in zip(found, own_batches, strict=True)]
        return results, [True] * len(results)

    return jax.jit(op, inline=True)
