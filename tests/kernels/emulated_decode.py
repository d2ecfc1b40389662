# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the decoding kernels, runs their PTX in the emulators and compares with a float64 reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import emulated_hopper
import numpy as np
import warp_emulator
from emulated_backward import Sizes, draw_operands, reference, with_sinks
from emulated_launch import MULTIPROCESSORS, arguments, compile_kernel, launch_scalars, number, place, text
from ptx_emulator import Memory

from jax_fastattn.ffi.compiler import KERNELS
from jax_fastattn.kernels.arguments import Scalars
from jax_fastattn.kernels.decode_config import decode_scratch
from jax_fastattn.kernels.key import KernelSpec


@functools.cache
def texts(spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of the kernels; see `compile_kernel`."""
    return compile_kernel(KERNELS[spec.family, spec.op](spec), spec)


def run_launches(spec: KernelSpec, buffers: Any, memory: Memory, scalars: Scalars) -> None:
    """Runs the kernels of a launch."""
    for launch in KERNELS[spec.family, spec.op](spec).launches(buffers, scalars):
        if spec.family == "sm90":
            emulated_hopper.start(launch, texts(spec), memory)
        else:
            ptx = text(launch, texts(spec))
            grid, shared_bytes = number(launch.grid), launch.shared_bytes
            warp_emulator.launch(ptx, arguments(launch), memory, grid, shared_bytes, finds_races=True)


def in_pages(arrays: dict[str, np.ndarray], page: int) -> dict[str, np.ndarray]:
    """Returns the same keys and values in pages at random places, and their table.

    Equal pages are one page. Free pages hold NaN. Entries past a length are out of range, and so are the ids of the
    first and of the last page, which are clamped.
    """
    random = np.random.default_rng(3)
    batch, keys = arrays["key"].shape[:2]
    assert keys % page == 0
    entries = keys // page
    counts = -(-np.clip(arrays["key_value_seq_lengths"][:batch], 0, keys) // page)
    tiles = {name: arrays[name].reshape(batch, entries, page, *arrays[name].shape[2:]) for name in ("key", "value")}
    used = [(b, j) for b in range(batch) for j in range(counts[b])]
    contents = {at: tiles["key"][at].tobytes() + tiles["value"][at].tobytes() for at in used}
    pages = len(set(contents.values())) + 3
    ids = dict(zip(dict.fromkeys(contents.values()), random.permutation(pages), strict=False))
    table = random.choice([-5, 1 << 30, -(1 << 31), pages], (batch, entries)).astype(np.int32)
    found = {name: np.full((pages, *x.shape[2:]), np.nan, x.dtype) for name, x in tiles.items()}
    for at in used:
        index = ids[contents[at]]
        table[at] = {0: -7, pages - 1: pages + 9}.get(index, index)
        for name, x in found.items():
            x[index] = tiles[name][at]
    return found | {"page_table": table}


def check(
    spec: KernelSpec,
    sizes: Sizes,
    *,
    multiprocessors: int = MULTIPROCESSORS,
    side_heads: int = 1,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> None:
    """Runs the kernels on poisoned operands, into buffers of NaN, and compares output and log-sum-exp.

    Args:
        spec: the compile key.
        sizes: of the call.
        multiprocessors: CTAs that the keys are split over.
        side_heads: how many key/value heads are read side by side.
        change: changes operands, of which all elements are visible.
    """
    arrays, wanted = draw_operands(spec, sizes)
    if change is not None:
        change(arrays)
        with np.errstate(invalid="ignore"):  # gradients, which are not compared
            wanted = reference(spec, sizes, arrays)
    out, lse = wanted["out"], wanted["lse"]
    if spec.sinks:
        arrays["sinks"], out, lse = with_sinks(spec, sizes, wanted)
    dtype = arrays["query"].dtype
    if spec.page:
        arrays |= in_pages(arrays, spec.page)
    arrays |= {"out": np.full(out.shape, np.nan, dtype), "lse": np.full(lse.shape, np.nan, np.float32)}
    for name, shape in decode_scratch(spec, multiprocessors, sizes.queries * spec.group).items():
        arrays[name] = np.full(shape, np.nan, np.float32)
    memory, buffers = place(spec, arrays)
    scalars = launch_scalars(spec, sizes)._replace(multiprocessors=multiprocessors, side_heads=side_heads)
    if spec.page:
        scalars = scalars._replace(pages=len(arrays["key"]))
    run_launches(spec, buffers, memory, scalars)

    tolerance = 2**-7 if spec.dtype == "bfloat16" else 2**-10  # a few roundings of P and of the output
    got = memory.read(buffers.out, out.shape, dtype).astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(memory.read(buffers.lse, lse.shape, np.float32), lse, atol=1e-4, rtol=1e-5)
