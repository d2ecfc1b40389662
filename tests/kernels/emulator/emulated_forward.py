# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the portable forward kernel, runs its PTX in `warp_emulator` and compares with a float64 reference."""

from __future__ import annotations

import numpy as np
from emulated_backward import FORWARD_TOLERANCE, Sizes, draw_operands, with_sinks
from emulated_launch import compile_kernel, launch_scalars, place, start

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.forward.kernel import ForwardKernel


def check(spec: KernelSpec, sizes: Sizes | None = None) -> None:
    """Runs the kernel on poisoned operands, into buffers of NaN, and compares output and lse."""
    sizes = sizes or Sizes()
    arrays, wanted = draw_operands(spec, sizes)
    out, lse = wanted["out"], wanted["lse"]
    if codes.SINKS in spec.features:
        arrays["sinks"], out, lse = with_sinks(spec, sizes, wanted)
    found = run(spec, sizes, arrays)
    tolerance = FORWARD_TOLERANCE[spec.result_dtype]
    got = found["out"].astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(found["lse"], lse, atol=1e-4, rtol=1e-5)


def run(spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the output and the log-sum-exp that the kernel makes of operands."""
    kernel = ForwardKernel(spec)
    texts = compile_kernel(kernel, spec)
    rows, v_head_dim = arrays["query"].shape[:3], arrays["value"].shape[3]
    results = {
        "out": np.full((*rows, v_head_dim), np.nan, arrays["query"].dtype),
        "lse": np.full(rows, np.nan, np.float32),
    }
    memory, buffers = place(spec, arrays | results)
    for launch in kernel.launches(buffers, launch_scalars(spec, sizes)):
        start(launch, texts, memory, schedule="random", finds_races=True)
    return {name: memory.read(getattr(buffers, name), x.shape, x.dtype) for name, x in results.items()}
