# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents and second derivatives as ops, and the rules by which JAX differentiates and transposes them.

With f the forward op, u and w tangents of operands, and c cotangents of results:

    tangent           J u             its transpose is `gradient`: the backward rule of `vjp.py`
    gradient          J^T c           the backward op; its transpose is `tangent`
    second_tangent    D2f[u, w]       bilinear; its transpose is `second_gradient`
    second_gradient   D2f[u, .]^T c   bilinear; its transpose in u is itself (a Hessian), in c `second_tangent`

So each transpose is one of these four, and reverse mode never goes through the loops of the XLA path. Output and
log-sum-exp are bound next to the operands. They are functions of the operands, so their own tangents add nothing to
the tangents of the operands, and no rule transposes in them; else the transposes would need more ops. `second_gradient`
binds them where JAX has them, and computes them again where it does not: in transposes. Operands that do not move have
no tangent among the arrays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from jax_fastattn.ops import abstract, dispatch, linear
from jax_fastattn.ops.backward import Cotangents, Saved, cotangent_arrays, gradient, gradient_op, wanted_names
from jax_fastattn.ops.cuda import tangents as cuda
from jax_fastattn.ops.linear import Names
from jax_fastattn.spec import DIFFERENTIABLE, AttentionSpec, Operands, Problem
from jax_fastattn.xla import tangents as xla
from jax_fastattn.xla.chunks import ACCELERATOR, CPU, Tuning

Tangents = Mapping[str, Any]

RESULTS: Names = ("out", "lse")


def _rows(*arrays: Any, spec: AttentionSpec, **_: Any) -> list[Any]:
    """Returns abstract tangents of output and log-sum-exp."""
    count = len(spec.present)
    return [abstract.like(x, x.shape, axes=tuple(range(len(x.shape)))) for x in arrays[count : count + 2]]


def _gradients(*arrays: Any, spec: AttentionSpec, wanted: Names, **_: Any) -> list[Any]:
    return abstract.backward_results(spec, arrays, wanted)


def _tangent(*arrays: jax.Array, spec: AttentionSpec, moved: Names, tuning: Tuning = CPU) -> Sequence[jax.Array]:
    saved, _, (u,) = _split(arrays, spec, 0, moved)
    return xla.tangent(spec, *_of_call(spec, saved), u, tuning)


def _second_tangent(
    *arrays: jax.Array, spec: AttentionSpec, moved: Names, along: Names, tuning: Tuning = CPU
) -> Sequence[jax.Array]:
    saved, _, (u, w) = _split(arrays, spec, 0, moved, along)
    return xla.second_tangent(spec, *_of_call(spec, saved), u, w, tuning)


def _second_gradient(
    *arrays: jax.Array,
    spec: AttentionSpec,
    with_dlse: bool,
    with_results: bool,
    wanted: Names,
    moved: Names,
    tuning: Tuning = CPU,
) -> Sequence[jax.Array]:
    saved, c, (results, u) = _split(arrays, spec, 1 + with_dlse, RESULTS * with_results, moved)
    dout, dlse = c if with_dlse else (*c, None)
    results = (results["out"], results["lse"]) if with_results else None
    found = xla.second_backward(spec, *_of_call(spec, saved), dout, dlse, u, results, wanted, tuning)
    return [getattr(found, name) for name in wanted]


def _split(arrays: Sequence[Any], spec: AttentionSpec, cotangents: int, *groups: Names) -> tuple[Any, Any, Any]:
    """Splits the arrays of an op: operands with output and log-sum-exp, cotangents, and a dict per group."""
    bounds = [0, len(spec.present) + 2]
    for count in (cotangents, *map(len, groups)):
        bounds.append(bounds[-1] + count)
    saved, c, *tangents = (arrays[a:b] for a, b in itertools.pairwise(bounds))
    return saved, c, [dict(zip(names, x, strict=True)) for names, x in zip(groups, tangents, strict=True)]


def _of_call(spec: AttentionSpec, saved: Saved) -> tuple[Operands, jax.Array, jax.Array]:
    return spec.operands(saved[:-2]), saved[-2], saved[-1]


def _lower_tangent(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec, moved: Names) -> Any:
    """Lowers a share for CUDA."""
    problem = Problem.of(spec, spec.operands(ctx.avals_in[: len(spec.present)]))

    def launch(*arrays: jax.Array) -> Sequence[jax.Array]:
        saved, _, (u,) = _split(arrays, spec, 0, moved)
        return cuda.tangent(spec, *_of_call(spec, saved), u)

    on_xla = functools.partial(_tangent, spec=spec, moved=moved, tuning=ACCELERATOR)
    run = launch if dispatch.takes_tangent_kernel(problem) else on_xla
    return abstract.lower_on_one_device(run, ctx, *values)


tangent_op = linear.define("jax_fastattn_tangent", "jax_fastattn_forward_tangent", _rows, _tangent, _lower_tangent)
second_tangent_op = linear.define(
    "jax_fastattn_second_tangent", "jax_fastattn_forward_second_tangent", _rows, _second_tangent
)
second_gradient_op = linear.define(
    "jax_fastattn_second_gradient", "jax_fastattn_backward_tangent", _gradients, _second_gradient
)
tangent_p = tangent_op.primitive


def tangent(spec: AttentionSpec, saved: Saved, u: Tangents) -> list[jax.Array]:
    return tangent_op.bind(*saved, *u.values(), spec=spec, moved=tuple(u))


def second_tangent(spec: AttentionSpec, saved: Saved, u: Tangents, w: Tangents) -> list[jax.Array]:
    arrays = *u.values(), *w.values()
    return second_tangent_op.bind(*saved, *arrays, spec=spec, moved=tuple(u), along=tuple(w))


def second_gradient(
    spec: AttentionSpec,
    saved: Saved,
    cotangents: Cotangents,
    u: Tangents,
    wanted: Collection[str],
    results: Sequence[Any] = (),
) -> dict[str, jax.Array]:
    """Returns what `gradient` does, of the directional derivative along `u`.

    Args:
        results: the tangents of output and log-sum-exp along `u`; they are used if there are both.
    """
    c, names = cotangent_arrays(saved, cotangents), wanted_names(wanted)
    results = [x for x in none_if_zero(results) if x is not None]
    results = results if len(results) == len(RESULTS) else []
    found = second_gradient_op.bind(
        *saved,
        *c,
        *results,
        *u.values(),
        spec=spec,
        with_dlse=len(c) > 1,
        with_results=len(results) > 0,
        wanted=names,
        moved=tuple(u),
    )
    return dict(zip(names, found, strict=True))


# Zeros: JAX has `ad.Zero` for a tangent or cotangent that is known to be zero, and None for an argument without one.


def none_if_zero(arrays: Iterable[Any]) -> list[Any]:
    return [None if x is None or type(x) is ad.Zero else x for x in arrays]


def is_zero(cotangents: Cotangents) -> bool:
    return all(x is None for x in cotangents)


def pair(cotangents: Sequence[Any]) -> Cotangents:
    """Returns the cotangents of output and log-sum-exp from those that are bound."""
    dout, *dlse = none_if_zero(cotangents)
    return dout, dlse[0] if dlse else None


def zeros(results: Iterable[Any]) -> list[Any]:
    return [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def moving(names: Names, tangents: Iterable[Any]) -> dict[str, Any]:
    """Returns the tangents by name, of those operands that have one which is not zero."""
    given = zip(names, none_if_zero(tangents), strict=True)
    return {name: x for name, x in given if x is not None and name in DIFFERENTIABLE}


def undefined(names: Names, arrays: Iterable[Any]) -> Names:
    """Returns the names of the arrays in which JAX transposes."""
    return tuple(name for name, x in zip(names, arrays, strict=True) if ad.is_undefined_primal(x))


def as_cotangents(found: Mapping[str, Any], names: Names, arrays: Iterable[Any]) -> list[Any]:
    """Returns gradients as cotangents of tangents, in their dtypes; None for arrays in which JAX does not transpose."""
    pairs = zip(names, arrays, strict=True)
    return [found[name].astype(x.aval.dtype) if ad.is_undefined_primal(x) else None for name, x in pairs]


def _in_dtype_of_operands(spec: AttentionSpec, saved: Saved, tangents: Tangents) -> dict[str, Any]:
    """Converts cotangents of gradients, some of which are wider than the operand, to tangents."""
    operands = spec.operands(saved[:-2])
    return {name: x.astype(getattr(operands, name).dtype) for name, x in tangents.items()}


def _if_undefined(found: Iterable[Any], arrays: Iterable[Any]) -> list[Any]:
    """Returns tangents of output and log-sum-exp as cotangents of their cotangents, of which one may not be bound."""
    return [y if ad.is_undefined_primal(x) else None for x, y in zip(arrays, found, strict=False)]


def _sum(terms: Sequence[Sequence[Any]], results: Sequence[Any]) -> list[Any]:
    if not terms:
        return zeros(results)
    return [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]


def _refuse_third() -> NoReturn:
    raise NotImplementedError(
        "jax_fastattn.attention has no third derivative: it was asked for the derivative of a second derivative with "
        "respect to the operands. Use `jax.lax.stop_gradient` on what needs no further derivative, or call "
        "`jax.nn.dot_product_attention` there."
    )


# tangent


def _tangent_jvp(primals: Any, tangents: Any, *, spec: AttentionSpec, moved: Names) -> Any:
    saved, _, (u,) = _split(primals, spec, 0, moved)
    count, terms = len(spec.present), []
    if w := moving(spec.present, tangents[:count]):
        terms.append(second_tangent(spec, saved, u, w))
    if du := moving(moved, tangents[count + 2 :]):
        terms.append(tangent(spec, saved, du))
    results = tangent(spec, saved, u)
    return results, _sum(terms, results)


# gradient


def _gradient_jvp(primals: Any, tangents: Any, *, spec: AttentionSpec, with_dlse: bool, wanted: Names) -> Any:
    saved, c, _ = _split(primals, spec, 1 + with_dlse)
    results = gradient(spec, saved, pair(c), wanted)
    terms = []
    if w := moving(spec.present, tangents[: len(spec.present)]):
        terms.append(second_gradient(spec, saved, pair(c), w, wanted, tangents[len(saved) - 2 : len(saved)]))
    dc = pair(tangents[len(saved) :])
    if not is_zero(dc):
        terms.append(gradient(spec, saved, dc, wanted))
    return list(results.values()), _sum([list(x.values()) for x in terms], list(results.values()))


def _gradient_transpose(
    cotangents: Any, *arrays: Any, spec: AttentionSpec, with_dlse: bool, wanted: Names
) -> list[Any]:
    saved, c, _ = _split(arrays, spec, 1 + with_dlse)
    u = _in_dtype_of_operands(spec, saved, moving(wanted, cotangents))
    if not u:
        return [None] * len(arrays)
    return [None] * len(saved) + _if_undefined(tangent(spec, saved, u), c)


# second_tangent


def _second_tangent_jvp(primals: Any, tangents: Any, *, spec: AttentionSpec, moved: Names, along: Names) -> Any:
    saved, _, (u, w) = _split(primals, spec, 0, moved, along)
    if moving(spec.present, tangents[: len(spec.present)]):
        _refuse_third()
    _, _, (du, dw) = _split(none_if_zero(tangents), spec, 0, moved, along)
    terms = [
        second_tangent(spec, saved, *pair)
        for pair in ((moving(moved, du.values()), w), (u, moving(along, dw.values())))
        if all(pair)
    ]
    results = second_tangent(spec, saved, u, w)
    return results, _sum(terms, results)


def _second_tangent_transpose(
    cotangents: Any, *arrays: Any, spec: AttentionSpec, moved: Names, along: Names
) -> list[Any]:
    saved, _, (u, w) = _split(arrays, spec, 0, moved, along)
    c = pair(cotangents)
    if is_zero(c):
        return [None] * len(arrays)
    if wanted := undefined(moved, u.values()):
        found = second_gradient(spec, saved, c, w, wanted)
        return [None] * len(saved) + as_cotangents(found, moved, u.values()) + [None] * len(w)
    found = second_gradient(spec, saved, c, u, undefined(along, w.values()))
    return [None] * (len(saved) + len(u)) + as_cotangents(found, along, w.values())


# second_gradient


def _second_gradient_jvp(
    primals: Any,
    tangents: Any,
    *,
    spec: AttentionSpec,
    with_dlse: bool,
    with_results: bool,
    wanted: Names,
    moved: Names,
) -> Any:
    groups = 1 + with_dlse, RESULTS * with_results, moved
    saved, c, (results, u) = _split(primals, spec, *groups)
    if moving(spec.present, tangents[: len(spec.present)]):
        _refuse_third()
    _, dc, (dresults, du) = _split(none_if_zero(tangents), spec, *groups)
    terms = []
    if not is_zero(pair(dc)):
        terms.append(second_gradient(spec, saved, pair(dc), u, wanted, [*results.values()]))
    if du := moving(moved, du.values()):
        terms.append(second_gradient(spec, saved, pair(c), du, wanted, [*dresults.values()]))
    found = list(second_gradient(spec, saved, pair(c), u, wanted, [*results.values()]).values())
    return found, _sum([list(x.values()) for x in terms], found)


def _second_gradient_transpose(
    cotangents: Any,
    *arrays: Any,
    spec: AttentionSpec,
    with_dlse: bool,
    with_results: bool,
    wanted: Names,
    moved: Names,
) -> list[Any]:
    """Transposes in cotangents, or in `u` as if the tangents of output and log-sum-exp were computed from it here."""
    saved, c, (results, u) = _split(arrays, spec, 1 + with_dlse, RESULTS * with_results, moved)
    w = _in_dtype_of_operands(spec, saved, moving(wanted, cotangents))
    if not w:
        return [None] * len(arrays)
    if names := undefined(moved, u.values()):
        found = second_gradient(spec, saved, pair(c), w, names)
        return [None] * (len(saved) + len(c) + len(results)) + as_cotangents(found, moved, u.values())
    of_cotangents = _if_undefined(second_tangent(spec, saved, w, u), c)
    return [None] * len(saved) + of_cotangents + [None] * (len(results) + len(u))


linear.differentiate(tangent_op.primitive, _tangent_jvp)  # `vjp.py` has its transpose
linear.differentiate(gradient_op.primitive, _gradient_jvp, _gradient_transpose)
linear.differentiate(second_tangent_op.primitive, _second_tangent_jvp, _second_tangent_transpose)
linear.differentiate(second_gradient_op.primitive, _second_gradient_jvp, _second_gradient_transpose)
