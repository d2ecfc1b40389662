# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention by CUDA kernels: sizes to launches. Head dims that no kernel takes are padded here, and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_fastattn import ffi
from jax_fastattn._compat import Primitive
from jax_fastattn.kernels.arguments import launch_scalars, present_buffers
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import config as sm80
from jax_fastattn.kernels.sm90.backward import config as sm90
from jax_fastattn.kernels.sm90.forward.config import forward_scratch
from jax_fastattn.ops.records import padded_rows, tile_records
from jax_fastattn.portable import scale_gradient
from jax_fastattn.spec import DIFFERENTIABLE, QKV, AttentionSpec, Gradients, Operands, Problem

launch_p = Primitive("jax_fastattn_launch")
launch_p.multiple_results = True

# Copies of 16 bytes need rows that are a multiple of 16 bytes apart.
HEAD_DIM_MULTIPLE = 8


def pad_head_dim(x: jax.Array) -> jax.Array:
    """Zero columns up to the next head dim that kernels take; no operation where it is one already."""
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def cut_head_dim(x: jax.Array, head_dim: int) -> jax.Array:
    """Inverse of `pad_head_dim`."""
    return x[..., :head_dim] if x.shape[-1] != head_dim else x


def _padded(operands: Operands) -> Operands:
    q, k, v = (pad_head_dim(x) for x in operands[:3])
    return operands._replace(query=q, key=k, value=v)


def _scaled(x: jax.Array, operands: Operands) -> jax.Array:
    """x `[B, T, N, H]` times a scale that is an operand, rounded once."""
    if operands.scale is None:
        return x
    return (x.astype(operands.scale.dtype) * operands.scale[:, :, None, None]).astype(x.dtype)


def _for_kernels(operands: Operands) -> Operands:
    """What kernels take, sinks apart: no scale on the device, so that one is multiplied into the query."""
    return _padded(operands._replace(query=_scaled(operands.query, operands), scale=None))


def forward(spec: AttentionSpec, operands: Operands, kernel: KernelSpec | None = None) -> tuple[jax.Array, jax.Array]:
    """One custom call: the output `[B, T, N, D]` and the log-sum-exp `[B, T, N]`.

    Args:
        spec: what is computed.
        operands: of the call.
        kernel: the compile key; by default the one that `kernel_spec` chooses.
    """
    padded = _for_kernels(operands)
    problem, arrays = _launched(spec, padded)
    kernel = kernel or kernel_spec(problem, "forward", ffi.arch())
    rows = padded.query.shape[:3]
    shapes = {"out": rows + padded.value.shape[3:], "lse": rows}
    launched = {name: _joined_shape(shape, padded) for name, shape in shapes.items()}
    found = _launch(kernel, problem, arrays | _records(kernel, padded), launched | forward_scratch(kernel))
    out, lse = (found[name].reshape(shape) for name, shape in shapes.items())
    return cut_head_dim(out, operands.value.shape[3]), lse


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Collection[str] = DIFFERENTIABLE,
    kernel: KernelSpec | None = None,
) -> Gradients:
    """One custom call, which launches every kernel of the backward pass.

    See `portable.backward` for `wanted`, and `forward` for `kernel`.
    """
    padded = _for_kernels(operands)._replace(sinks=None)
    problem, arrays = _launched(spec, padded)
    residuals = {"out": pad_head_dim(out), "lse": lse, "dout": pad_head_dim(dout), "dlse": dlse}
    residuals = {name: x if x is None else _joined(x, padded) for name, x in residuals.items()}
    kernel = kernel or kernel_spec(problem, "backward", ffi.arch(), dlse=dlse is not None)
    backward_scratch = {"sm80": sm80.backward_scratch, "sm90": sm90.backward_scratch}[kernel.family]
    scratch = backward_scratch(kernel, problem.num_sequences or problem.batch, problem.query_length, problem.num_heads)
    gradients = {"dq": padded.query.shape, "dk": padded.key.shape, "dv": padded.value.shape}
    launched = {name: _joined_shape(shape, padded) for name, shape in gradients.items()}
    found = _launch(kernel, problem, arrays | _records(kernel, padded) | residuals, launched | scratch)
    dq, dk, dv = (found[name].reshape(shape) for name, shape in gradients.items())
    dsinks = None
    if operands.sinks is not None and "sinks" in wanted:
        stats = stats_by_row(kernel, found["stats"], padded.sequences, operands.query.shape[1])
        delta = row_delta(kernel, stats, problem.query_length, residuals["dlse"])
        delta = delta.reshape(delta.shape[0], delta.shape[1], -1, lse.shape[1])  # entries that were joined come third
        delta = jnp.moveaxis(delta, 2, 1).reshape(lse.shape[0], lse.shape[2], lse.shape[1])
        dsinks = sinks_gradient(operands.sinks, lse, delta)
    dscaled = cut_head_dim(dq, operands.query.shape[3])
    return Gradients(
        query=_scaled(dscaled, operands),
        key=cut_head_dim(dk, operands.key.shape[3]),
        value=cut_head_dim(dv, operands.value.shape[3]),
        sinks=dsinks,
        scale=scale_gradient(operands, dscaled) if "scale" in wanted else None,
    )


def _launched(spec: AttentionSpec, operands: Operands) -> tuple[Problem, dict[str, jax.Array | None]]:
    """What a launch computes, and its operands by name. Batch entries with packed sequences become one."""
    problem = Problem.of(spec, operands)
    if not operands.is_packed:
        return problem, operands._asdict()
    problem = replace(
        problem,
        batch=1,
        query_length=problem.batch * problem.query_length,
        key_length=problem.batch * problem.key_length,
        num_sequences=problem.batch * problem.num_sequences,
    )
    joined = {name: _joined(getattr(operands, name), operands) for name in QKV}
    return problem, operands._asdict() | joined | {"sequences": None}


def _joined_shape(shape: tuple[int, ...], operands: Operands) -> tuple[int, ...]:
    """A shape `[B, T, ...]` as a launch has it."""
    return (1, shape[0] * shape[1], *shape[2:]) if operands.is_packed else shape


def _joined(x: jax.Array, operands: Operands) -> jax.Array:
    return x.reshape(_joined_shape(x.shape, operands))


def _records(kernel: KernelSpec, operands: Operands) -> dict[str, jax.Array]:
    """The records of tiles by name; none unless sequences are packed."""
    if operands.sequences is None:
        return {}
    lengths, rows = (operands.query.shape[1], operands.key.shape[1]), kernel.config.slot_rows
    sides = {"query_tiles": False} | ({"key_tiles": True} if kernel.op == "backward" else {})
    return {name: tile_records(operands.sequences, lengths, rows, of_keys=side) for name, side in sides.items()}


def stats_by_row(kernel: KernelSpec, stats: jax.Array, sequences: jax.Array | None, query_length: int) -> jax.Array:
    """Statistics in the order of rows. Hopper's kernels leave those of packed sequences in slots, see `padded_rows`."""
    if sequences is None or kernel.family == "sm80":
        return stats
    rows = padded_rows(sequences, query_length, kernel.config.slot_rows[0])
    by_row = stats.reshape(*stats.shape[:3], -1, sm90.stats_row_nbytes(kernel.config.adds_dq) // 4)
    return by_row[:, :, :, rows].reshape(*stats.shape[:3], -1)


def row_delta(kernel: KernelSpec, stats: jax.Array, query_length: int, dlse: jax.Array | None) -> jax.Array:
    """rowsum(out * dout) - dlse, `[B, N, T]`, from the statistics that backward kernels leave behind.

    The statistics of a row that sees no key are an infinity and 0, so that no gradient of the kernels depends on its
    cotangents. Its log-sum-exp still depends on its sink, so its delta is -dlse here.
    """
    delta = _statistic(kernel, stats, 1)[:, :, :query_length]
    if dlse is None:
        return delta
    sees_none = jnp.isinf(_statistic(kernel, stats, 0)[:, :, :query_length])
    return jnp.where(sees_none, -dlse.transpose(0, 2, 1), delta)


def _statistic(kernel: KernelSpec, stats: jax.Array, which: int) -> jax.Array:
    """The scaled log-sum-exp (0) or delta (1) of each row, `[B, N, T or more]`."""
    if kernel.family == "sm80":
        return stats[..., which]
    values = stats[:, :, which]
    if kernel.config.adds_dq:  # minus its parts in bfloat16, eight per row, see `kernels/sm90/backward/gradient.py`
        parts = jax.lax.bitcast_convert_type(values.reshape(*values.shape[:2], -1, 4), jnp.bfloat16)
        values = -parts.astype(jnp.float32).sum((-2, -1))
    return values


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """`-sum(exp(sink - lse) * delta)` over the rows of a head; delta `[B, N, T]` is that of `row_delta`.

    Rows with a log-sum-exp of -inf, such as padding, do not count: their cotangents may be NaN.
    """
    seen = lse != -jnp.inf
    weight = jnp.exp(sinks[:, None, :] - jnp.where(seen, lse, 0.0))
    per_batch = -jnp.sum(jnp.where(seen, weight * delta.transpose(0, 2, 1), 0.0), axis=1)
    return per_batch if sinks.shape[0] == per_batch.shape[0] else per_batch.sum(axis=0, keepdims=True)


def _launch(
    kernel: KernelSpec,
    problem: Problem,
    operands: Mapping[str, jax.Array | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.Array]:
    """One custom call; the buffers are those of `present_buffers`.

    Args:
        kernel: the compile key.
        problem: what it is made from.
        operands: the operands by name; None is absent.
        shapes: of the results and of scratch, by name.

    Returns:
        results and scratch by name.
    """
    buffers = {name: buffer for name, buffer in present_buffers(kernel).items() if buffer is not None}
    names = [name for name, buffer in buffers.items() if buffer.role == "operand"]
    results = {name: (shapes[name], buffer.dtype) for name, buffer in buffers.items() if buffer.role != "operand"}
    given = {name for name, x in operands.items() if x is not None}
    assert given == set(names) and shapes.keys() == results.keys(), (kernel, given, set(shapes))
    scalars = launch_scalars(problem, ffi.multiprocessors())
    found = launch_p.bind(
        *(operands[name] for name in names),
        kernel=kernel,
        ints=scalars.of_dtype("int32"),
        floats=scalars.of_dtype("float32"),
        results=tuple(results.values()),
    )
    return dict(zip(results, found, strict=True))


def _launch_abstract(*_, results, **params):  # type: ignore[no-untyped-def]
    del params
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in results]


def _launch_lower(ctx, *operands, kernel, ints, floats, results):  # type: ignore[no-untyped-def]
    del results
    return ffi.custom_call(ctx, kernel, operands, ints, floats)


launch_p.def_abstract_eval(_launch_abstract)
# Not inlined: identical calls, as those of a model's layers, share one function and carry their kernel once.
mlir.register_lowering(launch_p, _launch_lower, platform="cuda", inline=False)
