# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The folder in which test processes keep what they compile, and JAX's compilation cache in it.

JAX finds a program by its text, its options, XLA's flags, the version of jaxlib and the features of the CPU. A change
of the code that changes a program compiles it, and no test runs what other code compiled to. The kernels that CuTe DSL
compiles are in the same folder (`kernels/emulator/kept_kernels.py`). You may delete the folder at any time.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import jax
from jax._src import lru_cache

# If there is more, the oldest entries are deleted. All tests with both versions of jax write about a third of it.
MAX_NBYTES = 2 << 30

# PYTHONWARNINGS of processes whose warnings are errors. JAX warns of an entry that another process has begun to write,
# and compiles the program.
STRICT = ("error", *(f"ignore:Error {x} persistent compilation cache entry" for x in ("reading", "writing")))


@functools.cache
def folder(kind: str) -> Path | None:
    """Returns the folder of a kind of entries in the user's cache folder, or None if this process cannot write one."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        caches = Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()
        found = caches / "jax_fastattn_tests" / kind
        found.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # a file system that is read-only, or a user without a home
        return None
    return found if os.access(found, os.W_OK) else None


def summary() -> str:
    """Returns a line about the folder."""
    programs, kernels = folder("programs"), folder("kernels")
    if programs is None or kernels is None:
        return "compiles everything: the user's cache folder cannot be written"
    counts = [len(list(path.iterdir())) for path in (programs, kernels)]
    return f"compiled before: {counts[0]} programs and {counts[1]} kernels in {programs.parent}"


def prune() -> None:
    """Deletes the oldest entries if there are more than `MAX_NBYTES`."""
    folders = filter(None, map(folder, ("programs", "kernels")))
    entries = [(_state(path), path) for kind in folders for path in kind.iterdir()]
    states = sorted(((state, path) for state, path in entries if state), key=lambda x: x[0].st_mtime)
    excess = sum(state.st_size for state, _ in states) - MAX_NBYTES
    for state, path in states:
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= state.st_size


def _state(path: Path) -> os.stat_result | None:
    """Returns the state of an entry; None if another run has renamed or deleted it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def keep_programs() -> None:
    """Lets this process, and those that it starts, keep programs; leaves a folder that the user has named.

    A worker of pytest-xdist has inherited the settings, and needs the writing of entries.
    """
    programs = folder("programs")
    if programs is None or jax.config.jax_compilation_cache_dir not in (None, "", str(programs)):
        return
    lru_cache.LRUCache.put = _put
    settings = {
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def _put(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Writes an entry whole or not at all, and in the place of a damaged one. JAX's own method does neither."""
    descriptor, name = tempfile.mkstemp(dir=cache.path)
    with os.fdopen(descriptor, "wb") as file:
        file.write(value)
    Path(name).replace(Path(cache.path) / f"{key}{lru_cache._CACHE_SUFFIX}")
