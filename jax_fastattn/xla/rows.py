# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Terms of rows in a backward pass: shift and total of their softmax, and what gradients of weights are reduced by.

They are computed from all logits of a row, or taken from the results of a forward pass, as kernels do. The latter takes
no pass over the keys, and has their rounding: `delta` is then off by the rounding of the output, and every weight of a
row by the rounding of its log-sum-exp. `RowTerms.divided` removes the latter.

What stays out: gradients (`passes.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.layouts.heads import product_or_zero, rows_of
from jax_fastattn.spec import Operands
from jax_fastattn.xla.blocks import Blocks, zero_unseeing_queries
from jax_fastattn.xla.chunks import Index, Span
from jax_fastattn.xla.mods import ScoreMod


class Planes(NamedTuple):
    """The planes `[B, K, G, t, s]` of a block, and the cotangent of its output.

    Attributes:
        visible: which pairs are visible, broadcastable; None is all.
        logits: -inf where invisible.
        slope: the derivative of the soft cap; None without.
        mod: the `score_mod` of the block; None without.
        dweights: the gradient of the weights before dropout. It may be NaN where invisible.
        dout: `[B, K, G, t, D]`, and 0 for queries that see no key of the block.
        survival: the factors of dropout; None without.
    """

    visible: jax.Array | None
    logits: jax.Array
    slope: jax.Array | None
    mod: ScoreMod | None
    dweights: jax.Array
    dout: jax.Array
    survival: jax.Array | None

    @classmethod
    def of(cls, blocks: Blocks, dout: jax.Array, queries: Span, keys: Span, *, skip_stored_queries: bool) -> Planes:
        """Computes planes from the cotangent `[B, K, G, T, D]`; see `Predicate.visible` for `skip_stored_queries`."""
        visible = blocks.visible(queries, keys, skip_stored_queries=skip_stored_queries)
        logits, slope, mod = blocks.logits(queries, keys, visible)
        dout = zero_unseeing_queries(blocks.take_query(dout, queries), visible)
        dweights = blocks.product("bkgtd,bskd->bkgts", dout, blocks.take_key(blocks.value, keys))
        survival = blocks.survival(queries, keys)
        # The gradient of a weight that is dropped may be NaN where it is invisible.
        dweights = dweights if survival is None else jnp.where(survival == 0, 0.0, dweights * survival)
        return cls(visible, logits, slope, mod, dweights, dout, survival)


class Softmax(NamedTuple):
    """The softmax of rows that have all of their logits `[B, K, G, t, s]`.

    Forward and backward pass take their weights from here. Each row is thus divided by its own sum, and if both passes
    are in one program, XLA finds what they share.

    Attributes:
        exponentials: exponentials of logits less the greatest one of their row, `[B, K, G, t, s]`.
        top: the greatest logit of each row, sinks included, `[B, K, G, t]`. It has no derivative, since no weight
            depends on it.
        shift: `top`, but a finite number for rows that see nothing, so that every exponential is 0.
        total: the sums of exponentials, sinks included.
    """

    exponentials: jax.Array
    top: jax.Array
    shift: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, sinks: jax.Array | None) -> Softmax:
        """Computes the softmax; sinks are `[b, K, G, 1]`.

        Without sinks, each reduction is combined with its row only through a maximum with a constant, so XLA for GPUs
        recognizes a softmax and compiles it to one kernel.
        """
        limits = jnp.finfo(logits.dtype)
        top = jnp.max(lax.stop_gradient(logits), axis=-1, initial=-jnp.inf)
        top = top if sinks is None else jnp.maximum(top, lax.stop_gradient(sinks))
        shift = jnp.maximum(top, limits.min)
        exponentials = jnp.exp(logits - shift[..., None])
        total = exponentials.sum(-1)
        total = total if sinks is None else total + jnp.exp(sinks - shift)
        # In rows that see nothing, what is divided by it, and by its square in derivatives, is 0.
        return cls(exponentials, top, shift, jnp.maximum(total, float(limits.tiny) ** 0.5))

    @property
    def weights(self) -> jax.Array:
        return self.exponentials / self.total[..., None]


class RowTerms(NamedTuple):
    """The terms of its queries that the gradients of a block take, `[B, K, G, t]`.

    Attributes:
        shift: a weight is `exp(logit - shift) / total`.
        total: None for 1.
        delta: what is subtracted from the gradients of weights, and 0 for rows without a visible key.
        dsinks: what the row adds to the gradient of its sink; None without sinks.
        dlogits: what the gradients of the logits of a row in the block add up to; None if it is not known.
    """

    shift: jax.Array
    total: jax.Array | None
    delta: jax.Array
    dsinks: jax.Array | None
    dlogits: jax.Array | None = None

    @classmethod
    def of_planes(cls, planes: Planes, sinks: jax.Array | None, dlse: jax.Array | None) -> RowTerms:
        """Computes the rows of queries that see no key except the block's.

        Args:
            sinks: `[b, K, G, 1]`.
            dlse: `[B, K, G, t]`, and 0 for rows without a visible key and for padding.
        """
        softmax, visible = Softmax.of(planes.logits, sinks), planes.visible
        weighted = softmax.exponentials * planes.dweights
        weighted = weighted if visible is None else jnp.where(visible, weighted, 0.0)
        delta = weighted.sum(-1) / softmax.total
        delta = delta if dlse is None else delta - dlse
        dsinks = None if sinks is None else -jnp.exp(sinks - softmax.shift) / softmax.total * delta
        # A row of logits and its sink move the log-sum-exp alone if they move alike. A soft cap does not let them, nor
        # does a `score_mod`.
        dlogits = jnp.zeros_like(delta) if dlse is None else dlse
        dlogits = dlogits if dsinks is None else dlogits - dsinks
        is_plain = planes.slope is None and planes.mod is None
        return cls(softmax.shift, softmax.total, delta, dsinks, dlogits if is_plain else None)

    @classmethod
    def of_results(
        cls, operands: Operands, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
    ) -> RowTerms:
        """Takes the rows of all queries from the results of a forward pass and their cotangents."""
        # Rows without a visible key have no gradient, even if their cotangent is NaN.
        empty, num_kv_heads = lse == -jnp.inf, operands.key.shape[2]
        # A row whose log-sum-exp is its sink alone is not empty. Its output is 0, and its cotangent may be NaN.
        multiply = jnp.multiply if operands.sinks is None else product_or_zero
        delta = jnp.sum(multiply(out.astype(lse.dtype), dout.astype(lse.dtype)), axis=-1)
        delta = jnp.where(empty, 0.0, delta if dlse is None else delta - dlse)
        lse, dsinks = jnp.where(empty, 0.0, lse), None
        if operands.sinks is not None:
            weights = jnp.where(empty, 0.0, jnp.exp(operands.sinks[:, None, :].astype(lse.dtype) - lse))
            dsinks = rows_of(-weights * delta, num_kv_heads)
        return cls(rows_of(lse, num_kv_heads), None, rows_of(delta, num_kv_heads), dsinks)

    def divided(self, blocks: Blocks, empty: jax.Array) -> RowTerms:
        """Returns rows from `of_results` divided by the sums of their weights, by a pass over the keys.

        `empty` says which rows `[B, K, G, T]` have no weights.
        """

        def query_chunk(i: Index, totals: jax.Array) -> jax.Array:
            queries = blocks.queries.span(i)
            shift, sinks = blocks.take_query(self.shift, queries), blocks.sinks()

            def key_chunk(j: Index, total: jax.Array) -> jax.Array:
                keys = blocks.keys.span(j)
                logits, *_ = blocks.logits(queries, keys, blocks.visible(queries, keys))
                return total + jnp.exp(logits - shift[..., None]).sum(-1)

            total = jnp.zeros_like(shift) if sinks is None else jnp.exp(sinks - shift)
            total = blocks.keys.loop(blocks.key_chunks(queries), key_chunk, total)
            return queries.put(totals, total, 3)

        totals = blocks.queries.loop((0, blocks.queries.count), query_chunk, jnp.zeros_like(self.shift))
        total = jnp.where(empty, 1.0, totals)
        return self._replace(total=total, dsinks=None if self.dsinks is None else self.dsinks / total)

    def take(self, blocks: Blocks, queries: Span) -> RowTerms:
        return jax.tree.map(lambda x: blocks.take_query(x, queries), self)

    def of_exponentials(self, x: jax.Array) -> jax.Array:
        """Divides a plane that has exponentials `exp(logit - shift)` in the place of weights."""
        return x if self.total is None else x / self.total[..., None]


class RowSums(NamedTuple):
    """An online softmax of rows `[B, K, G, t]`: their greatest logit, and their sums of weights and of `P dP`.

    Both sums have a factor `exp(-top)`. A sink is a logit that has been seen before the first key.
    """

    top: jax.Array
    total: jax.Array
    weighted: jax.Array

    @classmethod
    def start(cls, blocks: Blocks, queries: Span) -> RowSums:
        top, sinks = blocks.full((*blocks.query.shape[:3], queries.size), -jnp.inf), blocks.sinks()
        top = top if sinks is None else jnp.maximum(top, sinks)
        return cls(top, jnp.where(top == -jnp.inf, 0.0, 1.0).astype(top.dtype), jnp.zeros_like(top))

    def add(self, planes: Planes) -> RowSums:
        top = jnp.maximum(self.top, jnp.max(planes.logits, axis=-1, initial=-jnp.inf))
        shift = _finite(top)
        weights, decay = jnp.exp(planes.logits - shift[..., None]), jnp.exp(self.top - shift)
        weighted = weights * planes.dweights
        weighted = weighted if planes.visible is None else jnp.where(planes.visible, weighted, 0.0)
        return RowSums(top, self.total * decay + weights.sum(-1), self.weighted * decay + weighted.sum(-1))

    def rows(self, blocks: Blocks, queries: Span, lse: jax.Array, dlse: jax.Array | None) -> RowTerms:
        """Returns the rows once all keys have been added.

        Args:
            lse, dlse: the log-sum-exp `[B, K, G, T]`, which says what rows are padding, and its cotangent.
        """
        empty, sinks = blocks.take_query(lse, queries) == -jnp.inf, blocks.sinks()
        shift, total = _finite(self.top), jnp.where(self.total == 0.0, 1.0, self.total)
        delta = self.weighted / total
        delta = delta if dlse is None else delta - blocks.take_query(dlse, queries)
        # Rows without a visible key have no gradient, even if their cotangent is NaN.
        delta = jnp.where(empty, 0.0, delta)
        dsinks = None if sinks is None else jnp.where(empty, 0.0, -jnp.exp(sinks - shift) / total * delta)
        return RowTerms(shift, total, delta, dsinks)


def rows_of_chunks(blocks: Blocks, dout: jax.Array, lse: jax.Array, dlse: jax.Array | None) -> RowTerms:
    """Computes the rows of all queries by a pass over the chunks of keys; see `RowSums.rows`."""

    def query_chunk(i: Index, rows: RowTerms) -> RowTerms:
        queries = blocks.queries.span(i)

        def key_chunk(j: Index, sums: RowSums) -> RowSums:
            return sums.add(Planes.of(blocks, dout, queries, blocks.keys.span(j), skip_stored_queries=False))

        sums = blocks.keys.loop(blocks.key_chunks(queries), key_chunk, RowSums.start(blocks, queries))
        found = sums.rows(blocks, queries, lse, dlse)
        return jax.tree.map(lambda x, y: queries.put(x, y, 3), rows, found)

    nothing = blocks.full(blocks.query.shape[:4], 0.0)
    rows = RowTerms(nothing, nothing, nothing, None if blocks.operands.sinks is None else nothing)
    return blocks.queries.loop((0, blocks.queries.count), query_chunk, rows)


def _finite(top: jax.Array) -> jax.Array:
    """Returns the greatest logits, and 0 for rows that have seen nothing: every exponential is 0 then."""
    return jnp.where(top == -jnp.inf, 0.0, top)
