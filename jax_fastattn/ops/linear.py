# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The derivatives of attention as ops: each is linear in its tangents, and in its cotangents.

All bind their arrays in one order: the operands; output and log-sum-exp; cotangents of both; tangents of both; tangents
of operands. The layout of a call follows from its parameters, and batching and partition rules follow from the layout.
What each op computes is in `backward.py` and `tangents.py`, and so are the rules of differentiation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax.experimental import jet
from jax.interpreters import ad, mlir
from jax.interpreters import batching as jax_batching

from jax_fastattn.ops import abstract, batching, dispatch
from jax_fastattn.ops.batching import axes_of
from jax_fastattn.ops.partitioned import Axes, Op
from jax_fastattn.spec import AttentionSpec, Problem
from jax_fastattn.xla.chunks import ACCELERATOR, CPU, Tuning

Names = tuple[str, ...]

# These are the axes of output, log-sum-exp, and their cotangents.
ROWS = ("BTND", "BTN", "BTND", "BTN")


@dataclass(frozen=True)
class Layout:
    """The arrays that an op binds and returns.

    Attributes:
        axes: axes of each array as `spec.Operand` has them.
        names: for each array, the operand that it is or whose tangent it is; None for output and cotangents.
        first_tangent: index of the first tangent.
        wanted: operands of which the results are gradients; None if the results are as output and log-sum-exp.
    """

    axes: tuple[str, ...]
    names: tuple[str | None, ...]
    first_tangent: int
    wanted: Names | None

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        *,
        moved: Names = (),
        along: Names = (),
        with_dlse: bool = False,
        with_results: bool = False,
        wanted: Names | None = None,
    ) -> Layout:
        """Returns the layout of a call from its parameters; an op with gradients has cotangents, too."""
        rows = ROWS[: 2 if wanted is None else 3 + with_dlse]
        results, tangents = ROWS[: 2 * with_results], moved + along
        axes = (*axes_of(spec.present), *rows, *results, *axes_of(tangents))
        names = (*spec.present, *(None for _ in rows + results), *tangents)
        return cls(axes, names, len(axes) - len(results + tangents), wanted)

    @property
    def results(self) -> Names:
        """Returns the axes of each result."""
        return ROWS[:2] if self.wanted is None else axes_of(self.wanted)

    def letters(self) -> Axes:
        operands, results = ([x.upper().replace("1", "N") for x in axes] for axes in (self.axes, self.results))
        return Axes(operands, results)

    def has_heads(self) -> bool:
        """Returns whether all results have an axis of heads; the gradient of a scale is summed over them."""
        return all("1" not in axes for axes in self.results)


def define(
    name: str,
    share: str,
    results: Callable[..., list[Any]],
    xla: Callable[..., Sequence[jax.Array]],
    cuda: Callable[..., Any] | None = None,
) -> Op:
    """Makes an op with all rules except for differentiation.

    Args:
        name, share: the names of its primitives.
        results: the abstract results, from abstract arrays and the parameters.
        xla: one device's share in plain JAX, from the arrays, the parameters and a `Tuning`.
        cuda: the lowering rule of the share for CUDA; None takes `xla`, with a warning.
    """
    op = Op(name, share, results, lambda spec, **params: Layout.of(spec, **params).letters())
    op.share.def_impl(functools.partial(xla, tuning=CPU))

    def lower(tuning: Tuning, ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        return abstract.lower_on_one_device(functools.partial(xla, tuning=tuning, **params), ctx, *values)

    def without_kernel(ctx: mlir.LoweringRuleContext, *values: Any, spec: AttentionSpec, **params: Any) -> Any:
        dispatch.note_second_derivative(Problem.of(spec, spec.operands(ctx.avals_in[: len(spec.present)])))
        return lower(ACCELERATOR, ctx, *values, spec=spec, **params)

    # It is not inlined: the layers of a model share one function, on every path.
    mlir.register_lowering(op.share, cuda or without_kernel, platform="cuda", inline=False)
    mlir.register_lowering(op.share, functools.partial(lower, CPU), platform="cpu", inline=False)
    mlir.register_lowering(op.share, functools.partial(lower, ACCELERATOR), inline=False)
    jax_batching.primitive_batchers[op.primitive] = functools.partial(_batch, op)
    return op


def differentiate(primitive: Any, jvp: Callable[..., Any] | None = None, transpose: Any = None) -> None:
    """Registers the rules that are given. They get the arrays and the parameters, except `needs_devices`."""

    def rule(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays, needs_devices, **params: function(*arrays, **params)

    if jvp is not None:
        ad.primitive_jvps[primitive] = rule(jvp)
    if transpose is not None:
        ad.primitive_transposes[primitive] = rule(transpose)
    jet.jet_rules[primitive] = _refuse_taylor_mode


def _refuse_taylor_mode(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "jax_fastattn.attention has no rule for `jax.experimental.jet`, which takes derivatives of any order. Use "
        "`jax.jvp`, twice for a second derivative, or call `jax.nn.dot_product_attention` there."
    )


def _batch(op: Op, arrays: Any, dims: Any, *, needs_devices: Any, spec: AttentionSpec, **params: Any) -> Any:
    """Folds the mapped axis V into the batch, or into the heads of examples that have one each."""
    del needs_devices
    layout = Layout.of(spec, **params)
    size, mapped, arrays = batching.leading(arrays, dims)
    into: batching.Fold | batching.IntoHeads = batching.Fold.of(arrays[0], mapped[0], size, batch_axis=int(mapped[0]))
    if layout.has_heads() and batching.IntoHeads.fits(layout.axes, len(spec.present), mapped, arrays):
        into = batching.IntoHeads(size)
    # An operand and its tangent are repeated together, since they have one shape. Each example's own gradient is asked
    # for: an operand that has one is repeated, and its gradient summed over B alone.
    repeated = {name for name, is_mapped in zip(layout.names, mapped, strict=True) if is_mapped}
    repeated |= set(layout.wanted or ())

    def fold(i: int, x: jax.Array) -> jax.Array:
        axes, may_broadcast = layout.axes[i], layout.names[i] not in repeated
        if mapped[i] or i < layout.first_tangent:
            return into.fold(x, mapped[i], axes, may_broadcast=may_broadcast)
        # The transpose is a sum over V, which should not add up 16-bit numbers.
        wide = x.astype(abstract.statistics_dtype(x.dtype))
        return into.fold(wide, False, axes, may_broadcast=may_broadcast).astype(x.dtype)

    found = op.bind(*(fold(i, x) for i, x in enumerate(arrays)), spec=spec, **params)
    results = [into.unfold(x, axes) for x, axes in zip(found, layout.results, strict=True)]
    for i, name in enumerate(layout.wanted or ()):
        source = layout.names.index(name)
        if batching.inner_batch(arrays[source], mapped[source]) == 1:
            results[i] = results[i].sum(axis=1, keepdims=True)
    return results, [0] * len(results)
