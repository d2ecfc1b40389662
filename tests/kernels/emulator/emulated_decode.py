# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the decoding kernels, runs their PTX in the emulators and compares with a float64 reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import emulated_hopper
import numpy as np
from emulated_backward import Sizes, draw_operands, reference, with_sinks
from emulated_launch import MULTIPROCESSORS, compile_kernel, launch_scalars, place, start
from ptx_emulator import Memory
from testing.pages import in_pages

from jax_fastattn.compilation.compiler import kernel_class
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.decode.config import decode_scratch
from jax_fastattn.kernels.key import KernelSpec


@functools.cache
def texts(spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of the kernels; see `compile_kernel`."""
    return compile_kernel(kernel_class(spec.family, spec.op)(spec), spec)


def run_launches(spec: KernelSpec, buffers: Any, memory: Memory, scalars: Scalars) -> None:
    """Runs the kernels of a launch."""
    for launch in kernel_class(spec.family, spec.op)(spec).launches(buffers, scalars):
        if spec.family == "sm90":
            emulated_hopper.start(launch, texts(spec), memory)
        else:
            start(launch, texts(spec), memory, finds_races=True)


def check(
    spec: KernelSpec,
    sizes: Sizes,
    *,
    multiprocessors: int = MULTIPROCESSORS,
    side_heads: int = 1,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> None:
    """Runs the kernels on poisoned operands, into buffers of NaN, and compares output and log-sum-exp.

    Args:
        spec: the compile key.
        sizes: of the call.
        multiprocessors: CTAs that the keys are split over.
        side_heads: how many key/value heads are read side by side.
        change: changes operands, of which all elements are visible.
    """
    arrays, wanted = draw_operands(spec, sizes)
    if change is not None:
        change(arrays)
        with np.errstate(invalid="ignore"):  # gradients, which are not compared
            wanted = reference(spec, sizes, arrays)
    out, lse = wanted["out"], wanted["lse"]
    if codes.SINKS in spec.features:
        arrays["sinks"], out, lse = with_sinks(spec, sizes, wanted)
    found = run(spec, sizes, arrays, multiprocessors=multiprocessors, side_heads=side_heads)
    tolerance = 2**-7 if spec.operand_dtype == "bfloat16" else 2**-10  # a few roundings of P and of the output
    got = found["out"].astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(found["lse"], lse, atol=1e-4, rtol=1e-5)


def run(
    spec: KernelSpec,
    sizes: Sizes,
    arrays: dict[str, np.ndarray],
    *,
    multiprocessors: int = MULTIPROCESSORS,
    side_heads: int = 1,
) -> dict[str, np.ndarray]:
    """Returns the output and the log-sum-exp that the kernels make of dense operands; see `check` for the arguments."""
    if spec.page:
        pages = in_pages(arrays["key"], arrays["value"], arrays["key_value_seq_lengths"], spec.page)
        arrays = arrays | dict(zip(("key", "value", "page_table"), pages, strict=True))
    rows, v_head_dim = arrays["query"].shape[:3], arrays["value"].shape[3]
    results = {
        "out": np.full((*rows, v_head_dim), np.nan, arrays["query"].dtype),
        "lse": np.full(rows, np.nan, np.float32),
    }
    units = sizes.batch * sizes.kv_heads
    shapes = decode_scratch(spec, multiprocessors, sizes.queries * spec.group, units, sizes.keys)
    scratch = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    memory, buffers = place(spec, arrays | results | scratch)
    scalars = launch_scalars(spec, sizes)._replace(multiprocessors=multiprocessors, side_heads=side_heads)
    if spec.page:
        scalars = scalars._replace(pages=len(arrays["key"]))
    run_launches(spec, buffers, memory, scalars)
    return {name: memory.read(getattr(buffers, name), x.shape, x.dtype) for name, x in results.items()}
