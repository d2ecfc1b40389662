# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: one file per key, in the user's cache directory.

A key holds everything that decides about an object: the spec, which holds the tile sizes, the version of the compiler
and of its CUDA libraries, the kernel sources and the CPU that the launcher is for. It deliberately omits paths,
the environment and JAX's version, since kernels do not see them.

A file holds a digest and the object. It is written whole or not at all, so that any number of processes may write the
same key. It is read only if its digest matches; otherwise it counts as absent and is written again. The digest does not
protect against other users, who can compute it too. An object is code that this process will run. Hence a file is read
only if no other user can write it or the directory, and both belong to the user or root.

Writing an entry deletes entries that have not been read for 90 days, and files of writers that were killed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import re
import stat
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from jax_fastattn.compilation import files, libraries
from jax_fastattn.compilation.settings import cache_directory as directory
from jax_fastattn.kernels.key import KernelSpec

# It changes when the layout of a file does.
_FORMAT = "1"
_DIGEST_SIZE = hashlib.sha256().digest_size

# An entry has at most this many bytes; csrc/store.cc takes objects up to this size.
_MAX_SIZE = 1 << 28

_DAY = 24 * 3600
_UNUSED_SECONDS = 90 * _DAY

_ENTRY = re.compile("[0-9a-f]{64}")

_OWN_DIRECTORY = "Set `JAX_FASTATTN_CACHE_DIR` to a directory that only you can write."
_UNTRUSTED_REMEDY = (
    "Delete that directory, or set `JAX_FASTATTN_CACHE_DIR` to one that only you can write. Root must fill a directory "
    "that several users share."
)

# A warning has said that these directories cannot be read.
_unreadable: set[Path] = set()


def kernel_key(spec: KernelSpec) -> str:
    """Returns the name of the kernel that `spec` compiles to in this process: 64 hexadecimal digits.

    Raises:
        ImportError: nvidia-cutlass-dsl is not installed.
    """
    compiler = f"{libraries.compiler_version()} for CUDA {libraries.toolkit()}"
    parts = (_FORMAT, repr(spec), compiler, sources_digest(), platform.machine())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def sources_digest() -> str:
    """Returns a digest of the sources that an object is compiled from.

    Kernels take a constant from `limits.py`, and what instructions mean from two files of `programs/`.
    """
    package = Path(__file__).parents[1]
    codes = [package / "programs" / name for name in ["code.py", "analysis.py"]]
    others = [package / "compilation" / "compiler.py", *codes, package / "limits.py"]
    return files.digest(package, sorted((package / "kernels").rglob("*.py")) + others)


@dataclass(frozen=True)
class State:
    """The cache directory as this process finds it.

    Attributes:
        path: the directory; None if the user has no home directory and the environment names no other place.
        exists: whether the directory exists; the first entry creates it.
        entries, size: compiled kernels that this process can read, and their bytes.
        is_writable: whether this process can add kernels.
        problem: why kernels in it are not used, or cannot be added; empty if nothing is in the way.
        remedy: what to do about the problem.
    """

    path: Path | None
    exists: bool = False
    entries: int = 0
    size: int = 0
    is_writable: bool = False
    problem: str = ""
    remedy: str = ""


def load(key: str) -> bytes | None:
    """Returns the object kept under `key`, or None if there is none or it is damaged.

    Warns once if an entry cannot be trusted, or cannot be read although it may exist.
    """
    target = directory()
    if target is None:
        return None
    try:
        content = _read(target, key)
    except files.UntrustedError as error:
        _warn_untrusted(target, str(error))
        return None
    except PermissionError:
        _warn_unreadable(target, key)
        return None
    except OSError:
        return None
    digest, kernel = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return kernel if kernel and digest == _digest(key, kernel) else None


def store(key: str, kernel: bytes) -> None:
    """Keeps an object under `key`, and deletes unused entries. If that is impossible, warns once and returns."""
    target = directory()
    if target is None:
        _warn_unwritable("anywhere, since the user's home directory is unknown")
        return
    try:
        files.write(target, key, _digest(key, kernel) + kernel)
    except files.UntrustedError as error:
        _warn_untrusted(target, str(error))
    except OSError as error:
        if target not in _unreadable or not isinstance(error, PermissionError):
            _warn_unwritable(f"to {target} ({error.strerror or error})")
    else:
        _prune(target)


def takes_entries() -> bool:
    """Returns whether this process can add kernels; creates the directory if it is absent."""
    target = directory()
    try:
        return target is not None and files.is_writable(target)
    except (OSError, files.UntrustedError):
        return False


def state() -> State:
    """Returns what the cache directory holds and whether this process can use it; changes nothing."""
    target = directory()
    if target is None:
        return State(None, problem="the user's home directory is unknown", remedy=_OWN_DIRECTORY)
    try:
        with files.opened(target, stat.S_IFDIR) as descriptor:
            return _listed(target, descriptor)
    except FileNotFoundError:
        above = next(path for path in target.absolute().parents if path.exists())
        if os.access(above, os.W_OK | os.X_OK, effective_ids=True):
            return State(target, is_writable=True)
        return State(target, problem=f"this user cannot create it in {above}", remedy=_OWN_DIRECTORY)
    except files.UntrustedError as error:
        return State(target, exists=True, problem=f"it will not be used, since {error}", remedy=_UNTRUSTED_REMEDY)
    except PermissionError:
        closed, remedy = files.closed(target, ""), _unreadable_remedy(target, "")
        return State(target, exists=True, problem=f"cannot read {closed} (Permission denied)", remedy=remedy)
    except OSError as error:
        return State(target, problem=f"cannot open it ({error.strerror or error})", remedy=_OWN_DIRECTORY)


def clear() -> tuple[int, int]:
    """Deletes all compiled kernels, and files of writers that were killed more than a day ago. Other files stay.

    Returns:
        The number of deleted files, and their bytes.

    Raises:
        OSError: the directory cannot be opened or changed, or another user may write it.
    """
    target = directory()
    sizes: list[int] = []
    if target is None:
        return 0, 0
    try:
        with files.opened(target, stat.S_IFDIR) as parent, os.scandir(parent) as found:
            for file in found:
                with contextlib.suppress(FileNotFoundError):  # another process deletes too
                    sizes += _deleted(file, parent)
    except FileNotFoundError:
        return 0, 0
    except files.UntrustedError as error:
        raise PermissionError(errno.EPERM, f"{error}, so nothing was deleted") from error
    return len(sizes), sum(sizes)


def _deleted(file: os.DirEntry[str], parent: int) -> list[int]:
    """Deletes a file of the directory if the cache made it and no writer needs it; returns its bytes."""
    status = file.stat(follow_symlinks=False)
    is_old = file.name.startswith(files.TEMPORARY_PREFIX) and time.time() - status.st_mtime > _DAY
    if stat.S_ISDIR(status.st_mode) or not (is_old or _ENTRY.fullmatch(file.name)):
        return []
    os.unlink(file.name, dir_fd=parent)
    return [status.st_size]


def _listed(target: Path, parent: int) -> State:
    """Returns the state of a directory that this process may open."""
    sizes: list[int] = []
    problems: list[tuple[str, str]] = []
    with os.scandir(parent) as found:
        names = [file.name for file in found if _ENTRY.fullmatch(file.name)]
    for name in names:
        try:
            with files.opened(name, stat.S_IFREG, parent) as descriptor:
                sizes.append(os.fstat(descriptor).st_size)
        except files.UntrustedError as error:
            problems.append((str(error), _UNTRUSTED_REMEDY))
        except PermissionError:
            problems.append(("this user cannot read them", _unreadable_remedy(target, name)))
        except FileNotFoundError:  # another process deletes
            continue
    text, remedy = problems[0] if problems else ("", "")
    return State(
        path=target,
        exists=True,
        entries=len(sizes),
        size=sum(sizes),
        is_writable=os.access(target, os.W_OK | os.X_OK, effective_ids=True),
        problem=f"{len(problems)} of {len(sizes) + len(problems)} entries are not used: {text}" if problems else "",
        remedy=remedy,
    )


def _digest(key: str, kernel: bytes) -> bytes:
    return hashlib.sha256(key.encode() + kernel).digest()


def _read(target: Path, key: str) -> bytes:
    """Returns the bytes of an entry; raises OSError or files.UntrustedError."""
    with files.opened(target, stat.S_IFDIR) as parent, files.opened(key, stat.S_IFREG, parent) as descriptor:
        status = os.fstat(descriptor)
        if status.st_size > _MAX_SIZE:
            raise files.UntrustedError("an entry is larger than any kernel")
        if time.time() - status.st_mtime > _DAY:  # `_prune` reads this as the time of the last use
            with contextlib.suppress(OSError):  # root owns the files of a cache that an administrator shares
                os.utime(descriptor)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(status.st_size)


def _prune(target: Path) -> None:
    """Deletes entries that were not read for 90 days, and files of writers that were killed more than a day ago."""
    with contextlib.suppress(OSError), os.scandir(target) as found:
        for file in found:
            is_temporary, is_entry = file.name.startswith(files.TEMPORARY_PREFIX), _ENTRY.fullmatch(file.name)
            limit = _DAY if is_temporary else _UNUSED_SECONDS
            if is_temporary or is_entry:
                with contextlib.suppress(OSError):  # another process deletes too
                    if time.time() - file.stat(follow_symlinks=False).st_mtime > limit:
                        Path(file.path).unlink()


def _warn_untrusted(target: Path, problem: str) -> None:
    _warn_once(
        f"Will not use the compiled kernels in {target}, since {problem}: whoever can write them can run code as this "
        f"user. Every process will recompile them. {_UNTRUSTED_REMEDY}"
    )


def _warn_unreadable(target: Path, key: str) -> None:
    """Warns, once for each directory, that this user may not open an entry, or a directory above it."""
    if target in _unreadable:
        return
    _unreadable.add(target)
    closed = files.closed(target, key)
    what = "compiled kernel" if closed.name == key else "directory"
    _warn_once(
        f"Cannot read the {what} {closed} (Permission denied); kernels that cannot be read are compiled again. "
        f"{_unreadable_remedy(target, key)}"
    )


def _unreadable_remedy(target: Path, key: str) -> str:
    closed = files.closed(target, key)
    above = "" if closed in (target, target / key) else f"make {closed} searchable and "
    return (
        f"If an administrator filled {target} for its users, let its owner {above}run `chmod -R a+rX {target}`. "
        f"Otherwise s{_OWN_DIRECTORY[1:]}"
    )


def _warn_unwritable(problem: str) -> None:
    _warn_once(f"Cannot write compiled kernels {problem}; every process will recompile them. {_OWN_DIRECTORY}")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
