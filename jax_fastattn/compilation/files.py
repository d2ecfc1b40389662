# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Files that only this user or root can have written, files that are written whole or not at all, and digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"


class UntrustedError(Exception):
    """Signals that another user may write a file or directory of the cache; the message says why."""


def write(target: Path, name: str, content: bytes) -> None:
    """Writes a file of the directory, which is created if it is absent.

    Raises:
        UntrustedError: another user can write the directory.
        OSError: the file cannot be written; nothing is left of it.
    """
    temporary: Path | None = None
    try:
        is_writable(target)
        descriptor, temporary_name = tempfile.mkstemp(dir=target, prefix=TEMPORARY_PREFIX)
        temporary = Path(temporary_name)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # regardless of the umask
            file.write(content)
        temporary.replace(target / name)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):  # an error may have made the file system read-only
                temporary.unlink()
        raise


def is_writable(target: Path) -> bool:
    """Returns whether this process can add files to the directory, which is created if it is absent.

    Raises:
        UntrustedError: another user can write it.
        OSError: it cannot be created or opened.
    """
    _create(target)
    with opened(target, stat.S_IFDIR):
        return os.access(target, os.W_OK | os.X_OK, effective_ids=True)


@contextlib.contextmanager
def opened(path: Path | str, kind: int, parent: int | None = None) -> Generator[int, None, None]:
    """Opens the cache's directory, or an entry in `parent`; raises UntrustedError if another user can write it.

    The checks apply to the file that was opened: no link is followed, and no name is looked up twice.
    """
    name = "it" if parent is None else "an entry"
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # else a FIFO would wait for a writer
    try:
        descriptor = os.open(path, flags, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedError(f"{name} is a link") from error
        if error.errno == errno.ENXIO:
            raise UntrustedError(f"{name} is a socket") from error
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_IFMT(status.st_mode) != kind:
            raise UntrustedError(f"{name} is not a {'directory' if kind == stat.S_IFDIR else 'regular file'}")
        if status.st_uid not in (os.geteuid(), 0):
            raise UntrustedError(f"{name} belongs to user {status.st_uid}, neither this user nor root")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UntrustedError(f"{name} can be written by its group or by others")
        yield descriptor
    finally:
        os.close(descriptor)


def closed(target: Path, name: str) -> Path:
    """Returns the first directory above a file that this user may not open, or the file itself."""
    above = [path for path in target.absolute().parents if not os.access(path, os.X_OK, effective_ids=True)]
    if above:
        return above[-1]
    return target / name if os.access(target, os.R_OK | os.X_OK, effective_ids=True) else target


def digest(root: Path, paths: Iterable[Path]) -> str:
    """Returns a digest of files and of their paths relative to `root`."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def _create(target: Path) -> None:
    """Creates the directory and its parents, for the user alone, regardless of the umask."""
    for path in reversed([path for path in (target, *target.parents) if not path.exists()]):
        with contextlib.suppress(FileExistsError):  # another process may create it meanwhile
            path.mkdir(mode=0o700)
            path.chmod(0o700)
