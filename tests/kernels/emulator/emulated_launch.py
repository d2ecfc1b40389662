# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What emulators of both families read from a host function: the PTX of its kernels, and its launches."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cutlass
import jax
import kept_kernels
import numpy as np
import warp_emulator
from cutlass import cute
from cutlass.base_dsl.compiler import CompilerDiagnosticError
from emulated_backward import Sizes, bias_scalars
from ptx_emulator import Memory

from jax_fastattn.compilation.compiler import fake_arguments
from jax_fastattn.kernels.arguments.present import launch_buffers, named_buffers
from jax_fastattn.kernels.arguments.scalars import VISIT_SCALARS, Scalars
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda.split import SPLIT, side_by_side

# So many that every CTA works on several tiles.
MULTIPROCESSORS = 3

_side_by_side = jax.jit(side_by_side)


def compile_kernel(kernel: Any, spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of a host function's kernels by class and method; no GPU needed.

    The name of a virtual architecture makes ptxas check the text and generate no code, which is a third of the work.
    """
    virtual = spec.gpu_arch.replace("sm_", "compute_")
    options = f"--gpu-arch {spec.gpu_arch} --ptxas-options --gpu-name={virtual}"

    def compiled() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            with _without_code():
                cute.compile(kernel, *fake_arguments(spec), options=f"--keep-ptx --dump-dir {folder} {options}")
            (path,) = Path(folder).glob("*.ptx")
            return path.read_bytes()

    ptx = kept_kernels.kernel(f"PTX, {options}", spec, kernel, compiled).decode()
    entries = re.split(r"(?=\.visible \.entry)", ptx)[1:]
    name = re.compile(r"cutlass_(\w+?)_jax_fastattnkernels[a-z0-9_]*([A-Z]\w*?)_object")
    found = [(name.search(text.split("(")[0]), text) for text in entries]
    return {f"{names[2]}.{names[1]}": text for names, text in found}


@contextlib.contextmanager
def _without_code() -> Iterator[None]:
    """Ignores that ptxas generated no code; if ptxas rejects the text, its log has a message."""
    try:
        yield
    except CompilerDiagnosticError as error:
        if error.backend != "ptxas" or error.ptxas_error != "with error code:":
            raise


def launch_scalars(spec: KernelSpec, sizes: Sizes) -> Scalars:
    """The scalars of a launch."""
    return Scalars(
        batch=sizes.batch,
        query_length=sizes.queries,
        key_length=sizes.keys,
        num_heads=sizes.kv_heads * spec.group,
        window_left=sizes.left,
        window_right=sizes.right,
        sinks_stride=sizes.kv_heads * spec.group,
        multiprocessors=MULTIPROCESSORS,
        **dict.fromkeys((*VISIT_SCALARS, "side_heads", "pages")),
        **bias_scalars(spec, sizes),
        bias_parts=sizes.bias_parts if spec.sums_dbias else None,
        scale=sizes.scale,
        logits_soft_cap=sizes.cap,
    )


def place(spec: KernelSpec, arrays: dict[str, np.ndarray]) -> tuple[Memory, Any]:
    """A memory with the buffers of a launch, and their addresses. Operands of a call may be whole."""
    memory = Memory()
    dtypes = launch_buffers(spec)
    if spec.products == "bf16x3":
        whole = {name for name in SPLIT if name in arrays and arrays[name].dtype == np.float32}
        arrays = arrays | {name: np.asarray(_side_by_side(arrays[name])) for name in whole}
    addresses = {name: dtype and memory.add(arrays[name]) for name, dtype in dtypes.items()}
    return memory, named_buffers(spec, addresses)


def text(launch: Launch, texts: dict[str, str]) -> str:
    """The PTX of a launch's kernel, given the kernels of its host function."""
    kernel: Any = launch.kernel
    return texts[f"{type(kernel.__self__).__name__}.{kernel.__name__}"]


def start(launch: Launch, texts: dict[str, str], memory: Memory, **options: Any) -> None:
    """Runs a launch of any kernel but Hopper's, given the kernels of its host function.

    `options` are those of `warp_emulator.WarpCta`.
    """
    grid, nbytes = number(launch.grid), max(launch.shared_bytes, 16)
    options |= {"begins_early": launch.begins_early}
    warp_emulator.launch(text(launch, texts), arguments(launch), memory, grid, nbytes, **options)


def arguments(launch: Launch) -> list[Any]:
    """The parameters of a kernel, one by one; TMA's come before them."""
    return [number(x) for members in launch.arguments for x in _flat(members) if x is not None]


def _flat(members: tuple[Any, ...]) -> list[Any]:
    """The members of a tuple and of those in it."""
    return [y for x in members for y in (_flat(x) if isinstance(x, tuple) else [x])]


def number(x: Any) -> Any:
    return x.value if isinstance(x, cutlass.Int32) else x
