# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Collective permutes of several arrays at once.

XLA overlaps one collective at a time with kernels. It would run a second permute of the same step before the kernel
starts. All arrays of a step therefore travel as the bits of one array.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.spec import Ring

_UNITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def permute(ring: Ring, arrays: list[jax.Array], pairs: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Returns what arrived: the arrays of the first device of a pair arrive at the second one, zeros elsewhere."""
    if all(source == target for source, target in pairs) and len(pairs) == ring.size:
        return arrays
    if len(arrays) == 1:
        return [jax.lax.ppermute(arrays[0], ring.axes, pairs)]
    return _packed(ring, tuple(pairs), *arrays)


def _packed(ring: Ring, pairs: tuple[tuple[int, int], ...], *arrays: jax.Array) -> list[jax.Array]:
    @jax.custom_jvp
    def send(*arrays: jax.Array) -> list[jax.Array]:
        unit = _UNITS[min(x.dtype.itemsize for x in arrays)]
        bits = [jax.lax.bitcast_convert_type(x, unit) for x in arrays]
        moved = jax.lax.ppermute(jnp.concatenate([x.reshape(-1) for x in bits]), ring.axes, pairs)
        parts = jnp.split(moved, np.cumsum([x.size for x in bits])[:-1].tolist())
        return [
            jax.lax.bitcast_convert_type(part.reshape(y.shape), x.dtype)
            for part, x, y in zip(parts, arrays, bits, strict=True)
        ]

    @send.defjvp
    def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
        moving = [i for i, x in enumerate(tangents) if x.dtype != jax.dtypes.float0]
        moved = iter(permute(ring, [tangents[i] for i in moving], pairs))
        return send(*primals), [next(moved) if i in moving else x for i, x in enumerate(tangents)]

    return send(*arrays)
