# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the portable kernels with lists in the emulators, on what the prepass writes there, and compares with float64.

Keys that no query sees, and queries that see no key, hold NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import emulated_masks
import emulated_prepass
import numpy as np
import ptx_emulator
from emulated_backward import DTYPES, Sizes, gradients
from emulated_launch import arguments, compile_kernel, number, place, text
from emulated_prepass import Predicate

from jax_fastattn.kernels.arguments import Scalars
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.forward import ForwardKernel

SIZES = Sizes(scale=emulated_masks.SCALE, cap=1.5)


def forward_spec(predicate: Predicate, head_dim: int, v_head_dim: int | None = None, **features: Any) -> KernelSpec:
    """Returns the compile key of a forward call."""
    key: dict[str, Any] = {"arch": "sm_80", "dtype": "bfloat16"} | features
    key |= {"query_seq_lengths": bool(predicate.query_lengths)}
    spec = KernelSpec("forward", **key, head_dim=head_dim, v_head_dim=v_head_dim or head_dim, group=predicate.group)
    return configured(dataclasses.replace(spec, listed=True))


def scalars(predicate: Predicate, *, one_row: bool = False) -> Scalars:
    """Returns the scalars of a launch."""
    numbers = emulated_masks.scalars(predicate, one_row=one_row)
    return numbers._replace(scale=SIZES.scale, logits_soft_cap=SIZES.cap, sinks_stride=predicate.query_heads)


def draw(predicate: Predicate, spec: KernelSpec) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Returns operands in the kernel's dtypes, what should be computed of them, and which query sees which key."""
    operands, seen = emulated_masks.draw(predicate, spec)
    arrays = {name: operands[name].astype(DTYPES[spec.dtype]) for name in ("query", "key", "value")}
    random = np.random.default_rng(1)
    shape = *arrays["query"].shape[:3], spec.v_head_dim
    arrays["dout"] = random.standard_normal(shape).astype(DTYPES[spec.dtype])
    arrays["dlse"] = random.standard_normal(shape[:3]).astype(np.float32)
    arrays["sinks"] = random.standard_normal((predicate.batch, predicate.query_heads)).astype(np.float32)
    inside = np.ones((predicate.batch, predicate.queries), bool)
    if predicate.query_lengths:
        inside = np.arange(predicate.queries) < operands["query_seq_lengths"][:, None]
    has_sinks = spec.sinks or spec.dsinks
    wanted = gradients(dataclasses.replace(spec, dsinks=has_sinks), SIZES, arrays, seen, inside)
    return operands | arrays, wanted, seen


def poison(spec: KernelSpec, arrays: dict[str, np.ndarray], seen: np.ndarray) -> dict[str, np.ndarray]:
    """Returns operands with NaN where keys or queries are hidden from everybody."""
    dead_keys = ~seen.reshape(seen.shape[0], -1, spec.group, *seen.shape[2:]).any((2, 3))
    dead_queries = ~seen.any(3)
    found = dict(arrays)
    for name, dead in (("query", dead_queries), ("dout", dead_queries), ("key", dead_keys), ("value", dead_keys)):
        found[name] = arrays[name].copy()
        found[name][dead.swapaxes(1, 2)] = np.nan
    return found


@functools.cache
def forward_texts(spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of a compile key."""
    return compile_kernel(ForwardKernel(spec), spec)


def check_forward(predicate: Predicate, spec: KernelSpec, *, one_row: bool = False) -> None:
    """Runs the forward kernel, and compares output and log-sum-exp.

    Args:
        predicate: what hides pairs, and sizes.
        spec: the compile key, see `forward_spec`.
        one_row: whether all tiles of queries share a list.
    """
    arrays, wanted, seen = draw(predicate, spec)
    lists = emulated_prepass.run(predicate, spec.config.prepass, arrays, one_row=one_row)
    out, lse = wanted["out"], wanted["lse"]
    arrays = poison(spec, arrays, seen)
    arrays |= {"key_lists": lists["lists"], "key_bits": lists["bits"]}
    arrays |= {"out": np.full(out.shape, np.nan, arrays["query"].dtype), "lse": np.full(lse.shape, np.nan, np.float32)}
    memory, buffers = place(spec, arrays)
    texts = forward_texts(spec)
    for launch in ForwardKernel(spec).launches(buffers, scalars(predicate, one_row=one_row)):
        ptx_emulator.launch(text(launch, texts), arguments(launch), memory, number(launch.grid), launch.shared_bytes)
    tolerance = 2**-7 if spec.dtype == "bfloat16" else 2**-10  # a few roundings of P and of the output
    got = memory.read(buffers.out, out.shape, arrays["out"].dtype).astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(memory.read(buffers.lse, lse.shape, np.float32), lse, atol=1e-4, rtol=1e-5)
