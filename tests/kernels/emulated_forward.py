# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the portable forward kernel, runs its PTX in `ptx_emulator` and compares with a float64 reference."""

from __future__ import annotations

import tempfile

import cutlass
import numpy as np
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from emulated_backward import DEVICE_DTYPES, Sizes, draw_operands, with_sinks
from ptx_emulator import Memory, launch

from jax_fastattn.kernels.sm80.config import ForwardConfig
from jax_fastattn.kernels.sm80.forward import ForwardKernel
from jax_fastattn.kernels.spec import KernelSpec, launch_buffers


def compile_forward(spec: KernelSpec, config: ForwardConfig | None = None) -> tuple[ForwardKernel, str]:
    """Returns the kernel object and its PTX; no GPU needed."""

    def pointer(dtype: str | None) -> cute.Pointer | None:
        return dtype and make_ptr(DEVICE_DTYPES[dtype], 16, cute.AddressSpace.gmem, assumed_align=16)

    buffers = [pointer(dtype) for dtype in launch_buffers(spec).values()]
    scalars = [cutlass.Int32(0)] * 8 + [cutlass.Float32(0.0)] * 2
    kernel = ForwardKernel(spec, config)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {spec.arch} --keep-ptx --dump-dir {folder}"
        return kernel, cute.compile(kernel, *buffers, *scalars, make_fake_stream(), options=options).artifacts.PTX


def check(spec: KernelSpec, sizes: Sizes | None = None, config: ForwardConfig | None = None) -> None:
    """Runs the kernel on poisoned operands, into buffers of NaN, and compares output and lse."""
    sizes = sizes or Sizes()
    kernel, ptx = compile_forward(spec, config)
    arrays, wanted = draw_operands(spec, sizes)
    out, lse, heads = wanted["out"], wanted["lse"], sizes.kv_heads * spec.group
    if spec.sinks:
        arrays["sinks"], out, lse = with_sinks(spec, sizes, wanted)
    arrays |= {"out": np.full(out.shape, np.nan, arrays["query"].dtype)}
    arrays |= {"lse": np.full(lse.shape, np.nan, np.float32)}
    memory = Memory()
    address = {name: memory.add(arrays[name]) for name, dtype in launch_buffers(spec).items() if dtype is not None}
    scalars = [sizes.queries, sizes.keys, heads, sizes.left, sizes.right, heads, sizes.scale, sizes.cap]
    blocks = sizes.batch * heads * -(-sizes.queries // kernel.config.rows)
    shared_nbytes = kernel.config.shared_memory(spec.head_dim, spec.v_head_dim)
    launch(ptx, [*address.values(), *scalars], memory, blocks, shared_nbytes)

    tolerance = 2**-7 if spec.dtype == "bfloat16" else 2**-10  # a few roundings of P and of the output
    got = memory.read(address["out"], out.shape, arrays["out"].dtype).astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(memory.read(address["lse"], lse.shape, np.float32), lse, atol=1e-4, rtol=1e-5)
