# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The definition of dropout: which attention weights a call keeps, as a function of key, rate and place alone.

The decision for query i and key j of head n of batch entry b takes 15 bits of a word of 64 bits, which a counter-based
generator makes of i, j and two numbers of the head. A word serves four pairs: queries r and r + 8 of a block of 16, and
keys c and c + 8 of a block of 16. One lane of a warp holds these four in an accumulator, whether its rows are queries
or keys.

    counter = (8 (i // 16) + i % 8 + first query + number 0, 8 (j // 16) + j % 8 + first key + number 1)    mod 2^32
    (x, y) = counter                     mix(z, n) = z ^ (z >> n)                                  all mod 2^32
    a = mix(M0 x + y, 16);    a = mix(M1 a + y, 15);    a = mix(M2 a + x, 15);    b = mix(M3 a + y, 16);    c = M4 b + a
    bits = b if i // 8 is even, else c; its low half if j // 8 is even, else its high half
    kept = bits % 2^15 >= 2^15 - keeps                          keeps = 2^15 - round(2^15 rate)

The numbers of a head are the first two words of Philox 4x32-10, keyed by the first two words of the key, at the counter
(b, n, words 2 and 3 of the key or 0). i and j are rows of the whole arrays, and the first query and key are 0. In
packed sequences i and j count from the start of their sequence, whose first rows are the first query and key. No two
pairs of a head thus share a counter and a part of its word.

No array of the size of the weights exists: an implementation draws what it needs where it needs it. The operand has
everything that a head's draws depend on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.limits import DROPOUT_MULTIPLIERS as MULTIPLIERS
from jax_fastattn.limits import DROPOUT_STEPS as STEPS

# The operand `[b, n, SIZE]` has these numbers of each head: the two of its counter, how many of `STEPS` values of the
# bits keep a weight, and the first rows of queries and keys in the whole arrays.
QUERY_NUMBER, KEY_NUMBER, KEEPS, FIRST_QUERY, FIRST_KEY = range(5)
SIZE = 5

_PHILOX = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_PHILOX_ROUNDS = 10


def numbers(words: jax.Array, rate: Any, batch: int, num_heads: int) -> jax.Array:
    """Returns the operand of a call, int32 `[batch, num_heads, SIZE]`.

    Args:
        words: the words of a key, uint32 `[count]`.
        rate: a number or an array of shape `()`; a value outside of 0 to 1 counts as the nearest one inside.
        batch, num_heads: how many have draws of their own.
    """
    at = (lax.broadcasted_iota(jnp.uint32, (batch, num_heads), axis) for axis in range(2))
    zero = jnp.zeros((batch, num_heads), jnp.uint32)
    w = [words[i] + zero if i < words.shape[0] else zero for i in range(4)]
    x, y, *_ = _philox((*at, w[2], w[3]), (w[0], w[1]))
    dropped = jnp.clip(jnp.round(jnp.asarray(rate, jnp.float32) * STEPS), 0, STEPS)
    keeps = STEPS - lax.stop_gradient(dropped).astype(jnp.uint32)
    return lax.bitcast_convert_type(jnp.stack([x, y, keeps + zero, zero, zero], axis=-1), jnp.int32)


def moved(operand: jax.Array, first_query: Any, first_key: Any) -> jax.Array:
    """Returns the operand of a part of a call: its first query and its first key have these rows in the call."""
    zero = jnp.zeros((), jnp.int32)
    first = [jnp.asarray(x, jnp.int32) for x in (first_query, first_key)]
    return operand + jnp.stack([zero, zero, zero, *first]).reshape(1, 1, SIZE)


def kept(
    operand: jax.Array, queries: jax.Array, keys: jax.Array, starts: tuple[jax.Array, jax.Array] | None = None
) -> jax.Array:
    """Returns which weights are kept, bool `[..., t, s]`.

    Args:
        operand: `[..., SIZE]`.
        queries, keys: their rows, int32 `[t]` and `[s]`.
        starts: the first rows of their sequences, int32 `[..., t]` and `[..., s]`; None if nothing is packed.
    """
    head = lax.bitcast_convert_type(operand, jnp.uint32)[..., None]
    first_query, first_key = starts if starts is not None else (head[..., FIRST_QUERY, :], head[..., FIRST_KEY, :])
    is_packed, ahead = starts is not None, (1,) * (operand.ndim - 1)
    x, is_lower = _counter(queries.reshape(*ahead, -1), first_query, is_packed)
    y, is_right = _counter(keys.reshape(*ahead, -1), first_key, is_packed)
    x, y = (x + head[..., QUERY_NUMBER, :])[..., :, None], (y + head[..., KEY_NUMBER, :])[..., None, :]
    bits = jnp.where(is_lower[..., :, None], *reversed(_word(x, y)))
    bits = jnp.where(is_right[..., None, :], bits >> 16, bits)
    return (bits & (STEPS - 1)) + head[..., KEEPS, :][..., None] >= STEPS


def factor(operand: jax.Array, dtype: Any) -> jax.Array:
    """Returns what a weight that is kept is multiplied by, `[...]`; 0 if none is."""
    keeps = operand[..., KEEPS].astype(dtype)
    return jnp.where(keeps == 0, 0.0, STEPS / jnp.maximum(keeps, 1.0))


def _counter(rows: jax.Array, first: jax.Array, is_packed: bool) -> tuple[jax.Array, jax.Array]:
    """Returns a word of the counter, and whether a row is in the second half of its block of 16.

    Without packed sequences, `first` moves the rows; rows of a sequence are counted from it.
    """
    first = first.astype(jnp.uint32)
    row = rows.astype(jnp.uint32) - first if is_packed else rows.astype(jnp.uint32) + first
    word = ((row >> 4) << 3) + (row & 7)
    return word + first if is_packed else word, (row >> 3) & 1 == 1


def _word(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two halves of the word at a counter."""
    m = [jnp.uint32(x) for x in MULTIPLIERS]
    a = _mix(m[0] * x + y, 16)
    a = _mix(m[1] * a + y, 15)
    a = _mix(m[2] * a + x, 15)
    b = _mix(m[3] * a + y, 16)
    return b, m[4] * b + a


def _mix(x: jax.Array, count: int) -> jax.Array:
    return x ^ (x >> count)


def _philox(counter: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the four words of Philox 4x32-10 (https://doi.org/10.1145/2063384.2063405)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = _wide_product(c0, _PHILOX[0]), _wide_product(c2, _PHILOX[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
    return c0, c1, c2, c3


def _wide_product(x: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low half of a product of uint32 and a constant. JAX may have no 64-bit integers."""
    a, b = x & 0xFFFF, x >> 16
    c, d = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    ac, ad, bc, bd = a * c, a * d, b * c, b * d
    middle = (ac >> 16) + (ad & 0xFFFF) + (bc & 0xFFFF)
    return bd + (ad >> 16) + (bc >> 16) + (middle >> 16), x * jnp.uint32(constant)
