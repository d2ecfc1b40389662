# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Asserts the types that a checker infers for the public functions. `tests/run lint` checks them; nothing runs here."""

from typing import assert_type

import jax

from jax_fastattn import attention, attention_varlen


def results_depend_on_return_residual(x: jax.Array, starts: jax.Array, flag: bool) -> None:
    assert_type(attention(x, x, x), jax.Array)
    assert_type(attention(x, x, x, is_causal=True, return_residual=False), jax.Array)
    assert_type(attention(x, x, x, None, x, scale=x, return_residual=True), tuple[jax.Array, jax.Array])
    assert_type(attention(x, x, x, return_residual=flag), jax.Array | tuple[jax.Array, jax.Array])
    packed = attention_varlen(x, x, x, starts, starts, local_window_size=(2, None))
    assert_type(packed, jax.Array)
    out, lse = attention_varlen(x, x, x, starts, starts, sinks=x, return_residual=True)
    assert_type((out, lse), tuple[jax.Array, jax.Array])
    either = attention_varlen(x, x, x, starts, starts, return_residual=flag)
    assert_type(either, jax.Array | tuple[jax.Array, jax.Array])
