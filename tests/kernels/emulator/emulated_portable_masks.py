# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the portable kernels with lists in the emulators, on what the prepass writes there, and compares with float64.

Keys that no query sees, and queries that see no key, hold poison.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import emulated_masks
import emulated_prepass
import numpy as np
from emulated_backward import DTYPES, Sizes, compare_dsinks_terms, draw_units, fill, gradients, is_poison
from emulated_dkdv_dq import ORDER
from emulated_launch import compile_kernel, place, start
from emulated_prepass import Predicate
from ptx_emulator import Memory

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.present import launch_buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import backward_scratch
from jax_fastattn.kernels.sm80.backward.launches import BackwardKernel
from jax_fastattn.kernels.sm80.forward.kernel import ForwardKernel

SIZES = Sizes(scale=emulated_masks.SCALE, cap=1.5)


def forward_spec(predicate: Predicate, head_dim: int, v_head_dim: int | None = None, **features: Any) -> KernelSpec:
    """Returns the compile key of a forward call."""
    key: dict[str, Any] = {"arch": "sm_80", "operand_dtype": "bfloat16"} | features
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
    arrays = {name: operands[name].astype(DTYPES[spec.operand_dtype]) for name in ("query", "key", "value")}
    random = np.random.default_rng(1)
    shape = *arrays["query"].shape[:3], spec.v_head_dim
    arrays["dout"] = random.standard_normal(shape).astype(DTYPES[spec.operand_dtype])
    arrays["dlse"] = random.standard_normal(shape[:3]).astype(np.float32)
    arrays["sinks"] = random.standard_normal((predicate.batch, predicate.query_heads)).astype(np.float32)
    inside = np.ones((predicate.batch, predicate.queries), bool)
    if predicate.query_lengths:
        inside = np.arange(predicate.queries) < operands["query_seq_lengths"][:, None]
    has_sinks = codes.SINKS in spec.features or spec.dsinks
    wanted = gradients(dataclasses.replace(spec, dsinks=has_sinks), SIZES, arrays, seen, inside)
    return operands | arrays, wanted, seen


def poison(spec: KernelSpec, arrays: dict[str, np.ndarray], seen: np.ndarray) -> dict[str, np.ndarray]:
    """Returns operands with poison in what is hidden from everybody, and in cotangents of such results."""
    found = emulated_masks.poisoned(spec, arrays, seen)
    if "lse" in arrays:
        found["dlse"] = fill(arrays["dlse"], np.isneginf(arrays["lse"]))
    return found


def backward_spec(predicate: Predicate, head_dim: int, v_head_dim: int | None = None, **features: Any) -> KernelSpec:
    """Returns the compile key of a backward call."""
    key: dict[str, Any] = {"arch": "sm_80", "operand_dtype": "bfloat16"} | features
    spec = KernelSpec("backward", **key, head_dim=head_dim, v_head_dim=v_head_dim or head_dim, group=predicate.group)
    return configured(dataclasses.replace(spec, listed=True))


@functools.cache
def texts(spec: KernelSpec) -> dict[str, str]:
    """Returns the PTX of a compile key."""
    return compile_kernel((ForwardKernel if spec.op == "forward" else BackwardKernel)(spec), spec)


def run_launches(spec: KernelSpec, buffers: Any, memory: Memory, scalars: Scalars) -> None:
    """Runs the launches of a compile key."""
    if spec.op == "forward":
        for launch in ForwardKernel(spec).launches(buffers, scalars):
            start(launch, texts(spec), memory, schedule="random", finds_races=True)
    else:
        for launch in BackwardKernel(spec).launches(buffers, scalars, ORDER):
            start(launch, texts(spec), memory)


def check_forward(predicate: Predicate, spec: KernelSpec, *, one_row: bool = False) -> None:
    """Runs the forward kernel, and compares output and log-sum-exp.

    Args:
        predicate: what hides pairs, and sizes.
        spec: the compile key, see `forward_spec`.
        one_row: whether all tiles of queries share a list.
    """
    arrays, wanted, seen = draw(predicate, spec)
    lists = emulated_prepass.run(predicate, spec.config.prepass, arrays, arch=spec.arch, one_row=one_row)
    out, lse = wanted["out"], wanted["lse"]
    arrays = poison(spec, arrays, seen)
    arrays |= {"key_lists": lists["lists"], "key_bits": lists["bits"]}
    arrays |= {"out": np.full(out.shape, np.nan, arrays["query"].dtype), "lse": np.full(lse.shape, np.nan, np.float32)}
    memory, buffers = place(spec, arrays)
    run_launches(spec, buffers, memory, scalars(predicate, one_row=one_row))
    tolerance = 2**-7 if spec.operand_dtype == "bfloat16" else 2**-10  # a few roundings of P and of the output
    got = memory.read(buffers.out, out.shape, arrays["out"].dtype).astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(memory.read(buffers.lse, lse.shape, np.float32), lse, atol=1e-4, rtol=1e-5)


class BackwardRun:
    """The kernels of a backward call, the memory of one launch of them, and what they should write.

    Args:
        predicate: what hides pairs, and sizes.
        spec: the compile key, see `backward_spec`.
    """

    def __init__(self, predicate: Predicate, spec: KernelSpec):
        self.spec, self.kernel = spec, BackwardKernel(spec)
        clean, self.wanted, self.seen = draw(predicate, spec)
        lists = emulated_prepass.run(predicate, spec.config.prepass, clean, arch=spec.arch)
        clean |= {
            "out": self.wanted["out"].astype(DTYPES[spec.result_dtype]),
            "lse": self.wanted["lse"].astype(np.float32),
        }
        arrays = poison(spec, clean, self.seen)
        arrays |= draw_units(spec, arrays)
        arrays |= {"query_lists": lists["lists"], "query_bits": lists["bits"], "key_tile_counts": lists["counts"]}
        for name, operand in (("dq", "query"), ("dk", "key"), ("dv", "value")):
            arrays[name] = np.full(arrays[operand].shape, np.nan, arrays[operand].dtype)
        heads = predicate.query_heads
        arrays["dsinks_terms"] = np.full((predicate.batch, heads, predicate.queries), np.nan, np.float32)
        for name, shape in backward_scratch(spec, predicate.batch, predicate.queries, heads).items():
            dtype = launch_buffers(spec)[name]
            arrays[name] = np.full(shape, np.nan if dtype == "float32" else -1, dtype)
        self.arrays = arrays
        self.memory, self.buffers = place(spec, arrays)
        launches = self.kernel.launches(self.buffers, scalars(predicate), ORDER)
        self.launches = {type(x.kernel.__self__).__name__.removesuffix("Kernel"): x for x in launches}

    def run(self, name: str, **options: Any) -> None:
        """Runs one kernel. `options` are those of `warp_emulator.WarpCta`."""
        start(self.launches[name], texts(self.spec), self.memory, **options)

    def read(self, name: str) -> np.ndarray:
        """Returns a buffer's contents."""
        return self.memory.read(getattr(self.buffers, name), self.arrays[name].shape, self.arrays[name].dtype)

    def compare(self) -> None:
        """Raises an `AssertionError` if a gradient is wrong, or not exactly 0 where something is hidden."""
        tolerance = 2**-6 if self.spec.operand_dtype == "bfloat16" else 2**-9  # roundings of out, P and dS
        for name, operand in (("dq", "query"), ("dk", "key"), ("dv", "value")):
            found, wanted = self.read(name).astype(np.float64), self.wanted[name]
            atol = tolerance * np.abs(wanted).max() + 1e-5
            np.testing.assert_allclose(found, wanted, atol=atol, rtol=0, err_msg=name)
            hidden = is_poison(self.arrays[operand]).any(-1)
            assert not found[hidden].any(), f"{name} of rows that are hidden from everybody"
        if self.spec.dsinks:
            compare_dsinks_terms(self.read("dsinks_terms"), self.wanted["dsinks_terms"], tolerance)


def check_backward(predicate: Predicate, spec: KernelSpec, schedule: str = "second") -> None:
    """Runs the backward kernels on poisoned operands, and compares every gradient.

    Args:
        predicate: what hides pairs, and sizes.
        spec: the compile key, see `backward_spec`.
        schedule: of the warps, see `warp_emulator.SCHEDULES`.
    """
    run = BackwardRun(predicate, spec)
    run.run("Preprocess")
    run.run("DkdvDq", schedule=schedule)
    run.run("Convert")
    run.compare()
