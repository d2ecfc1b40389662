# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Reads of captured arrays, whose gradients are summed in a fixed order.

The transpose of a gather is a scatter, and on a GPU XLA adds numbers of one element up in an order that may vary. Here
one read of each element is a gather, whose indices are unique, and the others copy what it found. The transposes of
such copies are sums of pairs of numbers.

What stays out: an array that depends on batch entry or head before it is read, and functions that have no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import _compat
from jax_fastattn.programs.facts import counted, facts
from jax_fastattn.programs.trace import Graph


def reads(graph: Graph, result: int, numbers: Mapping[str, int]) -> list[int]:
    """Returns the reads of captured arrays of floats, at indices that depend on the pair, that a value needs.

    Args:
        result: the value.
        numbers: how many numbers an argument has, for arguments that index an array only once if they are its indices.
    """
    of, values, found = facts(graph), graph.values, set[int]()
    ahead = [result]
    while ahead:
        i = ahead.pop()
        value = values[i]
        is_read = value.op in ("dynamic_slice", "gather") and value.is_float and not of[value.args[0]].depends
        if is_read and of[i].depends and not _is_once(graph, i, numbers):
            found.add(i)
        ahead += value.args
    return sorted(found)


def _is_once(graph: Graph, i: int, numbers: Mapping[str, int]) -> bool:
    """Returns whether each number of the arguments reads an element of its own."""
    value = graph.values[i]
    shape = graph.values[value.args[0]].shape
    if value.op != "dynamic_slice" or not numbers:
        return False
    starts = [graph.values[counted(graph, x)].op for x in value.args[1:]]
    return all(x in starts and shape[starts.index(x)] >= n for x, n in numbers.items())


def places(graph: Graph, i: int, starts: Sequence[Any]) -> jax.Array:
    """Returns for each element of a read which element of the flat array it is, -1 for what fills an empty place.

    Args:
        i: one of `reads`.
        starts: the operands of the read except for the array.
    """
    value = graph.values[i]
    shape = graph.values[value.args[0]].shape
    numbers = jnp.arange(int(np.prod(shape)), dtype=jnp.int32).reshape(shape)
    params = dict(value.params)
    if value.op == "gather":
        params["fill_value"] = -1
    return _compat.bind(value.primitive, [numbers, *starts], params)


def read(graph: Graph, i: int, array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns elements of an array at places that `places` gave."""
    filled = dict(graph.values[i].params).get("fill_value")
    found = _copied(array.reshape(-1), jnp.maximum(index, 0).reshape(-1)).reshape(index.shape)
    return jnp.where(index < 0, np.asarray(np.nan if filled is None else filled, found.dtype), found)


def _copied(array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns elements of `[R]` at `[M]` places, of which the transpose adds no two numbers in an order that varies."""
    (size,), (count,) = array.shape, index.shape
    if count == 0:
        return jnp.zeros((0,), array.dtype)
    order = jnp.argsort(index, stable=True)
    ordered, rows = index[order], jnp.arange(count, dtype=index.dtype)
    is_found = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    # Places past the end read a zero each.
    once = jnp.where(is_found, ordered, size + rows)
    found = array.at[once].get(mode="fill", fill_value=0, unique_indices=True)
    step = 1
    while step < count:
        before = [jnp.pad(x, (step, 0))[:count] for x in (found, is_found)]
        found, is_found = jnp.where(is_found, found, before[0]), is_found | before[1]
        step *= 2
    back = jnp.zeros_like(rows).at[order].set(rows, mode="promise_in_bounds", unique_indices=True)
    return found.at[back].get(mode="promise_in_bounds", unique_indices=True)
