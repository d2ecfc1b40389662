# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture, within its registers and shared memory. No GPU needed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from jax_fastattn.kernels.sm80.config import shared_memory_limit
from jax_fastattn.kernels.spec import FUSED_HEAD_DIM, KernelSpec
from jax_fastattn.kernels.support import ARCHITECTURES

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
# How dq is added up where one kernel computes all gradients.
BACKWARD_VARIANTS = [{}, {"ordered": True}]
# Local memory of the kernels with every feature at once, bytes per thread: values kept across the loop, at most 88
# (sm80 dkdv on sm_90a, head dim 128).
EVERYTHING_LOCAL_BYTES = 88


def _spec(family: str, op: str, arch: str, dims: tuple[int, int], features: dict[str, object]) -> KernelSpec:
    spec = KernelSpec(op, arch, "bfloat16", *dims, family=family, **features)  # pyright: ignore[reportArgumentType]
    everything = features is EVERYTHING
    return dataclasses.replace(spec, sinks=everything and op == "forward", dlse=everything and op == "backward")


@pytest.mark.parametrize("features", [CAUSAL, EVERYTHING], ids=["causal", "everything"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=lambda x: "v".join(map(str, x)))
@pytest.mark.parametrize(
    ("family", "arch", "op"),
    [
        *(("sm90", "sm_90a", op) for op in ("forward", "backward")),
        *(("sm80", arch, op) for arch in ARCHITECTURES for op in ("forward", "backward")),
    ],
)
def test_kernels_fit(family: str, arch: str, op: str, dims: tuple[int, int], features: dict[str, object]) -> None:
    from jax_fastattn.ffi.compiler import inspect_kernel

    spec = _spec(family, op, arch, dims, features)
    for variant in BACKWARD_VARIANTS if spec.fused else [{}]:
        kernels = inspect_kernel(dataclasses.replace(spec, **variant))
        assert len(kernels) == {"forward": 1, "backward": 2 if family == "sm80" else 3}[op]
        allowed = EVERYTHING_LOCAL_BYTES if features is EVERYTHING else 0
        for kernel in kernels:
            print(f"{kernel.registers} registers, {kernel.local_bytes} B local, {kernel.shared_bytes} B shared")
            assert kernel.registers <= 255
            assert kernel.local_bytes <= allowed
            assert kernel.shared_bytes <= shared_memory_limit(arch)


# A head dim of every row of `sm90.config`, and where lengths differ both of them.
HOPPER_ROWS = [
    *((dims, short) for dims in ((64, 64), (32, 16)) for short in (True, False)),
    *((dims, False) for dims in ((96, 96), (128, 128), (72, 128), (160, 160), (192, 128), (256, 256))),
]
_SHOW_REMARKS = """
import sys
from jax_fastattn.ffi.compiler import inspect_kernel
from jax_fastattn.kernels.spec import KernelSpec

specs = eval(sys.stdin.read())
for spec in specs:
    print("kernel", spec, flush=True)
    for kernel in inspect_kernel(spec):
        print("local bytes:", kernel.local_bytes, flush=True)
"""


@pytest.mark.parametrize("features", [{}, CAUSAL, {**CAUSAL, "logits_soft_cap": True}])
def test_hopper_rows_neither_spill_nor_serialise(features: dict[str, object]) -> None:
    """ptxas reports products that it had to serialise as C75xx; nothing else shows it but the speed."""
    specs = [
        dataclasses.replace(_spec("sm90", "forward", "sm_90a", dims, features), short=short)
        for dims, short in HOPPER_ROWS
    ]
    specs += [
        dataclasses.replace(_spec("sm90", "backward", "sm_90a", dims, features), **variant)
        for dims, short in HOPPER_ROWS
        for variant in ([] if short else BACKWARD_VARIANTS if max(dims) <= FUSED_HEAD_DIM else [{}])
    ]
    environment = {**os.environ, "CUTE_DSL_COMPILER_OPT": "remarks{ptx}"}
    run = subprocess.run(
        [sys.executable, "-c", _SHOW_REMARKS], input=repr(specs), env=environment, capture_output=True, text=True
    )
    printed = run.stdout + run.stderr
    assert run.returncode == 0, printed[-3000:]
    for spec, kernels in zip(specs, run.stdout.split("kernel KernelSpec")[1:], strict=True):
        local = [int(nbytes) for nbytes in re.findall(r"local bytes: (\d+)", kernels)]
        assert local and max(local) == 0, spec
    found = {line for line in printed.splitlines() if re.search(r"C75\d\d|^kernel", line)}
    assert "ptxas" in printed  # else the remarks have moved
    assert found == {f"kernel {spec}" for spec in specs}, printed[-3000:]
