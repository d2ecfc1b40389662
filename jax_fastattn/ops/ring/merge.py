# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a block, and the sums over blocks: results that are merged, and gradients that are added.

The results of blocks are merged in float32: with the log-sum-exp of both, `lse`, a block's output counts
`exp(lse_block - lse)`. Each block's output was rounded by its kernel, and the sum is rounded once more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn.ops.forward import forward_p
from jax_fastattn.ops.tangents import tangent_op
from jax_fastattn.spec import AttentionSpec


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend(spec: AttentionSpec, *arrays: jax.Array) -> list[jax.Array]:
    """Computes output and log-sum-exp of a block."""
    return forward_p.bind(*arrays, spec=spec, mapped=(False,) * len(arrays))


@attend.defjvp
def _attend_jvp(spec: AttentionSpec, arrays: Sequence[Any], tangents: Sequence[Any]) -> Any:
    results = attend(spec, *arrays)
    moved = {name: x for name, x in zip(spec.present, tangents, strict=True) if x.dtype != jax.dtypes.float0}
    return results, tangent_op.share.bind(*arrays, *results, *moved.values(), spec=spec, moved=tuple(moved))


class RowResults(NamedTuple):
    """Output and log-sum-exp of a range of queries."""

    out: jax.Array
    lse: jax.Array

    def merge(self, block: RowResults, first: int) -> RowResults:
        """Merges the results of a block, whose queries start at `first` of these."""
        stop = first + block.lse.shape[1]
        merged = merge(RowResults(*(x[:, first:stop] for x in self)), block)
        return RowResults(*(put(x, y, first) for x, y in zip(self, merged, strict=True)))

    def where(self, is_there: jax.Array) -> RowResults:
        """Returns these results if `is_there`, else rows that have seen no key. Replaced results may be NaN."""
        return RowResults(jnp.where(is_there, self.out, 0), jnp.where(is_there, self.lse, -jnp.inf))


def put(x: jax.Array, part: jax.Array, start: int) -> jax.Array:
    """Returns x with a range of its rows, on axis 1, replaced."""
    return part if part.shape == x.shape else jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def merge(x: RowResults, y: RowResults) -> RowResults:
    """Returns the results of all keys that two calls have seen, of the same queries, in the dtype of log-sum-exps."""
    # If neither has seen a key of a row, -inf would be subtracted from -inf, in the tangent of `logaddexp`, too.
    is_empty = jnp.maximum(x.lse, y.lse) == -jnp.inf
    shift = jnp.logaddexp(jnp.where(is_empty, 0.0, x.lse), y.lse)
    lse = jnp.where(is_empty, -jnp.inf, shift)
    weights = (jnp.exp(part.lse - shift)[..., None] for part in (x, y))
    terms = (part.out.astype(lse.dtype) * weight for part, weight in zip((x, y), weights, strict=True))
    return RowResults(next(terms) + next(terms), lse)


def add_rows(x: jax.Array, part: jax.Array, start: int) -> jax.Array:
    """Adds rows, on axis 1, to a range of x in the dtype of x."""
    part = part.astype(x.dtype)
    return x + part if part.shape == x.shape else put(x, x[:, start : start + part.shape[1]] + part, start)


def add_columns(x: jax.Array, part: jax.Array, row: int, column: Any) -> jax.Array:
    """Adds the gradient of a part of a bias `[b, n, t, s]`, which starts at a row and a column of those that x has."""
    start = (0, 0, row if x.shape[2] > 1 else 0, column if x.shape[3] > 1 else 0)
    return jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, start, part.shape) + part, start)
