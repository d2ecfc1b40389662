# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The environment variables of this package. All of them are read here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path | None:
    """Finds the directory of compiled kernels.

    Returns:
        `$JAX_FASTATTN_CACHE_DIR`, else `jax_fastattn` in the user's cache directory; None if the user has no home
        directory and the environment names no other place.
    """
    override = os.environ.get("JAX_FASTATTN_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if override:
            return Path(override).expanduser()
        # The XDG specification says to ignore a relative path.
        return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "jax_fastattn"
    except RuntimeError:  # there is neither HOME nor an entry in the password database
        return None


def has_workers() -> bool:
    """Returns whether this process may start others that compile kernels for it: unless `JAX_FASTATTN_WORKERS` is 0."""
    return os.environ.get("JAX_FASTATTN_WORKERS") != "0"
