# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: one file per key, in the user's cache directory.

A key holds everything that decides about an object: the spec, the compiler's version, the kernel sources and the CPU
that the launcher is for. Deliberately not in it: paths, the environment, JAX's version (kernels do not see them).
A file holds a digest and the object. It is written whole or not at all, so that any number of processes may write the
same key, and read only where its digest fits; everything else counts as absent and is written again. Nothing is ever
deleted: a kernel is some 100 kB.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import tempfile
import warnings
from pathlib import Path

from jax_fastattn.kernels.spec import KernelSpec

# Changes when the layout of a file does.
_FORMAT = "1"
_DIGEST_SIZE = hashlib.sha256().digest_size


def directory() -> Path:
    """Where kernels are kept: `$JAX_FASTATTN_CACHE_DIR`, else `jax_fastattn` in the user's cache directory."""
    override = os.environ.get("JAX_FASTATTN_CACHE_DIR")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "jax_fastattn"


def kernel_key(spec: KernelSpec) -> str:
    """Name of the kernel that `spec` compiles to here and now: 64 hexadecimal digits.

    Raises:
        ImportError: nvidia-cutlass-dsl is not installed.
    """
    parts = (_FORMAT, repr(spec), compiler_version(), sources_digest(), platform.machine())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def compiler_version() -> str:
    """Version of nvidia-cutlass-dsl, read from its metadata: importing it takes seconds."""
    return importlib.metadata.version("nvidia-cutlass-dsl")


@functools.cache
def sources_digest() -> str:
    """Digest of the sources that an object is made of."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in [*sorted((package / "kernels").rglob("*.py")), package / "ffi" / "compiler.py"]:
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def load(key: str) -> bytes | None:
    """The object kept under `key`; None when there is none, or when it is damaged or cannot be read."""
    try:
        content = (directory() / key).read_bytes()
    except OSError:
        return None
    digest, kernel = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return kernel if kernel and digest == _digest(key, kernel) else None


def store(key: str, kernel: bytes) -> None:
    """Keeps an object under `key`. Where that is impossible, warns once and goes on."""
    target = directory()
    temporary: Path | None = None
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target, prefix=".writing-")  # mode 0600
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(key, kernel) + kernel)
        temporary.replace(target / key)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        _warn_once(str(target), error.strerror or str(error))


def _digest(key: str, kernel: bytes) -> bytes:
    return hashlib.sha256(key.encode() + kernel).digest()


@functools.cache
def _warn_once(target: str, problem: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {target} ({problem}), so that each process compiles them again; set "
        "JAX_FASTATTN_CACHE_DIR to a directory that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
