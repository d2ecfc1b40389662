# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The facts of this process that decide about a lowered program, in addition to the call itself.

JAX's own cache keys hold the versions of JAX and XLA and the devices. They do not hold the facts that are listed here.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from jax_fastattn.compilation import files, libraries
from jax_fastattn.ffi import registry


def process_fingerprint() -> tuple[object, ...]:
    """Returns a digest of the package's sources, the compiler, the GPU to compile for, the CPU, and the missing parts.

    A process without a part takes the XLA path. Its programs must not serve a process that has the part.
    """
    missing = tuple(registry.missing_parts())
    compiler = None if missing else (libraries.compiler_version(), libraries.toolkit())
    return sources_digest(), missing, compiler, _gpu(), platform.machine()


def _gpu() -> tuple[str | None, int] | None:
    """Returns the architecture to compile for and its multiprocessors; None if the GPU is unknown."""
    try:
        return registry.arch(), registry.multiprocessors()
    except RuntimeError:
        return None


@functools.cache
def sources_digest() -> str:
    """Returns a digest of the package's Python sources."""
    package = Path(__file__).parents[1]
    return files.digest(package, sorted(package.rglob("*.py")))
