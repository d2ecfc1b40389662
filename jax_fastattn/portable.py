# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in plain JAX, in memory linear in the sequence length: the XLA path of every platform.

An online softmax over chunks of queries and keys, and a backward pass that recomputes the probabilities from the saved
log-sum-exp. Means what `reference.py` means. Never builds a `T x S` array of its own: a bias or mask that is given as
such is read in slices, and its broadcast dimensions stay of size 1.

What stays out: differentiation and batching rules (`ops/` has them; the loops here have dynamic bounds, through which
reverse-mode differentiation does not go).

In einsums: b batch, t query, s key, k key/value head, g query head within its group, h head_dim, d v_head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fastattn.spec import PADDING_ID, AttentionSpec, Operands

State = TypeVar("State")
Index = jax.Array | int

# A block of logits has at most CHUNK queries and keys per head, fewer where batch and heads would take it past
# BLOCK_SIZE elements: 8 MiB, which a CPU's cache holds. With 2**22 elements, forward and backward took twice as long
# (2 cores of a Xeon with AVX-512, B=2, T=S=1024, N=8, H=64, 2026-11-21).
CHUNK = 512
MIN_CHUNK = 128
BLOCK_SIZE = 1 << 21

# Wider than any sequence, and far from int32 overflow when a position is added.
UNBOUNDED = 1 << 29


class Gradients(NamedTuple):
    """Cotangents of the differentiable operands, in their shapes; None where the operand is absent.

    Those of query, key and value have the dtype of their operand. Those of bias, sinks and scale are float32 (float64
    for float64 operands), since the ops may have to add up several before they round.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None
    scale: jax.Array | None


def forward(spec: AttentionSpec, operands: Operands, *, barriers: bool = True) -> tuple[jax.Array, jax.Array]:
    """Attention of canonical operands.

    Args:
        barriers: whether to work around a fault of XLA:CPU, see `_Blocks.einsum`.

    Returns:
        out `[B, T, N, D]` in the dtype of the operands, and the log-sum-exp `[B, T, N]` in float32 (float64 for
        float64 operands).
    """
    blocks = _Blocks.of(spec, operands, barriers)
    batch, length, num_kv_heads, group, _ = blocks.query.shape
    v_head_dim = blocks.value.shape[-1]

    def query_chunk(i: Index, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def key_chunk(j: Index, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out, top, total = state
            visible = blocks.visible(i, j)
            logits, _ = blocks.logits(i, j, visible)
            value = _zero_unseen_keys(blocks.keys.take(blocks.value, j), visible)
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1, initial=-jnp.inf))
            # The maximum of a row that has seen nothing yet is -inf; with 0 in its place every exponential is 0.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights, decay = jnp.exp(logits - shift[..., None]), jnp.exp(top - shift)
            weighted = blocks.einsum("bkgts,bskd->bkgtd", weights.astype(value.dtype), value)
            return out * decay[..., None] + weighted, new_top, total * decay + weights.sum(-1)

        # A sink is a logit that has been seen before the first key.
        top = blocks.full((batch, num_kv_heads, group, blocks.queries.chunk), -jnp.inf)
        if operands.sinks is not None:
            top = jnp.maximum(top, blocks.per_head(operands.sinks)[..., None])
        total = jnp.where(top == -jnp.inf, 0.0, 1.0).astype(top.dtype)
        state = blocks.full((*top.shape, v_head_dim), 0.0), top, total
        out, top, total = _loop(blocks.keys, blocks.key_chunks(i), key_chunk, state)
        out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
        lse = top + jnp.log(total)
        chunks = jnp.moveaxis(out, 3, 1), jnp.moveaxis(lse, 3, 1)
        return tuple(blocks.queries.put(x, chunk, i) for x, chunk in zip(results, chunks, strict=True))

    results = (
        blocks.full((batch, length, num_kv_heads, group, v_head_dim), 0.0).astype(operands.query.dtype),
        blocks.full((batch, length, num_kv_heads, group), -jnp.inf),
    )
    out, lse = (_merge_heads(x) for x in _loop(blocks.queries, (0, blocks.queries.count), query_chunk, results))
    padding = _padding_rows(operands)
    return out, lse if padding is None else jnp.where(padding[:, :, None], -jnp.inf, lse)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Collection[str] = Gradients._fields,
    *,
    barriers: bool = True,
) -> Gradients:
    """Gradients of `forward` from its results and their cotangents.

    Args:
        out, lse: what `forward` returned.
        dout: `[B, T, N, D]`.
        dlse: `[B, T, N]`, or None for zero.
        wanted: names of operands; of bias, sinks and scale only those named get a gradient, and the others None.
        barriers: as for `forward`.
    """
    blocks = _Blocks.of(spec, operands, barriers)
    dtype = operands.query.dtype
    # Rows without a visible key have no gradient, whatever their cotangent holds.
    empty = lse == -jnp.inf
    products = out.astype(lse.dtype) * dout.astype(lse.dtype)
    if operands.sinks is not None:
        # A row whose log-sum-exp is its sink alone is not empty. Its output is 0, and its cotangent may be NaN.
        products = jnp.where(out == 0.0, 0.0, products)
    delta = jnp.sum(products, axis=-1)
    delta = jnp.where(empty, 0.0, delta if dlse is None else delta - dlse)
    lse = jnp.where(empty, 0.0, lse)
    dsinks = None
    if operands.sinks is not None and "sinks" in wanted:
        weights = jnp.where(empty, 0.0, jnp.exp(operands.sinks[:, None, :].astype(lse.dtype) - lse))
        dsinks = _reduce_to(operands.sinks.shape, -jnp.sum(weights * delta, axis=1))
    dout, lse, delta = (_split_heads(x, blocks.query.shape[2], 2) for x in (dout, lse, delta))

    def query_chunk(i: Index, sums: Gradients) -> Gradients:
        dout_i = blocks.queries.take(dout, i)
        lse_i, delta_i = (jnp.moveaxis(blocks.queries.take(x, i), 1, 3)[..., None] for x in (lse, delta))

        def key_chunk(j: Index, state: tuple[jax.Array, Gradients]) -> tuple[jax.Array, Gradients]:
            dquery, sums = state
            visible = blocks.visible(i, j, skip_stored_queries=True)
            logits, slope = blocks.logits(i, j, visible)
            query = _zero_unseeing_queries(blocks.queries.take(blocks.query, i), visible)
            key = _zero_unseen_keys(blocks.keys.take(blocks.key, j), visible)
            weights = jnp.exp(logits - lse_i)
            dweights = blocks.einsum("btkgd,bskd->bkgts", dout_i, blocks.keys.take(blocks.value, j))
            dlogits = weights * (dweights - delta_i)
            dlogits = dlogits if slope is None else dlogits * slope
            dlogits = dlogits if visible is None else jnp.where(visible, dlogits, 0.0)
            dbias = None if sums.bias is None else blocks.add_bias_block(sums.bias, dlogits, i, j)
            dlogits, weights = dlogits.astype(dtype), weights.astype(dtype)
            dkey = blocks.einsum("bkgts,btkgh->bskh", dlogits, query)
            dvalue = blocks.einsum("bkgts,btkgd->bskd", weights, _zero_unseeing_queries(dout_i, visible))
            dquery = dquery + blocks.einsum("bkgts,bskh->btkgh", dlogits, key)
            dkey, dvalue = blocks.keys.add(sums.key, dkey, j), blocks.keys.add(sums.value, dvalue, j)
            return dquery, sums._replace(key=dkey, value=dvalue, bias=dbias)

        state = blocks.full(blocks.queries.take(blocks.query, i).shape, 0.0), sums
        dquery, sums = _loop(blocks.keys, blocks.key_chunks(i), key_chunk, state)
        return sums._replace(query=blocks.queries.add(sums.query, dquery, i))

    sums = Gradients(
        query=blocks.full(blocks.query.shape, 0.0),
        key=blocks.full(blocks.key.shape, 0.0),
        value=blocks.full(blocks.value.shape, 0.0),
        bias=None if blocks.bias is None or "bias" not in wanted else blocks.full(blocks.bias.shape, 0.0),
        sinks=None,
        scale=None,
    )
    sums = _loop(blocks.queries, (0, blocks.queries.count), query_chunk, sums)
    dbias = None
    if operands.bias is not None and sums.bias is not None:
        dbias = sums.bias.reshape(operands.bias.shape)
    dscaled, scale = _merge_heads(sums.query), _scale(spec, operands, 4)
    return Gradients(
        query=(dscaled * scale).astype(dtype),
        key=(sums.key * scale).astype(dtype),
        value=sums.value.astype(dtype),
        bias=dbias,
        sinks=dsinks,
        scale=scale_gradient(operands, dscaled) if "scale" in wanted else None,
    )


def scale_gradient(operands: Operands, dscaled: jax.Array) -> jax.Array | None:
    """The gradient of a scale that is an operand, from that of the scaled query, `[B, T, N, H]`."""
    if operands.scale is None:
        return None
    dscaled = dscaled.astype(operands.scale.dtype)
    # A query that sees no key may be NaN; the gradient is exactly 0 there.
    products = jnp.where(dscaled == 0.0, 0.0, operands.query.astype(dscaled.dtype) * dscaled)
    return _reduce_to(operands.scale.shape, products.sum(axis=(1, 2, 3))[:, None])


@dataclass(frozen=True)
class _Axis:
    """A sequence axis, always axis 1 of its arrays, cut into `count` chunks of one size.

    The last chunk is moved back to end with the sequence, so it may begin with elements of the chunk before it.
    """

    length: int
    chunk: int
    count: int

    @classmethod
    def cut(cls, length: int, limit: int) -> _Axis:
        """The fewest chunks of at most `limit` elements, as even as can be."""
        count = max(-(-length // limit), 1)
        return cls(length, -(-length // count), count)

    @property
    def overlaps(self) -> bool:
        return self.chunk * self.count != self.length

    def start(self, i: Index) -> jax.Array:
        return jnp.minimum(jnp.int32(i) * self.chunk, self.length - self.chunk)

    def positions(self, i: Index) -> jax.Array:
        """int32 `[chunk]`."""
        return self.start(i) + jnp.arange(self.chunk, dtype=jnp.int32)

    def is_new(self, i: Index) -> jax.Array:
        """bool `[chunk]`: False for elements that belong to the chunk before."""
        return self.positions(i) >= jnp.int32(i) * self.chunk

    def take(self, x: jax.Array, i: Index, axis: int = 1) -> jax.Array:
        """The chunk of x, or x itself where it is broadcast along the axis."""
        if self.count == 1 or x.shape[axis] != self.length:
            return x
        return lax.dynamic_slice_in_dim(x, self.start(i), self.chunk, axis)

    def put(self, x: jax.Array, chunk: jax.Array, i: Index) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, chunk.astype(x.dtype), self.start(i), 1)

    def add(self, x: jax.Array, chunk: jax.Array, i: Index) -> jax.Array:
        return x + chunk if self.count == 1 else self.put(x, self.take(x, i) + chunk, i)


@dataclass(frozen=True)
class _Blocks:
    """The operands with the heads of a group apart, and the blocks of their `T x S` plane.

    Attributes:
        query: `[B, T, K, G, H]`; key `[B, S, K, H]`; value `[B, S, K, D]`.
        bias: `[b, k, g, t, s]`; mask as well.
        queries, keys: the chunks of T and of S.
        barriers: see `einsum`.
        zero: the number 0 in the accumulation dtype. Loop states start from it, so that inside `shard_map` they vary
            over the same mesh axes as the operands.
    """

    spec: AttentionSpec
    operands: Operands
    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    queries: _Axis
    keys: _Axis
    barriers: bool
    zero: jax.Array

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands, barriers: bool) -> _Blocks:
        batch, query_length, num_heads, _ = operands.query.shape
        _, key_length, num_kv_heads, _ = operands.key.shape
        chunk = CHUNK
        while chunk > MIN_CHUNK and batch * num_heads * chunk**2 > BLOCK_SIZE:
            chunk //= 2
        dtype = np.promote_types(operands.query.dtype, np.float32)
        # The sum of an empty slice is a constant 0 to XLA.
        zeros = [jnp.sum(x[:0].astype(dtype)) for x in operands.arrays()]
        return cls(
            spec=spec,
            operands=operands,
            query=_split_heads(operands.query, num_kv_heads, 2),
            key=operands.key,
            value=operands.value,
            bias=None if operands.bias is None else _split_heads(operands.bias, num_kv_heads, 1),
            mask=None if operands.mask is None else _split_heads(operands.mask, num_kv_heads, 1),
            queries=_Axis.cut(query_length, chunk),
            keys=_Axis.cut(key_length, chunk),
            barriers=barriers,
            zero=functools.reduce(jnp.add, zeros),
        )

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        return jnp.full(shape, value, self.zero.dtype) + self.zero

    def einsum(self, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """Multiplies in the dtype of the operands and accumulates in that of `zero`.

        XLA:CPU cannot run some bfloat16 products into which it has folded a transpose ("Unsupported element type for
        DotThunk", jax 0.8 to 0.12). A barrier keeps transposes out of the product, and took no measurable time;
        float32 operands took 20 to 40 % longer. On a GPU, it would prevent fusions.
        """
        if self.barriers and x.dtype == jnp.bfloat16:
            x, y = lax.optimization_barrier((x, y))
        return jnp.einsum(equation, x, y, preferred_element_type=self.zero.dtype)

    def per_head(self, x: jax.Array) -> jax.Array:
        """`[b, N]` to `[b, K, G]`."""
        return _split_heads(x, self.query.shape[2], 1).astype(self.zero.dtype)

    def query_positions(self, i: Index) -> jax.Array:
        """int32 `[b, t]`: where the queries of a chunk stand among the keys."""
        positions = self.queries.positions(i)[None, :]
        offset = self.operands.query_offset
        if offset is None:
            return positions
        offset = offset[:, None] if offset.ndim == 1 else self.queries.take(offset, i)
        return positions + jnp.clip(offset, -UNBOUNDED, UNBOUNDED)

    def key_chunks(self, i: Index) -> tuple[Index, Index]:
        """The chunks of keys of which a chunk of queries may see any: [begin, end)."""
        left, right = self.spec.bounds
        begin, end = jnp.int32(0), jnp.int32(self.keys.count)
        if self.keys.count == 1:
            return begin, end
        last = self.keys.length - 1
        position = self.query_positions(i)
        if left is not None:
            first = jnp.min(position, initial=UNBOUNDED) - min(left, UNBOUNDED)
            begin = jnp.clip(first, 0, last) // self.keys.chunk
        if right is not None:
            final = jnp.max(position, initial=-UNBOUNDED) + min(right, UNBOUNDED)
            end = jnp.clip(final, -1, last) // self.keys.chunk + 1
        lengths = self.operands.key_value_seq_lengths
        if lengths is not None:
            longest = jnp.max(lengths, initial=0)
            end = jnp.minimum(end, (jnp.minimum(longest, last + 1) + self.keys.chunk - 1) // self.keys.chunk)
        return begin, end

    def visible(self, i: Index, j: Index, *, skip_stored_queries: bool = False) -> jax.Array | None:
        """bool, broadcasts to `[B, K, G, t, s]`; None where all of any block is visible."""
        operands = self.operands
        queries, keys = self.queries.positions(i), self.keys.positions(j)
        terms = []
        if self.keys.overlaps:
            terms.append(self.keys.is_new(j)[None, None, :])
        if skip_stored_queries and self.queries.overlaps:
            terms.append(self.queries.is_new(i)[None, :, None])
        if operands.key_value_seq_lengths is not None:
            terms.append(keys[None, None, :] < operands.key_value_seq_lengths[:, None, None])
        if operands.query_seq_lengths is not None:
            terms.append(queries[None, :, None] < operands.query_seq_lengths[:, None, None])
        left, right = self.spec.bounds
        distance = keys[None, None, :] - self.query_positions(i)[:, :, None]
        if left is not None:
            terms.append(distance >= -min(left, UNBOUNDED))
        if right is not None:
            terms.append(distance <= min(right, UNBOUNDED))
        query_ids, key_ids = operands.query_segment_ids, operands.key_value_segment_ids
        if query_ids is not None and key_ids is not None:
            terms.append(self.queries.take(query_ids, i)[:, :, None] == self.keys.take(key_ids, j)[:, None, :])
        terms = [term[:, None, None] for term in terms]
        if self.mask is not None:
            terms.append(self.plane_block(self.mask, i, j))
        return functools.reduce(jnp.logical_and, terms) if terms else None

    def logits(self, i: Index, j: Index, visible: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """`[B, K, G, t, s]`, -inf where invisible, and the derivative of the soft cap, or None without one."""
        query, key = self.queries.take(self.query, i), self.keys.take(self.key, j)
        logits = self.einsum("btkgh,bskh->bkgts", query, key) * _scale(self.spec, self.operands, 5)
        if self.bias is not None:
            logits = logits + self.plane_block(self.bias, i, j).astype(logits.dtype)
        slope = None
        if self.spec.logits_soft_cap is not None:
            capped = jnp.tanh(logits / self.spec.logits_soft_cap)
            logits, slope = capped * self.spec.logits_soft_cap, 1.0 - capped**2
        return logits if visible is None else jnp.where(visible, logits, -jnp.inf), slope

    def plane_block(self, x: jax.Array, i: Index, j: Index) -> jax.Array:
        """The block of a bias or mask."""
        return self.keys.take(self.queries.take(x, i, 3), j, 4)

    def add_bias_block(self, dbias: jax.Array, dlogits: jax.Array, i: Index, j: Index) -> jax.Array:
        """dbias with the gradient of one block added, summed over the broadcast dimensions."""
        block = self.plane_block(dbias, i, j)
        start, zero = (self.queries.start(i), self.keys.start(j)), jnp.int32(0)
        start = [zero if block.shape[axis] == dbias.shape[axis] else start[axis - 3] for axis in (3, 4)]
        return lax.dynamic_update_slice(dbias, block + _reduce_to(block.shape, dlogits), [zero, zero, zero, *start])


def _loop(axis: _Axis, bounds: tuple[Index, Index], body: Callable[[Index, State], State], state: State) -> State:
    """`fori_loop` over chunks of an axis; a single chunk needs no loop."""
    return body(0, state) if axis.count == 1 else lax.fori_loop(*bounds, body, state)


def _padding_rows(operands: Operands) -> jax.Array | None:
    """bool `[B, T]`; None where there are no lengths and the input is not packed."""
    if operands.query_seq_lengths is not None:
        return jnp.arange(operands.query.shape[1], dtype=jnp.int32)[None, :] >= operands.query_seq_lengths[:, None]
    return operands.query_segment_ids == PADDING_ID if operands.is_packed else None


def _scale(spec: AttentionSpec, operands: Operands, ndim: int) -> jax.Array | float:
    """The factor on query . key, in a form that multiplies arrays `[B, ...]` of `ndim` axes."""
    return spec.scale if operands.scale is None else operands.scale.reshape(-1, *(1,) * (ndim - 1))


def _split_heads(x: jax.Array, num_kv_heads: int, axis: int) -> jax.Array:
    """Axis N to K, G; an axis of size 1 to 1, 1."""
    heads = x.shape[axis]
    kv_heads = 1 if heads == 1 else num_kv_heads
    return x.reshape(*x.shape[:axis], kv_heads, heads // max(kv_heads, 1), *x.shape[axis + 1 :])


def _merge_heads(x: jax.Array) -> jax.Array:
    """`[B, T, K, G, ...]` to `[B, T, N, ...]`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _reduce_to(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Sums x over the dimensions that are 1 in shape."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def _zero_unseen_keys(x: jax.Array, visible: jax.Array | None) -> jax.Array:
    """x `[B, s, K, ...]` with 0 for keys that no query of the block sees: 0 * NaN would be NaN."""
    if visible is None:
        return x
    seen = jnp.any(visible, axis=(2, 3))
    return jnp.where(jnp.moveaxis(seen, 2, 1)[..., None], x, jnp.zeros((), x.dtype))


def _zero_unseeing_queries(x: jax.Array, visible: jax.Array | None) -> jax.Array:
    """x `[B, t, K, G, ...]` with 0 for queries that see no key of the block."""
    if visible is None:
        return x
    sees = jnp.any(visible, axis=4)
    return jnp.where(jnp.moveaxis(sees, 3, 1)[..., None], x, jnp.zeros((), x.dtype))
