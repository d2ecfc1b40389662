# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of the portable backward in `warp_emulator` and compares with a float64 reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from emulated_backward import (
    BACKWARD_TOLERANCE,
    Sizes,
    compare_dbias,
    compare_dsinks_terms,
    dbias_buffers,
    draw_operands,
    dsinks_buffer,
    visibility,
)
from emulated_launch import compile_kernel, launch_scalars, place, start

from jax_fastattn.kernels.arguments.present import launch_buffers
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import backward_scratch
from jax_fastattn.kernels.sm80.backward.dkdv_dq import HeadOrder
from jax_fastattn.kernels.sm80.backward.gradient import log2_probability_factor
from jax_fastattn.kernels.sm80.backward.launches import BackwardKernel

ORDER = HeadOrder(group=2)


class Run:
    """The kernels of one compile key, the memory of one launch of them, and what they should write.

    `given` are operands in the place of drawn ones.
    """

    def __init__(self, spec: KernelSpec, sizes: Sizes, given: dict[str, np.ndarray] | None = None):
        self.spec, self.sizes, self.kernel = spec, sizes, BackwardKernel(spec)
        self.texts = compile_kernel(self.kernel, spec)
        self.arrays, self.wanted = draw_operands(spec, sizes)
        self.arrays |= given or {}
        operands = {"dq": "query", "dk": "key", "dv": "value"}
        self.arrays |= {
            name: np.full(self.arrays[x].shape, np.nan, self.arrays[x].dtype) for name, x in operands.items()
        }
        self.arrays |= dsinks_buffer(spec, sizes) | dbias_buffers(spec, sizes)
        scratch = backward_scratch(spec, sizes.batch, sizes.queries, sizes.kv_heads * spec.group)
        for name, shape in scratch.items():
            dtype = launch_buffers(spec)[name]
            self.arrays[name] = np.full(shape, np.nan if dtype == "float32" else -1, dtype)
        self.memory, self.buffers = place(spec, self.arrays)
        launches = self.kernel.launches(self.buffers, launch_scalars(spec, sizes), ORDER)
        self.launches = {type(x.kernel.__self__).__name__.removesuffix("Kernel"): x for x in launches}

    def run(self, name: str, **options: Any) -> None:
        """Runs one kernel. `options` are those of `warp_emulator.WarpCta`."""
        start(self.launches[name], self.texts, self.memory, **options)

    def read(self, name: str) -> np.ndarray:
        """Returns a buffer's contents."""
        return self.memory.read(getattr(self.buffers, name), self.arrays[name].shape, self.arrays[name].dtype)

    def compare(self) -> None:
        """Raises an `AssertionError` if a gradient or a statistic is wrong."""
        tolerance = BACKWARD_TOLERANCE[self.spec.result_dtype]
        for name in ("dq", "dk", "dv"):
            wanted = self.wanted[name]
            atol = tolerance * np.abs(wanted).max() + 1e-5
            np.testing.assert_allclose(self.read(name).astype(np.float64), wanted, atol=atol, rtol=0, err_msg=name)
        if self.spec.dsinks:
            compare_dsinks_terms(self.read("dsinks_terms"), self.wanted["dsinks_terms"], tolerance)
        if self.spec.dbias:
            found = {name: self.read(name).astype(np.float64) for name in dbias_buffers(self.spec, self.sizes)}
            pairs = visibility(self.spec, self.sizes)[2][:, None]
            compare_dbias(self.spec, self.sizes, found, self.arrays, self.wanted["dbias"], pairs, tolerance)
        stats, lse, delta = self.read("stats").swapaxes(1, 2), self.wanted["lse"], self.wanted["delta"]
        factor, (sees, _, _) = log2_probability_factor(self.spec, self.kernel.config), visibility(self.spec, self.sizes)
        if self.spec.has_gradient_units:
            dp, _, factor, _ = np.moveaxis(self.arrays["gradient_units"].repeat(self.spec.group, 1)[:, None], 3, 0)
            delta = delta * dp
        lse_scaled = np.where(np.isneginf(lse) | ~sees[..., None], np.inf, lse * math.log2(math.e) - factor)
        np.testing.assert_allclose(stats[..., 0], lse_scaled, atol=1e-4)
        np.testing.assert_allclose(stats[..., 1], delta, atol=tolerance * np.abs(delta).max() + 1e-6)


def run_backward(spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the gradients that the kernels make of operands, in float64."""
    run = Run(spec, sizes, arrays)
    for name in ("Preprocess", "DkdvDq", "Convert"):
        run.run(name)
    return {name: run.read(name).astype(np.float64) for name in ("dq", "dk", "dv")}


def check(spec: KernelSpec, sizes: Sizes | None = None, schedule: str = "second") -> None:
    """Runs the kernels on poisoned operands, into buffers of NaN, and compares every gradient."""
    run = Run(spec, sizes or Sizes())
    run.run("Preprocess")
    run.run("DkdvDq", schedule=schedule)
    run.run("Convert")
    if spec.sums_dbias:
        run.run("Dbias", schedule=schedule)
    run.compare()
