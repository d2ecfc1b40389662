# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The FFI target of this process, the parts that it needs, and the architecture to compile for.

Parts are found without being loaded; only `register` loads the C++ extension.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import re
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

from jax_fastattn.compilation import libraries
from jax_fastattn.kernels.architectures import ARCHITECTURES, H100_MULTIPROCESSORS
from jax_fastattn.keywords import explained

# Compiled programs and exported files hold this name, so it never changes.
TARGET_NAME = "jax_fastattn_launch"

_EXTENSION = "jax_fastattn.ffi._ffi"
# All tests ran with nvidia-cutlass-dsl from the first version to below the second one, as in pyproject.toml.
_COMPILER_FROM, _COMPILER_BELOW = (4, 8), (4, 9)


def _capability(arch: str) -> str:
    """Returns the compute capability that `arch` is named after, as JAX writes it: "10.3" for `"sm_103a"`."""
    digits = arch.removeprefix("sm_").removesuffix("a")
    return f"{digits[:-1]}.{digits[-1]}"


# Each compute capability has an architecture to compile for. Binaries run on later minor versions of their major
# version; binaries with the suffix "a" run on their own version only.
BY_CAPABILITY = {_capability(arch): arch for arch in ARCHITECTURES}

# The compiler writes code for an architecture of that name from this CUDA version on. For compute capability 11.0 the
# compiler of CUDA 12.9 writes what it calls sm_101a, and says nothing (nvidia-cutlass-dsl 4.8.1).
_FIRST_CUDA = {"sm_110a": 13}

_lock = threading.Lock()

# JAX caches traces, lowerings and compiled programs by its value, and each thread has a value of its own.
_target: Any = jax.make_user_context(default_value=None)


@explained
def target_arch(arch: str | None) -> contextlib.AbstractContextManager[None]:
    """Names the GPU to lower for inside a `with` block, in this thread, instead of the local ones.

    Use it to lower, compile or export a computation on a machine without its GPU. If a function is lowered for several
    architectures in turn, each program holds the kernels of the architecture that was named for it. A function that is
    traced inside the block must also be lowered inside it.

    Args:
        arch: one of the names in docs/support.md, such as `"sm_80"`, `"sm_90a"` (H100, H200) or `"sm_103a"`; None means
            the local GPUs, inside the block of another name too.

    Returns:
        The context manager.

    Raises:
        TypeError: `arch` is not a string.
        ValueError: `arch` is not an architecture that the kernels run on.
    """
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f'`arch` is {type(arch).__name__}, expected a string such as "sm_90a", or None')
    if arch is not None and arch not in ARCHITECTURES:
        raise ValueError(
            f'`arch` is "{arch}"; pass one of {", ".join(ARCHITECTURES)}. Calls with implementation="xla" need '
            "no name and run on other GPUs too"
        )
    return _inside(arch)


@contextlib.contextmanager
def _inside(arch: str | None) -> Generator[None, None, None]:
    with _target(arch):
        yield


def named_arch() -> str | None:
    """Returns the architecture that `target_arch` names in this thread; None outside its block."""
    return _target.value


def arch() -> str:
    """Returns the architecture to compile for: `target_arch`'s, else the one of this process's CUDA devices.

    Returns:
        A name such as `"sm_90a"`. `unsupported_reasons` refuses the names of devices that no kernel is written for.

    Raises:
        RuntimeError: there is no CUDA device and none was named, or the devices are of different architectures.
    """
    return named_arch() or _local_arch()


def _local_arch() -> str:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        raise RuntimeError(
            "a computation is lowered for CUDA in a process without a CUDA device, so that the GPU to compile for is "
            'unknown; name it with `with jax_fastattn.target_arch("sm_90a"):` (H100), around the lowering or export'
        ) from None
    found = {_arch_of(device.compute_capability) for device in devices}
    if len(found) > 1:
        listed = ", ".join(f"{device}: {device.compute_capability}" for device in devices)
        raise RuntimeError(
            f"the local CUDA devices have different compute capabilities ({listed}), and one program runs on all of "
            "them; start one process for each kind, with CUDA_VISIBLE_DEVICES"
        )
    return found.pop()


def _arch_of(capability: str) -> str:
    return BY_CAPABILITY.get(capability, f"sm_{capability.replace('.', '')}")


def multiprocessors() -> int:
    """Returns the streaming multiprocessors of the GPU to lower for, by which kernels size their grids.

    Returns:
        The number that the local CUDA device with the fewest has, or an H100 SXM's if `target_arch` names the GPU.
    """
    if named_arch() is not None:
        return H100_MULTIPROCESSORS
    return min(getattr(device, "core_count", H100_MULTIPROCESSORS) for device in jax.local_devices(backend="cuda"))


def missing_parts() -> list[str]:
    """Returns the parts that are missing to launch kernels, each with its remedy; an empty list if none are."""
    missing = [] if libraries.is_installed(_EXTENSION) else [_without_extension()]
    if problem := _compiler_problem():
        missing.append(
            f"{problem}; run `pip install '{_requirement(13)}'`, or `pip install '{_requirement(12)}'` for CUDA 12"
        )
    return missing


def _compiler_problem() -> str:
    """Says what is wrong with the installed compiler; an empty string if nothing is."""
    if not libraries.is_installed(libraries.COMPILER):
        return "nvidia-cutlass-dsl, which compiles and loads kernels, is not installed"
    try:
        found = libraries.compiler_version()
    except importlib.metadata.PackageNotFoundError:
        return "nvidia-cutlass-dsl is installed in part: its modules are present, but its metadata is missing"
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and _COMPILER_FROM <= tuple(map(int, numbers.groups())) < _COMPILER_BELOW:
        return ""
    return (
        f"nvidia-cutlass-dsl {found} is installed, but the kernels of this jax_fastattn were tested only with versions "
        f"{_versions()}"
    )


def _versions() -> str:
    """Returns the versions of nvidia-cutlass-dsl that the kernels take, as pip writes them."""
    return ">={}.{},<{}.{}".format(*_COMPILER_FROM, *_COMPILER_BELOW)


def _requirement(cuda: int) -> str:
    """Returns the requirement that installs the compiler for a major CUDA version."""
    return f"nvidia-cutlass-dsl{'' if cuda == 12 else f'[cu{cuda}]'}{_versions()}"


def _without_extension() -> str:
    """Says which package was imported without its extension, and what to do."""
    package = Path(__file__).parents[1]
    root = package.parent
    text = f"the C++ extension of jax_fastattn, built for this Python, is not in {package}"
    if not (root / "CMakeLists.txt").is_file():
        return f"{text}; reinstall jax_fastattn from its wheel or clone by `pip install --force-reinstall`"
    if other := _installed_elsewhere():
        text += (
            f", a source tree that Python imports instead of the installed package {other}; start Python in another "
            f"directory, or leave {root} out of PYTHONPATH"
        )
    return f"{text}; {'or ' if other else ''}run `pip install -e {root}`"


def _installed_elsewhere() -> Path | None:
    """Finds a package with an extension elsewhere on Python's path; returns None if there is none."""
    folders = [str(Path(entry, "jax_fastattn", "ffi")) for entry in sys.path]
    found = importlib.machinery.PathFinder.find_spec("_ffi", folders)
    return Path(found.origin).parents[1] if found and found.origin else None


def compiler_reasons(arch: str | None) -> list[str]:
    """Returns why the installed compiler cannot compile for `arch`, with the remedy; an empty list if it can."""
    needed = _FIRST_CUDA.get(arch or "")
    found = libraries.toolkit() if needed else None
    if needed is None or found is None or found >= needed:
        return []
    return [
        f"nvidia-cutlass-dsl compiles for {arch} only with its libraries for CUDA {needed}, but finds those for CUDA "
        f"{found}; run `pip install '{_requirement(needed)}'`"
    ]


@explained
def register() -> None:
    """Registers the FFI target for CUDA with XLA. Lowering does so too; repeated calls have no effect.

    A process that runs programs without lowering them, such as one that deserializes a `jax.export` file, calls this
    first.

    Raises:
        ImportError: the C++ extension is missing or does not load.
    """
    with _lock:
        _register_once()


@functools.cache
def _register_once() -> None:
    if not libraries.is_installed(_EXTENSION):
        raise ImportError(_without_extension())
    extension = importlib.import_module(_EXTENSION)
    extension.set_library_paths(runtime=libraries.runtime_library() or "", driver=libraries.DRIVER)
    stages = {"initialize": extension.initialize, "execute": extension.launch}
    jax.ffi.register_ffi_target(TARGET_NAME, stages, platform="CUDA")
