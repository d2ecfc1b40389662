# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The planes of a score function as kernels read them: with zeros at their ends, without those of a mask function."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_fastattn.kernels.codes import PLANE_PADDING, ScoreParts
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.layouts.heads import reduce_to
from jax_fastattn.spec import PLANES, Operands

# Zeros before and after the numbers of a plane.
_PADDING = {"query": (0, PLANE_PADDING), "key": (0, PLANE_PADDING), "distance": (PLANE_PADDING, PLANE_PADDING)}

# It stands for infinity: a product of two is a number, and a score of minus as much has no weight.
_MOST = 1e18


def score_parts(kernel: KernelSpec) -> ScoreParts | None:
    """Returns what a compile key holds of a score function; None without one."""
    found = [x for code in kernel.features for x in code.constants if isinstance(x, ScoreParts)]
    return found[0] if found else None


def with_score_planes(kernel: KernelSpec, arrays: Mapping[str, jax.Array | None]) -> dict[str, jax.Array | None]:
    """Returns the operands of a launch by name, of which planes are those that the score function reads."""
    found = {name: x for name, x in arrays.items() if name not in PLANES}
    parts = score_parts(kernel)
    for operand in parts.plane_operands if parts is not None else ():
        x = arrays[operand.name]
        assert x is not None
        # Planes of a mask function come after those of a score function.
        x, kind = x[:, :, : operand.planes], operand.name.partition("_")[0]
        if kernel.op == "backward" and parts is not None and parts.makes_planes_finite and x.dtype == jnp.float32:
            x = jnp.nan_to_num(x, posinf=_MOST, neginf=-_MOST) if kind in _PADDING else x
        found[operand.name] = jnp.pad(x, ((0, 0),) * 3 + (_PADDING[kind],)) if kind in _PADDING else x
    return found


def plane_gradient(kernel: KernelSpec, operands: Operands, rows: jax.Array) -> dict[str, jax.Array]:
    """Returns the gradient of the operand with the plane that a launch sums, by name.

    Args:
        operands: the call's.
        rows: what each row adds, `[B, N, T]`.
    """
    parts = score_parts(kernel)
    assert parts is not None and kernel.dplane is not None
    place = parts.places[kernel.dplane]
    x: jax.Array = getattr(operands, place.operand)
    if place.plane.kind == "head":
        found = reduce_to((*x.shape[:2], 1), rows)[:, :, 0]
    else:
        found = reduce_to((*x.shape[:2], rows.shape[2]), rows)
    return {place.operand: jnp.zeros_like(x).at[:, :, place.start].set(found)}
