# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that earlier runs of the tests have compiled are found by all that decides about them, and no others are."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import kept
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """An empty folder for programs, of this test alone."""
    before = jax.config.jax_compilation_cache_dir
    if before is None or not jax.config.jax_enable_compilation_cache:
        pytest.skip("no program is kept: the user's cache folder cannot be written, or there is a GPU")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def compiled(scale: float = 2.0) -> float:
    """Compiles and runs a program that this process does not have."""
    return float(jax.jit(lambda x: jnp.sin(x).sum() * scale)(jnp.ones(3)))


def test_a_program_is_compiled_once(programs: Path) -> None:
    expected = compiled()
    entries = {path.name: path.stat().st_mtime_ns for path in programs.iterdir()}
    assert compiled() == expected
    assert {path.name: path.stat().st_mtime_ns for path in programs.iterdir()} == entries


@pytest.mark.parametrize(
    "change",
    {
        "code": lambda: compiled(3.0),
        "optimizations": lambda: _with(
            "jax_disable_most_optimizations", not jax.config.values["jax_disable_most_optimizations"]
        ),
        "precision": lambda: _with("jax_enable_x64", True),
    }.items(),
    ids=lambda x: x[0],
)
def test_another_program_is_another_entry(programs: Path, change: tuple[str, Callable[[], object]]) -> None:
    compiled()
    before = len(list(programs.iterdir()))
    change[1]()
    assert len(list(programs.iterdir())) > before


def _with(setting: str, value: bool) -> None:
    """Compiles under another setting."""
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        compiled()
    finally:
        jax.config.update(setting, before)


def test_a_damaged_program_is_compiled_and_written_again(programs: Path) -> None:
    expected = compiled()
    # Two compilations of a program may differ by some bytes in length, so half of it is cut off.
    damaged = {path: x[: len(x) // 2] for path in programs.glob("jit__lambda*-cache") for x in [path.read_bytes()]}
    for path, content in damaged.items():
        path.write_bytes(content)
    assert compiled() == expected
    assert damaged and all(len(path.read_bytes()) > len(content) for path, content in damaged.items())


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax_fastattn_tests").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.folder.__wrapped__("programs") is None
    monkeypatch.setattr(kept, "folder", kept.folder.__wrapped__)
    monkeypatch.setattr(jax.config, "update", None)  # would fail
    kept.keep_programs()
    kept.prune()
    assert "compiles everything" in kept.summary()


def test_the_folder_is_closed_to_other_users_and_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not yet"))
    monkeypatch.setattr(kept, "folder", kept.folder.__wrapped__)
    programs, kernels = kept.folder("programs"), kept.folder("kernels")
    assert programs is not None and kernels is not None
    assert stat.S_IMODE(programs.parent.stat().st_mode) == stat.S_IMODE(kernels.stat().st_mode) == 0o700
    for age, path in enumerate((kernels / "c", programs / "b", programs / "a")):
        path.write_bytes(b"12345")
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(kept, "MAX_NBYTES", 11)
    # Another run may have deleted an entry that was just listed.
    gone = programs / "gone"
    gone.symlink_to("nowhere")
    kept.prune()
    gone.unlink()
    assert [x.name for x in (*programs.iterdir(), *kernels.iterdir())] == ["b", "c"]
    assert "1 programs and 1 kernels" in kept.summary()
