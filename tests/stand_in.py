# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Launches on the CPU, against a stand-in for the CuTe DSL runtime, the CUDA driver and zlib (csrc/stand_in.cc).

The extension, the custom call, XLA and its caches are the real ones; the kernel is an ELF header and some bytes.
Also run by tests in processes of their own: the functions here are what two processes have in common.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import platform
import struct
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_fastattn import ffi
from jax_fastattn.compilation import cache
from jax_fastattn.ffi import call
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.limits import UNBOUNDED

SOURCES = [Path(__file__).parent / "csrc" / name for name in ("stand_in.cc", "call_again.cc")]
SPEC = configured(KernelSpec("forward", "sm_90a", "bfloat16", 64, 32, key_value_seq_lengths=True))
INTS = (2, 193, 257, 4, UNBOUNDED, 0, 0)
FLOATS = (0.125, 30.0)
MACHINES = {"x86_64": 62, "aarch64": 183}

launch_p = Primitive("launch")
launch_p.multiple_results = True


@launch_p.def_abstract_eval
def _abstract(query: Any, key: Any, value: Any, *_: Any, **params: Any) -> list[Any]:
    del key, params
    rows = query.shape[:3]
    return [
        jax.core.ShapedArray((*rows, value.shape[3]), query.dtype),
        jax.core.ShapedArray(rows, jnp.float32),
    ]


def _lower(ctx: Any, *operands: Any, spec: KernelSpec, ints: Any, floats: Any) -> Any:
    return ffi.custom_call(ctx, spec, operands, ints, floats)


for platform_name in ("cuda", "cpu"):
    mlir.register_lowering(launch_p, _lower, platform=platform_name, inline=False)


def launch(*arrays: Any, spec: KernelSpec = SPEC, ints: Any = INTS, floats: Any = FLOATS) -> list[Any]:
    """Binds a launch; traceable."""
    return launch_p.bind(*arrays, spec=spec, ints=ints, floats=floats)


def operands(batch: int = 2, query_length: int = 193, key_length: int = 257) -> list[Any]:
    """Query, key, value and key_value_seq_lengths, as `SPEC` has them."""
    return [
        jnp.ones((batch, query_length, 4, 64), jnp.bfloat16),
        jnp.ones((batch, key_length, 2, 64), jnp.bfloat16),
        jnp.ones((batch, key_length, 2, 32), jnp.bfloat16),
        jnp.full((batch,), key_length, jnp.int32),
    ]


def elf_object(machine: int | None = None, content: bytes = b"kernel" * 100, section_table: int = 0) -> bytes:
    """What passes for an object file: the header of one, for this CPU or another."""
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    number = MACHINES[platform.machine()] if machine is None else machine
    entries = (64, 5, 1) if section_table else (0, 0, 0)
    return identity + struct.pack("<HHIQQQIHHHHHH", 1, number, 1, 0, 0, section_table, 0, 64, 0, 0, *entries) + content


def build(directory: Path) -> Path:
    """Compiles the stand-in."""
    path = directory / "stand_in.so"
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *options, f"-I{jax.ffi.include_dir()}", *map(str, SOURCES), "-o", str(path)], check=True)
    return path


def install(library: Path) -> ctypes.CDLL:
    """Makes this process launch on the CPU through the stand-in. Once per process: libraries stay open."""
    from jax_fastattn.ffi import _ffi

    ffi.register()
    _ffi.set_library_paths(runtime=str(library), driver=str(library), zlib=str(library))
    jax.ffi.register_ffi_target(ffi.TARGET_NAME, _ffi.launch_on_host, platform="cpu")
    return ctypes.CDLL(str(library))


_numbers = itertools.count()


def stand_in_compiler(patch: Any, kernel: bytes | None = None, name: str | None = None) -> None:
    """Compiles nothing: every spec yields `kernel`, under a key that no test had before (or that of `name`).

    Without `kernel` an object that no test had before either.
    """
    salt = name or f"test {next(_numbers)}"
    patch.setattr(call, "_kernels", {})
    patch.setattr(call, "_compile", lambda spec: elf_object(content=salt.encode() * 100) if kernel is None else kernel)
    patch.setattr(cache, "kernel_key", lambda spec: hashlib.sha256(f"{salt} {spec}".encode()).hexdigest())
