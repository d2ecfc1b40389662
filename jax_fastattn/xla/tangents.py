# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents and second derivatives of attention in plain JAX, at once or in chunks as `passes.py` does it.

If ds is the tangent of a logit and P its probability,

    dlse = sum(P ds) + P_sink dsink        dout = sum(P (ds - dlse) v) + sum(P dv)

With the saved log-sum-exp, one pass over the keys is enough. But it is rounded: the weights of a row add up to 1 + e,
so that dlse is off by e times the size of ds, and ds - dlse may be much smaller. Each row is therefore divided by the
sum of its weights, here and in second derivatives.

Second derivatives are `jax.jvp` of a tangent or of the backward pass. Output and log-sum-exp are functions of the
operands: along a direction of the operands, both move, and their tangents are computed here unless they are given.

What stays out: transposes. The transpose of each function here is one of them or `passes.backward`
(`ops/tangents.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_fastattn.layouts.heads import merge_rows, rows_of, split_heads
from jax_fastattn.spec import DIFFERENTIABLE, HIDDEN_BIAS, PLANES, AttentionSpec, Gradients, Operands
from jax_fastattn.xla.blocks import Blocks, mean_of_seen_keys
from jax_fastattn.xla.chunks import CPU, Index, Span, Tuning
from jax_fastattn.xla.passes import add_block, add_rows, gradients_of, sum_blocks
from jax_fastattn.xla.rows import RowTerms, Softmax

# An op holds this many planes of logits in float32 at once.
TANGENT_PLANES = 5
SECOND_DERIVATIVE_PLANES = 10

Results = tuple[jax.Array, jax.Array]
Tangents = Mapping[str, jax.Array]


def tangent(
    spec: AttentionSpec, operands: Operands, out: jax.Array, lse: jax.Array, moved: Tangents, tuning: Tuning = CPU
) -> Results:
    """Computes the tangents of `passes.forward`'s results.

    Args:
        out, lse: the results of `forward`.
        moved: tangents of operands by name, at least one, each in the shape and dtype of its operand. Other operands do
            not move.

    Returns:
        dout `[B, T, N, D]` and dlse `[B, T, N]`. Both are 0 for rows without a visible key.
    """
    return _tangent(spec, operands, out, lse, moved, tuning.with_planes(TANGENT_PLANES))


def second_tangent(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    first: Tangents,
    second: Tangents,
    tuning: Tuning = CPU,
) -> Results:
    """Computes the second derivatives of `passes.forward`'s results along two directions; see `tangent`."""
    results = tangent(spec, operands, out, lse, second, tuning)

    def along(given: Tangents, out: jax.Array, lse: jax.Array) -> Results:
        return _tangent(spec, operands._replace(**given), out, lse, first, _second(tuning))

    given = {name: getattr(operands, name) for name in second}
    return jax.jvp(along, (given, out, lse), (dict(second), *results))[1]


def second_backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    moved: Tangents,
    results: Results | None = None,
    wanted: Collection[str] = DIFFERENTIABLE,
    tuning: Tuning = CPU,
) -> Gradients:
    """Computes the tangents of `passes.backward`'s gradients as operands move and the cotangents do not.

    As a map from `moved` to gradients it is a Hessian, and so its own transpose.

    Args:
        results: what `tangent` returns along `moved`, which chunks take; None computes it.
    """
    given = {name: getattr(operands, name) for name in moved}
    blocks = Blocks.of(spec, operands, _second(tuning))
    num_kv_heads = blocks.key.shape[2]
    dout_rows, lse_rows = rows_of(dout, num_kv_heads), rows_of(lse, num_kv_heads)
    dlse_rows = None if dlse is None else rows_of(dlse, num_kv_heads)
    fields, dfields = _fields(given, num_kv_heads), _fields(moved, num_kv_heads)

    def add_at_once(queries: Span, keys: Span, dquery: jax.Array, sums: Gradients) -> tuple[jax.Array, Gradients]:
        """Adds tangents; the rows are computed, and so move, in here."""

        def along(fields: Tangents, dquery: jax.Array, sums: Gradients) -> tuple[jax.Array, Gradients]:
            moving = _with_fields(blocks, fields)
            return add_rows(moving, dout_rows, lse_rows, dlse_rows, queries, keys, dquery, sums, has_unit=False)

        still = jax.tree.map(jnp.zeros_like, (dquery, sums))
        return jax.jvp(along, (fields, *still), (dfields, dquery, sums))[1]

    if blocks.bands:
        sums = sum_blocks(blocks, wanted, add_at_once)
        return gradients_of(operands, sums, sums.sinks)

    if results is None:
        results = tangent(spec, operands, out, lse, moved, tuning)

    def rows_of_call(given: Tangents, out: jax.Array, lse: jax.Array) -> RowTerms:
        rows = RowTerms.of_results(operands._replace(**given), out, lse, dout, dlse)
        return rows.divided(_with_fields(blocks, _fields(given, num_kv_heads)), lse_rows == -jnp.inf)

    rows, drows = jax.jvp(rows_of_call, (given, out, lse), (dict(moved), *results))

    def add(queries: Span, keys: Span, dquery: jax.Array, sums: Gradients) -> tuple[jax.Array, Gradients]:
        """Adds tangents. Along a loop, `jax.jvp` would add up the gradients as well, which nothing reads."""

        def along(fields: Tangents, rows: RowTerms, dquery: jax.Array, sums: Gradients) -> tuple[jax.Array, Gradients]:
            moving = _with_fields(blocks, fields)
            return add_block(moving, dout_rows, rows, queries, keys, dquery, sums, has_unit=False)

        still = jax.tree.map(jnp.zeros_like, (dquery, sums))
        return jax.jvp(along, (fields, rows, *still), (dfields, drows, dquery, sums))[1]

    return gradients_of(operands, sum_blocks(blocks, wanted, add), drows.dsinks if "sinks" in wanted else None)


def _fields(arrays: Tangents, num_kv_heads: int) -> Tangents:
    """Returns operands or their tangents in the axes in which `Blocks` has them."""
    axes = {"query": lambda x: rows_of(x, num_kv_heads), "bias": lambda x: split_heads(x, num_kv_heads, 1)}
    return {name: axes[name](x) if name in axes else x for name, x in arrays.items()}


def _with_fields(blocks: Blocks, fields: Tangents) -> Blocks:
    """Returns blocks of other operands, as `_fields` returns them."""
    reshaped = {name: x for name, x in fields.items() if name in ("query", "key", "value", "bias")}
    others = {name: x for name, x in fields.items() if name not in reshaped}
    return replace(blocks, operands=blocks.operands._replace(**others), **reshaped)


def _second(tuning: Tuning) -> Tuning:
    """Returns the sizes for a function that `jax.jvp` differentiates.

    Values always get a copy without the rows that no query sees: their tangents may have NaN in such rows even if the
    values have none.
    """
    return replace(tuning.with_planes(SECOND_DERIVATIVE_PLANES), copied=math.inf)


def _tangent(
    spec: AttentionSpec, operands: Operands, out: jax.Array, lse: jax.Array, moved: Tangents, tuning: Tuning
) -> Results:
    motion = _Motion.of(Blocks.of(spec, operands, tuning), out, lse, moved)
    blocks = motion.blocks

    def query_chunk(i: Index, results: Results) -> Results:
        queries = blocks.queries.span(i)
        is_whole = blocks.keys.count == 1
        chunks = motion.rows_at_once(queries, blocks.keys.span(0)) if is_whole else motion.rows(queries)
        dout, dlse = (queries.put(x, chunk, 3) for x, chunk in zip(results, chunks, strict=True))
        return dout, dlse

    if blocks.bands:
        bands = [motion.rows_at_once(*band) for band in blocks.bands]
        dout, dlse = bands[0] if len(bands) == 1 else (jnp.concatenate(x, axis=3) for x in zip(*bands, strict=True))
    else:
        shape = blocks.query.shape[:4]
        results = blocks.full((*shape, out.shape[3]), 0.0).astype(out.dtype), blocks.full(shape, 0.0)
        dout, dlse = blocks.queries.loop((0, blocks.queries.count), query_chunk, results)
    return merge_rows(dout).astype(out.dtype), merge_rows(dlse)


@dataclass(frozen=True)
class _Motion:
    """The tangents of operands, in the axes in which `Blocks` has the operands; None does not move.

    Attributes:
        out, lse: rows `[B, K, G, T, D]` and `[B, K, G, T]` of the forward pass; 0 in the place of an lse of -inf.
        query, key, value: `[B, K, G, T, H]`, `[B, S, K, H]` and `[B, S, K, D]`.
        bias: `[b, k, g, t, s]`.
        scale: `[b, 1, 1, 1, 1]`.
        sinks: `[b, K, G, 1]`.
        planes: planes of programs by name.
        sink_weights: probabilities of sinks `[B, K, G, T]` by that lse; None without sinks.
        empty: which rows `[B, K, G, T]` have an lse of -inf.
    """

    blocks: Blocks
    out: jax.Array
    lse: jax.Array
    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    bias: jax.Array | None
    scale: jax.Array | None
    sinks: jax.Array | None
    planes: Tangents
    sink_weights: jax.Array | None
    empty: jax.Array

    @classmethod
    def of(cls, blocks: Blocks, out: jax.Array, lse: jax.Array, moved: Tangents) -> _Motion:
        num_kv_heads, dtype, sinks = blocks.key.shape[2], blocks.zero.dtype, blocks.sinks()
        lse = rows_of(lse, num_kv_heads)
        empty = lse == -jnp.inf
        lse = jnp.where(empty, 0.0, lse)
        sink_weights = None if sinks is None else jnp.where(empty, 0.0, jnp.exp(sinks - lse))
        return cls(
            blocks=blocks,
            out=rows_of(out, num_kv_heads),
            lse=lse,
            query=rows_of(moved["query"], num_kv_heads) if "query" in moved else None,
            key=moved.get("key"),
            value=moved.get("value"),
            bias=split_heads(moved["bias"], num_kv_heads, 1).astype(dtype) if "bias" in moved else None,
            scale=moved["scale"].reshape(-1, 1, 1, 1, 1) if "scale" in moved else None,
            sinks=split_heads(moved["sinks"], num_kv_heads, 1).astype(dtype)[..., None] if "sinks" in moved else None,
            planes={name: x for name, x in moved.items() if name in PLANES},
            sink_weights=sink_weights,
            empty=empty,
        )

    def rows_at_once(self, queries: Span, keys: Span) -> Results:
        """Returns tangents `[B, K, G, t, D]` and `[B, K, G, t]` of queries that see no key except `keys`."""
        blocks = self.blocks
        visible, logits, dlogits = self._block(queries, keys)
        sinks = blocks.sinks()
        softmax = Softmax.of(logits, sinks)
        weights = softmax.weights
        dlse = blocks.full(softmax.total.shape, 0.0)
        if sinks is not None and self.sinks is not None:
            of_sinks = jnp.exp(sinks - softmax.shift) / softmax.total
            dlse = dlse + jnp.where(blocks.take_query(self.empty, queries), 0.0, of_sinks) * self.sinks
        dlse = dlse if dlogits is None else dlse + jnp.sum(weights * dlogits, axis=-1)
        dout = self._no_dout(queries)
        if dlogits is not None or self.sinks is not None:
            dweights = weights * ((0.0 if dlogits is None else dlogits) - dlse[..., None])
            dout = dout + blocks.weighted(blocks.dropped(dweights, queries, keys), blocks.value, keys, visible)
        if self.value is not None:
            dout = dout + blocks.weighted(blocks.dropped(weights, queries, keys), self.value, keys, visible)
        return dout, dlse

    def rows(self, queries: Span) -> Results:
        """Computes what `rows_at_once` does, over chunks of keys.

        `dlse` is known after the last key, so `dlse out` is subtracted then, and `out` is rounded. Where all logits of
        a row move alike, dout is a small difference of large products; hence what `_shift` returns is not in them.
        """
        blocks, shift = self.blocks, self._shift(queries)

        def key_chunk(j: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dout, dlse, total = state
            keys = blocks.keys.span(j)
            visible, logits, dlogits = self._block(queries, keys)
            weights = jnp.exp(logits - blocks.take_query(self.lse, queries)[..., None])
            if dlogits is not None:
                dweights = weights * (dlogits if shift is None else dlogits - shift[..., None])
                survived = blocks.dropped(dweights, queries, keys)
                dout, dlse = dout + blocks.weighted(survived, blocks.value, keys, visible), dlse + dweights.sum(-1)
            if self.value is not None:
                dout = dout + blocks.weighted(blocks.dropped(weights, queries, keys), self.value, keys, visible)
            return dout, dlse, total + weights.sum(-1)

        dlse = self._from_sinks(queries, shift)
        total = jnp.zeros_like(dlse)
        total = total if self.sink_weights is None else total + blocks.take_query(self.sink_weights, queries)
        state = self._no_dout(queries), dlse, total
        dout, dlse, total = blocks.keys.loop(blocks.key_chunks(queries), key_chunk, state)
        total = jnp.where(blocks.take_query(self.empty, queries), 1.0, total)
        dout, dlse = dout / total[..., None], dlse / total
        dout = dout - dlse[..., None] * blocks.take_query(self.out, queries).astype(dlse.dtype)
        return dout, dlse if shift is None else dlse + shift

    def _no_dout(self, queries: Span) -> jax.Array:
        return self.blocks.full((*self.lse.shape[:3], queries.size, self.out.shape[4]), 0.0)

    def _from_sinks(self, queries: Span, shift: jax.Array | None) -> jax.Array:
        """Returns what a sink adds to dlse, `[B, K, G, t]`, if its tangent is reduced by `shift`; see `rows`."""
        moves = [x for x in (self.sinks, None if shift is None else -shift) if x is not None]
        nothing = self.blocks.full((*self.lse.shape[:3], queries.size), 0.0)
        if self.sink_weights is None or not moves:
            return nothing
        return nothing + self.blocks.take_query(self.sink_weights, queries) * functools.reduce(jnp.add, moves)

    def _block(self, queries: Span, keys: Span) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
        """Returns which pairs are visible (None is all), and `[B, K, G, t, s]`: logits, and their tangents.

        The tangents are 0 where invisible, and None if no logit moves.
        """
        blocks = self.blocks
        visible = blocks.visible(queries, keys)
        logits, slope, mod = blocks.logits(queries, keys, visible)
        query, key = blocks.take_query(blocks.query, queries), blocks.take_key(blocks.key, keys)

        pairs: list[tuple[jax.Array, jax.Array]] = []
        if self.query is not None:
            pairs.append((blocks.take_query(self.query, queries), key))
        if self.key is not None:
            pairs.append((query, blocks.take_key(self.key, keys)))
        terms = [blocks.rows_by_keys(tuple(pairs)) * blocks.scale(5)] if pairs else []
        if self.scale is not None:
            terms.append(blocks.rows_by_keys(((query, key),)) * self.scale)
        if self.bias is not None:
            terms.append(jnp.broadcast_to(self._moved_bias(queries, keys), logits.shape))
        if not terms and not self.planes:
            return visible, logits, None
        dlogits = functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(logits)
        if mod is not None:
            # A score of -inf has the weight 0, whatever its derivatives are.
            dlogits = jnp.where(logits == -jnp.inf, 0.0, mod.push(dlogits, self.planes))
        dlogits = dlogits if slope is None else dlogits * slope
        return visible, logits, dlogits if visible is None else jnp.where(visible, dlogits, 0.0)

    def _shift(self, queries: Span) -> jax.Array | None:
        """Returns the mean of a row's tangents of logits over the first keys, `[B, K, G, t]`.

        The results do not depend on it: a constant of a row moves its log-sum-exp alone. The mean over all keys that
        some query of the chunk sees takes no product of planes. With a soft cap or a
        `score_mod` no move of operands is a constant.
        """
        blocks = self.blocks
        if blocks.spec.logits_soft_cap is not None or blocks.spec.score_mod is not None:
            return None
        keys = blocks.keys.span(blocks.key_chunks(queries)[0])
        visible = blocks.visible(queries, keys)

        def mean_product(query: jax.Array, key: jax.Array) -> jax.Array:
            mean = mean_of_seen_keys(blocks.take_key(key, keys), visible, blocks.zero.dtype)
            return jnp.einsum("bkgth,bkh->bkgt", blocks.take_query(query, queries).astype(mean.dtype), mean)

        terms: list[jax.Array] = []
        if self.query is not None:
            terms.append(mean_product(self.query, blocks.key) * blocks.scale(4))
        if self.key is not None:
            terms.append(mean_product(blocks.query, self.key) * blocks.scale(4))
        if self.scale is not None:
            terms.append(mean_product(blocks.query, blocks.key) * self.scale[..., 0])
        if self.bias is not None:
            terms.append(self._mean_bias(queries, keys, visible))
        if not terms:
            return None
        shift = functools.reduce(jnp.add, terms)
        # A query that sees no key may be NaN.
        has_keys = ~self.empty if self.sink_weights is None else ~self.empty & (self.sink_weights < 0.999)
        return jnp.where(blocks.take_query(has_keys, queries) & jnp.isfinite(shift), shift, 0.0)

    def _moved_bias(self, queries: Span, keys: Span) -> jax.Array:
        """Returns the tangent of the bias in a block, and 0 where the bias counts as -inf."""
        assert self.bias is not None and self.blocks.bias is not None
        bias, moved = (self.blocks.take_plane(x, queries, keys) for x in (self.blocks.bias, self.bias))
        return jnp.where(bias.astype(moved.dtype) <= HIDDEN_BIAS, 0.0, moved)

    def _mean_bias(self, queries: Span, keys: Span, visible: jax.Array | None) -> jax.Array:
        plane = self._moved_bias(queries, keys)
        if visible is None:
            return plane.mean(axis=-1)
        seen = jnp.broadcast_to(visible, jnp.broadcast_shapes(visible.shape, plane.shape))
        return jnp.where(seen, plane, 0.0).sum(axis=-1) / jnp.maximum(seen.sum(axis=-1, dtype=plane.dtype), 1.0)
