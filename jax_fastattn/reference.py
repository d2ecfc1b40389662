# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The executable specification: attention as it is defined, on canonical operands, with every logit materialized.

This docstring and the function below are the contract that every implementation is tested against.

    logits = scale * query . key + bias                     where a bias at or below -2.36e38 counts as -inf
    logits = score_mod(logits, b, h, i, j)                  with score_mod
    logits = cap * tanh(logits / cap)                       with logits_soft_cap
    weights = exp(logits) over visible keys / (sum of exp(logits) over visible keys + exp(sink))
    out = weights . value                                   with dropout, (weights * survival) . value

Key j is visible to query i when all of this holds, with p = i + query_offset (0 if absent):

    i < query_seq_lengths                 j < key_value_seq_lengths
    j <= p                                if is_causal
    p - left <= j <= p + right            with window = (left, right)
    query_segment_ids[i] == key_value_segment_ids[j]
    mask_mod(b, h, i, j)
    mask[i, j]                            where a mask with K heads is read at the key/value head, and so is a bias

- Survival is 0 for a weight that is dropped, and 1 / (1 - rate) for one that is kept, as `dropout.py` defines it.
  Denominator and log-sum-exp have all weights, and no tile, device or implementation changes what is kept.
- The log-sum-exp is log(sum of exp(logits) over visible keys + exp(sink)): natural, and the softmax's denominator.
- A query that sees no key, or only logits of -inf, has out 0, zero gradients for its query, and a log-sum-exp of -inf,
  or of the sink where there is one.
- Rows from query_seq_lengths on, and packed rows that belong to no sequence, are padding: they have out 0 and
  log-sum-exp -inf, sink or not, and their cotangents are not read.
- A key and value that no query sees is not read, nor is a query that sees no key, nor a bias at an invisible position:
  NaN there reaches neither a result nor a gradient, and its own gradient is 0. So it is with arrays that `score_mod`
  captures.
- Arithmetic is float64 if the operands are float64, and float32 otherwise; so is the log-sum-exp. `out` and gradients
  are rounded once, to the dtype of their operand.

Plain automatic differentiation gives the gradients, the log-sum-exp's included. Only tests call this module: it is as
slow as it looks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import dropout
from jax_fastattn.layouts import packed
from jax_fastattn.layouts.paged import PagedOperands
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.programs.code import Code, Place, places
from jax_fastattn.programs.evaluation import evaluate_code
from jax_fastattn.programs.function import HARMLESS
from jax_fastattn.spec import HIDDEN_BIAS, AttentionSpec, Operands


def attention_reference(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes attention of canonical operands by the definition at the top of this module.

    Returns:
        out `[B, T, N, D]` in the dtype of the operands, and the log-sum-exp `[B, T, N]` in float32 (float64 for
        float64 operands).
    """
    dtype = np.promote_types(operands.query.dtype, np.float32)
    group = operands.query.shape[2] // max(operands.key.shape[2], 1)
    visible = visible_pairs(spec, operands)

    sees, seen = jnp.any(visible, axis=3), jnp.any(visible, axis=2)
    query = jnp.where(jnp.moveaxis(sees, 1, 2)[..., None], operands.query.astype(dtype), 0.0)
    key, value = (
        jnp.where(jnp.moveaxis(seen, 1, 2)[..., None], jnp.repeat(x.astype(dtype), group, axis=2), 0.0)
        for x in (operands.key, operands.value)
    )

    scale = spec.scale if operands.scale is None else operands.scale[:, :, None, None]
    logits = scale * jnp.einsum("btnh,bsnh->bnts", query, key)
    if operands.bias is not None:
        bias = by_query_head(operands.bias, logits.shape[1]).astype(dtype)
        logits = logits + jnp.where(bias <= HIDDEN_BIAS, -jnp.inf, bias)
    # They are hidden before the cap as well as after it: NaN times the zero cotangent of an invisible logit is NaN.
    logits = jnp.where(visible, logits, 0.0)
    if spec.score_mod is not None:
        logits = of_pairs(spec, operands, visible, logits)
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)

    rows = jnp.broadcast_to(jnp.any(visible, axis=3), logits.shape[:3])
    if operands.sinks is None:
        sinks = jnp.full(logits.shape[:3], -jnp.inf, dtype)
    else:
        sinks = jnp.broadcast_to(operands.sinks[:, :, None].astype(dtype), logits.shape[:3])
        sinks = jnp.where(padding_rows(operands)[:, None, :], -jnp.inf, sinks)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=3, initial=-jnp.inf), sinks))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(logits - top[..., None])
    total = jnp.sum(weights, axis=3) + jnp.exp(sinks - top)

    is_empty = total == 0.0
    safe_total = jnp.where(is_empty, 1.0, total)
    weights = weights / safe_total[..., None]
    if operands.dropout is not None:
        weights = weights * survival(operands, dtype)
    out = jnp.einsum("bnts,bsnd->btnd", weights, value)
    out = jnp.where(jnp.moveaxis(rows, 1, 2)[..., None], out, 0.0)
    lse = jnp.where(is_empty, -jnp.inf, top + jnp.log(safe_total))
    return out.astype(operands.query.dtype), jnp.moveaxis(lse, 1, 2)


def survival(operands: Operands, dtype: Any) -> jax.Array:
    """Returns the factors of dropout on the weights, in a shape that broadcasts to `[B, N, T, S]`."""
    assert operands.dropout is not None
    rows = [jnp.arange(x.shape[1], dtype=jnp.int32) for x in (operands.query, operands.key)]
    starts = None
    if operands.sequences is not None:
        of_queries, of_keys = first_rows(operands)
        starts = of_queries[:, None], of_keys[:, None]
    kept = dropout.kept(operands.dropout, rows[0], rows[1], starts)
    return jnp.where(kept, dropout.factor(operands.dropout, dtype)[..., None, None], 0.0)


def first_rows(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the first row of the packed sequence of each query `[B, T]` and of each key `[B, S]`."""
    assert operands.sequences is not None
    sides = operands.query, operands.key
    ids = [packed.token_ids(operands.sequences, x.shape[1], of_keys=i == 1) for i, x in enumerate(sides)]
    return packed.token_starts(operands.sequences, ids[0], ids[1])


def paged_reference(spec: AttentionSpec, operands: PagedOperands) -> tuple[jax.Array, jax.Array]:
    """Computes attention to pages of R rows: key j of entry b is row j % R of page `page_table[b, j // R]`.

    Ids are clamped to the pages. The lengths hide all other keys.
    """
    pages, rows = operands.key_pages.shape[:2]
    positions = jnp.arange(operands.page_table.shape[1] * rows, dtype=jnp.int32)
    ids = jnp.clip(operands.page_table, 0, pages - 1)[:, positions // rows]
    dense = Operands(
        operands.query,
        operands.key_pages[ids, positions % rows],
        operands.value_pages[ids, positions % rows],
        key_value_seq_lengths=operands.key_value_seq_lengths,
        query_offset=operands.query_offset,
        sinks=operands.sinks,
        scale=operands.scale,
    )
    return attention_reference(spec, dense)


def visible_pairs(spec: AttentionSpec, operands: Operands) -> jax.Array:
    """Returns which query sees which key, bool `[B, N, T, S]`."""
    given, operands = operands, packed.by_token(operands)
    batch, query_length, num_heads, _ = operands.query.shape
    key_length = operands.key.shape[1]
    queries = jnp.arange(query_length, dtype=jnp.int32)[None, None, :, None]
    keys = jnp.arange(key_length, dtype=jnp.int32)[None, None, None, :]
    terms = [jnp.ones((batch, num_heads, query_length, key_length), bool)]

    if operands.query_seq_lengths is not None:
        terms.append(queries < operands.query_seq_lengths[:, None, None, None])
    if operands.key_value_seq_lengths is not None:
        terms.append(keys < operands.key_value_seq_lengths[:, None, None, None])

    positions = queries
    if operands.query_offset is not None:
        offset = jnp.clip(operands.query_offset, -UNBOUNDED, UNBOUNDED)
        positions = queries + (offset[:, None, None, None] if offset.ndim == 1 else offset[:, None, :, None])
    left, right = spec.bounds
    if left is not None:
        terms.append(positions - min(left, UNBOUNDED) <= keys)
    if right is not None:
        terms.append(keys <= positions + min(right, UNBOUNDED))

    if operands.query_segment_ids is not None and operands.key_value_segment_ids is not None:
        terms.append(operands.query_segment_ids[:, None, :, None] == operands.key_value_segment_ids[:, None, None, :])
    if operands.mask is not None:
        terms.append(by_query_head(operands.mask, num_heads))
    if spec.mask_mod is not None:
        terms.append(of_pairs(spec, given))
    return functools.reduce(jnp.logical_and, terms)


def of_pairs(
    spec: AttentionSpec, operands: Operands, visible: jax.Array | None = None, scores: jax.Array | None = None
) -> jax.Array:
    """Returns what `score_mod` makes of scores, or `mask_mod` without scores, for all pairs `[B, N, T, S]`.

    At a pair that is not visible, all floats of `score_mod` are `HARMLESS`.
    """
    (batch, queries, heads, _), keys = operands.query.shape, operands.key.shape[1]
    shape = batch, heads, queries, keys
    b, h, i, j = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4))

    def read(place: Place) -> Any:
        x = getattr(operands, place.operand)
        x = jnp.broadcast_to(x, (batch, heads, *x.shape[2:]))
        if place.plane.kind == "table":
            return functools.partial(look_up, place) if isinstance(program, Code) else table(place)
        distance = leaves["key"] - leaves["query"] + queries
        at = {"head": (), "query": (i,), "key": (j,), "distance": (distance,)}[place.plane.kind]
        found = x[b, h, place.start, *at]
        return found if visible is None or place.plane.dtype == "i" else jnp.where(visible, found, HARMLESS)

    def table(place: Place) -> jax.Array:
        return getattr(operands, place.operand)[:, :, place.start : place.start + place.plane.length]

    def look_up(place: Place, index: jax.Array) -> jax.Array:
        x = table(place)
        return jnp.broadcast_to(x, (batch, heads, x.shape[2]))[b, h, jnp.broadcast_to(index, shape)]

    program, leaves = spec.mask_mod, {"query": i, "key": j}
    number = 1
    if scores is not None and visible is not None:
        program, number, leaves["score"] = spec.score_mod, 0, jnp.where(visible, scores, HARMLESS)
    if isinstance(program, Code) and operands.sequences is not None:  # such a code counts inside of sequences
        of_queries, of_keys = first_rows(operands)
        leaves |= {"query": i - of_queries[:, None, :, None], "key": j - of_keys[:, None, None, :]}
    assert program is not None
    planes = [read(place) for place in places((spec.score_mod, spec.mask_mod))[number]]
    if isinstance(program, Code):
        return jnp.broadcast_to(evaluate_code(program, leaves, planes, 1)[0], shape)
    return program.evaluate(shape, leaves, planes, visible)


def by_query_head(x: jax.Array, num_heads: int) -> jax.Array:
    """Returns a bias or mask `[b, n, t, s]` in which n is not K: a group of query heads shares the row of its head."""
    heads = x.shape[1]
    return jnp.repeat(x, num_heads // heads, axis=1) if heads > 1 else x


def padding_rows(operands: Operands) -> jax.Array:
    """Returns which rows are padding, bool `[B, T]`: from query_seq_lengths on, and packed rows of no sequence."""
    batch, query_length = operands.query.shape[:2]
    padding = jnp.zeros((batch, query_length), bool)
    if operands.query_seq_lengths is not None:
        padding |= jnp.arange(query_length, dtype=jnp.int32)[None, :] >= operands.query_seq_lengths[:, None]
    outside = packed.padding_rows(operands)
    return padding if outside is None else padding | outside
