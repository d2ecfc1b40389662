# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a process runs on: the architecture to compile for, and the libraries that are found without loading them."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import threading
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.compilation import libraries
from jax_fastattn.ffi import registry
from jax_fastattn.kernels.architectures import ARCHITECTURES
from jax_fastattn.ops import dispatch


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The CUDA devices that this process believes to have."""
    found: list[Any] = []

    def local_devices(backend: str) -> list[Any]:
        assert backend == "cuda"
        if not found:
            raise RuntimeError("Unknown backend")
        return found

    monkeypatch.setattr(jax, "local_devices", local_devices)
    return found


class Device(types.SimpleNamespace):
    def __str__(self) -> str:
        return f"cuda:{self.id}"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ("7.5", "sm_75"),
        ("8.0", "sm_80"),
        ("8.6", "sm_86"),
        ("8.7", "sm_87"),
        ("8.9", "sm_89"),
        ("9.0", "sm_90a"),
        ("10.0", "sm_100a"),
        ("10.3", "sm_103a"),
        ("11.0", "sm_110a"),
        ("12.0", "sm_120a"),
        ("12.1", "sm_121a"),
    ],
)
def test_arch_of_the_local_devices(devices: list[Any], capability: str, arch: str) -> None:
    devices += [Device(id=0, compute_capability=capability), Device(id=1, compute_capability=capability)]
    assert ffi.arch() == arch


@pytest.mark.parametrize(
    ("capability", "reasons"), [("7.5", ["the GPU architecture is sm_75; the kernels run on"]), ("10.3", [])]
)
def test_a_gpu_that_no_kernel_is_for_takes_the_xla_path(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch, capability: str, reasons: list[str]
) -> None:
    """It failed while it was lowered, since nothing spoke against the kernels."""
    monkeypatch.setattr(libraries, "is_installed", lambda module: True)
    monkeypatch.setattr(libraries, "compiler_version", lambda: "4.8.1")
    devices.append(Device(id=0, compute_capability=capability))
    found = [reason.text for reason in dispatch.cuda_reasons(Case(dtype="bfloat16").problem())]
    assert [reason[: len(start)] for reason, start in zip(found, reasons, strict=True)] == reasons


@pytest.mark.parametrize(("cuda", "refused"), [(12, {"sm_110a"}), (13, set()), (None, set())])
def test_a_compiler_that_writes_code_for_the_old_name_is_a_reason(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch, cuda: int | None, refused: set[str]
) -> None:
    """That of CUDA 12 compiles for sm_101a when asked for sm_110a, and the program would fail where it is loaded."""
    monkeypatch.setattr(libraries, "is_installed", lambda module: True)
    monkeypatch.setattr(libraries, "compiler_version", lambda: "4.8.1")
    monkeypatch.setattr(libraries, "toolkit", lambda: cuda)
    found = {arch: ffi.compiler_reasons(arch) for arch in ARCHITECTURES}
    assert {arch for arch, reasons in found.items() if reasons} == refused
    assert ffi.compiler_reasons(None) == []
    for arch in ARCHITECTURES:
        with ffi.target_arch(arch):
            reasons = dispatch.cuda_reasons(Case(dtype="bfloat16").problem())
        assert [reason.text for reason in reasons] == found[arch]
    for (reason,) in [found[arch] for arch in refused]:
        assert "run `pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'`" in reason


def test_arch_without_a_device(devices: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=r'with jax_fastattn.target_arch\("sm_90a"\)'):
        ffi.arch()
    with ffi.target_arch("sm_89"):
        assert ffi.arch() == "sm_89"
    with pytest.raises(RuntimeError, match="target_arch"):
        ffi.arch()


def test_named_arch_comes_before_the_local_one(devices: list[Any]) -> None:
    devices.append(Device(id=0, compute_capability="9.0"))
    with ffi.target_arch("sm_80"):
        assert ffi.arch() == "sm_80"
        with ffi.target_arch(None):
            assert ffi.arch() == "sm_90a"
        assert ffi.arch() == "sm_80"


def test_an_error_ends_the_block_of_target_arch() -> None:
    with pytest.raises(KeyError), ffi.target_arch("sm_80"):
        raise KeyError
    assert ffi.named_arch() is None


def test_target_arch_is_of_one_thread() -> None:
    """Two threads at the same time, and one that names nothing."""
    barrier = threading.Barrier(3)

    def named(arch: str | None) -> str | None:
        with ffi.target_arch(arch):
            barrier.wait()
            found = ffi.named_arch()
            barrier.wait()
            return found

    names = ["sm_80", "sm_90a", None]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(named, names)) == names


def test_devices_of_different_architectures(devices: list[Any]) -> None:
    devices += [Device(id=0, compute_capability="8.0"), Device(id=1, compute_capability="9.0")]
    with pytest.raises(RuntimeError, match=r"\(cuda:0: 8.0, cuda:1: 9.0\).*CUDA_VISIBLE_DEVICES"):
        ffi.arch()


def test_multiprocessors_are_those_of_the_smallest_local_device(devices: list[Any]) -> None:
    devices += [Device(id=0, core_count=132), Device(id=1, core_count=78)]
    assert ffi.multiprocessors() == 78
    with ffi.target_arch("sm_90a"):
        assert ffi.multiprocessors() == 132


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_target_arch_takes_every_name(devices: list[Any], name: str) -> None:
    with ffi.target_arch(name):
        assert ffi.arch() == name


OTHER_NAMES = ["hopper", "90a", "sm_", "SM_90A", "sm_90a ", "sm_٩0", "sm_75", "sm_103", "sm_101a", "sm_99999"]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_target_arch_refuses_other_names_with_the_list(devices: list[Any], name: str) -> None:
    listed = ", ".join(ARCHITECTURES)
    with pytest.raises(ValueError, match=f'`arch` is "{name}"; pass one of {listed}. .*implementation="xla"'):
        ffi.target_arch(name)


def test_target_arch_of_another_type(devices: list[Any]) -> None:
    with pytest.raises(TypeError, match="`arch` is int, expected a string"):
        ffi.target_arch(90)  # pyright: ignore[reportArgumentType] (the point of the test)


def test_only_the_first_registration_has_an_effect() -> None:
    ffi.register()
    before = registry._register_once.cache_info()
    ffi.register()
    assert registry._register_once.cache_info() == before._replace(hits=before.hits + 1)


@pytest.mark.parametrize(
    ("installed", "driver", "expected"),
    [((12, 13), 12, 12), ((12, 13), 13, 13), ((12, 13), None, 13), ((12,), 13, 12), ((13,), 12, None), ((), 13, None)],
)
def test_toolkit_is_the_newest_that_the_driver_runs(
    tmp_path: Path, monkeypatch: Any, installed: tuple[int, ...], driver: int | None, expected: int | None
) -> None:
    """The compiler's rule; the runtime library and the compile key follow it."""
    paths = {version: tmp_path / f"cu{version}" / "lib" / "libcute_dsl_runtime.so" for version in installed}
    for path in paths.values():
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(libraries, "is_installed", lambda module: module == "nvidia_cutlass_dsl")
    monkeypatch.setattr(libraries, "driver_version", lambda: driver)
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda module: spec)
    assert libraries.toolkit() == expected
    assert libraries.runtime_library() == (None if expected is None else str(paths[expected]))


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("4.8.0", True), ("4.8.12", True), ("4.7.3", False), ("4.9.0", False), ("4.9.0.dev1", False), ("5", False)],
)
def test_kernels_take_tested_versions_of_the_compiler_alone(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch, version: str, is_taken: bool
) -> None:
    """Another minor version may compile a kernel to something else, and nothing would say so."""
    monkeypatch.setattr(libraries, "is_installed", lambda module: True)
    monkeypatch.setattr(libraries, "compiler_version", lambda: version)
    with ffi.target_arch("sm_80"):
        reasons = [reason.text for reason in dispatch.cuda_reasons(Case(dtype="bfloat16").problem())]
    expected = (
        f"nvidia-cutlass-dsl {version} is installed, but the kernels of this jax_fastattn were tested only with "
        "versions >=4.8,<4.9; run `pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'`, or "
        "`pip install 'nvidia-cutlass-dsl>=4.8,<4.9'` for CUDA 12"
    )
    assert reasons == ([] if is_taken else [expected])


def test_a_compiler_without_metadata_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is part of the key of a kernel on disk; without it each lowering would fail."""

    def version() -> str:
        raise importlib.metadata.PackageNotFoundError("nvidia-cutlass-dsl")

    monkeypatch.setattr(libraries, "is_installed", lambda module: True)
    monkeypatch.setattr(libraries, "compiler_version", version)
    (reason,) = ffi.missing_parts()
    assert reason.startswith(
        "nvidia-cutlass-dsl is installed in part: its modules are present, but its metadata is missing;"
    )


def test_no_runtime_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "is_installed", lambda module: False)
    assert libraries.runtime_library() is None
    assert len(ffi.missing_parts()) == 2
    assert all("pip install" in reason for reason in ffi.missing_parts())
