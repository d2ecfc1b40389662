# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The rows past the end of a sequence that the devices of a ring do not divide evenly.

All devices have the same number of rows; the last rows of the last devices are padding of zeros (`Ring.lengths`). With
zeros for queries, cotangents and results, padding adds nothing to a gradient. Lengths hide it where zeros are not
enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_fastattn.ops.ring.helping import balances
from jax_fastattn.spec import PLANES, AttentionSpec, Operands


def hide(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns a call with lengths that end where the sequence does, if there is padding that they have to hide.

    Planes of functions get numbers of padding, which are 0.
    """
    assert spec.ring is not None
    if spec.ring.lengths is None:
        return spec, operands
    planes = {
        name: jnp.pad(getattr(operands, name), (*((0, 0),) * 3, sizes))
        for name, sizes in _missing(spec, operands).items()
    }
    operands = operands._replace(**planes)
    if operands.sequences is not None or _is_hidden(spec, operands):
        return spec, operands
    rows, keys = spec.ring.lengths
    operands = operands._replace(
        query_seq_lengths=_shorter(operands, operands.query_seq_lengths, rows),
        key_value_seq_lengths=_shorter(operands, operands.key_value_seq_lengths, keys),
    )
    return dataclasses.replace(spec, present=operands.present()), operands


def cut_planes(spec: AttentionSpec, operands: Operands, found: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns gradients without what `hide` adds to planes. `operands` are the ones that `hide` takes."""
    missing = {name: sizes for name, sizes in _missing(spec, operands).items() if name in found}
    cut = {
        name: jax.lax.slice_in_dim(found[name], low, found[name].shape[3] - high, axis=3)
        for name, (low, high) in missing.items()
    }
    return {**found, **cut}


def _missing(spec: AttentionSpec, operands: Operands) -> dict[str, tuple[int, int]]:
    """Returns how many numbers planes lack for padding, before and after their own, by the name of the operand."""
    ring = spec.ring
    assert ring is not None
    if ring.lengths is None:
        return {}
    rows = operands.query.shape[1] * ring.size
    keys = operands.key.shape[1] * (1 if ring.whole_keys else ring.size)
    # Of each kind of plane: numbers before its own, and how many it has with padding.
    sizes = {"query": (0, rows), "key": (0, keys), "distance": (rows - ring.lengths[0], rows + keys)}
    found: dict[str, tuple[int, int]] = {}
    for name in PLANES:
        x, kind = getattr(operands, name), name.partition("_")[0]
        if x is not None and kind in sizes:
            low, size = sizes[kind]
            found[name] = low, size - low - x.shape[3]
    return found


def _shorter(operands: Operands, lengths: jax.Array | None, most: int) -> jax.Array:
    """Returns lengths `[B]` of at most `most`."""
    return jnp.full(operands.query.shape[0], most, jnp.int32) if lengths is None else jnp.minimum(lengths, most)


def _is_hidden(spec: AttentionSpec, operands: Operands) -> bool:
    """Returns whether no query sees padding, and padding sees only what some query sees, which may not be NaN.

    Causality alone hides it in a call that balances, whose kernels then need no lengths. An id of padding is 0, which
    may be the id of keys that no query sees. Functions may hide keys from all queries except padding, too.
    """
    assert spec.ring is not None and spec.ring.lengths is not None
    rows, keys = spec.ring.lengths
    has_others = operands.query_segment_ids is not None or spec.has_programs
    return rows == keys and not has_others and balances(spec, operands)
