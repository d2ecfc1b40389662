# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The disk cache: what is kept is found again, and what is not as it was written is never used."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import stat
import warnings
from pathlib import Path

import pytest

from jax_fastattn.ffi import cache
from jax_fastattn.kernels.spec import KernelSpec

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


def test_only_the_user_may_read(directory: Path) -> None:
    old = os.umask(0)
    try:
        cache.store(KEY, KERNEL)
    finally:
        os.umask(old)
    assert stat.S_IMODE((directory / KEY).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


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


def test_entry_that_is_no_file(directory: Path) -> None:
    (directory / KEY).mkdir(parents=True)
    assert cache.load(KEY) is None


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
        RuntimeWarning, match=r"cannot be kept in .*/file/cache \(Not a directory\).*JAX_FASTATTN_CACHE_DIR"
    ):
        cache.store(KEY, KERNEL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.store(KEY, KERNEL)
    assert cache.load(KEY) is None


def test_full_disk_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.store(KEY, KERNEL)
    assert list(directory.iterdir()) == []


def test_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_FASTATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.directory() == Path("/somewhere/jax_fastattn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache.directory() == Path("/home/user/.cache/jax_fastattn")


@pytest.fixture
def compiler_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "compiler_version", lambda: "4.8.1")


CHANGES = {
    "op": "backward",
    "arch": "sm_80",
    "dtype": "float16",
    "head_dim": 72,
    "v_head_dim": 64,
    "group": 4,
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
    "logits_soft_cap": True,
    "sinks": True,
    "dlse": True,
    "family": "sm90",
    "short": True,
    "ordered": True,
}


def test_every_field_of_the_spec_is_in_the_key(compiler_version: None) -> None:
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(KernelSpec)}
    keys = {cache.kernel_key(dataclasses.replace(SPEC, **{name: value})) for name, value in CHANGES.items()}
    assert len(keys | {cache.kernel_key(SPEC)}) == len(CHANGES) + 1


def test_the_key_is_the_same_every_time(compiler_version: None) -> None:
    assert cache.kernel_key(SPEC) == cache.kernel_key(dataclasses.replace(SPEC))
    assert len(cache.kernel_key(SPEC)) == 64


def test_compiler_version_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "compiler_version", lambda: "4.8.1")
    old = cache.kernel_key(SPEC)
    monkeypatch.setattr(cache, "compiler_version", lambda: "4.9.0")
    assert cache.kernel_key(SPEC) != old


def test_kernel_sources_are_in_the_key(compiler_version: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ffi/cache.py", "ffi/compiler.py", "kernels/sm80/forward.py", "kernels/device/mma.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "ffi/cache.py"))

    def key() -> str:
        cache.sources_digest.cache_clear()
        return cache.kernel_key(SPEC)

    keys = [key()]
    assert key() == keys[0]
    (tmp_path / "kernels/device/mma.py").write_text("a = 2\n")
    keys.append(key())
    (tmp_path / "kernels/device/mma.py").rename(tmp_path / "kernels/device/other.py")
    keys.append(key())
    (tmp_path / "ffi/compiler.py").write_text("a = 3\n")
    keys.append(key())
    assert len(set(keys)) == 4
    (tmp_path / "ffi/cache.py").write_text("a = 4\n")
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
    assert (root / "kernels" / "spec.py").is_file()
    assert (root / "ffi" / "compiler.py").is_file()
