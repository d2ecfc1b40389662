# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What this process lowers calls with: all that decides about a lowered program besides the call itself.

JAX's own cache keys hold the versions of JAX and XLA and the devices. They do not hold what is listed here.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from jax_fastattn.ffi import cache, registry


def process_fingerprint() -> tuple[object, ...]:
    """Returns the package's sources, the compiler, the GPU to compile for, the CPU, and what is missing of these.

    A process without a part takes the XLA path. Its programs must not serve a process that has the part.
    """
    missing = tuple(registry.missing_parts())
    compiler = None if missing else (registry.compiler_version(), registry.toolkit())
    return sources_digest(), missing, compiler, _gpu(), platform.machine()


def _gpu() -> tuple[str | None, int] | None:
    """Returns the architecture to compile for and its multiprocessors; None if nothing says which GPU that is."""
    try:
        return registry.arch(), registry.multiprocessors()
    except RuntimeError:
        return None


@functools.cache
def sources_digest() -> str:
    """Returns a digest of the package's Python sources."""
    package = Path(__file__).parents[1]
    return cache.files_digest(package, sorted(package.rglob("*.py")))
