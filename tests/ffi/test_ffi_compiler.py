# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The compiler, in a process without a GPU: objects for any architecture, the same every time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from resources import KernelResources, inspect_kernel, kernel_resources

from jax_fastattn.compilation import libraries
from jax_fastattn.ffi import registry
from jax_fastattn.kernels.architectures import ARCHITECTURES
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia_cutlass_dsl") is None, reason="nvidia-cutlass-dsl is not installed"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass"),
]

FORWARD = configured(KernelSpec("forward", "sm_80", "bfloat16", 64, 32, group=2, window_right=True))
BACKWARD = configured(dataclasses.replace(FORWARD, op="backward"))


@pytest.fixture(scope="module")
def compiler() -> Any:
    from jax_fastattn.compilation import compiler

    return compiler


@pytest.mark.parametrize(("spec", "kernels"), [(FORWARD, 1), (BACKWARD, 3)], ids=["forward", "backward"])
def test_one_object_holds_every_kernel_of_an_operation(compiler: Any, spec: KernelSpec, kernels: int) -> None:
    found = inspect_kernel(spec)
    assert len(found) == kernels
    for resources in found:
        assert 16 <= resources.registers <= 255
        assert resources.shared_bytes <= 163 * 1024
    assert any(resources.shared_bytes > 0 for resources in found)


def _chip(kernel: bytes) -> int:
    """The architecture of the first cubin, from the flags of its header: 80 for sm_80."""
    cubin = kernel[kernel.index(b"\x7fELF", 1) :]
    flags, version = int.from_bytes(cubin[48:52], "little"), cubin[8]
    return (flags >> 8 if version >= 8 else flags) & 0xFF  # CUDA 13 writes version 8, CUDA 12 version 7


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architecture_is_an_option_of_one_compilation(compiler: Any, arch: str) -> None:
    """The compiler of CUDA 12 writes code for sm_101a where it is asked for sm_110a; a reason says so."""
    environment = dict(os.environ)
    kernel = compiler.compile_kernel(dataclasses.replace(FORWARD, arch=arch))
    assert (_chip(kernel) == int(arch.strip("sm_a"))) == (registry.compiler_reasons(arch) == [])
    assert dict(os.environ) == environment


def test_threads_compile_side_by_side(compiler: Any) -> None:
    specs = [dataclasses.replace(FORWARD, arch=arch) for arch in ("sm_80", "sm_90a", "sm_80", "sm_90a")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        kernels = list(pool.map(compiler.compile_kernel, specs))
    assert kernels[0] == kernels[2]
    assert kernels[1] == kernels[3]
    assert kernels[0] != kernels[1]


def test_every_kernel_has_a_class(compiler: Any) -> None:
    classes = [compiler.kernel_class(*key) for key in compiler._KERNELS]
    assert all(isinstance(x, type) for x in classes) and len({*classes}) == len(classes)


def test_another_process_compiles_the_same_bytes(compiler: Any) -> None:
    """Else JAX's compilation cache would miss after a rebuild. It imports no kernels of the other family."""
    code = (
        "import hashlib, pickle, sys; from jax_fastattn.compilation import compiler; "
        "print(hashlib.sha256(compiler.compile_kernel(pickle.load(sys.stdin.buffer))).hexdigest()); "
        "print(sum('.sm80.' in x for x in sys.modules) > 0, sum('.sm90.' in x for x in sys.modules))"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, input=pickle.dumps(FORWARD), env=environment, capture_output=True, check=True)
    digest = hashlib.sha256(compiler.compile_kernel(FORWARD)).hexdigest()
    assert done.stdout.decode().splitlines() == [digest, "True 0"]


def test_compiler_with_other_libraries_than_the_key_says(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "toolkit", lambda: 11)
    with pytest.raises(RuntimeError, match=r"libraries for CUDA 1[23], but .* those of CUDA 11; install its libraries"):
        compiler.compile_kernel(FORWARD)


def test_resources_of_something_else() -> None:
    with pytest.raises(ValueError, match="no cubin"):
        kernel_resources(b"\x7fELF" + b"\0" * 100, {})


def test_resources_name_every_launched_kernel(compiler: Any) -> None:
    kernel = compiler.compile_kernel(FORWARD)
    (found,) = kernel_resources(kernel, {})
    assert found == KernelResources(found.name, found.registers, found.local_bytes, shared_bytes=0)
    with pytest.raises(ValueError, match="expected"):
        kernel_resources(kernel, {"another kernel": 1})
