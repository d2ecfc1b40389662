# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the three kernels of the fused portable backward in `warp_emulator` and compares with a float64 reference."""

from __future__ import annotations

import math
import re
import tempfile
from typing import Any

import cutlass
import numpy as np
import warp_emulator
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from emulated_backward import DEVICE_DTYPES, DTYPES, Sizes, draw_operands
from ptx_emulator import Memory

from jax_fastattn.kernels.sm80.backward import BackwardKernel
from jax_fastattn.kernels.sm80.backward_config import DkdvDqConfig
from jax_fastattn.kernels.sm80.gradient import log2_probability_factor
from jax_fastattn.kernels.spec import KernelSpec, launch_buffers

HEAD_GROUP = 2


def compile_kernels(spec: KernelSpec, config: DkdvDqConfig | None = None) -> tuple[BackwardKernel, dict[str, str]]:
    """Returns the kernels and the PTX of "Preprocess", "DkdvDq" and "Convert"; no GPU needed."""

    def pointer(dtype: str | None) -> cute.Pointer | None:
        return dtype and make_ptr(DEVICE_DTYPES[dtype], 16, cute.AddressSpace.gmem, assumed_align=16)

    buffers = [pointer(dtype) for dtype in launch_buffers(spec).values()]
    scalars = [cutlass.Int32(0)] * 8 + [cutlass.Float32(0.0)] * 2
    kernel = BackwardKernel(spec, config)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {spec.gpu_arch} --keep-ptx --dump-dir {folder}"
        ptx = cute.compile(kernel, *buffers, *scalars, make_fake_stream(), options=options).artifacts.PTX
    entries = re.split(r"(?=\.visible \.entry)", ptx)[1:]
    names = ("Preprocess", "DkdvDq", "Convert")
    return kernel, {name: next(text for text in entries if f"{name}Kernel" in text.split("(")[0]) for name in names}


class Launch:
    """One launch: its memory, and the runs of its kernels."""

    def __init__(self, spec: KernelSpec, sizes: Sizes, kernel: BackwardKernel, ptx: dict[str, str]):
        self.spec, self.sizes, self.kernel, self.ptx = spec, sizes, kernel, ptx
        self.arrays, self.wanted = draw_operands(spec, sizes)
        self.heads = sizes.kv_heads * spec.group
        self.query_tiles = -(-sizes.queries // kernel.config.queries)
        self.arrays |= self._results()
        self.memory = Memory()
        present = [name for name, dtype in launch_buffers(spec).items() if dtype is not None]
        self.address = {name: self.memory.add(self.arrays[name]) for name in present}
        scalars = [sizes.batch, sizes.queries, sizes.keys, self.heads, sizes.left, sizes.right, sizes.scale, sizes.cap]
        self.parameters = [*self.address.values(), *scalars, HEAD_GROUP]

    def _results(self) -> dict[str, np.ndarray]:
        sizes, tile = self.sizes, self.kernel.convert.tile
        dtype = DTYPES[self.spec.dtype]
        results = {name: np.full(self.wanted[name].shape, np.nan, dtype) for name in ("dq", "dk", "dv")}
        rows = self.query_tiles * tile.rows
        results["stats"] = np.full((sizes.batch, self.heads, sizes.queries, 2), np.nan, np.float32)
        results["dq_accum"] = np.full((sizes.batch, self.heads, rows, tile.padded_columns), np.nan, np.float32)
        counts = sizes.batch * self.heads * self.query_tiles * self.kernel.config.dq_warps
        results["dq_semaphore"] = np.full(counts + 1, -1, np.int32)
        return results

    def run(self, name: str, **options: Any) -> int:
        """Runs one kernel; returns the number of instruction issues. `options` are those of `warp_emulator.WarpCta`."""
        sizes, config = self.sizes, self.kernel.config
        blocks = self.heads * self.query_tiles
        if name == "DkdvDq":
            blocks = sizes.kv_heads * -(-sizes.keys // config.keys)
        shared = {"DkdvDq": self.kernel.dkdv_dq.shared_nbytes, "Convert": self.kernel.convert.shared_nbytes}
        nbytes = shared.get(name, 16)
        blocks *= sizes.batch
        return warp_emulator.launch(self.ptx[name], self.parameters, self.memory, blocks, nbytes, **options)

    def read(self, name: str) -> np.ndarray:
        """Returns a buffer's contents."""
        return self.memory.read(self.address[name], self.arrays[name].shape, self.arrays[name].dtype)

    def compare(self) -> None:
        """Raises an `AssertionError` if a gradient or a statistic is wrong."""
        tolerance = 2**-6 if self.spec.dtype == "bfloat16" else 2**-9  # roundings of out, P and dS
        for name in ("dq", "dk", "dv"):
            wanted = self.wanted[name]
            atol = tolerance * np.abs(wanted).max() + 1e-5
            np.testing.assert_allclose(self.read(name).astype(np.float64), wanted, atol=atol, rtol=0, err_msg=name)
        stats, lse, delta = self.read("stats").swapaxes(1, 2), self.wanted["lse"], self.wanted["delta"]
        factor = log2_probability_factor(self.spec, self.kernel.config)
        lse_scaled = np.where(np.isneginf(lse), np.inf, lse * math.log2(math.e) - factor)
        np.testing.assert_allclose(stats[..., 0], lse_scaled, atol=1e-4)
        np.testing.assert_allclose(stats[..., 1], delta, atol=tolerance * np.abs(delta).max() + 1e-6)


def check(
    spec: KernelSpec,
    sizes: Sizes | None = None,
    config: DkdvDqConfig | None = None,
    schedule: str = "second",
) -> None:
    """Runs the kernels on poisoned operands, into buffers of NaN, and compares every gradient."""
    launch = Launch(spec, sizes or Sizes(), *compile_kernels(spec, config))
    launch.run("Preprocess")
    launch.run("DkdvDq", schedule=schedule)
    launch.run("Convert")
    launch.compare()
