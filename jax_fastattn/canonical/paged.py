# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of `paged_attention` to canonical operands."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_fastattn.canonical import arguments, validation
from jax_fastattn.layouts.paged import PAGED_OPERANDS, PagedOperands
from jax_fastattn.spec import AttentionSpec


def canonicalize(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    sinks: Any = None,
    query_offset: Any = None,
    **static: Any,
) -> tuple[AttentionSpec, PagedOperands]:
    """Checks the arguments of `api.paged_attention`; lengths are clamped, ids are not."""
    axes = validation.Axes()
    pages = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    pages = {name: validation.as_array(name, x) for name, x in pages.items()}
    validation.check_float_operands(**pages)
    for name, x in pages.items():
        axes.bind(name, x, PAGED_OPERANDS[name].letters)
    validation.check_heads(axes)
    validation.check_pages(axes)
    table = arguments.to_int32(validation.as_integers("page_table", page_table))
    axes.bind("page_table", table, "BM")
    lengths = arguments.to_int32(validation.as_integers("lengths", lengths))
    axes.bind("lengths", lengths, "B")
    axes.set("S", axes["M"] * axes["R"], "`page_table`")
    lengths = jnp.clip(lengths, 0, axes["S"]).astype(jnp.int32)
    offset = None if query_offset is None else arguments.offset_per_batch(query_offset, axes["B"])
    if query_offset is None and arguments.has_positions(static):
        offset = (lengths - axes["T"]).astype(jnp.int32)
    offset, static = arguments.near_offset(axes, offset, static)
    operands = PagedOperands(
        **pages,
        page_table=table,
        key_value_seq_lengths=lengths,
        query_offset=offset,
        sinks=None if sinks is None else arguments.check_sinks(axes, sinks, pages["query"].dtype),
    )
    return arguments.resolve(operands, **static)
