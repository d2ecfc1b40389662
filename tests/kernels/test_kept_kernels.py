# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What CuTe DSL compiled in an earlier run is taken if the code is the same, and for no other code."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import kept
import kept_kernels

from jax_fastattn.compilation import cache
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.prepass.kernel import PrepassKernel
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.visits import lists

SPEC = configured(KernelSpec("forward", "sm_80", "bfloat16", 64, 32))
PREPASS = KernelSpec("prepass", "sm_80", "bfloat16", 64, 64, mask=True, config=PrepassConfig(64, 64))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "folder", lambda kind: tmp_path)
    tmp_path.chmod(0o700)
    return tmp_path


def is_compiled(spec: KernelSpec = SPEC, kind: str = "PTX", host: Any = None) -> bool:
    """Returns whether a kernel is compiled; what is found has to be what was compiled."""
    compiled: list[bytes] = []
    found = kept_kernels.kernel(kind, spec, host, lambda: compiled.append(b"code") or compiled[0])
    assert found == b"code"
    return bool(compiled)


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    assert is_compiled() and not is_compiled()


def test_another_key_or_kind_or_option_is_another_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled() and is_compiled(dataclasses.replace(SPEC, group=2)) and is_compiled(kind="object")
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "remarks{ptx}")
    assert is_compiled()


def test_a_change_of_any_source_of_kernels_compiles_again(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path_factory.mktemp("clone") / "jax_fastattn"
    shutil.copytree(Path(cache.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    assert is_compiled()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "__file__", str(copy / "compilation" / "cache.py"))
        cache.sources_digest.cache_clear()
        assert not is_compiled(), "another clone has the same sources"
        for name in ("kernels/device/mma.py", "kernels/sm80/forward/kernel.py", "compilation/compiler.py", "limits.py"):
            (copy / name).write_text((copy / name).read_text() + "\n")
            cache.sources_digest.cache_clear()
            assert is_compiled(), name
    cache.sources_digest.cache_clear()
    assert not is_compiled()


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "function": lambda patch: patch.setattr(lists, next(iter(_own(lists))), None),
    "method": lambda patch: patch.setattr(PrepassKernel, "launches", None),
    "new-name": lambda patch: patch.setattr(lists, "another", 1, raising=False),
}


def _own(module: Any) -> list[str]:
    """Returns the names that a module defines."""
    return [name for name, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]


@pytest.mark.parametrize("patch", PATCHES)
def test_nothing_is_kept_of_patched_kernels(patch: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled()
    with monkeypatch.context() as patched:
        PATCHES[patch](patched)
        assert is_compiled() and is_compiled()
    assert not is_compiled()


def test_nothing_is_kept_of_a_feature_that_a_test_defines(folder: Path) -> None:
    spec = dataclasses.replace(SPEC, features=(Code("of a test", "test_kept_kernels:Feature"),))
    assert is_compiled(spec) and is_compiled(spec)
    assert is_compiled(host=SimpleNamespace()) and is_compiled(host=SimpleNamespace())
    assert list(folder.iterdir()) == []


def test_attributes_of_the_host_function_are_in_the_key(folder: Path) -> None:
    assert is_compiled(PREPASS, host=PrepassKernel(PREPASS, 2)) and is_compiled(PREPASS, host=PrepassKernel(PREPASS, 3))
    assert not is_compiled(PREPASS, host=PrepassKernel(PREPASS, 2))


def test_a_damaged_entry_is_compiled_again(folder: Path) -> None:
    assert is_compiled()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert is_compiled() and not is_compiled()


def test_without_a_folder_every_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "folder", lambda kind: None)
    assert is_compiled() and is_compiled()
