# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of dropout to the operand that `jax_fastattn/dropout.py` defines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn import dropout
from jax_fastattn.canonical import validation


def operand(rate: Any, key: Any, broadcast: Any, shape: tuple[int, int]) -> jax.Array | None:
    """Returns the operand of a call with batch size and heads `shape`; None if the rate is known to be 0.

    The key is then used up, as by a function of `jax.random`.
    """
    rate = validation.check_rate("dropout_rate", rate)
    shape = (1, 1) if validation.check_flag("broadcast_dropout", broadcast) else shape
    if key is not None:
        key = check_key("dropout_key", key)
    if isinstance(rate, float) and rate == 0.0:
        return None
    if key is None:
        given = rate if isinstance(rate, float) else "an array"
        raise ValueError(
            f"`dropout_key` is None and `dropout_rate` is {given}, expected a key of `jax.random`; pass "
            "`dropout_key=jax.random.key(seed)`. In a module of Flax, pass "
            "`jax_fastattn.integrations.flax.attention_fn` as its `attention_fn`: it takes the module's key"
        )
    _use_up(key)
    return dropout.numbers(_words(key), rate, *shape)


def words_of(name: str, key: Any) -> jax.Array:
    """Returns the words of one key, uint32 `[count]`: of a typed key, or of a legacy one, which is its words."""
    return _words(check_key(name, key))


def _words(key: jax.Array) -> jax.Array:
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def check_key(name: str, key: Any) -> jax.Array:
    """Returns one key, typed or legacy."""
    key = validation.as_array(name, key)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != jnp.uint32:
        raise TypeError(
            f"`{name}` has dtype {key.dtype}, expected a key of `jax.random`; pass `jax.random.key(seed)` for a seed"
        )
    if key.ndim != (0 if is_typed else 1) or 0 in key.shape:
        raise ValueError(f"`{name}` has shape {key.shape}, expected one key; pass one of them, or `jax.vmap` over them")
    return key


def _use_up(key: Any) -> None:
    """Draws from the key where JAX checks the use of keys (`jax.debug_key_reuse`): `key_data` is no use to it."""
    checks: bool = jax.config.jax_debug_key_reuse  # pyright: ignore (settings are made at run time)
    if checks and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        jax.random.bits(key, (), jnp.uint32)
