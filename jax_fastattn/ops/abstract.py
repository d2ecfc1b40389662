# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Abstract values of results, derived from the operands', so that manual axes and explicit shardings carry over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, PartitionSpec

from jax_fastattn.spec import QKV, AttentionSpec


def like(aval: Any, shape: tuple[int, ...], dtype: Any = None, axes: tuple[int | None, ...] | None = None) -> Any:
    """Returns `aval` with another shape, whose axis i is sharded as axis `axes[i]` of `aval` (default: not at all)."""
    spec = tuple(aval.sharding.spec) + (None,) * (len(aval.shape) - len(aval.sharding.spec))
    axes = axes or (None,) * len(shape)
    sharding = aval.sharding.update(spec=PartitionSpec(*(None if axis is None else spec[axis] for axis in axes)))
    return aval.update(shape=shape, dtype=dtype or aval.dtype, weak_type=False, sharding=sharding)


def statistics_dtype(dtype: Any) -> Any:
    """Returns the dtype of log-sum-exps: float32, or float64 for float64 operands."""
    return np.promote_types(np.float32, dtype) if dtype == np.float64 else np.dtype(np.float32)


def forward_results(spec: AttentionSpec, arrays: Any) -> list[Any]:
    """Returns the abstract output and log-sum-exp, and what else the spec asks for, see `AttentionSpec.further`."""
    query, _, value, *_ = arrays
    rows = query.shape[:-1]
    axes = tuple(range(len(rows)))
    of_rows = like(query, rows, statistics_dtype(query.dtype), axes=axes)
    out = like(query, rows + value.shape[3:], axes=(*axes, None))
    further = {"row_means": of_rows, "out_rests": out.update(dtype=np.dtype(np.int8))}
    return [out, of_rows, *(further[name] for name in spec.further)]


def backward_results(spec: AttentionSpec, arrays: Any, wanted: tuple[str, ...]) -> list[Any]:
    """Returns abstract gradients of the operands named in `wanted`: float32 or wider, except for QKV."""
    operands = spec.operands(arrays[: len(spec.present)])

    def gradient(name: str) -> Any:
        x = getattr(operands, name)
        dtype = statistics_dtype(operands.query.dtype)
        return x if name in QKV else like(x, x.shape, dtype, axes=tuple(range(len(x.shape))))

    return [gradient(name) for name in wanted]


def lower_on_one_device(function: Callable[..., Any], ctx: mlir.LoweringRuleContext, *values: Any) -> Any:
    """Lowers `function` of the operands without a mesh: one device's share is plain arrays."""

    def plain(avals: Any) -> list[Any]:
        return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]

    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        plain_ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return mlir.lower_fun(function)(plain_ctx, *values)
