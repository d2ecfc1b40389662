# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Records of tiles of packed sequences, which kernels read.

`kernels/tiles/records.py` says what a record holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fastattn.kernels.tiles.records import Record, slot_count


def tile_records(sequences: jax.Array, lengths: tuple[int, int], rows: tuple[int, int], *, of_keys: bool) -> jax.Array:
    """Returns the records of all query tiles or of all key tiles, int32 `[slots, 8]`, see `kernels/tiles/records.py`.

    Args:
        sequences: `[B, M, 4 or 5]`; their batch entries lie one after the other.
        lengths: T and S of a batch entry.
        rows: the rows of a query tile and of a key tile.
        of_keys: whether the tiles are key tiles.
    """
    batch, count, columns = sequences.shape
    entry = jnp.arange(batch, dtype=jnp.int32)[:, None]
    index = jnp.arange(count, dtype=jnp.int32)
    is_padding = jnp.broadcast_to((index == 0) | (index == count - 1), (batch, count))
    first = [(sequences[:, :, 2 * side] + entry * lengths[side]).reshape(-1) for side in range(2)]
    size = [sequences[:, :, 2 * side + 1].reshape(-1) for side in range(2)]
    slots = [first[side] // rows[side] + jnp.arange(batch * count, dtype=jnp.int32) for side in range(2)]
    own, other = int(of_keys), int(not of_keys)
    total = slot_count(batch * lengths[own], rows[own], batch * count)
    slot = jnp.arange(total, dtype=jnp.int32)
    owner = jnp.searchsorted(slots[own], slot, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    tile = slot - slots[own][owner]
    exists = tile * rows[own] < size[own][owner]
    record = Record(
        first=first[own],
        rows=size[own],
        tile=tile,
        first_other=jnp.minimum(first[other], batch * lengths[other] - 1),
        others=jnp.where(is_padding.reshape(-1), 0, size[other]),
        first_slot=slots[0],
        offset=sequences[:, :, 4].reshape(-1) if columns == 5 else jnp.zeros(batch * count, jnp.int32),
        entry=jnp.where(is_padding, -1, entry).reshape(-1),
    )
    words = [x if name == "tile" else x[owner] for name, x in record._asdict().items()]
    return jnp.where(exists[:, None], jnp.stack(words, axis=1), 0)
