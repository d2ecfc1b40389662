# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention as a function that JAX differentiates: the forward rule, and the backward rule of reverse mode.

The forward rule saves the operands, the output and the log-sum-exp (FlashAttention, algorithm 4), and returns a tangent
that is linear in the tangents of operands. It also saves the means of rows if kernels sum with them, and what rounding
took from the output if the caller asks for it, which are more operands of the tangent (`sums/row_means.py`,
`sums/out_rests.py`). The backward rule transposes that tangent: it recomputes the probabilities from what was saved.
JAX tells the forward rule which tangents are zero and the backward rule which cotangents are, so that only the
gradients and cotangents that are needed are computed.

These are rules of primitives and not a `custom_vjp`, which refuses forward mode. `tangents.py` has the second
derivatives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_fastattn.kernels.sums.out_rests import keeps_rests
from jax_fastattn.kernels.sums.row_means import mean_plane
from jax_fastattn.ops import linear
from jax_fastattn.ops.backward import gradient, note_gradient
from jax_fastattn.ops.forward import attend_p, forward
from jax_fastattn.ops.linear import Names
from jax_fastattn.ops.ring import rules
from jax_fastattn.ops.tangents import (
    as_cotangents,
    is_zero,
    moving,
    none_if_zero,
    pair,
    tangent,
    tangent_p,
    undefined,
    zeros,
)
from jax_fastattn.spec import AttentionSpec, Operands

# These names are for `jax.checkpoint` policies: saving both spares the backward pass the forward kernel.
OUT_NAME = "jax_fastattn_out"
LSE_NAME = "jax_fastattn_lse"


def attend(spec: AttentionSpec, operands: Operands, return_residual: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output `[B, T, N, D]` and, if asked for, the log-sum-exp `[B, T, N]`, else None."""
    out, lse = forward(spec, operands.arrays())
    return out, lse if return_residual else None


def _forward_rule(operands: Any, tangents: Any, *, spec: AttentionSpec, mapped: tuple[bool, ...]) -> tuple[Any, Any]:
    moved = moving(spec.present, tangents)
    dtype = str(operands[0].dtype)
    plane = mean_plane(spec, dtype, moved) if spec.mean_plane is None else spec.mean_plane
    told = replace(spec, mean_plane=plane, keeps_rests=spec.keeps_rests or (bool(moved) and keeps_rests(spec, dtype)))
    if moved and not any(mapped):
        note_gradient(told, [jax.typeof(x) for x in operands], moved)
    out, lse, *further = forward(told, operands, mapped)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    further = [checkpoint_name(x, LSE_NAME if x.ndim == lse.ndim else OUT_NAME) for x in further]
    kept = dict(zip(told.further, further, strict=True))
    results = [out, lse, *(kept[name] for name in spec.further)]
    if not moved:
        return results, zeros(results)
    tangents = _moving_results(told, mapped, [*operands, *further, out, lse], moved)
    # No gradient depends on what else is saved: these are constants.
    return results, [*tangents, *zeros(results[2:])]


def _moving_results(spec: AttentionSpec, mapped: tuple[bool, ...], saved: list[Any], moved: dict[str, Any]) -> Any:
    """Returns the tangents of output and log-sum-exp, of operands of which some may have a mapped axis."""

    saving = replace(spec, present=(*spec.present, *spec.further))

    def one(saved: Any, moved: Any) -> Any:
        return tangent(saving, saved, moved)

    if any(mapped):  # the mapped axis becomes query heads in the forward pass alone
        axes = [0 if is_mapped else None for is_mapped in mapped]
        of_moved = {name: axis for name, axis in zip(spec.present, axes, strict=True) if name in moved}
        one = jax.vmap(one, in_axes=([*axes, *[0] * len(spec.further), 0, 0], of_moved))
    return one(saved, moved)


def _transpose_rule(cotangents: Any, *operands: Any, spec: AttentionSpec, mapped: tuple[bool, ...]) -> list[Any]:
    """Transposes attention in values: the output is linear in them alone, and the log-sum-exp does not have them."""
    names = undefined(spec.present, operands)
    if names != ("value",):
        raise NotImplementedError(
            "jax_fastattn.attention is linear in `value` alone, and was asked for its transpose with respect to "
            f"{' and '.join(f'`{name}`' for name in names)}. Call `jax.linear_transpose` of a function of `value`, or "
            "`jax.vjp` for gradients."
        )
    dout, *_ = none_if_zero(cotangents)
    spec = replace(spec, mean_plane=None, keeps_rests=False)
    if dout is None:
        return [None] * len(operands)
    index = spec.present.index("value")
    zeros = ad.instantiate_zeros(ad.Zero(operands[index].aval))
    given = [zeros if i == index else x for i, x in enumerate(operands)]
    saved = [*given, *forward(spec, given, mapped)]
    transposed = jax.linear_transpose(lambda value: _moving_results(spec, mapped, saved, {"value": value})[0], zeros)
    return [transposed(dout)[0] if i == index else None for i in range(len(operands))]


def _backward_rule(cotangents: Any, *arrays: Any, spec: AttentionSpec, moved: Names) -> list[Any]:
    count = len(spec.present) + 2
    saved, tangents = arrays[:count], arrays[count:]
    c = pair(cotangents)
    if is_zero(c):
        return [None] * len(arrays)
    found = gradient(spec, saved, c, undefined(moved, tangents))
    return [None] * count + as_cotangents(found, moved, tangents)


rules.define()
linear.differentiate(attend_p, _forward_rule, _transpose_rule)
linear.differentiate(tangent_p, transpose=_backward_rule)
