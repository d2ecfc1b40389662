# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels of tangents, runs their PTX in the emulators and compares with a float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import emulated_hopper
import numpy as np
from emulated_backward import DTYPES, FORWARD_TOLERANCE, Sizes, draw_operands, fill, visibility, with_sinks
from emulated_launch import compile_kernel, launch_scalars, place, start
from ptx_emulator import Memory

from jax_fastattn.compilation.compiler import kernel_class
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.key import KernelSpec

Arrays = dict[str, np.ndarray]


@functools.cache
def texts(spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of the kernel; see `compile_kernel`."""
    return compile_kernel(kernel_class(spec.family, spec.op)(spec), spec)


def check(spec: KernelSpec, sizes: Sizes | None = None, *, alike: float = 0.0) -> None:
    """Runs the kernel on poisoned operands, into buffers of NaN, and compares both tangents.

    Args:
        alike: is added to each element of tangents of keys, so that all logits of a row move nearly alike.
    """
    sizes = sizes or Sizes()
    arrays, wanted = draw(spec, sizes, alike)
    found = run(spec, sizes, arrays)
    tolerance = FORWARD_TOLERANCE[spec.result_dtype]
    for name, expected in wanted.items():
        got, largest = found[name].astype(np.float64), np.abs(expected).max()
        assert largest > 0 or not spec.moves_scores
        np.testing.assert_allclose(got, expected, atol=tolerance * largest, rtol=0, err_msg=name)


def draw(spec: KernelSpec, sizes: Sizes, alike: float) -> tuple[Arrays, Arrays]:
    """Draws operands, their results and tangents, poisoned, and returns them with the tangents of the results."""
    arrays, wanted = draw_operands(spec, sizes)
    clean = draw_operands(spec, sizes)[0]
    out, lse = wanted["out"], wanted["lse"]
    if codes.SINKS in spec.features:
        arrays["sinks"], out, lse = with_sinks(spec, sizes, wanted)
        arrays |= {"out": out.astype(arrays["out"].dtype), "lse": lse.astype(np.float32)}
    random, dtype = np.random.default_rng(2), DTYPES[spec.result_dtype]
    tangents = {name: random.standard_normal(clean[name].shape) for name in spec.moved}
    if alike:
        tangents["key"] += alike
    tangents = {name: x.astype(dtype) for name, x in tangents.items()}
    sees, seen, pairs = visibility(spec, sizes)
    expected = reference(spec, sizes, _numbers(arrays), _numbers(tangents), pairs, lse)
    hidden = {"query": ~sees, "key": ~seen, "value": ~seen}
    return arrays | {f"{name}_tangent": fill(x, hidden[name]) for name, x in tangents.items()}, expected


def _numbers(arrays: Arrays) -> Arrays:
    """Returns arrays in float64, and 0 where they are poisoned."""
    return {name: np.nan_to_num(x.astype(np.float64), posinf=0.0, neginf=0.0) for name, x in arrays.items()}


def reference(
    spec: KernelSpec, sizes: Sizes, arrays: Arrays, tangents: Arrays, pairs: np.ndarray, lse: np.ndarray
) -> Arrays:
    """Returns the tangents of output and log-sum-exp."""
    out_tangent = np.zeros((*arrays["query"].shape[:3], spec.v_head_dim))
    lse_tangent = np.zeros(out_tangent.shape[:3])
    for b, n in np.ndindex(sizes.batch, sizes.kv_heads * spec.group):
        kv = n // spec.group
        query, key, value = arrays["query"][b, :, n], arrays["key"][b, :, kv], arrays["value"][b, :, kv]
        moved = {name: x[b, :, n if name == "query" else kv] for name, x in tangents.items()}
        with np.errstate(all="ignore"):
            logits, moves = sizes.scale * query @ key.T, np.zeros((len(query), len(key)))
            moves += sizes.scale * (moved["query"] @ key.T) if spec.moves_query else 0.0
            moves += sizes.scale * (query @ moved["key"].T) if spec.moves_key else 0.0
            if {codes.SOFT_CAP, codes.EXACT_SOFT_CAP} & {*spec.features}:
                tanh = np.tanh(logits / sizes.cap)
                logits, moves = sizes.cap * tanh, moves * (1 - tanh**2)
            p = np.where(pairs[b], np.exp(logits - np.where(np.isneginf(lse[b, :, n]), 0, lse[b, :, n])[:, None]), 0)
            moves = np.where(pairs[b], moves, 0)
        mean = (p * moves).sum(1)
        out_tangent[b, :, n] = (p * (moves - mean[:, None])) @ value
        out_tangent[b, :, n] += p @ moved["value"] if spec.moves_value else 0.0
        lse_tangent[b, :, n] = mean
    return {"out_tangent": out_tangent, "lse_tangent": lse_tangent}


def run(spec: KernelSpec, sizes: Sizes, arrays: Arrays) -> Arrays:
    """Returns what the kernel makes of operands."""
    rows = arrays["query"].shape[:3]
    results = {
        "out_tangent": np.full((*rows, spec.v_head_dim), np.nan, arrays["query"].dtype),
        "lse_tangent": np.full(rows, np.nan, np.float32),
    }
    memory, buffers = place(spec, arrays | results)
    run_launches(spec, buffers, memory, launch_scalars(spec, sizes))
    return {name: memory.read(getattr(buffers, name), x.shape, x.dtype) for name, x in results.items()}


def run_launches(spec: KernelSpec, buffers: Any, memory: Memory, scalars: Scalars) -> None:
    """Runs the launches of the kernel of either family."""
    kernel: Any = kernel_class(spec.family, spec.op)(spec)
    for launch in kernel.launches(buffers, scalars):
        if spec.family == "sm90":
            emulated_hopper.start(launch, texts(spec), memory)
        else:
            start(launch, texts(spec), memory, schedule="random", finds_races=True)
