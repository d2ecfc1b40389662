# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs custom calls in the emulators of both families: what `ops/cuda/passes.py` binds, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated_decode
import emulated_hopper
import emulated_packed
import emulated_portable_masks
import emulated_tangent
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_launch import MULTIPROCESSORS, compile_kernel, place, start
from ptx_emulator import Memory
from testing.poison import poison

from jax_fastattn import ffi
from jax_fastattn.kernels.arguments.prepass import PrepassScalars
from jax_fastattn.kernels.arguments.present import absent_scalars, present_buffers
from jax_fastattn.kernels.arguments.scalars import SCALAR_DTYPES, Scalars
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.prepass.kernel import PrepassKernel
from jax_fastattn.kernels.sm90.backward.launches import BackwardKernel
from jax_fastattn.kernels.sm90.forward.kernel import ForwardKernel
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.launch import launch_p
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV, AttentionSpec, Operands

_prepasses: dict[KernelSpec, dict[str, str]] = {}


def bind(*operands: jax.Array, kernel: KernelSpec, ints: Any, floats: Any, results: Any) -> list[jax.Array]:
    """Takes the place of `launch_p.bind`. Results are poison where the kernel writes nothing."""
    buffers = {name: buffer for name, buffer in present_buffers(kernel).items() if buffer is not None}
    arrays: dict[str, np.ndarray] = {}
    given, empty = iter(operands), iter(results)
    for name, buffer in buffers.items():
        if buffer.role == "operand":
            x = np.asarray(next(given))
            assert x.dtype == buffer.dtype, (name, x.dtype)
            arrays[name] = x.astype(np.uint8) if x.dtype == bool else x
        else:
            shape, dtype = next(empty)
            arrays[name] = np.full(shape, -77 if dtype.startswith("int") else np.nan, jnp.dtype(dtype))
    memory, placed = place(kernel, arrays)
    runs = {"prepass": _prepass, "forward": _forward, "decode": _decode, "backward": _backward, "tangent": _tangent}
    runs[kernel.op](kernel, placed, memory, tuple(ints), tuple(floats))
    names = [name for name, buffer in buffers.items() if buffer.role != "operand"]
    return [jnp.asarray(memory.read(getattr(placed, x), arrays[x].shape, arrays[x].dtype)) for x in names]


def emulate(patch: pytest.MonkeyPatch, arch: str = "sm_90a", bind: Callable[..., list[jax.Array]] = bind) -> None:
    """Lets the ops launch on an emulated GPU of an architecture."""
    patch.setattr(ffi, "arch", lambda: arch)
    patch.setattr(ffi, "multiprocessors", lambda: MULTIPROCESSORS)
    patch.setattr(launch_p, "bind", bind)


def compare_with_reference(spec: AttentionSpec, operands: Operands, dlse: jax.Array | None = None) -> None:
    """Compares a call and its gradients, on poisoned operands, with the float32 reference.

    Residuals of the gradients are those of the emulated forward kernel.

    Args:
        spec: the static facts of the call.
        operands: its arrays.
        dlse: the cotangent of log-sum-exps; None for zero.
    """
    dout = np.random.default_rng(1).standard_normal((*operands.query.shape[:3], operands.value.shape[3]))
    dout = jnp.asarray(dout, jnp.bfloat16)
    poisoned, poisoned_dout, poisoned_dlse = poison(spec, operands, dout, dlse)
    names = [*QKV, *(x for x in ("bias", "sinks") if getattr(operands, x) is not None)]
    out, lse = cuda.forward(spec, poisoned)
    found = cuda.backward(spec, poisoned, out, lse, poisoned_dout, poisoned_dlse, names)

    def loss(*given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        results = attention_reference(spec, operands._replace(**dict(zip(names, given, strict=True))))
        total = (results[0] * dout.astype(jnp.float32)).sum()
        told = 0.0 if dlse is None else jnp.where(jnp.isfinite(results[1]), results[1] * dlse, 0.0).sum()
        return total + told, results

    single = [getattr(operands, x).astype(jnp.float32) for x in names]
    gradients, wanted = jax.grad(loss, argnums=tuple(range(len(single))), has_aux=True)(*single)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(wanted[1]), atol=1e-4, rtol=1e-4)
    results = {"out": (out, wanted[0], 2**-7)}
    results |= {x: (getattr(found, x), y, 2**-6) for x, y in zip(names, gradients, strict=True)}
    for name, (got, expected, tolerance) in results.items():
        assert got.shape == expected.shape, name
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
        # The gradient of a bias of rows may be 0, apart from roundings of the output.
        atol = tolerance * np.abs(expected).max() + (1e-4 if name == "bias" else 1e-5)
        np.testing.assert_allclose(got, expected, atol=atol, err_msg=name)


def _prepass(kernel: KernelSpec, buffers: Any, memory: Memory, ints: Any, floats: Any) -> None:
    assert not floats
    if kernel not in _prepasses:
        _prepasses[kernel] = compile_kernel(PrepassKernel(kernel), kernel)
    for launch in PrepassKernel(kernel).launches(buffers, PrepassScalars(*ints)):
        start(launch, _prepasses[kernel], memory, finds_races=True)


def _forward(kernel: KernelSpec, buffers: Any, memory: Memory, ints: Any, floats: Any) -> None:
    scalars = _scalars(kernel, ints, floats)
    if kernel.family == "sm80":
        emulated_portable_masks.run_launches(kernel, buffers, memory, scalars)
        return
    for launch in ForwardKernel(kernel).launches(buffers, scalars):
        emulated_hopper.start(launch, emulated_hopper.forward_texts(kernel), memory)


def _decode(kernel: KernelSpec, buffers: Any, memory: Memory, ints: Any, floats: Any) -> None:
    emulated_decode.run_launches(kernel, buffers, memory, _scalars(kernel, ints, floats))


def _backward(kernel: KernelSpec, buffers: Any, memory: Memory, ints: Any, floats: Any) -> None:
    scalars = _scalars(kernel, ints, floats)
    if kernel.family == "sm80":
        emulated_portable_masks.run_launches(kernel, buffers, memory, scalars)
        return
    host = BackwardKernel(kernel)
    few = emulated_packed.few_slots if kernel.packed else emulated_hopper.few_heads
    for launch in host.launches(buffers, scalars, few(host, scalars)):
        emulated_hopper.start(launch, emulated_hopper.backward_texts(kernel), memory)


def _tangent(kernel: KernelSpec, buffers: Any, memory: Memory, ints: Any, floats: Any) -> None:
    emulated_tangent.run_launches(kernel, buffers, memory, _scalars(kernel, ints, floats))


def _scalars(kernel: KernelSpec, ints: Any, floats: Any) -> Scalars:
    absent = absent_scalars(kernel)
    names = [name for name in SCALAR_DTYPES if name not in absent]
    scalars = Scalars(**dict(zip(names, (*ints, *floats), strict=True)), **dict.fromkeys(absent))
    assert scalars.multiprocessors == MULTIPROCESSORS
    return scalars
