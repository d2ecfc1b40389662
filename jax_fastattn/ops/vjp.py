# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention as a function that JAX differentiates: the forward rule, and the backward rule of reverse mode.

The forward rule saves the operands, the output and the log-sum-exp (FlashAttention, algorithm 4), and returns a tangent
that is linear in the tangents of operands. The backward rule transposes that tangent: it recomputes the probabilities
from what was saved. JAX tells the forward rule which tangents are zero and the backward rule which cotangents are, so
that only the gradients and cotangents that are needed are computed.

These are rules of primitives and not a `custom_vjp`, which refuses forward mode. `tangents.py` has the second
derivatives.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_fastattn.ops import linear
from jax_fastattn.ops.backward import gradient
from jax_fastattn.ops.forward import attend_p, forward
from jax_fastattn.ops.linear import Names
from jax_fastattn.ops.ring import rules
from jax_fastattn.ops.tangents import as_cotangents, is_zero, moving, pair, tangent, tangent_p, undefined, zeros
from jax_fastattn.spec import AttentionSpec, Operands

# For `jax.checkpoint` policies: saving both spares the backward pass the forward kernel.
OUT_NAME = "jax_fastattn_out"
LSE_NAME = "jax_fastattn_lse"


def attend(spec: AttentionSpec, operands: Operands, return_residual: bool) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output `[B, T, N, D]` and, if asked for, the log-sum-exp `[B, T, N]`, else None."""
    out, lse = forward(spec, operands.arrays())
    return out, lse if return_residual else None


def _forward_rule(operands: Any, tangents: Any, *, spec: AttentionSpec, mapped: tuple[bool, ...]) -> tuple[Any, Any]:
    out, lse = forward(spec, operands, mapped)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    moved = moving(spec.present, tangents)
    if not moved:
        return [out, lse], zeros([out, lse])

    def one(saved: Any, moved: Any) -> Any:
        return tangent(spec, saved, moved)

    if any(mapped):  # the mapped axis becomes query heads in the forward pass alone
        axes = [0 if is_mapped else None for is_mapped in mapped]
        of_moved = {name: axis for name, axis in zip(spec.present, axes, strict=True) if name in moved}
        one = jax.vmap(one, in_axes=([*axes, 0, 0], of_moved))
    return [out, lse], one([*operands, out, lse], moved)


def _backward_rule(cotangents: Any, *arrays: Any, spec: AttentionSpec, moved: Names) -> list[Any]:
    count = len(spec.present) + 2
    saved, tangents = arrays[:count], arrays[count:]
    c = pair(cotangents)
    if is_zero(c):
        return [None] * len(arrays)
    found = gradient(spec, saved, c, undefined(moved, tangents))
    return [None] * count + as_cotangents(found, moved, tangents)


rules.define()
linear.differentiate(attend_p, _forward_rule)
linear.differentiate(tangent_p, transpose=_backward_rule)
