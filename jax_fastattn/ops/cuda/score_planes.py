# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The planes of a function as attention kernels read them: with zeros at their ends, and only those that they read.

A launch joins batch entries of packed sequences, and so the rows of their planes.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_fastattn.kernels.codes import PLANE_PADDING, plane_parts, score_parts
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.tiles import KEYS, ROWS, diagonal_parts, diagonals
from jax_fastattn.layouts.heads import reduce_to
from jax_fastattn.ops.cuda.summed import distance_sums, row_gradient
from jax_fastattn.spec import PLANES, Operands, Problem

# Zeros before and after the numbers of a plane.
_PADDING = {"query": (0, PLANE_PADDING), "key": (0, PLANE_PADDING), "distance": (PLANE_PADDING, PLANE_PADDING)}

# It stands for infinity: a product of two is a number, and a score of minus as much has no weight.
_MOST = 1e18


def joined_shapes(shapes: tuple[tuple[str, int, int], ...]) -> tuple[tuple[str, int, int], ...]:
    """Returns `Problem.planes` of a launch that joins batch entries: each row has a plane's number of its own."""
    return tuple((name, 1 if _kind(name) in ("query", "key") else batch, heads) for name, batch, heads in shapes)


def _kind(operand: str) -> str:
    return operand.partition("_")[0]


def _joined(x: jax.Array, kind: str, lengths: tuple[int, int, int]) -> jax.Array:
    """Returns planes `[b, n, P, ...]` of a launch that joins batch entries, given B, T and S."""
    batch, queries, keys = lengths
    if batch == 1 or kind not in _PADDING:
        return x
    if kind == "distance":  # distance 0 is element B T of a launch
        return jnp.pad(x, ((0, 0),) * 3 + (((batch - 1) * queries, (batch - 1) * keys),))
    x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
    return jnp.moveaxis(x, 0, 2).reshape(1, *x.shape[1:3], -1)


def with_score_planes(
    kernel: KernelSpec, arrays: Mapping[str, jax.Array | None], lengths: tuple[int, int, int]
) -> dict[str, jax.Array | None]:
    """Returns the operands of a launch by name, of which planes are those that its function reads.

    Args:
        arrays: operands by name.
        lengths: B, T and S of the call.
    """
    found = {name: x for name, x in arrays.items() if name not in PLANES}
    parts = plane_parts(kernel.features)
    for operand in parts.plane_operands if parts is not None else ():
        x = arrays[operand.name]
        assert x is not None
        # Planes of a mask function come after those of a score function.
        x, kind = x[:, :, : operand.planes], _kind(operand.name)
        x = _joined(x, kind, lengths) if kernel.packed else x
        if kernel.op == "backward" and parts is not None and parts.makes_planes_finite and x.dtype == jnp.float32:
            x = jnp.nan_to_num(x, posinf=_MOST, neginf=-_MOST) if kind in _PADDING else x
        found[operand.name] = jnp.pad(x, ((0, 0),) * 3 + (_PADDING[kind],)) if kind in _PADDING else x
    return found


def diagonal_shape(kernel: KernelSpec, problem: Problem, multiprocessors: int) -> tuple[int, ...]:
    """Returns the shape of the sums for a plane of distances, `[parts, planes, diagonals, 128, 128]`."""
    parts = score_parts(kernel.features)
    assert parts is not None and kernel.dplane is not None
    operand = parts.operands[parts.places[kernel.dplane].operand]
    planes = (problem.batch if operand.per_batch else 1) * (problem.num_heads if operand.per_head else 1)
    count = diagonals(problem.query_length, problem.key_length)
    return diagonal_parts(planes * count, multiprocessors), planes, count, ROWS, KEYS


def plane_gradient(
    kernel: KernelSpec,
    operands: Operands,
    found: Mapping[str, jax.Array],
    dlse: jax.Array | None,
    products: jax.Array | None,
) -> dict[str, jax.Array]:
    """Returns the gradient of the operand with the plane that a launch sums, by name.

    Args:
        operands: the call's.
        found: what the launch has written, by name.
        dlse: the cotangent of the log-sum-exps `[B, T, N]`, or None for 0.
        products: as for `bias_gradient`.
    """
    parts = score_parts(kernel.features)
    assert parts is not None and kernel.summed_plane is not None
    place = parts.places[kernel.summed_plane]
    x: jax.Array = getattr(operands, place.operand)
    batch, heads, kind = *x.shape[:2], place.plane.kind
    if kind == "distance":
        queries = operands.query.shape[1]
        plane = distance_sums(jnp.sum(found["dbias"], axis=0), queries, x.shape[3]).reshape(batch, heads, -1)
    elif kernel.has_row_means:
        heads_of_batch = found["dkey_bias"].reshape(operands.query.shape[0], operands.query.shape[2], -1)
        plane = reduce_to((batch, heads, 1), jnp.sum(heads_of_batch, axis=2, keepdims=True))
    elif kind == "key":
        by_warp = found["dkey_bias"].reshape(operands.query.shape[0], operands.query.shape[2], -1, x.shape[3])
        plane = reduce_to((batch, heads, x.shape[3]), jnp.sum(by_warp, axis=2))
    else:
        rows = row_gradient(found["dbias"], dlse, products)
        plane = reduce_to((batch, heads, 1 if kind == "head" else rows.shape[2]), rows)
    plane = plane[:, :, 0] if kind == "head" else plane
    return {place.operand: jnp.zeros_like(x).at[:, :, place.start].set(plane)}
