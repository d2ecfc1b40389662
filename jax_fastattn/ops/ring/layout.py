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

from jax_fastattn.ops.ring.permute import permute
from jax_fastattn.spec import Ring

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


def to_zigzag(ring: Ring, arrays: list[jax.Array]) -> list[jax.Array]:
    """Exchanges contiguous rows, on axis 1, into zigzag order: two permutes, each of one half of all arrays."""
    size, owners = ring.size, _owners(ring.size)
    even, odd = ([half(x) for x in arrays] for half in (_low, _high))
    even = permute(ring, even, [(d, owners[2 * d]) for d in range(size)])
    odd = permute(ring, odd, [(d, owners[2 * d + 1]) for d in range(size)])
    return [jnp.concatenate(_ordered(ring, x, y), axis=1) for x, y in zip(even, odd, strict=True)]


def from_zigzag(ring: Ring, arrays: list[jax.Array]) -> list[jax.Array]:
    """Inverts `to_zigzag`."""
    size, owners = ring.size, _owners(ring.size)
    even, odd = zip(*(_ordered(ring, _low(x), _high(x)) for x in arrays), strict=True)
    even = permute(ring, list(even), [(owners[2 * d], d) for d in range(size)])
    odd = permute(ring, list(odd), [(owners[2 * d + 1], d) for d in range(size)])
    return [jnp.concatenate(pair, axis=1) for pair in zip(even, odd, strict=True)]


def _owners(size: int) -> list[int]:
    """Returns the device that has each chunk in zigzag order."""
    return [min(chunk, 2 * size - 1 - chunk) for chunk in range(2 * size)]


def _ordered(ring: Ring, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Swaps two halves on devices with an odd index; the first chunk of a device is its even one elsewhere."""
    is_even = jax.lax.axis_index(ring.axes) % 2 == 0
    return jnp.where(is_even, x, y), jnp.where(is_even, y, x)


def _low(x: jax.Array) -> jax.Array:
    return x[:, : x.shape[1] // 2]


def _high(x: jax.Array) -> jax.Array:
    return x[:, x.shape[1] // 2 :]


def reorder(x: jax.Array, order: list[int], axis: int) -> jax.Array:
    """Cuts an axis into as many chunks as `order` has and concatenates them in that order."""
    parts = jnp.split(x, len(order), axis)
    return jnp.concatenate([parts[chunk] for chunk in order], axis)


@functools.cache
def inverse(size: int) -> tuple[int, ...]:
    """Returns the order that inverts `zigzag_order`."""
    order = zigzag_order(size)
    return tuple(order.index(chunk) for chunk in range(2 * size))
