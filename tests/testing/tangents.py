# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents of calls: draws of them, and the rule by which they are right.

The oracle is the XLA path in float32, whose formula tests/xla/test_tangents.py holds against float64. The baseline is
the XLA path in the dtype of the call, in chunks of keys: like kernels it then knows the tangent of a log-sum-exp after
the last key alone, and subtracts its product with the output, which is rounded. Without chunks it subtracts before it
rounds. That has half of the errors or less where one key has most of the weight, and only small calls have no chunks. A
tangent passes when its largest error, and their root mean square, are at most twice the baseline's, plus a rounding of
the result.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.spec import DIFFERENTIABLE, QKV, AttentionSpec, Operands
from jax_fastattn.xla import chunks, passes, tangents
from testing.poison import poison

Moved = dict[str, jax.Array]
Tangents = tuple[jax.Array, jax.Array]

# Of the largest number: kernels round weights, and their tangents, where the XLA path rounds their difference.
_ROUNDING = {"bfloat16": 2.0**-8, "float32": 2.0**-12}
# A rough tanh has a slope with an absolute error of up to this.
_ROUGH_SLOPE = 2.0**-10
# Chunks have up to this many queries and keys, about as many keys as a tile of the kernels, and at least that many.
_MOST, _FEWEST = 64, 8


def draw(operands: Operands) -> Moved:
    """Returns tangents of everything that has one."""
    random = np.random.default_rng(1)
    arrays = {name: getattr(operands, name) for name in DIFFERENTIABLE}
    return {name: jnp.asarray(random.standard_normal(x.shape), x.dtype) for name, x in arrays.items() if x is not None}


def hidden(spec: AttentionSpec, operands: Operands, moved: Moved) -> tuple[Operands, Moved]:
    """Returns operands and tangents with NaN and infinities in everything that no result depends on."""
    of_rows = {name: moved[name] for name in QKV}
    poisoned, moving = (
        poison(spec, x, jnp.zeros_like(operands.query))[0] for x in (operands, operands._replace(**of_rows))
    )
    return poisoned, moved | {name: getattr(moving, name) for name in QKV}


def assert_within_budget(
    found: Any, spec: AttentionSpec, operands: Operands, moved: Moved, *, rough_cap: bool = False
) -> None:
    """Raises an `AssertionError` unless tangents of the output and of the log-sum-exp are right.

    Args:
        found: the two tangents.
        rough_cap: whether the tanh of the soft cap is the approximate one of the GPU (docs/semantics.md), whose errors
            a tangent of the log-sum-exp shows: it is not rounded to the dtype of the call.
    """
    expected, baseline = (_by_xla(spec, operands, moved, is_exact) for is_exact in (True, False))
    for name, got, wanted, based in zip(("dout", "dlse"), found, expected, baseline, strict=True):
        wanted = np.asarray(wanted, np.float32)
        error, allowed = (np.abs(np.asarray(x, np.float32) - wanted) for x in (got, based))
        rough = _ROUGH_SLOPE if rough_cap and name == "dlse" else 0.0
        rounding = _ROUNDING[str(operands.query.dtype)] * (1.0 + np.abs(wanted).max()) if name == "dout" else 1e-3
        rounding += rough * np.abs(wanted).max()
        assert error.max() <= 2.0 * allowed.max() + rounding, (name, error.max(), allowed.max())
        typical, most, size = (np.sqrt(np.mean(x**2)) for x in (error, allowed, wanted))
        assert typical <= 2.0 * most + 1e-4 * (1.0 + size) + rough * size, (name, typical, most)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _by_xla(spec: AttentionSpec, operands: Operands, moved: Moved, is_exact: bool) -> Tangents:
    """Returns the tangents on the XLA path, in float32 if they are to be exact."""
    spec, tuning = dataclasses.replace(spec, precision="highest"), chunks.CPU
    with jax.default_matmul_precision("highest"):
        if is_exact:
            operands = operands._replace(**{name: getattr(operands, name).astype(jnp.float32) for name in QKV})
            moved = {name: x.astype(jnp.float32) for name, x in moved.items()}
        else:
            tuning = _in_chunks(operands.key.shape[1])
            operands, moved = (operands, moved) if operands.scale is None else _scaled(operands, moved)
        return tangents.tangent(spec, operands, *passes.forward(spec, operands), moved, tuning)


def _in_chunks(key_length: int) -> chunks.Tuning:
    """Returns sizes by which keys are cut into two chunks at least, unless there are few."""
    size = min(_MOST, max(-(-key_length // 2), _FEWEST))
    return dataclasses.replace(chunks.CPU, whole=0, block=1, chunk=size, min_chunk=size)


def _scaled(operands: Operands, moved: Moved) -> tuple[Operands, Moved]:
    """Returns a call whose scale is part of the query, which is rounded once more, as its tangent is."""
    query, scale = operands.query, operands.scale
    assert scale is not None

    def times(x: jax.Array, factor: jax.Array) -> jax.Array:
        return (x.astype(factor.dtype) * factor[:, :, None, None]).astype(x.dtype)

    moves = times(moved["query"], scale) + times(query, moved["scale"])
    moved = {name: x for name, x in moved.items() if name != "scale"} | {"query": moves}
    return operands._replace(query=times(query, scale), scale=None), moved
