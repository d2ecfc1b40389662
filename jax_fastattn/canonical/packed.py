# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of `attention_varlen` to canonical operands: packed tokens become one batch entry."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.canonical import arguments, dropout, validation
from jax_fastattn.canonical.programs import programs
from jax_fastattn.layouts import packed
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.ops.block_mask import BlockMask
from jax_fastattn.programs.planes import PackedRows, Rows
from jax_fastattn.spec import AttentionSpec, Operands


def canonicalize(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    sinks: Any = None,
    query_offset: Any = 0,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    broadcast_dropout: Any = False,
    score_mod: Any = None,
    mask_mod: Any = None,
    **static: Any,
) -> tuple[AttentionSpec, Operands]:
    """Checks the arguments of `api.attention_varlen`; packed tokens become one batch entry."""
    if isinstance(mask_mod, BlockMask):
        raise TypeError("`mask_mod` is a BlockMask, which `attention` alone takes; pass the function")
    axes, (q, k, v) = arguments.check_qkv(query, key, value, packed=True)
    starts_q = arguments.to_int32(validation.as_integers("cu_seqlens_q", cu_seqlens_q))
    starts_k = arguments.to_int32(validation.as_integers("cu_seqlens_k", cu_seqlens_k))
    axes.bind("cu_seqlens_q", starts_q, "C")
    axes.bind("cu_seqlens_k", starts_k, "C")
    validation.check_boundaries("cu_seqlens_q", axes)
    sequences = packed.sequences(starts_q, starts_k, (axes["T"], axes["S"]))
    offset = _packed_offset(query_offset, sequences)
    offset, static = arguments.near_offset(axes, offset, static)
    rows = None if score_mod is None and mask_mod is None else packed_rows(sequences, (axes["T"], axes["S"]))
    in_order = validation.check_flag("deterministic", static.get("deterministic", False))
    found, planes = programs(axes, q.dtype, score_mod, mask_mod, rows, in_order=in_order)
    operands = Operands(
        query=q,
        key=k,
        value=v,
        sinks=None if sinks is None else arguments.check_sinks(axes, sinks, q.dtype),
        sequences=packed.with_offsets(sequences, None if offset is None else jnp.clip(offset, -UNBOUNDED, UNBOUNDED))[
            None
        ],
        dropout=dropout.operand(dropout_rate, dropout_key, broadcast_dropout, (1, axes["N"])),
        **planes,
    )
    return arguments.resolve(operands, **static, **found)


def packed_rows(sequences: jax.Array, lengths: tuple[int, int]) -> PackedRows:
    """Returns the rows of both sides, as functions count them, given the sequences `[M, 4]` and T and S."""
    found: list[Rows] = []
    for side, length in enumerate(lengths):
        ids = jnp.maximum(packed.token_ids(sequences[None], length, of_keys=side == 1)[0], 0)
        places = jnp.arange(length, dtype=jnp.int32) - sequences[ids, 2 * side]
        found.append(Rows(jnp.maximum(ids - 1, 0), places))  # the first of the sequences is padding
    return PackedRows(*found)


def _packed_offset(query_offset: Any, sequences: jax.Array) -> jax.Array | None:
    """Returns the offset of each sequence, int32 `[C - 1]`; None for the common 0."""
    if not isinstance(query_offset, str):
        return arguments.offset_per_batch(query_offset, sequences.shape[0] - 2)
    if query_offset != "bottom_right":
        raise ValueError(f'`query_offset` is {query_offset!r}, expected an int, integers, or "bottom_right"')
    return sequences[1:-1, 3] - sequences[1:-1, 1]
