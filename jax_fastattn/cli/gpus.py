# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The GPUs that JAX finds, for commands that must also run where it finds none."""

from __future__ import annotations

import os
from typing import Any

import jax

from jax_fastattn.ffi import registry


def local_gpus() -> tuple[list[Any], str]:
    """Returns the CUDA devices of JAX, and without any the first line of what JAX says about that.

    JAX is asked to take no memory in advance: another process may have the GPU's.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return list(jax.local_devices(backend="cuda")), ""
    except Exception as error:
        # A plugin that does not fit its libraries raises what it likes.
        return [], str(error).partition("\n")[0]


def architecture(device: Any) -> str | None:
    """Returns what kernels for a device are compiled for; None if there are no kernels for it."""
    return registry.BY_CAPABILITY.get(str(device.compute_capability))
