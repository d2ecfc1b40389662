# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Finds what this machine has, for commands that must also run where parts are missing or broken."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import jax

from jax_fastattn import ffi
from jax_fastattn.compilation import libraries
from jax_fastattn.ffi import registry


def version(package: str) -> str | None:
    """Returns the version of an installed package; None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_parts() -> list[str]:
    """Returns what the installation lacks to launch kernels, even if an uninstallation left parts of the compiler."""
    missing = ffi.missing_parts()
    if libraries.runtime_libraries() and version("nvidia-cutlass-dsl") is None:
        missing.append(
            "nvidia-cutlass-dsl is installed in part: libraries are there, and the package is not; run `pip install "
            "--force-reinstall 'nvidia-cutlass-dsl[cu13]>=4.8'`, or `'nvidia-cutlass-dsl>=4.8'` for CUDA 12"
        )
    return missing


def local_gpus() -> tuple[list[Any], str]:
    """Returns the CUDA devices of JAX, and the first line of JAX's reason if there are none.

    JAX is asked to take no memory in advance: another process may have the GPU's.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return list(jax.local_devices(backend="cuda")), ""
    except Exception as error:
        # A plugin that does not fit its libraries may raise any error.
        return [], str(error).partition("\n")[0]


def architecture(device: Any) -> str | None:
    """Returns what kernels for a device are compiled for; None if there are no kernels for it."""
    return registry.BY_CAPABILITY.get(str(device.compute_capability))
