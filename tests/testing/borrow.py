# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable kernels on a Hopper GPU, for tests and benchmarks: compiled for it, with the tiles of another card."""

from jax_fastattn.ffi import registry
from jax_fastattn.kernels.architectures import BORROWED


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
