# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The order of rows over the devices of a ring.

In zigzag order the sequence is cut into 2 n chunks, and device i of n has the chunks i and 2 n - 1 - i. Under a causal
mask all devices then have equal work.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_fastattn.ring import Ring

Layout = Literal["contiguous", "zigzag"]


def chunk_starts(ring: Ring, device: Any, length: int) -> tuple[Any, ...]:
    """Returns where the chunks of a device start in the whole sequence.

    Args:
        ring: the devices.
        device: its index, which may be traced.
        length: rows of a device.
    """
    if ring.layout == "contiguous":
        return (device * length,)
    half = length // 2
    return device * half, (2 * ring.size - 1 - device) * half


def zigzag_order(size: int) -> list[int]:
    """Returns the chunks in the order in which `size` devices have them."""
    return [chunk for i in range(size) for chunk in (i, 2 * size - 1 - i)]


def reorder(x: jax.Array, order: list[int], axis: int) -> jax.Array:
    """Cuts an axis into as many chunks as `order` has and concatenates them in that order."""
    parts = jnp.split(x, len(order), axis)
    return jnp.concatenate([parts[chunk] for chunk in order], axis)


@functools.cache
def inverse(size: int) -> tuple[int, ...]:
    """Returns the order that inverts `zigzag_order`."""
    order = zigzag_order(size)
    return tuple(order.index(chunk) for chunk in range(2 * size))
