# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The derivative rule: residuals are query, key, value, output and log-sum-exp (FlashAttention, algorithm 4).

JAX tells the forward rule which operands are differentiated and the backward rule which cotangents are zero, so that
only the gradients and cotangents that are needed are computed. The names of the differentiated operands reach the
backward rule as the keys of a dict without values, which is structure, not data.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jax_fastattn import _compat
from jax_fastattn.ops.backward import backward
from jax_fastattn.ops.forward import forward
from jax_fastattn.spec import DIFFERENTIABLE, AttentionSpec, Operands

# For `jax.checkpoint` policies: saving both spares the backward pass the forward kernel.
OUT_NAME = "jax_fastattn_out"
LSE_NAME = "jax_fastattn_lse"

Results = tuple[jax.Array, jax.Array | None]


def attend(spec: AttentionSpec, operands: Operands, return_residual: bool) -> Results:
    """Returns the output `[B, T, N, D]` and, if asked for, the log-sum-exp `[B, T, N]`, else None."""

    def run(operands: Operands) -> Results:
        return _attend(spec, operands, return_residual)

    # A `shard_map` that is not jitted refuses a `custom_vjp` with symbolic zeros. The jitted function is made anew for
    # each call: calls that shared its trace would also share which operands are differentiated.
    is_in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.jit(run, inline=True)(operands) if is_in_shard_map else run(operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def _attend(spec: AttentionSpec, operands: Operands, return_residual: bool) -> Results:
    out, lse = forward(spec, operands)
    return out, lse if return_residual else None


def _attend_fwd(spec: AttentionSpec, primals: Any, return_residual: bool) -> tuple[Results, Any]:
    operands: Operands = jax.tree.map(lambda x: x.value, primals)
    wanted = {name: None for name, x in primals._asdict().items() if x is not None and x.perturbed}
    out, lse = forward(spec, operands)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse if return_residual else None), (operands, out, lse, wanted)


def _attend_bwd(spec: AttentionSpec, return_residual: bool, residuals: Any, cotangents: Any) -> tuple[Operands]:
    del return_residual  # without it the cotangent is None
    operands, out, lse, wanted = residuals
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    dout = _compat.zeros_like(out) if dout is None else dout
    found = backward(spec, operands, out, lse, dout, dlse, wanted)
    gradients: dict[str, Any] = {}
    for name in DIFFERENTIABLE:
        x, operand = getattr(found, name), getattr(operands, name)
        # Not None, which would change the structure of the result: jax 0.8 wants the same one for every derivative of
        # a jitted function.
        gradients[name] = zero_from_primal(operand, symbolic_zeros=True) if x is None else x.astype(operand.dtype)
    return (Operands(**gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
