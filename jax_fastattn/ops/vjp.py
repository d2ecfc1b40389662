# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The derivative rule: residuals are query, key, value, output and log-sum-exp (FlashAttention, algorithm 4)."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_fastattn.ops.backward import backward
from jax_fastattn.ops.forward import forward
from jax_fastattn.spec import AttentionSpec, Operands

# For `jax.checkpoint` policies: saving both spares the backward pass the forward kernel.
OUT_NAME = "jax_fastattn_out"
LSE_NAME = "jax_fastattn_lse"

Results = tuple[jax.Array, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def attend(spec: AttentionSpec, operands: Operands, return_residual: bool) -> Results:
    """The output `[B, T, N, D]` and, if asked for, the log-sum-exp `[B, T, N]`, else None."""
    out, lse = forward(spec, operands)
    return out, lse if return_residual else None


def _attend_fwd(spec: AttentionSpec, operands: Operands, return_residual: bool) -> tuple[Results, Any]:
    out, lse = forward(spec, operands)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse if return_residual else None), (operands, out, lse)


def _attend_bwd(spec: AttentionSpec, return_residual: bool, residuals: Any, cotangents: Results) -> tuple[Operands]:
    del return_residual  # without it the cotangent is None
    operands, out, lse = residuals
    found = backward(spec, operands, out, lse, *cotangents)
    gradients: dict[str, Any] = dict.fromkeys(Operands._fields)
    for name, x in found._asdict().items():
        gradients[name] = None if x is None else x.astype(getattr(operands, name).dtype)
    return (Operands(**gradients),)


attend.defvjp(_attend_fwd, _attend_bwd)
