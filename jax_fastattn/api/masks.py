# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions for `mask_mod`: conjunction, disjunction, and causality with an offset."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastattn.api.options import MaskMod
from jax_fastattn.keywords import explained


@explained
def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a `mask_mod` of the pairs that count by all of the given ones; without any, all pairs count."""

    def conjunction(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> ArrayLike:
        return functools.reduce(jnp.logical_and, (mod(b, h, q, k) for mod in mask_mods), True)

    return conjunction


@explained
def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a `mask_mod` of the pairs that count by one of the given ones; without any, none counts."""

    def disjunction(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> ArrayLike:
        return functools.reduce(jnp.logical_or, (mod(b, h, q, k) for mod in mask_mods), False)

    return disjunction


@explained
def causal(offset: ArrayLike = 0) -> MaskMod:
    """Returns a `mask_mod` that shows what `is_causal=True` with `query_offset=offset` shows.

    Args:
        offset: query i stands at key position i + offset: an int, which is compiled in, or integers of shape `()` or
            `[B]`, which are data. Default: 0.
    """

    def counts(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> ArrayLike:
        return k - q <= (offset if jnp.ndim(offset) == 0 else jnp.asarray(offset)[b])

    return counts
