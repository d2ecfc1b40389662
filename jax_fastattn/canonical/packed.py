# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of `attention_varlen` to canonical operands: packed tokens become one batch entry."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn import packed
from jax_fastattn.canonical import arguments, validation
from jax_fastattn.spec import UNBOUNDED, AttentionSpec, Operands


def canonicalize(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    sinks: Any = None,
    query_offset: Any = 0,
    **static: Any,
) -> tuple[AttentionSpec, Operands]:
    """Checks the arguments of `api.attention_varlen`; packed tokens become one batch entry."""
    axes, (q, k, v) = arguments.check_qkv(query, key, value, packed=True)
    starts_q = arguments.to_int32(validation.as_integers("cu_seqlens_q", cu_seqlens_q))
    starts_k = arguments.to_int32(validation.as_integers("cu_seqlens_k", cu_seqlens_k))
    axes.bind("cu_seqlens_q", starts_q, "C")
    axes.bind("cu_seqlens_k", starts_k, "C")
    validation.check_boundaries("cu_seqlens_q", axes)
    sequences = packed.sequences(starts_q, starts_k, (axes["T"], axes["S"]))
    offset = _packed_offset(query_offset, sequences)
    offset, static = arguments.near_offset(axes, offset, static)
    operands = Operands(
        query=q,
        key=k,
        value=v,
        sinks=None if sinks is None else arguments.check_sinks(axes, sinks, q.dtype),
        sequences=packed.with_offsets(sequences, None if offset is None else jnp.clip(offset, -UNBOUNDED, UNBOUNDED))[
            None
        ],
    )
    return arguments.resolve(operands, **static)


def _packed_offset(query_offset: Any, sequences: jax.Array) -> jax.Array | None:
    """Returns the offset of each sequence, int32 `[C - 1]`; None for the common 0."""
    if not isinstance(query_offset, str):
        return arguments.offset_per_batch(query_offset, sequences.shape[0] - 2)
    if query_offset != "bottom_right":
        raise ValueError(f'`query_offset` is {query_offset!r}, expected an int, integers, or "bottom_right"')
    return sequences[1:-1, 3] - sequences[1:-1, 1]
