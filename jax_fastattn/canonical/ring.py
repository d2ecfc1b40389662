# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of `api/ring.py` to the canonical operands of a device and the spec of its ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_fastattn.canonical import arguments, batched, validation
from jax_fastattn.canonical.programs import programs
from jax_fastattn.layouts import packed
from jax_fastattn.ops.block_mask import BlockMask
from jax_fastattn.ring import Ring
from jax_fastattn.spec import AttentionSpec, Operands

# Packed sequences replace these arguments.
_NOT_PACKED = (
    "bias",
    "mask",
    "query_offset",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "segment_ids",
    "score_mod",
    "mask_mod",
)


def canonicalize(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    ring: Ring,
    boundaries: Any = None,
    query_offset: Any = 0,
    is_causal: Any = False,
    local_window_size: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    **options: Any,
) -> tuple[AttentionSpec, Operands]:
    """Checks the arguments of `ring_attention` and `all_to_all_attention`, and gives them canonical shapes.

    The arrays belong to one device; positions count from the start of the whole sequence.
    """
    replaced = {"bias": bias, "mask": mask, "query_offset": query_offset, "score_mod": score_mod, "mask_mod": mask_mod}
    _check_packed_alone(boundaries, options | replaced)
    if isinstance(mask_mod, BlockMask):
        raise TypeError("`mask_mod` is a BlockMask, which `attention` alone takes; pass the function")
    spec, operands = batched.canonicalize(
        query, key, value, is_causal=is_causal, local_window_size=local_window_size, **options
    )
    rows, keys = operands.query.shape[1], operands.key.shape[1]
    validation.check_chunks(ring.layout, query=rows, key=keys)
    axes = validation.Axes()
    axes.bind("query", operands.query, "BTNH")
    axes.bind("key", operands.key, "BMKH")
    axes.set("S", keys * ring.size, "`key` on all devices")
    planes = {
        name: arguments.plane(axes, name, x, arguments.is_batched(query))
        for name, x in (("bias", bias), ("mask", mask))
    }
    offset, window = arguments.fold_wide_window(
        arguments.offset_per_batch(query_offset, axes["B"]), spec.bounds, rows * ring.size, keys * ring.size
    )
    whole, share = _whole(axes, ring), (rows, keys)
    found, of_functions = programs(
        whole, operands.query.dtype, score_mod, mask_mod, share=share, in_order=spec.deterministic
    )
    operands = operands._replace(**planes, **of_functions, query_offset=offset)
    if boundaries is not None:
        operands = operands._replace(sequences=_shared_sequences(axes, boundaries, rows * ring.size, keys * ring.size))
        ring = replace(ring, shared_boundaries=True)
    operands = arguments.unify_varying(operands, frozenset(ring.axes))
    is_causal = window[1] == 0
    window = (window[0], None if is_causal else window[1])
    spec = replace(spec, is_causal=is_causal, window=window, present=operands.present(), ring=ring, **found)
    return spec, operands


def _whole(axes: validation.Axes, ring: Ring) -> validation.Axes:
    """Returns the sizes of a call of all devices, which have the rows together."""
    whole = validation.Axes()
    for axis, size in (("B", axes["B"]), ("N", axes["N"]), ("T", axes["T"] * ring.size), ("S", axes["S"])):
        whole.set(axis, size, axes.source(axis))
    return whole


def _check_packed_alone(boundaries: Any, options: dict[str, Any]) -> None:
    """Raises ValueError if `boundaries` and an argument that they replace are both given."""
    given = [name for name in _NOT_PACKED if options.get(name) is not None]
    if "query_offset" in given and _is_zero(options["query_offset"]):
        given.remove("query_offset")
    if boundaries is not None and given:
        raise ValueError(f"`boundaries` and `{given[0]}` are both given, expected one of them; leave out `{given[0]}`")


def _shared_sequences(axes: validation.Axes, boundaries: Any, rows: int, keys: int) -> jax.Array:
    """Returns sequences `[B, M, 4]` whose queries and keys have the same boundaries."""
    if rows != keys:
        raise ValueError(
            f"`boundaries` are given for {rows} rows of `query` and {keys} of `key`, expected as many of both; "
            "pass `segment_ids` for cross-attention"
        )
    ends = arguments.to_int32(validation.as_integers("boundaries", boundaries))
    axes.bind("boundaries", ends, "C" if ends.ndim == axes["B"] == 1 else "BC")
    validation.check_boundaries("boundaries", axes)
    return jax.vmap(lambda x: packed.sequences(x, x, (rows, keys)))(arguments.add_batch(ends, 2))


def _is_zero(query_offset: Any) -> bool:
    return isinstance(query_offset, (int, np.integer)) and not isinstance(query_offset, bool) and query_offset == 0
