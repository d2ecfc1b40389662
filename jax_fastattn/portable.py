# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX: the XLA path of every platform. Its results are those that `reference.py` defines.

A call with few logits is computed at once, by a softmax over whole rows. Any other call takes memory that is linear in
the sequence length: an online softmax over chunks of queries and keys. The backward pass recomputes the probabilities
from the saved log-sum-exp either way. A bias or mask keeps its broadcast dimensions of size 1.

What stays out: tangents and second derivatives (`tangents.py`), and differentiation and batching rules, which `ops/`
has. The loops here have dynamic bounds, through which `jax.jvp` goes and reverse-mode differentiation does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn.blocks import Blocks, merge_rows, reduce_to, rows_of, zero_unseeing_queries, zero_unseen_keys
from jax_fastattn.chunks import CPU, Index, Span, Tuning
from jax_fastattn.packed import padding_rows
from jax_fastattn.spec import DIFFERENTIABLE, AttentionSpec, Gradients, Operands


def forward(spec: AttentionSpec, operands: Operands, tuning: Tuning = CPU) -> tuple[jax.Array, jax.Array]:
    """Computes attention of canonical operands.

    Returns:
        out `[B, T, N, D]` in the dtype of the operands, and the log-sum-exp `[B, T, N]` in float32 (float64 for
        float64 operands).
    """
    blocks = Blocks.of(spec, operands, tuning)
    rows, v_head_dim = blocks.query.shape[:4], operands.value.shape[3]

    def query_chunk(i: Index, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries = blocks.queries.span(i)
        chunks = (
            _rows(blocks, queries) if blocks.keys.count > 1 else _rows_at_once(blocks, queries, blocks.keys.span(0))
        )
        return tuple(queries.put(x, chunk, 3) for x, chunk in zip(results, chunks, strict=True))

    if blocks.bands:
        bands = [_rows_at_once(blocks, queries, keys) for queries, keys in blocks.bands]
        out, lse = bands[0] if len(bands) == 1 else (jnp.concatenate(x, axis=3) for x in zip(*bands, strict=True))
    else:
        results = blocks.full((*rows, v_head_dim), 0.0).astype(operands.query.dtype), blocks.full(rows, -jnp.inf)
        out, lse = blocks.queries.loop((0, blocks.queries.count), query_chunk, results)
    out, lse, padding = merge_rows(out), merge_rows(lse), _padding_rows(operands)
    return out, lse if padding is None else jnp.where(padding[:, :, None], -jnp.inf, lse)


def _rows_at_once(blocks: Blocks, queries: Span, keys: Span) -> tuple[jax.Array, jax.Array]:
    """Returns output `[B, K, G, t, D]` and log-sum-exp of queries that see no key except `keys`.

    Without sinks, each reduction is combined with its row only through a maximum with a constant, so XLA for GPUs
    recognizes a softmax and compiles it to one kernel. With sinks there is no such kernel, and weights are rounded
    before they are divided: the greatest one is then exactly 1, since the gradient of sinks sums small differences.
    """
    visible = blocks.visible(queries, keys)
    logits, _ = blocks.logits(queries, keys, visible)
    limits, sinks = jnp.finfo(logits.dtype), blocks.sinks()
    top = jnp.max(logits, axis=-1, initial=-jnp.inf)
    top = top if sinks is None else jnp.maximum(top, sinks)
    # The maximum of a row that sees nothing is -inf; with a finite number in its place every exponential is 0.
    shift = jnp.maximum(top, limits.min)
    weights = jnp.exp(logits - shift[..., None])
    total = weights.sum(-1)
    total = total if sinks is None else total + jnp.exp(sinks - shift)
    total = jnp.maximum(total, limits.tiny)
    weights = weights if sinks is not None else weights / total[..., None]
    out = blocks.weighted(weights, blocks.value, keys, visible)
    out = out if sinks is None else out / total[..., None]
    return out.astype(blocks.value.dtype), top + jnp.log(total)


def _rows(blocks: Blocks, queries: Span) -> tuple[jax.Array, jax.Array]:
    """Computes what `_rows_at_once` does, over chunks of keys."""

    def key_chunk(j: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, top, total = state
        keys = blocks.keys.span(j)
        visible = blocks.visible(queries, keys)
        logits, _ = blocks.logits(queries, keys, visible)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, initial=-jnp.inf))
        # The maximum of a row that has seen nothing yet is -inf; with 0 in its place every exponential is 0.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights, decay = jnp.exp(logits - shift[..., None]), jnp.exp(top - shift)
        weighted = blocks.weighted(weights, blocks.value, keys, visible)
        return out * decay[..., None] + weighted, new_top, total * decay + weights.sum(-1)

    # A sink is a logit that has been seen before the first key.
    top, sinks = blocks.full((*blocks.query.shape[:3], queries.size), -jnp.inf), blocks.sinks()
    top = top if sinks is None else jnp.maximum(top, sinks)
    total = jnp.where(top == -jnp.inf, 0.0, 1.0).astype(top.dtype)
    state = blocks.full((*top.shape, blocks.value.shape[3]), 0.0), top, total
    out, top, total = blocks.keys.loop(blocks.key_chunks(queries), key_chunk, state)
    return out / jnp.where(total == 0.0, 1.0, total)[..., None], top + jnp.log(total)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Collection[str] = DIFFERENTIABLE,
    tuning: Tuning = CPU,
) -> Gradients:
    """Computes the gradients of `forward` from its results and their cotangents.

    Args:
        out, lse: the results of `forward`.
        dout: `[B, T, N, D]`.
        dlse: `[B, T, N]`, or None for zero.
        wanted: names of operands. Bias, sinks and scale get a gradient only if they are named, else None.
    """
    blocks, rows = Blocks.of(spec, operands, tuning), Rows.of(operands, out, lse, dout, dlse)
    sums = sum_blocks(blocks, wanted, functools.partial(add_block, blocks, rows_of(dout, blocks.key.shape[2]), rows))
    return gradients_of(operands, sums, rows.sinks if "sinks" in wanted else None)


class Rows(NamedTuple):
    """What the gradients of a block take of its queries, `[B, K, G, T]`, and the gradient of sinks (None without).

    Attributes:
        lse: the log-sum-exp, and 0 for rows without a visible key.
        delta: what is subtracted from the tangents of weights, and 0 for these rows.
    """

    lse: jax.Array
    delta: jax.Array
    sinks: jax.Array | None

    @classmethod
    def of(cls, operands: Operands, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None) -> Rows:
        # Rows without a visible key have no gradient, whatever their cotangent holds.
        empty = lse == -jnp.inf
        # A row whose log-sum-exp is its sink alone is not empty. Its output is 0, and its cotangent may be NaN.
        multiply = jnp.multiply if operands.sinks is None else _product_or_zero
        delta = jnp.sum(multiply(out.astype(lse.dtype), dout.astype(lse.dtype)), axis=-1)
        delta = jnp.where(empty, 0.0, delta if dlse is None else delta - dlse)
        lse = jnp.where(empty, 0.0, lse)
        dsinks = None
        if operands.sinks is not None:
            weights = jnp.where(empty, 0.0, jnp.exp(operands.sinks[:, None, :].astype(lse.dtype) - lse))
            dsinks = reduce_to(operands.sinks.shape, -jnp.sum(weights * delta, axis=1))
        num_kv_heads = operands.key.shape[2]
        return cls(rows_of(lse, num_kv_heads), rows_of(delta, num_kv_heads), dsinks)


def add_block(
    blocks: Blocks, dout: jax.Array, rows: Rows, queries: Span, keys: Span, dquery: jax.Array, sums: Gradients
) -> tuple[jax.Array, Gradients]:
    """Adds the gradients of a block to that of its queries, `[B, K, G, t, H]`, and to the others.

    `dout` is `[B, K, G, T, D]`, and `sums` is as `sum_blocks` returns it.
    """
    dtype = blocks.query.dtype
    visible = blocks.visible(queries, keys, skip_stored_queries=True)
    logits, slope = blocks.logits(queries, keys, visible)
    query, dout_i = (zero_unseeing_queries(blocks.take_query(x, queries), visible) for x in (blocks.query, dout))
    key = zero_unseen_keys(blocks.take_key(blocks.key, keys), visible)
    lse, delta = (blocks.take_query(x, queries)[..., None] for x in (rows.lse, rows.delta))
    weights = jnp.exp(logits - lse)
    dweights = blocks.product("bkgtd,bskd->bkgts", dout_i, blocks.take_key(blocks.value, keys))
    dlogits = weights * (dweights - delta)
    dlogits = dlogits if slope is None else dlogits * slope
    dlogits = dlogits if visible is None else jnp.where(visible, dlogits, 0.0)
    dbias = None if sums.bias is None else blocks.add_plane(sums.bias, dlogits, queries, keys)
    dlogits, weights = dlogits.astype(dtype), weights.astype(dtype)
    dkey = keys.add(sums.key, blocks.product("bkgts,bkgth->bksh", dlogits, query) * blocks.scale(4), 2)
    dvalue = keys.add(sums.value, blocks.product("bkgts,bkgtd->bksd", weights, dout_i), 2)
    dscaled = blocks.product("bkgts,bskh->bkgth", dlogits, key)
    dscale = sums.scale
    if dscale is not None:
        products = dscaled.astype(dscale.dtype) * query.astype(dscale.dtype)
        dscale = dscale + reduce_to(dscale.shape, products.sum(axis=(1, 2, 3, 4))[:, None])
    return dquery + dscaled * blocks.scale(5), sums._replace(key=dkey, value=dvalue, bias=dbias, scale=dscale)


def sum_blocks(
    blocks: Blocks,
    wanted: Collection[str],
    add: Callable[[Span, Span, jax.Array, Gradients], tuple[jax.Array, Gradients]],
) -> Gradients:
    """Sums the gradients, except those of sinks, over all blocks by `add`, which is `add_block` of its last arguments.

    The sums have the axes of `blocks`, except that keys and values are `[B, K, S, ...]`.
    """

    def no_gradient(queries: Span) -> jax.Array:
        return blocks.full(blocks.take_query(blocks.query, queries).shape, 0.0)

    def query_chunk(i: Index, sums: Gradients) -> Gradients:
        queries = blocks.queries.span(i)

        def key_chunk(j: Index, state: tuple[jax.Array, Gradients]) -> tuple[jax.Array, Gradients]:
            return add(queries, blocks.keys.span(j), *state)

        state = no_gradient(queries), sums
        dquery, sums = blocks.keys.loop(blocks.key_chunks(queries), key_chunk, state)
        return sums._replace(query=queries.add(sums.query, dquery, 3))

    scale = blocks.operands.scale
    sums = Gradients(
        query=blocks.full(blocks.query.shape, 0.0),
        key=jnp.moveaxis(blocks.full(blocks.key.shape, 0.0), 2, 1),
        value=jnp.moveaxis(blocks.full(blocks.value.shape, 0.0), 2, 1),
        bias=None if blocks.bias is None or "bias" not in wanted else blocks.full(blocks.bias.shape, 0.0),
        scale=None if scale is None or "scale" not in wanted else blocks.full(scale.shape, 0.0),
    )
    for queries, keys in blocks.bands:
        dquery, sums = add(queries, keys, no_gradient(queries), sums)
        sums = sums._replace(query=queries.put(sums.query, dquery, 3))
    return sums if blocks.bands else blocks.queries.loop((0, blocks.queries.count), query_chunk, sums)


def gradients_of(operands: Operands, sums: Gradients, dsinks: jax.Array | None) -> Gradients:
    """Returns what `sum_blocks` does, and the gradient of sinks, in the axes and dtypes of `backward`'s results."""
    dtype = operands.query.dtype
    return Gradients(
        query=merge_rows(sums.query).astype(dtype),
        key=jnp.moveaxis(sums.key, 1, 2).astype(dtype),
        value=jnp.moveaxis(sums.value, 1, 2).astype(dtype),
        bias=None if operands.bias is None or sums.bias is None else sums.bias.reshape(operands.bias.shape),
        sinks=dsinks,
        scale=sums.scale,
    )


def scale_gradient(operands: Operands, dscaled: jax.Array) -> jax.Array | None:
    """Returns the gradient of a scale operand from that of the scaled query `[B, T, N, H]`; None without one."""
    if operands.scale is None:
        return None
    dscaled = dscaled.astype(operands.scale.dtype)
    # A query that sees no key may be NaN; the gradient is exactly 0 there.
    products = _product_or_zero(dscaled, operands.query.astype(dscaled.dtype))
    return reduce_to(operands.scale.shape, products.sum(axis=(1, 2, 3))[:, None])


@jax.custom_jvp
def _product_or_zero(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x * y, and 0 where x is 0, whatever y is.

    A `where` alone would also have no derivative along x where x is 0. `ops/` calls this inside primitives only, in
    which no transformation of the user's can drop the rule.
    """
    return jnp.where(x == 0.0, 0.0, x * y)


@_product_or_zero.defjvp
def _product_or_zero_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, y), (dx, dy) = primals, tangents
    return _product_or_zero(x, y), _product_or_zero(dx, y) + _product_or_zero(x, dy)


def _padding_rows(operands: Operands) -> jax.Array | None:
    """Returns which rows are padding, bool `[B, T]`; None without lengths of queries and without packed sequences."""
    if operands.query_seq_lengths is not None:
        return jnp.arange(operands.query.shape[1], dtype=jnp.int32)[None, :] >= operands.query_seq_lengths[:, None]
    return padding_rows(operands)
