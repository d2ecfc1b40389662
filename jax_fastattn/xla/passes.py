# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX: the XLA path of every platform. `reference.py` defines its results.

A call with few logits is computed at once, by a softmax over whole rows. Any other call takes memory that is linear in
the sequence length: an online softmax over chunks of queries and keys. The backward pass recomputes the probabilities
either way, see `rows.py`. A bias or mask keeps its broadcast dimensions of size 1.

What stays out: tangents and second derivatives (`tangents.py`), and differentiation and batching rules, which `ops/`
has. The loops here have dynamic bounds, through which `jax.jvp` goes and reverse-mode differentiation does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.layouts.heads import merge_rows, reduce_to, rows_of
from jax_fastattn.layouts.packed import padding_rows
from jax_fastattn.spec import DIFFERENTIABLE, PLANES, AttentionSpec, Gradients, Operands
from jax_fastattn.xla.blocks import (
    Blocks,
    mean_of_seen_keys,
    zero_unseeing_queries,
    zero_unseen_keys,
)
from jax_fastattn.xla.chunks import CPU, Index, Span, Tuning
from jax_fastattn.xla.rows import Planes, RowTerms, Softmax, rows_of_chunks


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

    With sinks, weights are rounded before they are divided: the greatest one is then exactly 1, since the gradient of
    sinks sums small differences.
    """
    visible = blocks.visible(queries, keys)
    logits, *_ = blocks.logits(queries, keys, visible)
    sinks = blocks.sinks()
    softmax = Softmax.of(logits, sinks)
    weights = blocks.dropped(softmax.weights if sinks is None else softmax.exponentials, queries, keys)
    out = blocks.weighted(weights, blocks.value, keys, visible)
    out = out if sinks is None else out / softmax.total[..., None]
    return out.astype(blocks.value.dtype), softmax.top + jnp.log(softmax.total)


def _rows(blocks: Blocks, queries: Span) -> tuple[jax.Array, jax.Array]:
    """Computes what `_rows_at_once` does, over chunks of keys."""

    def key_chunk(j: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, top, total = state
        keys = blocks.keys.span(j)
        visible = blocks.visible(queries, keys)
        logits, *_ = blocks.logits(queries, keys, visible)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, initial=-jnp.inf))
        # The maximum of a row that has seen nothing yet is -inf; with 0 in its place every exponential is 0.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights, decay = jnp.exp(logits - shift[..., None]), jnp.exp(top - shift)
        weighted = blocks.weighted(blocks.dropped(weights, queries, keys), blocks.value, keys, visible)
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

    The rows are computed anew, and in chunks this takes one more pass over the keys. They are taken from the results
    instead if the call has a part of their keys, or in chunks if the output was not rounded.

    Args:
        out, lse: the results of `forward`; with `spec.is_part`, the results of all keys.
        dout: `[B, T, N, D]`.
        dlse: `[B, T, N]`, or None for zero.
        wanted: names of operands. Bias, sinks and scale get a gradient only if they are named, else None.
    """
    blocks, num_kv_heads = Blocks.of(spec, operands, tuning), operands.key.shape[2]
    dout_rows, lse_rows = rows_of(dout, num_kv_heads), rows_of(lse, num_kv_heads)
    dlse_rows = None if dlse is None else rows_of(dlse, num_kv_heads)
    if blocks.bands and not spec.is_part:
        add = functools.partial(add_rows, blocks, dout_rows, lse_rows, dlse_rows)
        sums = sum_blocks(blocks, wanted, add)
        return gradients_of(operands, sums, sums.sinks)
    if spec.is_part or out.dtype == lse.dtype:
        rows = RowTerms.of_results(operands, out, lse, dout, dlse)
    else:
        rows = rows_of_chunks(blocks, dout_rows, lse_rows, dlse_rows)
    sums = sum_blocks(blocks, wanted, functools.partial(add_block, blocks, dout_rows, rows))
    return gradients_of(operands, sums, rows.dsinks if "sinks" in wanted else None)


def add_rows(
    blocks: Blocks,
    dout: jax.Array,
    lse: jax.Array,
    dlse: jax.Array | None,
    queries: Span,
    keys: Span,
    dquery: jax.Array,
    sums: Gradients,
    *,
    has_unit: bool = True,
) -> tuple[jax.Array, Gradients]:
    """Adds what `add_block` does, for queries that see no key except `keys`, and the gradients of sinks by row."""
    planes = Planes.of(blocks, dout, queries, keys, skip_stored_queries=True)
    if dlse is not None:
        # Rows without a visible key have no gradient, even if their cotangent is NaN.
        empty = blocks.take_query(lse, queries) == -jnp.inf
        dlse = jnp.where(empty, 0.0, blocks.take_query(dlse, queries))
    rows = RowTerms.of_planes(planes, blocks.sinks(), dlse)
    if sums.sinks is not None and rows.dsinks is not None:
        sums = sums._replace(sinks=queries.put(sums.sinks, rows.dsinks, 3))
    return _add_planes(blocks, planes, rows, queries, keys, dquery, sums, has_unit)


def add_block(
    blocks: Blocks,
    dout: jax.Array,
    rows: RowTerms,
    queries: Span,
    keys: Span,
    dquery: jax.Array,
    sums: Gradients,
    *,
    has_unit: bool = True,
) -> tuple[jax.Array, Gradients]:
    """Adds the gradients of a block to `dquery`, for its queries `[B, K, G, t, H]`, and to `sums`.

    Args:
        dout: `[B, K, G, T, D]`.
        sums: what `sum_blocks` returns.
        has_unit: whether gradients of logits in float16 have a unit. It has room for them, and not for their tangents.
    """
    planes = Planes.of(blocks, dout, queries, keys, skip_stored_queries=True)
    return _add_planes(blocks, planes, rows.take(blocks, queries), queries, keys, dquery, sums, has_unit)


def _add_planes(
    blocks: Blocks,
    planes: Planes,
    rows: RowTerms,
    queries: Span,
    keys: Span,
    dquery: jax.Array,
    sums: Gradients,
    has_unit: bool,
) -> tuple[jax.Array, Gradients]:
    dtype, visible = blocks.query.dtype, planes.visible
    query = zero_unseeing_queries(blocks.take_query(blocks.query, queries), visible)
    # XLA for GPUs fuses both planes with what is before them only if each divides exponentials itself.
    exponentials = jnp.exp(planes.logits - rows.shift[..., None])
    weights = rows.of_exponentials(exponentials)
    weights = (weights if planes.survival is None else weights * planes.survival).astype(dtype)
    dlogits = rows.of_exponentials(exponentials * (planes.dweights - rows.delta[..., None]))
    dlogits = dlogits if planes.slope is None else dlogits * planes.slope
    dlogits = dlogits if visible is None else jnp.where(visible, dlogits, 0.0)
    if planes.mod is not None:
        dlogits, dplanes = planes.mod.pull(dlogits, [name for name in PLANES if getattr(sums, name) is not None])
        sums = sums._replace(**{name: getattr(sums, name) + x for name, x in dplanes.items()})
    dbias = None if sums.bias is None else blocks.add_plane(sums.bias, dlogits, queries, keys)
    total, scale, unit = rows.dlogits, blocks.scale(4), None
    if has_unit and dtype == jnp.float16:
        unit = _unit(dlogits)
        dlogits, total, scale = dlogits / unit, None if total is None else total / unit[..., 0], scale * unit[..., 0]
    rounded = _rounded(dlogits, dtype)
    dkey = keys.add(sums.key, blocks.product("bkgts,bkgth->bksh", rounded, query) * scale, 2)
    dvalue = keys.add(sums.value, blocks.product("bkgts,bkgtd->bksd", weights, planes.dout), 2)
    dscaled = _of_scaled_query(blocks, dlogits, rounded, total, keys, visible)
    dscaled = dscaled if unit is None else dscaled * unit
    dscale = sums.scale
    if dscale is not None:
        products = dscaled.astype(dscale.dtype) * query.astype(dscale.dtype)
        dscale = dscale + reduce_to(dscale.shape, products.sum(axis=(1, 2, 3, 4))[:, None])
    return dquery + dscaled * blocks.scale(5), sums._replace(key=dkey, value=dvalue, bias=dbias, scale=dscale)


def _unit(dlogits: jax.Array) -> jax.Array:
    """Returns a power of two `[B, K, 1, 1, 1]`: gradients of logits, divided by it, fit into float16.

    Most weights of a long row are so small that the gradients of its logits would be subnormal numbers of float16, or
    0. The greatest gradient becomes 2^14 to 2^15. What is not finite does not count, so that it reaches no other row.
    """
    size = jnp.abs(lax.stop_gradient(dlogits))
    greatest = jnp.max(jnp.where(size < jnp.inf, size, 0.0), axis=(2, 3, 4), keepdims=True, initial=0.0)
    return jnp.ldexp(jnp.ones((), size.dtype), jnp.clip(jnp.frexp(greatest)[1] - 15, -100, 100))


def _of_scaled_query(
    blocks: Blocks,
    dlogits: jax.Array,
    rounded: jax.Array,
    total: jax.Array | None,
    keys: Span,
    visible: jax.Array | None,
) -> jax.Array:
    """Returns the gradient of scaled queries `[B, K, G, t, H]` from the gradients of logits, as they are and rounded.

    If all keys are large in a channel, the terms of that channel nearly cancel, and the errors that rounding made
    remain. Their sum in a row, times the mean key, is taken back: the error falls from 20 to 1.4 times jax.nn's.

    `total` is what the rows of `dlogits` add up to; None computes it.
    """
    key = zero_unseen_keys(blocks.take_key(blocks.key, keys), visible)
    dscaled = blocks.product("bkgts,bskh->bkgth", rounded, key)
    if rounded.dtype == dlogits.dtype:
        return dscaled
    wide = rounded.astype(dlogits.dtype)
    error = jnp.sum(dlogits - wide, axis=-1) if total is None else total - jnp.sum(wide, axis=-1)
    mean = mean_of_seen_keys(key, visible, error.dtype)
    return dscaled + error[..., None] * mean[:, :, None, None]


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds x to another dtype.

    XLA would drop a plain conversion if the result is converted back, and compute the plane once more for each use of
    it if there were no barrier.
    """
    if x.dtype == dtype:
        return x
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant).astype(dtype)
    return lax.optimization_barrier(rounded)


def sum_blocks(
    blocks: Blocks,
    wanted: Collection[str],
    add: Callable[[Span, Span, jax.Array, Gradients], tuple[jax.Array, Gradients]],
) -> Gradients:
    """Sums the gradients over all blocks by `add`, which is `add_block` of its last arguments.

    The sums have the axes of `blocks`, except that keys and values are `[B, K, S, ...]`. The sums of sinks are there
    for calls that are computed at once, by row `[B, K, G, T]`, and 0 unless `add` puts them there.
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

    scale, has_sinks = blocks.operands.scale, len(blocks.bands) > 0 and blocks.operands.sinks is not None
    sums = Gradients(
        query=blocks.full(blocks.query.shape, 0.0),
        key=jnp.moveaxis(blocks.full(blocks.key.shape, 0.0), 2, 1),
        value=jnp.moveaxis(blocks.full(blocks.value.shape, 0.0), 2, 1),
        bias=None if blocks.bias is None or "bias" not in wanted else blocks.full(blocks.bias.shape, 0.0),
        sinks=None if not has_sinks or "sinks" not in wanted else blocks.full(blocks.query.shape[:4], 0.0),
        scale=None if scale is None or "scale" not in wanted else blocks.full(scale.shape, 0.0),
        **{
            name: blocks.full(getattr(blocks.operands, name).shape, 0.0)
            for name in PLANES
            if name in wanted and name in blocks.spec.present
        },
    )
    for queries, keys in blocks.bands:
        dquery, sums = add(queries, keys, no_gradient(queries), sums)
        sums = sums._replace(query=queries.put(sums.query, dquery, 3))
    return sums if blocks.bands else blocks.queries.loop((0, blocks.queries.count), query_chunk, sums)


def gradients_of(operands: Operands, sums: Gradients, dsinks: jax.Array | None) -> Gradients:
    """Returns what `sum_blocks` does, in the axes and dtypes of `backward`'s results.

    `dsinks` is what each row adds to the gradient of its sink, `[B, K, G, T]`; None if there is none.
    """
    dtype = operands.query.dtype
    if dsinks is not None and operands.sinks is not None:
        dsinks = reduce_to(operands.sinks.shape, merge_rows(dsinks).sum(axis=1))
    return Gradients(
        query=merge_rows(sums.query).astype(dtype),
        key=jnp.moveaxis(sums.key, 1, 2).astype(dtype),
        value=jnp.moveaxis(sums.value, 1, 2).astype(dtype),
        bias=None if operands.bias is None or sums.bias is None else sums.bias.reshape(operands.bias.shape),
        sinks=dsinks,
        scale=sums.scale,
        **{name: getattr(sums, name) for name in PLANES},
    )


def _padding_rows(operands: Operands) -> jax.Array | None:
    """Returns which rows are padding, bool `[B, T]`; None without lengths of queries and without packed sequences."""
    if operands.query_seq_lengths is not None:
        return jnp.arange(operands.query.shape[1], dtype=jnp.int32)[None, :] >= operands.query_seq_lengths[:, None]
    return padding_rows(operands)
