# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of the public functions for type checkers; nothing runs here.

`tests/run lint` has pyright check this file against the source tree, `tests/distributions.py` has pyright and mypy
check it against an installed wheel. `assert_type` states the type that they infer. A wrong call carries comments that
ignore its error, `type: ignore` for mypy and `pyright: ignore` for pyright; a comment that ignores nothing is an error.
"""

from contextlib import AbstractContextManager
from typing import assert_type

import jax

import jax_fastattn
from jax_fastattn import (
    all_to_all_attention,
    attention,
    attention_varlen,
    causal,
    explain,
    paged_attention,
    register_ffi_targets,
    ring_attention,
    target_arch,
)


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


def results_of_pages(x: jax.Array, table: jax.Array, flag: bool) -> None:
    assert_type(paged_attention(x, x, x, table, table, is_causal=True, query_offset=None), jax.Array)
    pair = paged_attention(x, x, x, table, table, return_residual=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    either = paged_attention(x, x, x, table, table, return_residual=flag)
    assert_type(either, jax.Array | tuple[jax.Array, jax.Array])


def results_of_split_rows(x: jax.Array, flag: bool) -> None:
    assert_type(ring_attention(x, x, x, axis_name="seq", layout="zigzag", is_causal=True), jax.Array)
    pair = ring_attention(x, x, x, axis_name=("a", "b"), balance=False, return_residual=True)
    assert_type(pair, tuple[jax.Array, jax.Array])
    assert_type(all_to_all_attention(x, x, x, x, axis_name="seq", sinks=x, mask_mod=causal()), jax.Array)
    either = all_to_all_attention(x, x, x, axis_name="seq", boundaries=x, return_residual=flag)
    assert_type(either, jax.Array | tuple[jax.Array, jax.Array])


def the_other_functions(x: jax.Array) -> None:
    assert_type(jax_fastattn.__version__, str)
    assert_type(explain(x, x, x, is_causal=True).reasons, tuple[str, ...])
    assert_type(target_arch("sm_90a"), AbstractContextManager[None])
    register_ffi_targets()


# Each line below is wrong.


def arguments_of_attention(x: jax.Array) -> None:
    attention(x, x)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]
    attention(x, x, x, causal=True)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]
    attention(x, x, x, is_causal="yes")  # type: ignore[call-overload] # pyright: ignore[reportArgumentType]
    attention(x, x, x, None, None, 0.5)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]


def arguments_of_split_rows(x: jax.Array) -> None:
    ring_attention(x, x, x)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]
    ring_attention(x, x, x, axis_name="a", layout="stripes")  # type: ignore[call-overload] # pyright: ignore[reportArgumentType]
    all_to_all_attention(x, x, x, axis_name="a", layout="zigzag")  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]
