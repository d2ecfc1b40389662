# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable kernels on a Hopper GPU, for tests and benchmarks: compiled for it, with the tiles of another card."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_fastattn.ffi import registry
from jax_fastattn.kernels.architectures import BORROWED
from jax_fastattn.kernels.choose import configured, forward_spec, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.spec import Problem


def borrow(arch: str) -> None:
    """Makes this process compile the portable kernels on Hopper GPUs.

    Args:
        arch: "sm_90-a100" or "sm_90-rtx" for tiles that fit the shared memory of an A100 or of an RTX card, "sm_90" for
            tiles that fit the GPU's own.

    Raises:
        ValueError: `arch` is none of these.
    """
    if arch not in BORROWED:
        raise ValueError(f'`arch` is "{arch}"; pass one of {", ".join(BORROWED)}')
    registry.BY_CAPABILITY["9.0"] = arch


def portable_kernel(problem: Problem, op: Any, arch: str, **options: Any) -> KernelSpec:
    """Returns the compile key of the portable kernel that stands in for `choose.kernel_spec`, for any GPU."""
    return configured(dataclasses.replace(kernel_spec(problem, op, "sm_80", **options), arch=arch))


def portable_forward(problem: Problem, arch: str) -> KernelSpec:
    """Returns the compile key of the portable kernel that stands in for `choose.forward_spec`."""
    return configured(dataclasses.replace(forward_spec(problem, "sm_80"), arch=arch))
