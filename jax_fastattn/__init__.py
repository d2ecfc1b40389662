# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Exact attention for JAX on NVIDIA GPUs: CUDA kernels and a drop-in for `jax.nn.dot_product_attention`.

Importing this package loads neither the kernel compiler nor the C++ extension; the first call that is lowered for CUDA
loads what it needs.
"""

from jax_fastattn.api import (
    all_to_all_attention,
    and_masks,
    attention,
    attention_varlen,
    causal,
    explain,
    or_masks,
    paged_attention,
    positions,
    ring_attention,
    unzigzag,
    zigzag,
)
from jax_fastattn.ffi import register as register_ffi_targets
from jax_fastattn.ffi import target_arch

__all__ = [
    "all_to_all_attention",
    "and_masks",
    "attention",
    "attention_varlen",
    "causal",
    "explain",
    "or_masks",
    "paged_attention",
    "positions",
    "register_ffi_targets",
    "ring_attention",
    "target_arch",
    "unzigzag",
    "zigzag",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """Returns the public names; submodules that an import leaves here are not among them."""
    return [*__all__, "__version__"]
