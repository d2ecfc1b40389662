# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Exact attention for JAX on NVIDIA GPUs: CUDA kernels and a drop-in for `jax.nn.dot_product_attention`.

Importing this package loads neither the kernel compiler nor the C++ extension; the first call that is lowered for CUDA
loads what it needs. The first use of a public name loads JAX, so that a process that only compiles kernels does not.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_fastattn.api import (
        all_to_all_attention,
        and_masks,
        attention,
        attention_varlen,
        block_mask,
        causal,
        dropout_mask,
        or_masks,
        paged_attention,
        positions,
        ring_attention,
        unzigzag,
        zigzag,
    )
    from jax_fastattn.api.explain import explain
    from jax_fastattn.ffi import register as register_ffi_targets
    from jax_fastattn.ffi import target_arch

__all__ = [
    "all_to_all_attention",
    "and_masks",
    "attention",
    "attention_varlen",
    "block_mask",
    "causal",
    "dropout_mask",
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


def __getattr__(name: str) -> Any:
    """Imports all public names when one of them is first used, and a submodule when it is."""
    if name not in __all__:
        return _submodule(name)
    api, ffi = _submodule("api"), _submodule("ffi")
    homes = {"register_ffi_targets": ffi.register, "target_arch": ffi.target_arch}
    globals().update({public: homes.get(public) or getattr(api, public) for public in __all__})
    return globals()[name]


def _submodule(name: str) -> Any:
    path = f"{__name__}.{name}"
    if name.startswith("__") or importlib.util.find_spec(path) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(path)


def __dir__() -> list[str]:
    """Returns the public names; submodules that an import leaves here are not among them."""
    return [*__all__, "__version__"]
