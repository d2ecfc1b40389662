# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture, within its registers and shared memory. No GPU needed."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from jax_fastattn.ffi import resources
from jax_fastattn.ffi.resources import KernelResources
from jax_fastattn.kernels.sm80.config import shared_memory_limit
from jax_fastattn.kernels.spec import KernelSpec
from jax_fastattn.kernels.support import ARCHITECTURES, tilings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
]

CAUSAL = {"window_right": True}
EVERYTHING = {
    **CAUSAL,
    "window_left": True,
    "group": 3,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
    "logits_soft_cap": True,
}
FEATURES = {"full": {}, "causal": CAUSAL, "soft-cap": {**CAUSAL, "logits_soft_cap": True}, "everything": EVERYTHING}
# How dq is added up where one kernel computes all gradients.
BACKWARD_VARIANTS = [{}, {"ordered": True}]
# GPUs whose calls run the portable family. Of sm_89 one row per operation is compiled, see
# `test_sm_89_has_the_machine_code_of_sm_86`.
PORTABLE_ARCHITECTURES = tuple(arch for arch in ARCHITECTURES if arch not in ("sm_89", "sm_90a"))
# Of the portable family the order is compiled for one architecture of each size of shared memory.
ORDERED_ARCHITECTURES = ("sm_80", "sm_86", "sm_90a")
# Local memory of the kernels with every feature at once, bytes per thread: values kept across the loop, most of them
# in the portable backward at head dims 192 and 128.
EVERYTHING_LOCAL_BYTES = 88
# Of the portable backward with a causal mask: at head dim 64 on sm_80, whose warps keep sums of dK and of dV; at those
# from 136 to 192, whose warps keep sums of up to 192 columns, most of it in semaphore order; and at 256 on sm_120a.
LOCAL_BYTES = {
    ("sm_80", (64, 64)): 24,
    ("sm_80", (160, 160)): 88,
    ("sm_80", (192, 128)): 128,
    ("sm_86", (192, 128)): 64,
    ("sm_86", (192, 192)): 120,
    ("sm_120a", (192, 128)): 48,
    ("sm_120a", (192, 192)): 136,
    ("sm_120a", (256, 256)): 16,
}


def _spec(family: str, op: str, arch: str, dims: tuple[int, int], features: dict[str, object]) -> KernelSpec:
    spec = KernelSpec(op, arch, "bfloat16", *dims, family=family, **features)  # pyright: ignore[reportArgumentType]
    everything = features is EVERYTHING
    return dataclasses.replace(spec, sinks=everything and op == "forward", dlse=everything and op == "backward")


def _assert_fits(spec: KernelSpec, kernels: Sequence[KernelResources], local_bytes: int) -> None:
    # Where CTAs take tiles by a counter, a kernel resets it.
    forward, backward = 1 + int(spec.takes_tiles), 3
    assert len(kernels) == (forward if spec.op == "forward" else backward), spec
    for kernel in kernels:
        assert kernel.registers <= 255, (spec, kernel)
        assert kernel.local_bytes <= local_bytes, (spec, kernel)
        assert kernel.shared_bytes <= shared_memory_limit(spec.arch), (spec, kernel)


DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
# Those of Hopper that are causal only are among `HOPPER_ROWS`.
COMPILED = [
    *(("sm90", "sm_90a", op, "everything") for op in ("forward", "backward")),
    *(
        ("sm80", arch, op, features)
        for arch in PORTABLE_ARCHITECTURES
        for op in ("forward", "backward")
        for features in ("causal", "everything")
    ),
]

# One head dim of each tiling of the portable kernels that those of `DIMS` do not have, with a causal mask.
OTHER_TILINGS = [
    ("sm_80", "backward", (96, 96)),
    ("sm_80", "backward", (160, 160)),
    ("sm_80", "backward", (256, 64)),
    *(
        (arch, op, dims)
        for arch in ("sm_86", "sm_120a")
        for op, dims in (
            ("forward", (80, 80)),
            ("forward", (192, 192)),
            ("backward", (32, 32)),
            ("backward", (96, 96)),
            ("backward", (112, 16)),
            ("backward", (160, 16)),
            ("backward", (192, 192)),
            ("backward", (256, 32)),
            ("backward", (256, 128)),
        )
    ),
]


def _variants(spec: KernelSpec) -> list[KernelSpec]:
    variants = BACKWARD_VARIANTS if spec.fused and spec.arch in ORDERED_ARCHITECTURES else [{}]
    return [dataclasses.replace(spec, **variant) for variant in variants]


@pytest.mark.parametrize("dims", DIMS, ids=lambda x: "v".join(map(str, x)))
@pytest.mark.parametrize(("family", "arch", "op", "features"), COMPILED)
def test_kernels_fit(family: str, arch: str, op: str, features: str, dims: tuple[int, int]) -> None:
    from jax_fastattn.ffi.compiler import inspect_kernel

    causal_bytes = LOCAL_BYTES.get((arch, dims), 0) if family == "sm80" and op == "backward" else 0
    allowed = EVERYTHING_LOCAL_BYTES if features == "everything" else causal_bytes
    for spec in _variants(_spec(family, op, arch, dims, FEATURES[features])):
        _assert_fits(spec, inspect_kernel(spec), allowed)


@pytest.mark.parametrize(("arch", "op", "dims"), OTHER_TILINGS)
def test_other_tilings_fit(arch: str, op: str, dims: tuple[int, int]) -> None:
    from jax_fastattn.ffi.compiler import inspect_kernel

    spec = _spec("sm80", op, arch, dims, CAUSAL)
    allowed = LOCAL_BYTES.get((arch, dims), 0) if op == "backward" else 0
    _assert_fits(spec, inspect_kernel(spec), allowed)


def test_every_portable_tiling_is_compiled() -> None:
    compiled = {(spec.arch, spec.op, tilings(spec)) for spec in rows().values() if spec.family == "sm80"}
    head_dims, ops = range(8, 257, 8), ("forward", "backward")
    for arch, op, *dims in itertools.product(PORTABLE_ARCHITECTURES, ops, head_dims, head_dims):
        spec = _spec("sm80", op, arch, tuple(dims), CAUSAL)
        assert (arch, op, tilings(spec)) in compiled, spec
        if arch == "sm_86":
            assert tilings(dataclasses.replace(spec, arch="sm_89")) == tilings(spec)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_sm_89_has_the_machine_code_of_sm_86(op: str) -> None:
    """The same bytes, so that rows of sm_86 count for sm_89 too."""
    from jax_fastattn.ffi.compiler import compile_kernel

    texts = []
    for arch in ("sm_86", "sm_89"):
        sections = resources._sections(resources.cubin(compile_kernel(_spec("sm80", op, arch, (64, 64), EVERYTHING))))
        texts.append({name: code for name, code in sections.items() if name.startswith(".text.")})
    assert texts[0] and texts[0] == texts[1]


# A head dim of every row of `sm90.config`, and where lengths differ both of them.
HOPPER_ROWS = [
    *((dims, short) for dims in ((64, 64), (32, 16)) for short in (True, False)),
    *((dims, False) for dims in ((96, 96), (128, 128), (72, 128), (160, 160), (192, 128), (256, 256))),
]
# Those of packed sequences: forward a CTA for each tile, and CTAs that walk; backward one kernel, and two.
PACKED_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
# Features of those rows, all of which have to do without local memory.
HOPPER = ("full", "causal", "soft-cap")


def _hopper_specs(op: str, features: str) -> list[KernelSpec]:
    specs = []
    for dims, short in HOPPER_ROWS:
        spec = _spec("sm90", op, "sm_90a", dims, FEATURES[features])
        is_packed = dims in PACKED_DIMS and features == "causal" and not short
        if op == "forward":
            specs.append(dataclasses.replace(spec, short=short))
            if is_packed:
                specs.append(dataclasses.replace(spec, packed=True))
        elif not short:
            specs += _variants(spec)
            if is_packed:
                specs += _variants(dataclasses.replace(spec, packed=True))
    return specs


def rows() -> dict[str, KernelSpec]:
    """Everything that is compiled here, by name: what `benchmarks/machine_code.py` compares between commits."""
    named = [
        (features, spec)
        for family, arch, op, features in COMPILED
        for dims in DIMS
        for spec in _variants(_spec(family, op, arch, dims, FEATURES[features]))
    ]
    named += [("causal", _spec("sm80", op, arch, dims, CAUSAL)) for arch, op, dims in OTHER_TILINGS]
    named += [
        (features, x) for op in ("forward", "backward") for features in HOPPER for x in _hopper_specs(op, features)
    ]
    found = {_row_name(features, spec): spec for features, spec in named}
    assert len(found) == len(named)
    return found


def _row_name(features: str, spec: KernelSpec) -> str:
    dims = f"d{spec.head_dim}" + (f"v{spec.v_head_dim}" if spec.v_head_dim != spec.head_dim else "")
    flags = [name for name in ("short", "ordered", "packed") if getattr(spec, name)]
    return "-".join([spec.family, spec.arch, spec.op, dims, features, *flags])


_SHOW_REMARKS = """
import dataclasses, sys
from jax_fastattn.ffi.compiler import inspect_kernel
from jax_fastattn.kernels.spec import KernelSpec

specs = eval(sys.stdin.read())
for spec in specs:
    print("kernel", spec, flush=True)
    print("resources", [dataclasses.astuple(kernel) for kernel in inspect_kernel(spec)], flush=True)
"""


@pytest.mark.parametrize("features", HOPPER)
def test_hopper_rows_neither_spill_nor_serialise(features: str) -> None:
    """ptxas reports products that it had to serialise as C75xx; nothing else shows it but the speed."""
    assert {(dims, False) for dims in DIMS} < set(HOPPER_ROWS)
    specs = [spec for op in ("forward", "backward") for spec in _hopper_specs(op, features)]
    environment = {**os.environ, "CUTE_DSL_COMPILER_OPT": "remarks{ptx}"}
    run = subprocess.run(
        [sys.executable, "-c", _SHOW_REMARKS], input=repr(specs), env=environment, capture_output=True, text=True
    )
    printed = run.stdout + run.stderr
    assert run.returncode == 0, printed[-3000:]
    found = re.findall(r"^resources (.*)$", run.stdout, re.MULTILINE)
    for spec, kernels in zip(specs, found, strict=True):
        _assert_fits(spec, [KernelResources(*kernel) for kernel in ast.literal_eval(kernels)], local_bytes=0)
    remarks = {line for line in printed.splitlines() if re.search(r"C75\d\d|^kernel", line)}
    assert "ptxas" in printed  # else the remarks have moved
    assert remarks == {f"kernel {spec}" for spec in specs}, printed[-3000:]
