# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A kernel launch as an XLA custom call that carries its kernel, so that a later process needs nothing from this one.

A kernel is looked up in memory, then on disk. If neither has it, it is compiled, here or in a worker.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib.version
from jax.interpreters import mlir

from jax_fastattn.compilation import cache, workers
from jax_fastattn.ffi import registry
from jax_fastattn.kernels.arguments.present import launch_buffers
from jax_fastattn.kernels.key import KernelSpec

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kernel:
    """A compiled kernel in the form in which a custom call carries it.

    Attributes:
        key: its name, see `cache.kernel_key`.
        digest: SHA-256 of the object file, in hexadecimal.
        text: the object file, compressed and in base64: XLA keeps attributes as escaped text, in which raw bytes would
            take more than twice their size.
        size: bytes of the object file.
    """

    key: str
    digest: str
    text: str
    size: int

    @classmethod
    def of(cls, key: str, kernel: bytes) -> _Kernel:
        text = base64.b64encode(zlib.compress(kernel, 9)).decode("ascii")
        return cls(key, hashlib.sha256(kernel).hexdigest(), text, len(kernel))


_kernels: dict[str, _Kernel] = {}  # by key
_compile_count = 0

# Nobody holds the first of these locks while something compiles. A kernel's own one keeps two threads from compiling
# it, and `_turn` is the compiler's, which compiles one kernel at a time.
_lock = threading.Lock()
_locks: dict[str, threading.Lock] = {}  # by key
_turn = threading.Lock()


def compile_count() -> int:
    """Returns how many kernels this process has compiled; those found on disk do not count."""
    return _compile_count


def prepare(spec: KernelSpec) -> None:
    """Makes sure that the kernel of `spec` is in memory and on disk, as a lowering would."""
    _kernel(spec, tuple)


def custom_call(
    ctx: mlir.LoweringRuleContext,
    spec: KernelSpec,
    operands: Sequence[Any],
    ints: tuple[int, ...],
    floats: tuple[float, ...],
    foreseen: Callable[[], Iterable[KernelSpec]] = tuple,
) -> Sequence[Any]:
    """Emits the launch of the kernel of `spec`, in a lowering rule for CUDA.

    Args:
        ctx: the context of a primitive whose operands are `operands` and whose results are the kernel's.
        operands: the operands that `launch_buffers(spec)` has, in its order, as row-major ir values.
        ints, floats: see `launch_scalars`.
        foreseen: returns other kernels that will be needed soon. It is called if this one has to be compiled, and
            workers compile them meanwhile.

    Returns:
        The results, as ir values.

    Raises:
        ValueError: the kernel takes another number of operands and results, or one of them in another dtype; or
            `jax.export` would refuse the call.
        ImportError: the extension or the compiler is not installed.
    """
    names = {name: dtype for name, dtype in launch_buffers(spec).items() if dtype is not None}
    count = len(operands) + len(ctx.avals_out)
    if count != len(names):
        raise ValueError(
            f"the {spec.op} kernel takes {len(names)} buffers ({', '.join(names)}); found {len(operands)} operands and "
            f"{len(ctx.avals_out)} results"
        )
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    for (name, dtype), aval in zip(names.items(), avals, strict=True):
        if aval.dtype != dtype:
            raise ValueError(f"the {spec.op} kernel takes `{name}` in {dtype}; found {aval.dtype}")
    _check_export(ctx)
    registry.register()
    kernel = _kernel(spec, foreseen)
    attributes = {
        "key": mlir.ir.StringAttr.get(kernel.key),
        "arch": mlir.ir.StringAttr.get(spec.gpu_arch),
        "digest": mlir.ir.StringAttr.get(kernel.digest),
        "object": mlir.ir.StringAttr.get(kernel.text),
        "object_size": _int32(kernel.size),
        "num_buffers": _int32(count),
        "ints": mlir.ir.DenseI32ArrayAttr.get(ints),
        "floats": mlir.ir.DenseF32ArrayAttr.get(floats),
    }
    results = jax.ffi.ffi_lowering(registry.TARGET_NAME, backend_config=attributes)(ctx, *operands)
    return _behind_barrier(results) if _updates_are_fused() else results


def _updates_are_fused() -> bool:
    """Returns whether XLA fuses a launch with updates by its results, and does so wrongly: in jaxlib 0.11.2 alone.

    If the results are used elsewhere, too, it keeps the launch and fuses a copy of it, as in the gradient of a scan
    over layers. If what is stored was computed from the results, it finds a cycle, and refuses the program.
    """
    return jaxlib.version.__version__ == "0.11.2"


def _behind_barrier(results: Sequence[Any]) -> Sequence[Any]:
    """Hides from XLA that a launch computes these values, until it has fused what it fuses."""
    from jax.extend.mlir.dialects import stablehlo  # its package loads Pallas

    return stablehlo.OptimizationBarrierOp(list(results)).results


def _check_export(ctx: mlir.LoweringRuleContext) -> None:
    """Raises if `jax.export` would refuse the launch of a kernel.

    JAX's own error comes once kernels are compiled, and prints each custom call with its kernel: 20 000 characters for
    one of them.
    """
    if not ctx.module_context.lowering_parameters.for_export:
        return
    disabled = _disabled_checks()
    if disabled is None or any(check.is_custom_call() in (registry.TARGET_NAME, "ALL") for check in disabled):
        return
    flag = f'disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("{registry.TARGET_NAME}")]'
    raise ValueError(
        "jax.export refuses the custom calls that launch jax_fastattn's kernels, since JAX does not know that they "
        f'stay compatible. Pass `{flag}` to `jax.export.export`, or `implementation="xla"` to attention.'
    )


def _disabled_checks() -> Sequence[Any] | None:
    """Returns the checks that `jax.export` was told to disable; None if they cannot be found.

    JAX tells lowering rules only that they lower for an export. The disabled checks are in the frame of `do_export`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "do_export" and frame.f_globals.get("__name__") == "jax._src.export._export":
            return frame.f_locals.get("disabled_checks")
        frame = frame.f_back
    return None


def _int32(value: int) -> Any:
    return mlir.ir.IntegerAttr.get(mlir.ir.IntegerType.get_signless(32), value)


def _kernel(spec: KernelSpec, foreseen: Callable[[], Iterable[KernelSpec]]) -> _Kernel:
    key = cache.kernel_key(spec)
    with _lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _kernels:
            kernel = cache.load(key)
            if kernel is None:
                workers.start(_others(spec, foreseen))
                kernel = _made(spec, key)
            _kernels[key] = _Kernel.of(key, kernel)
        return _kernels[key]


def _others(spec: KernelSpec, foreseen: Callable[[], Iterable[KernelSpec]]) -> Iterator[KernelSpec]:
    """Yields the other kernels that are foreseen. Nothing is traced if workers do not ask for the first one."""
    yield from (other for other in foreseen() if other != spec)


def _made(spec: KernelSpec, key: str) -> bytes:
    """Returns a kernel that is not on disk: from its worker if that delivers soon, else compiled here."""
    if (kernel := workers.take(key)) is not None:
        return kernel
    with _turn:
        if (kernel := workers.delivered(key)) is not None:  # while another thread compiled
            return kernel
        kernel = _compile(spec)
    workers.abandon(key)
    cache.store(key, kernel)
    return kernel


def _compile(spec: KernelSpec) -> bytes:
    global _compile_count
    from jax_fastattn.compilation import compiler  # loads the compiler, which takes seconds

    _logger.info("compiling %s", spec)
    kernel = compiler.compile_kernel(spec)
    _compile_count += 1
    return kernel
