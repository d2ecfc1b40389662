# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The disk cache: what is kept is found again, and what is not as it was written is never used."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import platform
import re
import resource
import signal
import socket
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_fastattn.compilation import cache, libraries
from jax_fastattn.ffi import call
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

KEY = "ab" * 32
KERNEL = bytes(range(256)) * 400
SPEC = KernelSpec("forward", "sm_90a", "bfloat16", 64, 32)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "not yet" / "there"
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(path))
    return path


def test_round_trip(directory: Path) -> None:
    assert cache.load(KEY) is None
    cache.store(KEY, KERNEL)
    assert cache.load(KEY) == KERNEL
    assert [path.name for path in directory.iterdir()] == [KEY], "nothing is left behind"


@pytest.mark.parametrize("length", [0, 5, 32, 33, len(KERNEL)])
def test_truncated_entry(directory: Path, length: int) -> None:
    cache.store(KEY, KERNEL)
    path = directory / KEY
    path.write_bytes(path.read_bytes()[:length])
    assert cache.load(KEY) is None


@pytest.mark.parametrize("position", [0, 31, 32, 5000, -1])
def test_flipped_bit(directory: Path, position: int) -> None:
    cache.store(KEY, KERNEL)
    path = directory / KEY
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
    assert cache.load(KEY) is None
    cache.store(KEY, KERNEL)
    assert cache.load(KEY) == KERNEL, "a damaged entry is replaced"


def test_entry_under_another_name(directory: Path) -> None:
    cache.store(KEY, KERNEL)
    (directory / KEY).rename(directory / ("cd" * 32))
    assert cache.load("cd" * 32) is None


def _write(directory: str, number: int) -> None:
    os.environ["JAX_FASTATTN_CACHE_DIR"] = directory
    for _ in range(30):
        cache.store(KEY, KERNEL + bytes([number]))


def test_concurrent_writers(directory: Path) -> None:
    """Readers find no entry or a whole one, from whichever writer, at any time."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=_write, args=(str(directory), number))
        for number in range(2)
    ]
    for process in processes:
        process.start()
    found = set()
    while any(process.is_alive() for process in processes):
        kernel = cache.load(KEY)
        assert kernel[:-1] == KERNEL if kernel else not found, "an entry was torn"
        if kernel:
            found.add(kernel)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert found
    assert [path.name for path in directory.iterdir()] == [KEY]


def test_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so once. (A file in the way: permissions do not stop root.)"""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(
        RuntimeWarning,
        match=r"Cannot write compiled kernels to .*/file/cache \(Not a directory\).*JAX_FASTATTN_CACHE_DIR",
    ):
        cache.store(KEY, KERNEL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.store(KEY, KERNEL)
    assert cache.load(KEY) is None


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `path` somebody else's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def _make_link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def _make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _make_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


UNTRUSTED_ENTRIES = {
    "an entry belongs to user": _give_away,
    "an entry can be written by its group": lambda path, _: path.chmod(0o620),
    "an entry can be written by .*others": lambda path, _: path.chmod(0o602),
    "an entry is a link": lambda path, _: _make_link(path),
    "an entry is not a regular file": lambda path, _: _make_fifo(path),
    "an entry is not a regular file ": lambda path, _: _make_directory(path),
    "an entry is a socket": lambda path, _: _make_socket(path),
    "an entry is larger than any kernel": lambda path, _: os.truncate(path, 1 << 40),
}


@contextlib.contextmanager
def _no_hang() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError("hangs")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize(
    "problem", UNTRUSTED_ENTRIES, ids=["owner", "group", "world", "link", "fifo", "dir", "sock", "huge"]
)
def test_entry_that_somebody_else_may_write(directory: Path, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    """Not read, with one warning, and no hang on a FIFO and no MemoryError on a sparse file; a new one replaces it."""
    cache.store(KEY, KERNEL)
    UNTRUSTED_ENTRIES[problem](directory / KEY, monkeypatch)
    owner = "it belongs|an entry belongs" if "belongs" in problem else problem.strip()
    with _no_hang(), pytest.warns(RuntimeWarning, match=rf"{owner}.*Delete .*`JAX_FASTATTN_CACHE_DIR`"):
        assert cache.load(KEY) is None
    with _no_hang(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(KEY) is None, "one warning"
    if (directory / KEY).is_dir() or os.geteuid() != 0:
        return
    cache.store(KEY, KERNEL)
    assert cache.load(KEY) == KERNEL


UNTRUSTED_DIRECTORIES = {
    "it belongs to user": _give_away,
    "it can be written by its group": lambda path, _: path.chmod(0o770),
    "it can be written by .*others": lambda path, _: path.chmod(0o1703),
    "it is a link": lambda path, _: _make_link(path),
}


@pytest.mark.parametrize("problem", UNTRUSTED_DIRECTORIES, ids=["owner", "group", "world", "link"])
def test_directory_that_somebody_else_may_write(directory: Path, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    """Neither read nor written."""
    cache.store(KEY, KERNEL)
    UNTRUSTED_DIRECTORIES[problem](directory, monkeypatch)
    with pytest.warns(RuntimeWarning, match=rf"{problem}.*Delete .*`JAX_FASTATTN_CACHE_DIR`"):
        assert cache.load(KEY) is None
    cache.store("cd" * 32, KERNEL)  # and no second warning
    assert [path.name for path in directory.iterdir()] == [KEY]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own what root owns")
def test_files_of_root_are_trusted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that an administrator shares."""
    cache.store(KEY, KERNEL)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.load(KEY) == KERNEL


@contextlib.contextmanager
def _another_user() -> Iterator[None]:
    """Runs a block as a user whose files are not root's; tests of other users take away their own rights instead."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with one entry that every user can read. Not in `tmp_path`, which pytest closes to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        path = Path(name).resolve() / "image" / "cache"
        monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(path))
        cache.store(KEY, KERNEL)
        for made in (*list(path.parents)[:2], path):
            made.chmod(0o755)
        (path / KEY).chmod(0o644)
        yield path
        for made in (path.parent, path):
            made.chmod(0o755)


@pytest.mark.parametrize(
    ("place", "closed", "above"),
    [
        (f"image/cache/{KEY}", f"compiled kernel .*/image/cache/{KEY}", ""),
        ("image/cache", "directory .*/image/cache", ""),
        ("image", "directory .*/image", "make .*/image searchable and "),
    ],
    ids=["entry", "directory", "above"],
)
def test_a_cache_that_root_filled_and_others_cannot_read(filled: Path, place: str, closed: str, above: str) -> None:
    """One warning names what is closed and how to open it, and none follows about what cannot be written."""
    path = filled.parents[1] / place
    path.chmod((0o600 if path.is_file() else 0o700) if os.geteuid() == 0 else 0)
    with _another_user():
        with pytest.warns(
            RuntimeWarning,
            match=rf"Cannot read the {closed} \(Permission denied\).* {above}run `chmod -R a\+rX .*/image/cache`\.",
        ):
            assert cache.load(KEY) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.store("cd" * 32, KERNEL)
            assert cache.load(KEY) is None


def test_a_cache_that_root_filled_and_opened_is_read(filled: Path) -> None:
    """By the command of the documentation: `chmod -R a+rX`."""
    for path in (filled, filled / KEY):
        path.chmod(0o700 if path.is_dir() else 0o600)
    subprocess.run(["chmod", "-R", "a+rX", str(filled)], check=True)
    with _another_user(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(KEY) == KERNEL
        assert cache.load("cd" * 32) is None, "what is not there is no reason for a warning"


@pytest.mark.parametrize("umask", [0, 0o777])
def test_whatever_the_umask_only_the_user_may_read_and_write(directory: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        cache.store(KEY, KERNEL)
    finally:
        os.umask(old)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory.parent, directory, directory / KEY)]
    assert modes == [0o700, 0o700, 0o600]


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with an arbitrary user id: one warning, no cache."""

    def no_entry(*_: object) -> None:
        raise KeyError

    for name in ("JAX_FASTATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    cache._warn_once.cache_clear()
    assert cache.load(KEY) is None
    with pytest.warns(RuntimeWarning, match="home directory is unknown.*JAX_FASTATTN_CACHE_DIR"):
        cache.store(KEY, KERNEL)
    cache.store(KEY, KERNEL)
    assert cache.load(KEY) is None


def _age(path: Path, days: float) -> None:
    path.touch()
    os.utime(path, (time.time() - days * 24 * 3600,) * 2)


def test_files_of_killed_writers_and_unused_entries_are_deleted(directory: Path) -> None:
    cache.store(KEY, KERNEL)
    old, young, foreign = "cd" * 32, "ef" * 32, "notes.txt"
    for name, days in {old: 91, young: 89, foreign: 1000, ".writing-old": 1.1, ".writing-young": 0.9}.items():
        _age(directory / name, days)
    cache.store(KEY, KERNEL)
    assert {path.name for path in directory.iterdir()} == {KEY, young, foreign, ".writing-young"}


def test_an_entry_that_is_read_is_in_use(directory: Path) -> None:
    cache.store(KEY, KERNEL)
    _age(directory / KEY, 91)
    assert cache.load(KEY) == KERNEL
    cache.store("cd" * 32, KERNEL)
    assert cache.load(KEY) == KERNEL


def test_full_disk_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.store(KEY, KERNEL)
    assert list(directory.iterdir()) == []


def test_a_write_that_fails_halfway_leaves_nothing_behind(directory: Path) -> None:
    """As on a full disk: the operating system takes a part of the file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(KERNEL) // 2, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match=r"Cannot write compiled kernels to .* \(File too large\)"):
            cache.store(KEY, KERNEL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(directory.iterdir()) == []


def test_a_file_system_that_became_read_only_is_no_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux mounts a file system read-only after an error of its disk: nothing can be deleted either."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(RuntimeWarning, match=r"Cannot write .* \(Read-only file system\)"):
        cache.store(KEY, KERNEL)


def test_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_FASTATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.directory() == Path("/somewhere/jax_fastattn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache.directory() == Path("/home/user/.cache/jax_fastattn")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.directory() == Path("/home/user/.cache/jax_fastattn"), "the XDG specification says to ignore it"
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", "~/kernels")
    assert cache.directory() == Path("/home/user/kernels")


@pytest.fixture
def compiler_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "compiler_version", lambda: "4.8.1")


CHANGES = {
    "op": "backward",
    "moved": ("query",),
    "arch": "sm_80",
    "operand_dtype": "float16",
    "products": "bf16x3",
    "head_dim": 72,
    "v_head_dim": 64,
    "group": 4,
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
    "packed": True,
    "listed": True,
    "compared": True,
    "alike": True,
    "row_bits": True,
    "page": 16,
    "mask": True,
    "segment_ids": True,
    "bias": "matrix",
    "bias_dtype": "float32",
    "dbias": True,
    "splits_dbias": True,
    "dplane": 0,
    "mean_plane": 0,
    "out_rests": True,
    "dlse": True,
    "dsinks": True,
    "small_weights": True,
    "family": "sm90",
    "ordered": True,
    "features": (codes.SINKS,),
    "config": configured(SPEC, short=True).config,
}


def test_every_field_of_the_spec_is_in_the_key(compiler_version: None) -> None:
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(KernelSpec)}
    keys = {cache.kernel_key(dataclasses.replace(SPEC, **{name: value})) for name, value in CHANGES.items()}
    assert len(keys | {cache.kernel_key(SPEC)}) == len(CHANGES) + 1


def test_the_key_is_the_same_every_time(compiler_version: None) -> None:
    assert cache.kernel_key(SPEC) == cache.kernel_key(dataclasses.replace(SPEC))
    assert len(cache.kernel_key(SPEC)) == 64


def test_compiler_version_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "compiler_version", lambda: "4.8.1")
    old = cache.kernel_key(SPEC)
    monkeypatch.setattr(libraries, "compiler_version", lambda: "4.9.0")
    assert cache.kernel_key(SPEC) != old


def test_cuda_libraries_of_the_compiler_are_in_the_key(compiler_version: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for version in (12, 13):
        monkeypatch.setattr(libraries, "toolkit", lambda version=version: version)
        keys.add(cache.kernel_key(SPEC))
    assert len(keys) == 2


def test_cpu_of_the_launcher_is_in_the_key(compiler_version: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory may be shared by machines of two kinds."""
    keys = set()
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        keys.add(cache.kernel_key(SPEC))
    assert len(keys) == 2


# Keys, and the path to each config that they hold.
KEYED_CONFIGS = {
    "sm80 forward": (SPEC, ()),
    "sm80 backward": (dataclasses.replace(SPEC, op="backward"), ()),
    "sm90 forward": (dataclasses.replace(SPEC, family="sm90"), ()),
    "sm90 backward": (dataclasses.replace(SPEC, op="backward", family="sm90"), ("main",)),
    "sm90 dkdv": (dataclasses.replace(SPEC, op="backward", family="sm90", head_dim=192), ("main",)),
    "sm90 dq": (dataclasses.replace(SPEC, op="backward", family="sm90", head_dim=192), ("dq",)),
}


def _with_another(config: Any, path: tuple[str, ...]) -> Any:
    """Returns a config that differs in one field only."""
    if path:
        return dataclasses.replace(config, **{path[0]: _with_another(getattr(config, path[0]), path[1:])})
    name = dataclasses.fields(config)[0].name
    return dataclasses.replace(config, **{name: getattr(config, name) + 1})


@pytest.mark.parametrize("case", KEYED_CONFIGS)
def test_a_kernel_of_another_tiling_is_not_taken(
    compiler_version: None, directory: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Neither from disk nor from memory."""
    spec, path = KEYED_CONFIGS[case]
    spec = configured(spec)
    compiled: list[KernelSpec] = []
    monkeypatch.setattr(call, "_kernels", {})
    monkeypatch.setattr(call, "_compile", lambda spec: compiled.append(spec) or KERNEL)
    call.prepare(spec)
    call.prepare(spec)
    assert compiled == [spec]
    other = dataclasses.replace(spec, config=_with_another(spec.config, path))
    assert other.config != spec.config and cache.kernel_key(other) != cache.kernel_key(spec)
    call.prepare(other)
    assert compiled == [spec, other]


def test_kernel_sources_are_in_the_key(compiler_version: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "compilation/cache.py",
        "compilation/compiler.py",
        "limits.py",
        "programs/code.py",
        "programs/analysis.py",
        "kernels/sm80/forward/kernel.py",
        "kernels/device/mma.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "compilation/cache.py"))

    def key() -> str:
        cache.sources_digest.cache_clear()
        return cache.kernel_key(SPEC)

    keys = [key()]
    assert key() == keys[0]
    (tmp_path / "kernels/device/mma.py").write_text("a = 2\n")
    keys.append(key())
    (tmp_path / "kernels/device/mma.py").rename(tmp_path / "kernels/device/other.py")
    keys.append(key())
    (tmp_path / "compilation/compiler.py").write_text("a = 3\n")
    keys.append(key())
    (tmp_path / "limits.py").write_text("UNBOUNDED = 2\n")
    keys.append(key())
    (tmp_path / "programs/code.py").write_text("a = 5\n")
    keys.append(key())
    (tmp_path / "programs/analysis.py").write_text("a = 6\n")
    keys.append(key())
    assert len(set(keys)) == 7
    (tmp_path / "compilation/cache.py").write_text("a = 4\n")
    assert key() == keys[-1], "no part of an object"
    cache.sources_digest.cache_clear()


def test_objects_of_before_are_not_taken(
    compiler_version: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic gradients were added up in integers, by kernels that take other buffers."""
    spec = dataclasses.replace(SPEC, op="backward", family="sm90", ordered=True)
    with monkeypatch.context() as before:
        before.setattr(cache, "sources_digest", lambda: "of kernels that add integers")
        cache.store(cache.kernel_key(spec), KERNEL)
        assert cache.load(cache.kernel_key(spec)) == KERNEL
    assert cache.load(cache.kernel_key(spec)) is None


def test_sources_of_the_installed_package_are_found() -> None:
    root = Path(cache.__file__).parents[1]
    assert (root / "kernels" / "key.py").is_file()
    assert (root / "compilation" / "compiler.py").is_file()


def test_state_counts_entries_that_can_be_used(directory: Path) -> None:
    assert cache.state() == cache.State(directory, is_writable=True), "the first entry creates it"
    cache.store(KEY, KERNEL)
    (directory / "notes").write_text("no entry")
    assert cache.state() == cache.State(directory, True, 1, len(KERNEL) + 32, True)
    (directory / KEY).chmod(0o666)
    found = cache.state()
    assert (found.entries, found.problem) == (
        0,
        "1 of 1 entries are not used: an entry can be written by its group or by others",
    )


def test_state_of_the_directory_of_another_user(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(KEY, KERNEL)
    directory.chmod(0o755)
    owner = os.geteuid() or 1000
    if os.geteuid() == 0:
        os.chown(directory, owner, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    found = cache.state()
    assert found.problem == f"it will not be used, since it belongs to user {owner}, neither this user nor root"
    assert found.remedy.startswith("Delete that directory, or set `JAX_FASTATTN_CACHE_DIR`")
    assert not found.is_writable
    with pytest.raises(PermissionError, match="so nothing was deleted"):
        cache.clear()


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (f"image/cache/{KEY}", "1 of 1 entries are not used: this user cannot read them"),
        ("image/cache", r"cannot read .*/image/cache \(Permission denied\)"),
        ("image", r"cannot read .*/image \(Permission denied\)"),
    ],
    ids=["entry", "directory", "above"],
)
def test_state_of_a_cache_that_others_cannot_read(filled: Path, place: str, problem: str) -> None:
    path = filled.parents[1] / place
    path.chmod((0o600 if path.is_file() else 0o700) if os.geteuid() == 0 else 0)
    with _another_user():
        found = cache.state()
    assert re.fullmatch(problem, found.problem)
    assert f"run `chmod -R a+rX {filled}`" in found.remedy


def test_state_of_a_cache_that_others_only_read(filled: Path) -> None:
    with _another_user():
        found = cache.state()
        assert os.geteuid() == 0 or (found.entries, found.problem) == (1, "")
        assert found.is_writable == (filled.stat().st_uid == os.geteuid())


def test_state_without_a_directory_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cache.state().problem == "cannot open it (Not a directory)"
    monkeypatch.setattr(cache, "directory", lambda: None)
    assert cache.state().problem == "the user's home directory is unknown"
    assert cache.clear() == (0, 0)


def test_clear_deletes_entries_and_what_killed_writers_left(directory: Path) -> None:
    assert cache.clear() == (0, 0), "there is no directory"
    cache.store(KEY, KERNEL)
    kept = [directory / name for name in ("notes", ".writing-now", "cd" * 32)]
    kept[0].write_text("no entry")
    kept[1].write_text("a writer is at work")
    kept[2].mkdir()
    old = directory / ".writing-killed"
    old.write_text("x")
    os.utime(old, (0, 0))
    assert cache.clear() == (2, len(KERNEL) + 32 + 1)
    assert set(directory.iterdir()) == set(kept)
