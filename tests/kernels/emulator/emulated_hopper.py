# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the Hopper kernels, runs their PTX in `hopper_emulator` and compares with float64 references."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from emulated_backward import (
    BACKWARD_TOLERANCE,
    FORWARD_TOLERANCE,
    Sizes,
    compare_dbias,
    compare_dsinks_terms,
    dbias_buffers,
    draw_operands,
    dsinks_buffer,
    visibility,
    with_sinks,
)
from emulated_launch import MULTIPROCESSORS, arguments, compile_kernel, launch_scalars, number, place, text
from hopper_emulator import Operand
from hopper_emulator import launch as emulate
from ptx_emulator import Memory

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.present import launch_buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.wgmma import atom_columns
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import backward_scratch
from jax_fastattn.kernels.sm90.backward.launches import BackwardKernel, HeadOrders
from jax_fastattn.kernels.sm90.forward.kernel import ForwardKernel
from jax_fastattn.kernels.sm90.query_order import HeadOrder


def start(launch: Launch, texts: dict[str, str], memory: Memory) -> None:
    """Runs a launch that was made of addresses and Python numbers, given the kernels of its host function."""
    parameters: list[Any] = []
    for box in launch.tma or ():
        if box is not None:
            shape = (number(box.batch), box.rows, box.heads, number(box.head_dim))
            parameters += [Operand(box.pointer, shape, box.box_rows, atom_columns(box.box_columns)), None]
    parameters += arguments(launch)
    ptx = text(launch, texts)
    assert ptx.partition(")")[0].count(".param") == len(parameters), launch.kernel
    grid, early = number(launch.grid), launch.begins_early
    emulate(ptx, parameters, memory, grid, launch.shared_bytes, begins_early=early)


@functools.cache
def forward_texts(spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of the forward kernel; see `compile_kernel`."""
    return compile_kernel(ForwardKernel(spec), spec)


@functools.cache
def backward_texts(spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of the backward kernels; see `compile_kernel`."""
    return compile_kernel(BackwardKernel(spec), spec)


def check_forward(spec: KernelSpec, sizes: Sizes | None = None) -> None:
    """Runs the kernel on poisoned operands, into buffers of NaN, and compares output and lse."""
    sizes = sizes or Sizes()
    arrays, wanted = draw_operands(spec, sizes)
    out, lse = wanted["out"], wanted["lse"]
    if codes.SINKS in spec.features:
        arrays["sinks"], out, lse = with_sinks(spec, sizes, wanted)
    found = run_forward(spec, sizes, arrays)
    tolerance = FORWARD_TOLERANCE[spec.result_dtype]
    got = found["out"].astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(found["lse"], lse, atol=1e-4, rtol=1e-5)


def run_forward(spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the output and the log-sum-exp that the kernel makes of operands."""
    kernel = ForwardKernel(spec)
    rows, v_head_dim = arrays["query"].shape[:3], arrays["value"].shape[3]
    results = {
        "out": np.full((*rows, v_head_dim), np.nan, arrays["query"].dtype),
        "lse": np.full(rows, np.nan, np.float32),
    }
    if spec.out_rests:
        results["out_rests"] = np.full((*rows, v_head_dim), -77, np.int8)
    memory, buffers = place(spec, arrays | results)
    texts = forward_texts(spec)
    for launch in kernel.launches(buffers, launch_scalars(spec, sizes)):
        start(launch, texts, memory)
    return {name: memory.read(getattr(buffers, name), x.shape, x.dtype) for name, x in results.items()}


def few_heads(kernel: BackwardKernel, scalars: Scalars) -> HeadOrders:
    """The orders of a launch, with fewer heads than there are begun together or prepared, as where there are many."""

    def few(order: HeadOrder, tiles: int) -> int:
        return max(1, min(order.heads - 1, MULTIPROCESSORS // tiles))

    keys, queries = kernel.orders(scalars)
    together = few(keys, -(-scalars.key_length // kernel.main.config.keys))
    prologue = together if kernel.preprocess.has_background else keys.heads
    keys = keys._replace(section=together, prefetch_distance=together, prologue=prologue)
    if queries is not None:
        queries = queries._replace(section=few(queries, -(-scalars.query_length // kernel.dq.config.rows)))
    return HeadOrders(keys, queries)


def check_backward(spec: KernelSpec, sizes: Sizes | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Runs the kernels on poisoned operands, into buffers of NaN, and compares every gradient.

    Returns:
        dq, and what it should be, in float64.
    """
    sizes = sizes or Sizes()
    arrays, wanted = draw_operands(spec, sizes)
    found = run_backward(spec, sizes, arrays)
    tolerance = BACKWARD_TOLERANCE["float32" if spec.terms > 1 else spec.operand_dtype]  # roundings of out, P and dS
    for name in ("dq", "dk", "dv"):
        largest = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], atol=tolerance * largest + 1e-5, rtol=0, err_msg=name)
    if spec.dbias:
        pairs = visibility(spec, sizes)[2][:, None]
        compare_dbias(spec, sizes, found, arrays, wanted["dbias"], pairs, tolerance)
    if spec.dsinks:
        compare_dsinks_terms(found["dsinks_terms"], wanted["dsinks_terms"], tolerance)
    return found["dq"], wanted["dq"]


def result_buffers(spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns buffers of NaN for what the backward kernels write, given the operands."""
    operands = {"dq": "query", "dk": "key", "dv": "value"}
    gradients = {name: np.full(arrays[x].shape, np.nan, arrays[x].dtype) for name, x in operands.items()}
    return gradients | dsinks_buffer(spec, sizes) | dbias_buffers(spec, sizes)


def run_backward(spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what the kernels make of operands, in float64: the gradients, and what rows add to that of their sink."""
    kernel = BackwardKernel(spec)
    results = result_buffers(spec, sizes, arrays)
    arrays = arrays | results
    for name, shape in backward_scratch(spec, sizes.batch, sizes.queries, sizes.kv_heads * spec.group).items():
        dtype = launch_buffers(spec)[name]
        arrays[name] = np.full(shape, np.nan if dtype == "float32" else -1000, dtype)
    memory, buffers = place(spec, arrays)
    scalars = launch_scalars(spec, sizes)
    texts = backward_texts(spec)
    for launch in kernel.launches(buffers, scalars, few_heads(kernel, scalars)):
        start(launch, texts, memory)
    found = {x: memory.read(getattr(buffers, x), arrays[x].shape, arrays[x].dtype) for x in results}
    return {name: x.astype(np.float64) for name, x in found.items()}
