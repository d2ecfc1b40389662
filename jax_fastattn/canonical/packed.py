# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of `attention_varlen` to canonical operands: packed tokens become one batch entry."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.canonical import arguments, dropout, validation
from jax_fastattn.canonical.programs import programs
from jax_fastattn.layouts import packed
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.ops.block_mask import BlockMask
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
    lengths = axes["T"], axes["S"]
    mods = (in_sequences(mod, sequences, lengths) for mod in (score_mod, mask_mod))
    found, planes = programs(axes, q.dtype, *mods)
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


def in_sequences(mod: Any, sequences: jax.Array, lengths: tuple[int, int]) -> Any:
    """Returns a function of rows that gives one of the user's the number of a sequence, and the places in it."""
    if not callable(mod) or isinstance(mod, type):
        return mod
    query_ids, key_ids = (
        jnp.maximum(packed.token_ids(sequences[None], length, of_keys=of_keys)[0], 0)
        for length, of_keys in zip(lengths, (False, True), strict=True)
    )
    numbers = jnp.maximum(query_ids - 1, 0)  # the first of the sequences is padding
    first_queries, first_keys = sequences[query_ids, 0], sequences[key_ids, 2]

    @functools.wraps(mod)
    def of_rows(*args: jax.Array) -> Any:
        *score, _, h, q, k = args
        return mod(*score, numbers[q], h, q - first_queries[q], k - first_keys[k])

    return of_rows


def _packed_offset(query_offset: Any, sequences: jax.Array) -> jax.Array | None:
    """Returns the offset of each sequence, int32 `[C - 1]`; None for the common 0."""
    if not isinstance(query_offset, str):
        return arguments.offset_per_batch(query_offset, sequences.shape[0] - 2)
    if query_offset != "bottom_right":
        raise ValueError(f'`query_offset` is {query_offset!r}, expected an int, integers, or "bottom_right"')
    return sequences[1:-1, 3] - sequences[1:-1, 1]
