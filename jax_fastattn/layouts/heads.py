# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Axes of heads, and gradients of operands that lack an axis; the XLA path and the launches of kernels need both."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fastattn.spec import Operands


def split_heads(x: jax.Array, num_kv_heads: int, axis: int) -> jax.Array:
    """Splits an axis of size N into K, G, one of size 1 into 1, 1, and one of size K into K, 1."""
    heads = x.shape[axis]
    kv_heads = 1 if heads == 1 else num_kv_heads
    return x.reshape(*x.shape[:axis], kv_heads, heads // max(kv_heads, 1), *x.shape[axis + 1 :])


def rows_of(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """Transposes `[B, T, N, ...]` to `[B, K, G, T, ...]`."""
    return jnp.moveaxis(split_heads(x, num_kv_heads, 2), 1, 3)


def merge_rows(x: jax.Array) -> jax.Array:
    """Inverts `rows_of`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def reduce_to(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Sums x over the dimensions that are 1 in shape."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def scale_gradient(operands: Operands, dscaled: jax.Array) -> jax.Array | None:
    """Returns the gradient of a scale operand from the scaled query's gradient `[B, T, N, H]`; None without one."""
    if operands.scale is None:
        return None
    dscaled = dscaled.astype(operands.scale.dtype)
    # A query that sees no key may be NaN; the gradient is exactly 0 there.
    products = product_or_zero(dscaled, operands.query.astype(dscaled.dtype))
    return reduce_to(operands.scale.shape, products.sum(axis=(1, 2, 3))[:, None])


@jax.custom_jvp
def product_or_zero(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x * y, and 0 where x is 0, even if y is NaN or infinite.

    A `where` alone would also have no derivative along x where x is 0. `ops/` calls this inside primitives only, in
    which no transformation of the user's can drop the rule.
    """
    return jnp.where(x == 0.0, 0.0, x * y)


@product_or_zero.defjvp
def _product_or_zero_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    return product_or_zero(x, y), product_or_zero(dx, y) + product_or_zero(x, dy)
