# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Collective permutes of several arrays at once.

XLA overlaps one collective at a time with kernels. It would run a second permute of the same step before the kernel
starts. All arrays of a step therefore travel as the bits of one array, also where devices send different arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.ring import Ring

Pairs = Sequence[tuple[int, int]]

_UNITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def permute(ring: Ring, arrays: list[jax.Array], pairs: Pairs) -> list[jax.Array]:
    """Returns what arrived: the arrays of the first device of a pair arrive at the second one, zeros elsewhere."""
    if len(arrays) == 1:
        return [_permute(ring, arrays[0], pairs)]
    return permute_during(ring, [arrays], pairs, ())[0][0]


def permute_during(
    ring: Ring, groups: Sequence[list[jax.Array]], pairs: Pairs, results: Any, *, is_second: jax.Array | None = None
) -> tuple[list[list[jax.Array]], Any]:
    """Sends one of two groups of arrays while a kernel runs. Returns what arrived, read as each group, and `results`.

    A device that reads what arrived as the other group reads bits of no meaning, which may be NaN.

    Args:
        ring, pairs: as for `permute`.
        groups: one group or two, with the same shapes and dtypes on all devices.
        results: the kernel's results, floating-point arrays. Nothing reads what arrived before the kernel ends:
            otherwise XLA may wait for the permute first, to unpack what arrived.
        is_second: whether this device sends the second group.
    """
    given, tree = jax.tree.flatten(results)
    sizes = [*map(len, groups), len(given)]

    @jax.custom_jvp
    def send(*arrays: jax.Array) -> list[jax.Array]:
        *sent, after = _cut(arrays, sizes)
        unit = _UNITS[min(x.dtype.itemsize for group in sent for x in group)]
        bits = [_pack(group, unit) for group in sent]
        size = max(x.size for x in bits)
        padded = [jnp.pad(x, (0, size - x.size)) for x in bits]
        chosen = padded[0] if is_second is None else jnp.where(is_second, padded[1], padded[0])
        moved = _permute(ring, chosen, pairs)
        if after:
            moved, after = jax.lax.optimization_barrier((moved, after))
        arrived = [_unpack(moved[: x.size], group) for x, group in zip(bits, sent, strict=True)]
        return [*itertools.chain(*arrived, after)]

    @send.defjvp
    def _(primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[list[jax.Array], list[Any]]:
        *moving, after = ([x for x in part if not _is_zero(x)] for part in _cut(tangents, sizes))
        arrived, after = permute_during(ring, moving, pairs, after, is_second=is_second)
        moved = itertools.chain(*arrived, after)
        return send(*primals), [x if _is_zero(x) else next(moved) for x in tangents]

    *arrived, given = _cut(send(*itertools.chain(*groups, given)), sizes)
    return arrived, tree.unflatten(given)


def _permute(ring: Ring, x: jax.Array, pairs: Pairs) -> jax.Array:
    """Returns what arrived of one array. JAX permutes over axes in the order of the mesh alone."""
    sizes = {name: size for name, size in ring.mesh if name in ring.axes}
    axes = tuple(sizes)
    # These numbers are what each device of the ring has along the axes in the mesh's order.
    numbers = np.arange(ring.size).reshape(*sizes.values()).transpose([axes.index(name) for name in ring.axes]).ravel()
    return jax.lax.ppermute(x, axes, [(int(numbers[source]), int(numbers[target])) for source, target in pairs])


def _is_zero(tangent: Any) -> bool:
    """Returns whether a tangent belongs to integers."""
    return tangent.dtype == jax.dtypes.float0


def _cut(x: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Cuts a sequence into parts of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [list(x[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _pack(arrays: Sequence[jax.Array], unit: Any) -> jax.Array:
    """Returns the bits of arrays, one after the other."""
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, unit).reshape(-1) for x in arrays])


def _unpack(bits: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Inverts `_pack`, given arrays of the same shapes and dtypes."""
    counts = [x.size * x.dtype.itemsize // bits.dtype.itemsize for x in like]
    parts = jnp.split(bits, np.cumsum(counts)[:-1].tolist())

    def restore(part: jax.Array, x: jax.Array) -> jax.Array:
        wide = x.dtype.itemsize // bits.dtype.itemsize
        return jax.lax.bitcast_convert_type(part.reshape(x.shape if wide == 1 else (*x.shape, wide)), x.dtype)

    return [restore(part, x) for part, x in zip(parts, like, strict=True)]
