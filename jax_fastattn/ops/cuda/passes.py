# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention by CUDA kernels: from sizes to launches. Head dims that no kernel takes are padded only here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_fastattn import ffi
from jax_fastattn.heads import reduce_to, scale_gradient
from jax_fastattn.kernels.arguments.present import present_buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.choose import forward_spec, kernel_spec, prepass_configs
from jax_fastattn.kernels.decode.config import decode_scratch
from jax_fastattn.kernels.decode.split import heads_side_by_side
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import config as sm80
from jax_fastattn.kernels.sm90.backward import config as sm90
from jax_fastattn.kernels.sm90.forward.config import forward_scratch
from jax_fastattn.ops.cuda.bias import bias_operands, with_usable_scale
from jax_fastattn.ops.cuda.bias_gradient import (
    RowBias,
    bias_gradient,
    is_of_rows_alone,
    result_shapes,
    row_products,
    with_parts,
)
from jax_fastattn.ops.cuda.launch import launch_p, launch_scalars, persistent_blocks
from jax_fastattn.ops.cuda.prepass import PREDICATE, TileLists, tile_lists
from jax_fastattn.ops.cuda.records import tile_records
from jax_fastattn.ops.cuda.row_bits import RowBits, row_bits
from jax_fastattn.paged import PagedOperands
from jax_fastattn.spec import DIFFERENTIABLE, QKV, AttentionSpec, Gradients, Operands, Problem

# Copies of 16 bytes need rows that are a multiple of 16 bytes apart.
HEAD_DIM_MULTIPLE = 8


def pad_head_dim(x: jax.Array) -> jax.Array:
    """Pads x with zero columns up to the next head dim that kernels take; returns x itself if it has one."""
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def cut_head_dim(x: jax.Array, head_dim: int) -> jax.Array:
    """Inverts `pad_head_dim`."""
    return x[..., :head_dim] if x.shape[-1] != head_dim else x


def _padded(operands: Operands) -> Operands:
    q, k, v = (pad_head_dim(x) for x in operands[:3])
    return operands._replace(query=q, key=k, value=v)


def _scaled(x: jax.Array, operands: Operands | PagedOperands) -> jax.Array:
    """Multiplies x `[B, T, N, H]` by a scale that is an operand, and rounds once."""
    if operands.scale is None:
        return x
    return (x.astype(operands.scale.dtype) * operands.scale[:, :, None, None]).astype(x.dtype)


def _for_kernels(operands: Operands) -> Operands:
    """Returns operands for kernels, sinks unchanged. Kernels take no scale operand; it is multiplied into the query."""
    return _padded(operands._replace(query=_scaled(operands.query, operands), scale=None))


def forward(
    spec: AttentionSpec, operands: Operands, kernel: KernelSpec | None = None, kept: Sequence[TileLists] = ()
) -> tuple[jax.Array, jax.Array]:
    """Returns the output `[B, T, N, D]` and the log-sum-exp `[B, T, N]`.

    They come from one custom call. A mask or segment ids take another one before it, the prepass, unless lists for the
    kernel's tiles are kept.

    Args:
        spec: the static facts of the call.
        operands: the arrays of the call.
        kernel: the compile key; by default the one that `forward_spec` chooses.
        kept: see `tile_lists`.
    """
    spec, padded = with_usable_scale(spec, _for_kernels(operands))
    problem, arrays = _launched(spec, padded)
    kernel = kernel or forward_spec(problem, ffi.arch())
    arrays = _with_bias(kernel, problem, arrays)
    rows = padded.query.shape[:3]
    shapes = {"out": rows + padded.value.shape[3:], "lse": rows}
    launched = {name: _joined_shape(shape, padded) for name, shape in shapes.items()}
    arrays, lists = _with_lists(spec, padded, kernel, arrays, kept)
    launched |= _forward_scratch(kernel, problem)
    found = _launch(kernel, problem, arrays | _records(kernel, padded), launched, lists)
    out, lse = (found[name].reshape(shape) for name, shape in shapes.items())
    return cut_head_dim(out, operands.value.shape[3]), lse


def paged_forward(
    spec: AttentionSpec, operands: PagedOperands, kernel: KernelSpec | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns what `forward` does, from one custom call that reads the pages, which `reads_pages` has to admit."""
    problem = operands.problem(spec)
    kernel = kernel or forward_spec(problem, ffi.arch())
    arrays = operands._replace(query=_scaled(operands.query, operands), scale=None)._asdict()
    arrays |= {"key": arrays.pop("key_pages"), "value": arrays.pop("value_pages")}
    rows = operands.query.shape[:3]
    shapes = {"out": rows + operands.value_pages.shape[3:], "lse": rows}
    found = _launch(kernel, problem, arrays, shapes | _forward_scratch(kernel, problem))
    return found["out"], found["lse"]


def _forward_scratch(kernel: KernelSpec, problem: Problem) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the scratch buffers of a forward pass by name."""
    if kernel.op == "decode":
        return decode_scratch(kernel, ffi.multiprocessors(), problem.query_length * problem.group)
    return forward_scratch(kernel)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Collection[str] = DIFFERENTIABLE,
    kernel: KernelSpec | None = None,
    kept: Sequence[TileLists] = (),
) -> Gradients:
    """Returns the gradients from one custom call, which launches every kernel of the backward pass.

    A mask or segment ids take others before it, the prepasses: two where dq has a kernel of its own, else one, less
    those whose lists are kept. See `xla.passes.backward` for `wanted`, and `forward` for `kernel` and `kept`.
    """
    sinks = operands.sinks if "sinks" in wanted else None
    padded = _for_kernels(operands)._replace(sinks=sinks)
    problem, arrays = _launched(spec, padded)
    asked = {"dlse": dlse is not None, "dsinks": sinks is not None, "dbias": "bias" in {*wanted} & {*spec.present}}
    kernel = kernel or kernel_spec(problem, "backward", ffi.arch(), **asked)
    if is_of_rows_alone(kernel):
        return _without_rows(spec, operands, (out, lse), (dout, dlse), wanted, kept)
    residuals = {"out": pad_head_dim(out), "lse": lse, "dout": pad_head_dim(dout), "dlse": dlse}
    residuals = {name: x if x is None else _joined(x, padded) for name, x in residuals.items()}
    gradient = result_shapes(kernel, problem, ffi.multiprocessors()) if kernel.dbias else {}
    kernel = with_parts(kernel, gradient)
    arrays = _with_bias(kernel, problem, arrays)
    backward_scratch = {"sm80": sm80.backward_scratch, "sm90": sm90.backward_scratch}[kernel.family]
    scratch = backward_scratch(kernel, problem.num_sequences or problem.batch, problem.query_length, problem.num_heads)
    gradients = {"dq": padded.query.shape, "dk": padded.key.shape, "dv": padded.value.shape}
    launched = {name: _joined_shape(shape, padded) for name, shape in gradients.items()}
    if sinks is not None:
        launched["dsinks_terms"] = (problem.batch, problem.num_heads, problem.query_length)
    launched |= gradient
    arrays, lists = _with_lists(spec, padded, kernel, arrays, kept)
    found = _launch(kernel, problem, arrays | _records(kernel, padded) | residuals, launched | scratch, lists)
    dq, dk, dv = (found[name].reshape(shape) for name, shape in gradients.items())
    dscaled = cut_head_dim(dq, operands.query.shape[3])
    products = row_products(out, dout, lse.dtype) if spec.is_part and kernel.drow_bias else None
    return Gradients(
        query=_scaled(dscaled, operands),
        key=cut_head_dim(dk, operands.key.shape[3]),
        value=cut_head_dim(dv, operands.value.shape[3]),
        bias=bias_gradient(problem.bias_shape, found, dlse, products) if gradient and problem.bias_shape else None,
        sinks=None if sinks is None else sinks_gradient(sinks, found["dsinks_terms"], operands.query.shape[0]),
        scale=scale_gradient(operands, dscaled) if "scale" in wanted else None,
    )


def _without_rows(
    spec: AttentionSpec,
    operands: Operands,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array | None],
    wanted: Collection[str],
    kept: Sequence[TileLists],
) -> Gradients:
    """Returns the gradients of a call with a bias of rows that no kernel reads, see `bias_gradient.py`."""
    # A part of the keys says nothing of this gradient: `ring/gradient.py` computes it.
    assert not spec.is_part or "bias" not in wanted
    (out, lse), (dout, dlse) = results, cotangents
    sinks = operands.sinks if "sinks" in wanted else None
    rows = RowBias(operands, out, lse)
    terms = None
    if not {"bias", "sinks"}.isdisjoint(wanted):
        terms = rows.sink_terms(out, dout, dlse)
    names = tuple(name for name in spec.present if name not in ("bias", "sinks"))
    others = [name for name in wanted if name not in ("bias", "sinks")]
    rest = operands._replace(bias=None, sinks=None)
    found = backward(replace(spec, present=names), rest, out, rows.lse(), dout, dlse, others, kept=kept)
    return found._replace(
        bias=rows.gradient(dlse, terms) if "bias" in wanted else None,
        sinks=sinks_gradient(sinks, terms, out.shape[0]) if sinks is not None and terms is not None else None,
    )


def _with_bias(
    kernel: KernelSpec, problem: Problem, arrays: dict[str, jax.Array | None]
) -> dict[str, jax.Array | None]:
    """Returns the operands of a launch with a bias as the kernel reads it."""
    bias = arrays.pop("bias")
    return arrays | bias_operands(kernel, bias, problem.key_length, problem.spec.scale)


def _with_lists(
    spec: AttentionSpec,
    operands: Operands,
    kernel: KernelSpec,
    arrays: dict[str, jax.Array | None],
    kept: Sequence[TileLists],
) -> tuple[dict[str, jax.Array | None], TileLists | RowBits | None]:
    """Returns the operands of a launch with lists or bits in place of the predicate, and these; else all as it is.

    Of a launch with lists of both sides these are the lists of tiles of queries, whose `planes` hold for both.
    """
    if not (kernel.listed or kernel.row_bits):
        return arrays, None
    found: list[TileLists | RowBits] = [row_bits(spec, operands)] if kernel.row_bits else []
    found += [tile_lists(spec, operands, config, kept) for config in prepass_configs(kernel)]
    others = {name: x for name, x in arrays.items() if name not in PREDICATE or getattr(kernel, name, False)}
    for lists in found:
        others |= lists.buffers()
    if not getattr(kernel, "classifies_keys", False):
        others.pop("key_classes", None)
    return others, found[-1]


def _launched(spec: AttentionSpec, operands: Operands) -> tuple[Problem, dict[str, jax.Array | None]]:
    """Returns the problem of a launch and its operands by name. Batch entries with packed sequences become one."""
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
    """Returns a shape `[B, T, ...]` as a launch has it."""
    return (1, shape[0] * shape[1], *shape[2:]) if operands.is_packed else shape


def _joined(x: jax.Array, operands: Operands) -> jax.Array:
    return x.reshape(_joined_shape(x.shape, operands))


def _records(kernel: KernelSpec, operands: Operands) -> dict[str, jax.Array]:
    """Returns the records of tiles by name; none unless sequences are packed."""
    if operands.sequences is None:
        return {}
    lengths, rows = (operands.query.shape[1], operands.key.shape[1]), kernel.config.slot_rows
    sides = {"query_tiles": False} | ({"key_tiles": True} if kernel.op == "backward" else {})
    return {name: tile_records(operands.sequences, lengths, rows, of_keys=side) for name, side in sides.items()}


def sinks_gradient(sinks: jax.Array, terms: jax.Array, batch: int) -> jax.Array:
    """Sums the terms of rows to the gradient of sinks `[1 or B, N]`.

    Args:
        sinks: the operand.
        terms: `[B, N, T]`, or `[1, N, B T]` if a launch has joined batch entries.
        batch: B.
    """
    launched, heads, rows = terms.shape
    joined = batch // launched
    by_entry = jnp.moveaxis(terms.reshape(launched, heads, joined, rows // joined), 2, 1)
    return reduce_to((*sinks.shape, 1), by_entry.reshape(batch, heads, rows // joined))[..., 0]


def _launch(
    kernel: KernelSpec,
    problem: Problem,
    operands: Mapping[str, jax.Array | None],
    shapes: Mapping[str, tuple[int, ...]],
    lists: TileLists | RowBits | None = None,
) -> dict[str, jax.Array]:
    """Binds one custom call; its buffers are those of `present_buffers`.

    Args:
        kernel: the compile key.
        problem: the problem that the kernel was chosen for.
        operands: the operands by name; None is absent.
        shapes: the shapes of the results and of scratch, by name.
        lists: what the kernel has in place of the predicate, if it does.

    Returns:
        The results and scratch by name.
    """
    buffers = {name: buffer for name, buffer in present_buffers(kernel).items() if buffer is not None}
    names = [name for name, buffer in buffers.items() if buffer.role == "operand"]
    results = {name: (shapes[name], buffer.dtype) for name, buffer in buffers.items() if buffer.role != "operand"}
    given = {name for name, x in operands.items() if x is not None}
    assert given == set(names) and shapes.keys() == results.keys(), (kernel, given, set(shapes))
    parts = shapes["dbias"][0] if "dbias" in shapes else None
    scalars = _scalars(kernel, problem, lists, parts)
    found = launch_p.bind(
        *(operands[name] for name in names),
        kernel=kernel,
        ints=scalars.of_dtype("int32"),
        floats=scalars.of_dtype("float32"),
        results=tuple(results.values()),
    )
    return dict(zip(results, found, strict=True))


def _scalars(
    kernel: KernelSpec, problem: Problem, lists: TileLists | RowBits | None, bias_parts: int | None
) -> Scalars:
    """Returns the scalars of a launch."""
    multiprocessors, side_heads = ffi.multiprocessors(), None
    if kernel.op == "decode":
        side_heads = heads_side_by_side(problem.num_kv_heads, multiprocessors)
    elif kernel.op == "forward":
        multiprocessors = persistent_blocks(problem, multiprocessors)
    visit = () if lists is None else (lists.planes,)
    scalars = launch_scalars(problem, multiprocessors, *visit, side_heads=side_heads, bias_parts=bias_parts)
    # The range of keys begins at the offset.
    return scalars._replace(window_left=0) if kernel.row_bits else scalars
