# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The contents of one block of queries and keys, once `chunks.py` has cut the plane of logits into blocks.

`passes.py` visits the blocks. In product equations: b batch, t query, s key, k key/value head, g query head within
its group, h head_dim, d v_head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_fastattn import dropout
from jax_fastattn.layouts.heads import reduce_to, rows_of, split_heads
from jax_fastattn.layouts.packed import by_token, key_range, token_starts
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.programs.analysis import reads_positions
from jax_fastattn.programs.code import Code
from jax_fastattn.spec import HIDDEN_BIAS, AttentionSpec, Operands, is_known
from jax_fastattn.xla import mods
from jax_fastattn.xla.chunks import Axis, Index, Span, Tuning
from jax_fastattn.xla.predicate import Predicate

Pairs = tuple[tuple[jax.Array, jax.Array], ...]

# A call that is computed at once has at most MAX_BANDS bands of queries, each of at least MIN_BAND rows if there are
# several. Their first and last keys are multiples of BAND_KEYS.
MAX_BANDS = 8
MIN_BAND = 256
BAND_KEYS = 64

# Up to this many queries, a product with values takes about as long as a copy of the values.
FEW_QUERIES = 16


@dataclass(frozen=True)
class Blocks:
    """The operands with the group as a separate axis, and the blocks of their `T x S` plane.

    Attributes:
        query, key, value: `[B, K, G, T, H]`, `[B, S, K, H]` and `[B, S, K, D]`.
        bias, mask: `[b, k, g, t, s]`. With one row for each key/value head, g is 1.
        dropout: the operand `[b, k, g, W]`; None without.
        starts: the first rows of the sequences of queries and keys, `[B, 1, 1, T]` and `[B, 1, 1, S]`, if sequences are
            packed, and weights are dropped or a code counts inside of them.
        bands: queries of a band and the keys that they may see, if the call is computed at once; else empty.
        queries, keys: the chunks of T and of S otherwise.
        sequences: the operand, if sequences are packed.
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
    dropout: jax.Array | None
    starts: tuple[jax.Array, jax.Array] | None
    bands: tuple[tuple[Span, Span], ...]
    queries: Axis
    keys: Axis
    barriers: bool
    copied: float
    sequences: jax.Array | None
    zero: jax.Array

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands, tuning: Tuning) -> Blocks:
        batch, query_length, num_heads, _ = operands.query.shape
        _, key_length, num_kv_heads, _ = operands.key.shape
        rows = num_heads * (batch if is_known(batch) else 1)
        chunk = tuning.chunk
        while chunk > tuning.min_chunk and rows * chunk**2 > tuning.block:
            chunk //= 2
        queries = Axis.cut(query_length, chunk)
        # A few queries take more keys at a time.
        is_few = is_known(query_length) and 0 < rows * query_length < rows * chunk
        key_chunk = max(chunk, tuning.block // (rows * query_length)) if is_few else chunk
        dtype = np.promote_types(operands.query.dtype, np.float32)
        # The sum of an empty slice is a constant 0 to XLA.
        zeros = [jnp.sum(x[:0].astype(dtype)) for x in operands.arrays()]
        sequences, operands = operands.sequences, by_token(operands)
        return cls(
            spec=spec,
            operands=operands,
            query=rows_of(operands.query, num_kv_heads),
            key=operands.key,
            value=operands.value,
            bias=None if operands.bias is None else split_heads(operands.bias, num_kv_heads, 1),
            mask=None if operands.mask is None else split_heads(operands.mask, num_kv_heads, 1),
            dropout=None if operands.dropout is None else split_heads(operands.dropout, num_kv_heads, 1),
            starts=_starts(spec, sequences, operands),
            bands=bands(spec, operands, tuning),
            queries=queries,
            keys=Axis.cut(key_length, key_chunk),
            barriers=tuning.barriers,
            copied=tuning.copied,
            sequences=sequences,
            zero=functools.reduce(jnp.add, zeros),
        )

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        return jnp.full(shape, value, self.zero.dtype) + self.zero

    def product(self, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """Multiplies in the dtype of the operands and accumulates in the dtype of `zero`.

        Operands of 16 bits with a float32 result are what the dot algorithms `BF16_BF16_F32` and `F16_F16_F32` of a GPU
        mean: it multiplies them as they are and adds in float32.

        The axes of a result should be, in this order, the axes that x and y share, the axes of x alone, and the axes of
        y alone. Otherwise a plane of logits is transposed, which takes a CPU longer than the product.

        XLA:CPU cannot run some bfloat16 products into which it has folded a transpose ("Unsupported element type for
        DotThunk", jax 0.8 to 0.12). A barrier keeps transposes out of the product, and took no measurable time;
        float32 operands took 20 to 40 % longer. On a GPU, it would prevent fusions.
        """
        if self.barriers and x.dtype == jnp.bfloat16:
            x, y = lax.optimization_barrier((x, y))
        return jnp.einsum(equation, x, y, precision=self.spec.precision, preferred_element_type=self.zero.dtype)

    def rows_by_keys(self, pairs: Pairs) -> jax.Array:
        """Sums the products of queries `[B, K, G, t, H]` and keys `[B, s, K, H]` to one plane `[B, K, G, t, s]`."""
        return _rows_by_keys(self.product, pairs)

    def weighted(self, weights: jax.Array, value: jax.Array, keys: Span, visible: jax.Array | None) -> jax.Array:
        """Sums the values of `keys` with weights `[B, K, G, t, s]`. Unseen keys may have values that are NaN.

        `value` is `[B, S, K, D]`: the values themselves, or their tangents.

        0 * NaN is NaN, so such values become 0 in a copy. Few queries use it only if the sum without it is not finite.
        """
        value = self.take_key(value, keys)
        weights = weights.astype(value.dtype)

        def of_seen_keys() -> jax.Array:
            return self.product("bkgts,bskd->bkgtd", weights, zero_unseen_keys(value, visible))

        is_many = not is_known(self.queries.length) or self.queries.length > FEW_QUERIES
        is_small = self.copied == math.inf or (
            is_known(value.size) and value.size * value.dtype.itemsize <= self.copied
        )
        if visible is None or is_many or is_small:
            return of_seen_keys()
        out = self.product("bkgts,bskd->bkgtd", weights, value)
        return lax.cond(jnp.isfinite(out).all(), lambda: out, of_seen_keys)

    def survival(self, queries: Span, keys: Span) -> jax.Array | None:
        """Returns the factors on the weights of a block by dropout, in a shape that broadcasts; None without.

        They are drawn anew where they are needed, so that no array of all of them exists.
        """
        if self.dropout is None:
            return None
        starts = None
        if self.starts is not None:
            starts = self.take_query(self.starts[0], queries), keys.take(self.starts[1], 3, self.keys.length)
        kept = dropout.kept(self.dropout, queries.positions(), keys.positions(), starts)
        factor = dropout.factor(self.dropout, self.zero.dtype)[..., None, None]
        return jnp.where(kept, factor, jnp.zeros((), self.zero.dtype))

    def dropped(self, weights: jax.Array, queries: Span, keys: Span) -> jax.Array:
        """Returns the weights `[B, K, G, t, s]` of a block, or their tangents, after dropout."""
        survival = self.survival(queries, keys)
        return weights if survival is None else weights * survival

    def sinks(self) -> jax.Array | None:
        """Returns the sinks `[b, K, G, 1]`; None if they are absent."""
        sinks = self.operands.sinks
        if sinks is None:
            return None
        return split_heads(sinks, self.key.shape[2], 1).astype(self.zero.dtype)[..., None]

    def scale(self, ndim: int) -> jax.Array | float:
        """Returns the factor on query . key in a shape that broadcasts to arrays `[B, ...]` of `ndim` axes."""
        scale = self.operands.scale
        return self.spec.scale if scale is None else scale.reshape(-1, *(1,) * (ndim - 1))

    def take_query(self, x: jax.Array, queries: Span) -> jax.Array:
        """Returns the rows of x `[B, K, G, T, ...]` that are in `queries`."""
        return queries.take(x, 3, self.queries.length)

    def take_key(self, x: jax.Array, keys: Span) -> jax.Array:
        """Returns the rows of x `[B, S, ...]` that are in `keys`."""
        return keys.take(x, 1, self.keys.length)

    def take_plane(self, x: jax.Array, queries: Span, keys: Span) -> jax.Array:
        """Returns the block of a bias or mask."""
        return keys.take(self.take_query(x, queries), 4, self.keys.length)

    def add_plane(self, dbias: jax.Array, dlogits: jax.Array, queries: Span, keys: Span) -> jax.Array:
        """Adds the gradient of one block, summed over the broadcast dimensions, to dbias."""
        block = self.take_plane(dbias, queries, keys)
        block = block + reduce_to(block.shape, dlogits)
        if block.shape == dbias.shape:
            return block
        starts = [queries.start, keys.start]
        starts = [0 if block.shape[3 + i] == dbias.shape[3 + i] else start for i, start in enumerate(starts)]
        return lax.dynamic_update_slice(dbias, block, [jnp.int32(start) for start in (0, 0, 0, *starts)])

    def query_positions(self, queries: Span) -> jax.Array:
        """Returns the positions of the queries among the keys, int32 `[b, t]`."""
        return self.predicate.query_positions(queries)

    def key_chunks(self, queries: Span) -> tuple[Index, Index]:
        """Returns the range [begin, end) of chunks with keys that the queries may see."""
        if self.keys.count == 1:
            return 0, 1
        left, right = self.spec.bounds
        begin, end = jnp.int32(0), jnp.int32(self.keys.count)
        last = self.keys.length - 1
        position = self.query_positions(queries)
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
        if self.sequences is not None:
            first, final = key_range(self.sequences, queries.start, queries.start + queries.size)
            begin = jnp.maximum(begin, first // self.keys.chunk)
            end = jnp.minimum(end, (final + self.keys.chunk - 1) // self.keys.chunk)
        return begin, end

    @property
    def predicate(self) -> Predicate:
        """Returns which queries see which keys."""
        lengths = self.queries.length, self.keys.length
        return Predicate(self.spec, self.operands, self.mask, *lengths, self.starts)

    def visible(self, queries: Span, keys: Span, *, skip_stored_queries: bool = False) -> jax.Array | None:
        """Returns which pairs are visible, see `Predicate.visible`."""
        return self.predicate.visible(queries, keys, skip_stored_queries=skip_stored_queries)

    def rounded(self, logits: jax.Array) -> jax.Array:
        """Keeps XLA:CPU from fusing the last product of the logits with the subtraction that follows.

        `exp(product * scale - max)` would be one multiply-add, which subtracts a rounded maximum from a logit that is
        not rounded. A weight of 1 would be off by half an ulp of the logit: by 0.6 at 1.6e7, and by any factor from 2e9
        on. The multiply-add is spent on adding a zero that XLA does not know. On two cores of an AMD EPYC calls took
        0.96 to 1.02 times as long (benchmarks/results/jax-nn-2026-11-26-cpu.jsonl). A barrier on the logits would cost
        a pass over them instead. A product with a power of two is exact without either.
        """
        cap = self.spec.logits_soft_cap
        is_exact = is_power_of_two(self.spec.scale if cap is None else cap)
        is_exact = is_exact and (cap is not None or self.spec.score_mod is None)
        if not self.barriers or (is_exact and (cap is not None or self.operands.scale is None)):
            return logits
        return logits + lax.optimization_barrier(jnp.zeros((), logits.dtype))

    def logits(
        self, queries: Span, keys: Span, visible: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, mods.ScoreMod | None]:
        """Returns logits `[B, K, G, t, s]`, -inf where invisible, and what their derivatives need.

        That is the derivative of the soft cap, and the `score_mod` of the block; None without.
        """
        query, key = self.take_query(self.query, queries), self.take_key(self.key, keys)
        logits = self.rows_by_keys(((query, key),)) * self.scale(5)
        if self.bias is not None:
            bias = self.take_plane(self.bias, queries, keys).astype(logits.dtype)
            logits = logits + jnp.where(bias <= HIDDEN_BIAS, -jnp.inf, bias)
        slope = mod = None
        if self.spec.score_mod is not None:
            lengths = self.queries.length, self.keys.length
            starts = self.starts if isinstance(self.spec.score_mod, Code) else None
            block = mods.Block(self.operands, queries, keys, lengths, starts)
            mod = mods.ScoreMod(self.spec.score_mod, block, logits, visible)
            logits = mod.value()
        if self.spec.logits_soft_cap is not None:
            capped = jnp.tanh(logits / self.spec.logits_soft_cap)
            logits, slope = capped * self.spec.logits_soft_cap, 1.0 - capped**2
        logits = self.rounded(logits)
        return logits if visible is None else jnp.where(visible, logits, -jnp.inf), slope, mod


def _starts(spec: AttentionSpec, sequences: jax.Array | None, operands: Operands) -> tuple[jax.Array, jax.Array] | None:
    """Returns `Blocks.starts`, from the sequences and from operands by token."""
    query_ids, key_ids = operands.query_segment_ids, operands.key_value_segment_ids
    is_counted = isinstance(spec.mask_mod, Code) and reads_positions(spec.mask_mod)
    is_asked = operands.dropout is not None or isinstance(spec.score_mod, Code) or is_counted
    if sequences is None or not is_asked or query_ids is None or key_ids is None:
        return None
    of_queries, of_keys = token_starts(sequences, query_ids, key_ids)
    return of_queries[:, None, None], of_keys[:, None, None]


def bands(spec: AttentionSpec, operands: Operands, tuning: Tuning) -> tuple[tuple[Span, Span], ...]:
    """Returns bands of queries, each with the keys that it sees by position; () if logits are too many or symbolic."""
    batch, query_length, num_heads, _ = operands.query.shape
    key_length = operands.key.shape[1]
    if not is_known(query_length) or not is_known(key_length):
        return ()
    logits = (batch if is_known(batch) else 1) * num_heads * query_length * key_length
    if logits > tuning.whole:
        return ()
    left, right = spec.bounds if operands.query_offset is None else (None, None)
    if left is None and right is None:
        return ((Span(0, query_length), Span(0, key_length)),)
    count = max(min(logits // tuning.band, query_length // MIN_BAND, MAX_BANDS), 1)
    rows = max(-(-query_length // count), 1)
    found: list[tuple[Span, Span]] = []
    for start in range(0, max(query_length, 1), rows):
        stop = min(start + rows, query_length)
        first = 0 if left is None else min(max(start - left, 0) // BAND_KEYS * BAND_KEYS, key_length)
        end = key_length if right is None else min(-(-(stop + right) // BAND_KEYS) * BAND_KEYS, key_length)
        found.append((Span(start, stop - start), Span(first, max(end - first, 0))))
    return tuple(found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rows_by_keys(product: Callable[[str, jax.Array, jax.Array], jax.Array], pairs: Pairs) -> jax.Array:
    """Computes `Blocks.rows_by_keys` by one product, of all pairs next to each other.

    A sum of products would write and read a plane in float32 for each. So would a tangent, hence the rule. As with
    `heads.product_or_zero`, no transformation of the user's can drop it.
    """
    query, key = pairs[0] if len(pairs) == 1 else (jnp.concatenate(x, axis=-1) for x in zip(*pairs, strict=True))
    return product("bkgth,bskh->bkgts", query, key)


def _rows_by_keys_jvp(
    product: Callable[[str, jax.Array, jax.Array], jax.Array], primals: tuple[Pairs], tangents: tuple[Any]
) -> tuple[jax.Array, jax.Array]:
    (pairs,), (moves,) = primals, tangents
    moved: list[tuple[jax.Array, jax.Array]] = []
    for (query, key), (dquery, dkey) in zip(pairs, moves, strict=True):
        moved += [(dquery, key)] if not isinstance(dquery, SymbolicZero) else []
        moved += [(query, dkey)] if not isinstance(dkey, SymbolicZero) else []
    return _rows_by_keys(product, pairs), _rows_by_keys(product, tuple(moved))


_rows_by_keys.defjvp(_rows_by_keys_jvp, symbolic_zeros=True)


def is_power_of_two(x: float) -> bool:
    return math.frexp(abs(x))[0] == 0.5


def zero_unseen_keys(x: jax.Array, visible: jax.Array | None) -> jax.Array:
    """Returns x `[B, s, K, ...]` with 0 for keys that no query of the block sees: 0 * NaN would be NaN."""
    if visible is None:
        return x
    seen = jnp.any(visible, axis=(2, 3))
    return jnp.where(jnp.moveaxis(seen, 2, 1)[..., None], x, jnp.zeros((), x.dtype))


def mean_of_seen_keys(x: jax.Array, visible: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the mean `[B, K, H]` of x `[B, s, K, H]` over the keys that some query of the block sees."""
    seen = zero_unseen_keys(jnp.ones((1, x.shape[1], 1, 1), dtype), visible).sum(axis=1)
    return zero_unseen_keys(x, visible).astype(dtype).sum(axis=1) / jnp.maximum(seen, 1.0)


def zero_unseeing_queries(x: jax.Array, visible: jax.Array | None) -> jax.Array:
    """Returns x `[B, K, G, t, ...]` with 0 for queries that see no key of the block."""
    if visible is None:
        return x
    return jnp.where(jnp.any(visible, axis=4)[..., None], x, jnp.zeros((), x.dtype))
