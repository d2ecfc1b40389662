# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles a compile key to an object file with CuTe DSL.

Compilation needs no GPU. Importing this module takes seconds.

The object holds the cubin of every kernel that the host function launches, and the host function as CPU code. The
architecture is an option of each compilation, so that neither the environment nor later compilations see it.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_ptr

from jax_fastattn.compilation import libraries
from jax_fastattn.kernels.arguments.prepass import PrepassScalars
from jax_fastattn.kernels.arguments.present import absent_scalars, launch_buffers, named_buffers
from jax_fastattn.kernels.arguments.scalars import SCALAR_DTYPES, Scalars
from jax_fastattn.kernels.key import KernelSpec

# csrc/store.cc looks the host function up under this name.
FUNCTION_PREFIX = "jax_fastattn"

# XLA aligns buffers to 256 bytes; kernels copy 16 at a time.
_ALIGNMENT = 16

# The classes of kernels, below `jax_fastattn.kernels`. Importing all of them takes 0.15 s, and a process needs few.
_KERNELS = {
    # The prepass is portable, and the same for both families.
    ("sm80", "prepass"): "prepass.kernel.PrepassKernel",
    ("sm80", "forward"): "sm80.forward.kernel.ForwardKernel",
    ("sm80", "decode"): "sm80.decode.kernel.DecodeKernel",
    ("sm80", "backward"): "sm80.backward.launches.BackwardKernel",
    ("sm80", "tangent"): "sm80.tangent.kernel.TangentKernel",
    ("sm90", "forward"): "sm90.forward.kernel.ForwardKernel",
    ("sm90", "decode"): "sm90.decode.kernel.DecodeKernel",
    ("sm90", "backward"): "sm90.backward.launches.BackwardKernel",
    ("sm90", "tangent"): "sm90.tangent.kernel.TangentKernel",
}
_DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int8": cutlass.Int8,
    "bool": cutlass.Uint8,
}

# Tracing changes state of the whole process.
_lock = threading.Lock()


def kernel_class(family: str, op: str) -> Any:
    """Returns the class of a kernel, which takes a spec; imports its module."""
    module, _, name = _KERNELS[family, op].rpartition(".")
    return getattr(importlib.import_module(f"jax_fastattn.kernels.{module}"), name)


def compile_kernel(spec: KernelSpec) -> bytes:
    """Compiles the kernel of `spec` for `spec.arch`; is safe to call from several threads.

    Returns:
        An ELF object file with one function, `FUNCTION_PREFIX`. It takes the buffers that `launch_buffers(spec)` has,
        then the scalars of `launch_scalars`, then the stream.
    """
    return _compile(spec, lambda *_: None)


def compile_launches(spec: KernelSpec) -> tuple[bytes, dict[str, int]]:
    """Compiles the kernel of `spec`; returns its object file, and dynamic shared memory by kernel."""
    shared_bytes: dict[str, int] = {}

    def read_launches(dsl: Any, module: Any, function_name: str) -> None:
        del dsl, function_name
        found = re.findall(r"cuda\.kernel @(\w+)\(.*smem\.config_smem_size = (\d+) : i64", str(module))
        shared_bytes.update({name: int(size) for name, size in found})

    return _compile(spec, read_launches), shared_bytes


def _compile(spec: KernelSpec, on_traced: Callable[[Any, Any, str], None]) -> bytes:
    imported: int = cutlass.CUDA_VERSION.major  # pyright: ignore[reportPrivateImportUsage] (in no `__all__`)
    if imported != libraries.toolkit():
        raise RuntimeError(
            f"nvidia-cutlass-dsl was imported with its libraries for CUDA {imported}, but compiled kernels are kept as "
            f"those of CUDA {libraries.toolkit()}; install its libraries for one CUDA version only"
        )
    with _lock:
        _open_runtime()
        compiled = cute.compile(
            kernel_class(spec.family, spec.op)(spec),
            *fake_arguments(spec),
            options=f"--gpu-arch {spec.gpu_arch}",
            trace_finalize_hooks=on_traced,
            no_jit_engine=True,  # where the GPU can run the kernel, an engine that runs it would be made, too
        )
        return compiled.dump_to_object(FUNCTION_PREFIX)


def fake_arguments(spec: KernelSpec) -> list[Any]:
    """Returns what a host function is traced with."""
    pointers = {name: _fake_pointer(dtype) for name, dtype in launch_buffers(spec).items()}
    buffers = named_buffers(spec, pointers)
    return [buffers, _fake_scalars(spec), make_fake_stream()]


def _fake_scalars(spec: KernelSpec) -> Scalars | PrepassScalars:
    if spec.op == "prepass":
        absent = () if spec.features else tuple(PrepassScalars._field_defaults)
        return PrepassScalars(*[None if name in absent else cutlass.Int32(0) for name in PrepassScalars._fields])
    absent = absent_scalars(spec)
    return Scalars(**{name: None if name in absent else _DTYPES[x](0) for name, x in SCALAR_DTYPES.items()})


def _fake_pointer(dtype: str | None) -> Any:
    if dtype is None:
        return None
    return make_ptr(_DTYPES[dtype], _ALIGNMENT, cute.AddressSpace.gmem, assumed_align=_ALIGNMENT)


@cute.jit
def _nothing() -> None:
    pass


@functools.cache
def _open_runtime() -> None:
    # Writing an object needs symbols of the DSL's runtime library. That is opened for the first function that can run
    # on this machine, hence not for kernels where there is no GPU, or another one (CuTe DSL 4.8.1: "Failed to dump
    # object file with PIC relocation").
    cute.compile(_nothing)
