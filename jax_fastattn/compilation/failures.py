# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The last failure of a worker, in a file of the cache directory: calls are silent about it, and `info` prints it."""

from __future__ import annotations

import contextlib
import os
import stat

from jax_fastattn.compilation import files
from jax_fastattn.compilation.settings import cache_directory

_NAME = "worker-failure.txt"
_MOST_BYTES = 2000


def note(problem: str) -> None:
    """Keeps a problem in place of the one before."""
    if target := cache_directory():
        with contextlib.suppress(OSError, files.UntrustedError):
            files.write(target, _NAME, problem.encode(errors="replace")[:_MOST_BYTES])


def noted() -> str:
    """Returns the problem that is kept; empty if there is none."""
    if target := cache_directory():
        with (
            contextlib.suppress(OSError, files.UntrustedError),
            files.opened(target, stat.S_IFDIR) as parent,
            files.opened(_NAME, stat.S_IFREG, parent) as descriptor,
        ):
            return os.read(descriptor, _MOST_BYTES).decode(errors="replace")
    return ""


def forget() -> None:
    """Deletes the problem, since a worker has succeeded."""
    if target := cache_directory():
        with contextlib.suppress(OSError):
            (target / _NAME).unlink()
