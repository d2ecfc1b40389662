# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of `attention` to canonical operands."""

from __future__ import annotations

from typing import Any

import jax

from jax_fastattn.canonical import arguments, validation
from jax_fastattn.canonical.programs import programs
from jax_fastattn.spec import OPERANDS, AttentionSpec, Operands


def canonicalize(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    sinks: Any = None,
    query_offset: Any = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    **static: Any,
) -> tuple[AttentionSpec, Operands]:
    """Checks the arguments of `api.attention` and gives them canonical shapes."""
    axes, (q, k, v) = arguments.check_qkv(query, key, value, packed=False)
    batch, batched = axes["B"], arguments.is_batched(query)

    def per_batch(name: str, x: Any) -> jax.Array:
        x = arguments.to_int32(validation.as_integers(name, x))
        x = x if batched or x.ndim else x[None]
        axes.bind(name, x, OPERANDS[name].letters)
        return x

    query_ids, key_ids = _check_segment_ids(axes, segment_ids, batched)
    offset, static = arguments.near_offset(axes, arguments.offset_per_batch(query_offset, batch), static)
    found, planes = programs(axes, q.dtype, score_mod, mask_mod)
    operands = Operands(
        query=q,
        key=k,
        value=v,
        bias=arguments.plane(axes, "bias", bias, batched),
        mask=arguments.plane(axes, "mask", mask, batched),
        query_seq_lengths=None if query_seq_lengths is None else per_batch("query_seq_lengths", query_seq_lengths),
        key_value_seq_lengths=(
            None if key_value_seq_lengths is None else per_batch("key_value_seq_lengths", key_value_seq_lengths)
        ),
        query_offset=offset,
        query_segment_ids=query_ids,
        key_value_segment_ids=key_ids,
        sinks=None if sinks is None else arguments.check_sinks(axes, sinks, q.dtype),
        **planes,
    )
    return arguments.resolve(operands, **static, **found)


def _check_segment_ids(
    axes: validation.Axes, ids: Any, batched: bool
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    if ids is None:
        return None, None
    is_pair = isinstance(ids, (tuple, list)) and len(ids) == 2
    query_ids, key_ids = ids if is_pair else (ids, ids)
    if not is_pair:
        validation.check_one_length("segment_ids", axes)
    arrays = []
    for name, x in (("query_segment_ids", query_ids), ("key_value_segment_ids", key_ids)):
        x = validation.as_integers("segment_ids", x)
        axes.bind("segment_ids", x, arguments.letters(name, batched))
        arrays.append(arguments.add_batch(x, 2))
    # Only their equality matters, and any dtype has it.
    query_ids, key_ids = arrays if arrays[0].dtype == arrays[1].dtype else map(arguments.to_int32, arrays)
    return query_ids, key_ids
