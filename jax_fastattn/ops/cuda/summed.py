# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of the sums that a kernel of its own writes, see `kernels/sums/tile_sums.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fastattn.kernels.sums.tiles import KEYS, ROWS


def row_gradient(sums: jax.Array, dlse: jax.Array | None, products: jax.Array | None = None) -> jax.Array:
    """Returns what each row adds to the gradient of a bias of rows or a plane, `[B, N, T]`; see `tile_sums.RowSums`.

    Rows without weights add 0: they see nothing, and their dlse may be no number.
    """
    changes, weights, own = jnp.moveaxis(jnp.sum(sums, axis=(0, 3)), 2, 0)
    delta = own if products is None else products.swapaxes(1, 2)
    delta = delta if dlse is None else delta - dlse.swapaxes(1, 2)
    return jnp.where(weights == 0, changes, changes - weights * delta)


def distance_sums(tiles: jax.Array, queries: int, length: int) -> jax.Array:
    """Returns sums by distance `[planes, U]` of the sums of diagonals of tiles `[planes, diagonals, 128, 128]`.

    Distance `key - query + T` is element U. The diagonals begin with the tile of the last queries and the first keys.
    """
    planes, count = tiles.shape[:2]
    # Row r is moved 127 - r columns to the right, by one column less in each row of a flat array.
    flat = jnp.pad(tiles[:, :, ::-1], ((0, 0),) * 3 + ((0, ROWS),)).reshape(planes, count, -1)
    rows = flat[..., : ROWS * (ROWS + KEYS - 1)].reshape(planes, count, ROWS, ROWS + KEYS - 1)
    sums = jnp.pad(jnp.sum(rows, axis=2), ((0, 0), (0, 0), (0, 1))).reshape(planes, count, 2, KEYS)
    # The second half of a diagonal's distances are the first half of the next one's.
    found = jnp.pad(sums[:, :, 0], ((0, 0), (0, 1), (0, 0))) + jnp.pad(sums[:, :, 1], ((0, 0), (1, 0), (0, 0)))
    found = jnp.pad(found.reshape(planes, -1), ((0, 0), (1, 0)))
    first = -(-queries // ROWS) * ROWS - queries
    return found[:, first : first + length]
