# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The rows past the end of a sequence that the devices of a ring do not divide evenly.

All devices have the same number of rows; the last rows of the last devices are padding of zeros (`Ring.lengths`). With
zeros for queries, cotangents and results, padding adds nothing to a gradient. Lengths hide it where zeros are not
enough.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_fastattn.ops.ring.helping import balances
from jax_fastattn.spec import AttentionSpec, Operands


def hide(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns a call with lengths that end where the sequence does, if there is padding that they have to hide."""
    assert spec.ring is not None
    if spec.ring.lengths is None or operands.sequences is not None or _is_hidden(spec, operands):
        return spec, operands
    rows, keys = spec.ring.lengths
    operands = operands._replace(
        query_seq_lengths=_shorter(operands, operands.query_seq_lengths, rows),
        key_value_seq_lengths=_shorter(operands, operands.key_value_seq_lengths, keys),
    )
    return dataclasses.replace(spec, present=operands.present()), operands


def _shorter(operands: Operands, lengths: jax.Array | None, most: int) -> jax.Array:
    """Returns lengths `[B]` of at most `most`."""
    return jnp.full(operands.query.shape[0], most, jnp.int32) if lengths is None else jnp.minimum(lengths, most)


def _is_hidden(spec: AttentionSpec, operands: Operands) -> bool:
    """Returns whether no query sees padding, and padding sees only what some query sees, which may not be NaN.

    Causality alone hides it in a call that balances, whose kernels then need no lengths. An id of padding is 0, which
    may be the id of keys that no query sees.
    """
    assert spec.ring is not None and spec.ring.lengths is not None
    rows, keys = spec.ring.lengths
    return rows == keys and operands.query_segment_ids is None and balances(spec, operands)
