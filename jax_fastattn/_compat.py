# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""JAX spellings that differ between versions, or that cost less than the public one. This module imports only jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# `jax.extend.core.Primitive`, whose package loads Pallas in jax 0.12: 42 ms that every import would pay.
Primitive: Any = type(jax.lax.add_p)

# Whether XLA takes a ring from a partition callback. That of jax 0.8 fails ("Could not find mapping for") on one that
# also adds up gradients over devices.
HAS_RING_IN_PARTITION = jax.__version_info__ >= (0, 9)


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the manual mesh axes (of an enclosing `shard_map`) over which `x` varies."""
    aval = jax.typeof(x)
    return aval.vma if hasattr(aval, "vma") else aval.mat.varying


def zeros_like(x: jax.Array) -> jax.Array:
    """Returns zeros that vary over the manual mesh axes over which `x` varies."""
    return as_varying(jnp.zeros_like(x), varying_axes(x))


def as_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Returns `x` marked as varying over `axes` too; the transpose sums over the axes that were added."""
    added = tuple(axes - varying_axes(x))
    if not added:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, added, to="varying")
    return jax.lax.pvary(x, added)  # pyright: ignore[reportAttributeAccessIssue] (gone from newer jax)
