# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The mask that dropout of attention weights applies, for tests and for formulas."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastattn import dropout
from jax_fastattn.canonical import arguments, validation
from jax_fastattn.canonical.dropout import words_of
from jax_fastattn.keywords import explained
from jax_fastattn.layouts import packed


@explained
def dropout_mask(
    key: jax.Array,
    rate: float | jax.Array,
    shape: tuple[int, int, int, int],
    *,
    broadcast: bool = False,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
) -> jax.Array:
    """Returns which attention weights a call with this key and rate keeps.

    `attention(..., dropout_rate=rate, dropout_key=key)` computes, with the softmax `weights` `[B, N, T, S]`,

        out = jnp.where(keep, weights / (1 - r), 0) . value,  keep = dropout_mask(key, rate, (B, N, T, S))

    where r is the rate, rounded to a multiple of 2^-15. The array is as large as all weights; a call never makes it.
    To `jax.debug_key_reuse` this function does not use the key up, so that a test may pass it to `attention`, too.

    Args:
        key: as `dropout_key` of `attention`.
        rate: as `dropout_rate` of `attention`.
        shape: `(B, N, T, S)`.
        broadcast: as `broadcast_dropout` of `attention`; the mask is then `[1, 1, T, S]`. Default: False.
        cu_seqlens_q, cu_seqlens_k: as for `attention_varlen`, with B = 1, T = total_q and S = total_k. Pairs of no
            common sequence are False. Default: None, for a call of `attention`.

    Returns:
        bool `[B, N, T, S]`, or `[1, 1, T, S]`.

    Raises:
        ValueError, TypeError: a shape or value does not fit, as for `attention`.
    """
    if len(shape) != 4 or any(size < 0 for size in shape):
        raise ValueError(f"`shape` is {shape}, expected four sizes (B, N, T, S); pass the sizes of the weights")
    rate, broadcast = validation.check_rate("rate", rate), validation.check_flag("broadcast", broadcast)
    words, given = words_of("key", key), {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lacking = [name for name, x in given.items() if x is None]
    if len(lacking) == 2:
        return _mask(words, rate, tuple(shape), broadcast, ())
    if lacking:
        raise ValueError(f"`{lacking[0]}` is None, expected boundaries of queries and of keys; pass both")
    if shape[0] != 1:
        raise ValueError(f"`shape` is {shape} with B = {shape[0]}, expected B = 1 for packed rows; pass (1, N, T, S)")
    boundaries = tuple(arguments.to_int32(validation.as_integers(name, x)) for name, x in given.items())
    return _mask(words, rate, tuple(shape), broadcast, boundaries)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _mask(
    words: jax.Array,
    rate: ArrayLike,
    shape: tuple[int, int, int, int],
    broadcast: bool,
    boundaries: Sequence[jax.Array],
) -> jax.Array:
    batch, heads, *lengths = shape
    operand = dropout.numbers(words, rate, *((1, 1) if broadcast else (batch, heads)))
    queries, keys = (jnp.arange(length, dtype=jnp.int32) for length in lengths)
    if not boundaries:
        return dropout.kept(operand, queries, keys)
    sequences = packed.sequences(boundaries[0], boundaries[1], (lengths[0], lengths[1]))[None]
    ids = [packed.token_ids(sequences, size, of_keys=i == 1) for i, size in enumerate(lengths)]
    starts = packed.token_starts(sequences, ids[0], ids[1])
    kept = dropout.kept(operand, queries, keys, (starts[0][:, None], starts[1][:, None]))
    return kept & (ids[0][:, None, :, None] == ids[1][:, None, None, :])
