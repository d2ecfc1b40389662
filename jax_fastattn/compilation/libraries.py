# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The installed compiler, its libraries and the CUDA driver, found without loading the compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
from pathlib import Path

COMPILER = "nvidia_cutlass_dsl"
DRIVER = "libcuda.so.1"


@functools.cache
def compiler_version() -> str:
    """Returns the version of nvidia-cutlass-dsl from its metadata: importing it takes seconds.

    Raises:
        ImportError: it is not installed.
    """
    return importlib.metadata.version("nvidia-cutlass-dsl")


def runtime_library() -> str | None:
    """Returns the path of the CuTe DSL runtime for `toolkit`; None if there is none."""
    found = toolkit()
    return None if found is None else str(runtime_libraries()[found])


def toolkit() -> int | None:
    """Returns the CUDA version of the CuTe DSL libraries that this process compiles and launches with, such as 13.

    Returns:
        The newest installed one that the driver can run, or the newest one without a driver; None if there is none.
        The compiler picks its libraries by the same rule, when it is imported.
    """
    driver = driver_version()
    return max((version for version in runtime_libraries() if driver is None or version <= driver), default=None)


def runtime_libraries() -> dict[int, Path]:
    """Returns the installed CuTe DSL runtimes by the CUDA version that they are for; empty without the compiler."""
    spec = importlib.util.find_spec(COMPILER) if is_installed(COMPILER) else None
    roots = [Path(root) for root in (spec.submodule_search_locations if spec else None) or ()]
    found = [path for root in reversed(roots) for path in root.glob("cu[0-9]*/lib/libcute_dsl_runtime.so")]
    return {int(path.parents[1].name.removeprefix("cu")): path for path in found}


@functools.cache
def driver_version() -> int | None:
    """Returns the major CUDA version of the driver, without initializing it; None if there is no driver."""
    version = ctypes.c_int(0)
    try:
        error = ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if error else version.value // 1000


@functools.cache
def is_installed(module: str) -> bool:
    """Returns whether a module can be found."""
    return importlib.util.find_spec(module) is not None
