# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Strict JAX settings, eight CPU devices for sharding tests, and skips that say why."""

import dataclasses
import functools
import importlib.util
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxlib.version import __version_info__ as jaxlib_version

# XLA compiles in less than half of the time if no MLIR comes before the LLVM IR of fusions. Later versions have no such
# choice, so that the newest environment runs what users run.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8"
    + (" --xla_cpu_use_fusion_emitters=false" if jaxlib_version < (0, 11) else ""),
)

# A process of pytest keeps a core busy. Threads of NumPy's products would take another one, a tenth of the time of
# emulated forward passes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No test starts a process that compiles kernels unless it says so: it would compile what others count.
os.environ.setdefault("JAX_FASTATTN_WORKERS", "0")

import jax
import kept
import pytest
import sampling
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A program of a test runs once. LLVM's optimization of it took 60 % of the CPU time of six tests of gradients and of
# the XLA path. Programs in processes of their own, such as the examples, are optimized.
jax.config.update("jax_disable_most_optimizations", True)

kept.keep_programs()

# An sdist has no records, no notebook and no CI: tests that compare them stay out there.
_IN_SDIST = not (Path(__file__).parents[1] / "notebook").is_dir()
collect_ignore = ["benchmarks", "pages", "test_distributions.py", "test_runner.py"] if _IN_SDIST else []

_ended = itertools.count()  # tests of this process
_ITEMS = pytest.StashKey[list[pytest.Item]]()


@functools.cache
def _cuda_devices() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


def _has_gpu_compiler() -> bool:
    """Returns whether a plugin of jax for GPUs is installed, which brings XLA's compiler for them."""
    plugins = (f"jax_plugins.xla_cuda{version}" for version in (12, 13))
    return importlib.util.find_spec("jax_plugins") is not None and any(map(importlib.util.find_spec, plugins))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--arch", help="what a Hopper GPU counts as: sm_90-a100, sm_90-rtx or sm_90")
    parser.addoption("--seed", type=int, default=34, help="of random calls (default: %(default)s)")
    parser.addoption("--part", default="0/1", help="I/N: part I of N of the tests, cases undivided")
    parser.addoption("--sample", type=int, default=1, help="of functions marked slow or numbers, one in so many cases")
    parser.addoption("--turn", type=int, default=0, help="which cases a sample has: others for each number")
    parser.addoption("--mainly", default="", help="FILE,...: of each function of another file one case runs")


def pytest_report_header(config: pytest.Config) -> list[str]:
    sample, turn = config.getoption("--sample"), config.getoption("--turn")
    return [
        f"random calls: --seed {config.getoption('--seed')}",
        kept.summary(),
        f"of each slow function: {'every case' if sample == 1 else f'one case in {sample}, --turn {turn}'}",
    ]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        kept.prune()
    if arch := config.getoption("--arch"):
        from testing.borrow import borrow

        borrow(arch)


class _NeedsGpu(pytest.Module):
    """A file of cases that need a GPU. Where there is none, a single case stands for them, which is skipped."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Returns the cases."""
        mark = getattr(self.obj, "pytestmark", None)
        if _cuda_devices() or mark is None or mark.name != "gpu":
            return super().collect()
        every_case = pytest.Function.from_parent(self, name="every_case", callobj=lambda: None)
        every_case.add_marker(pytest.mark.skip(reason=f"{self.nodeid}: no case is collected without a CUDA device"))
        return [every_case]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _NeedsGpu.from_parent(parent, path=module_path) if module_path.name.startswith("test_gpu") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    mine = [zlib.crc32(_together(item).encode()) % parts == part for item in items]
    config.stash[_ITEMS] = [*items]
    mainly = list(filter(None, config.getoption("--mainly").split(",")))
    sampled = sampling.sampled(items, config.getoption("--sample"), config.getoption("--turn"), mainly)
    mine = [mine and is_sampled for mine, is_sampled in zip(mine, sampled, strict=True)]
    config.hook.pytest_deselected(items=[item for item, is_mine in zip(items, mine, strict=True) if not is_mine])
    items[:] = [item for item, is_mine in zip(items, mine, strict=True) if is_mine]
    # Tests that take minutes begin first: at the end processes take over what is left of each other's, test by test.
    items.sort(key=lambda item: "serialise" not in item.name)
    found = _cuda_devices()
    # The kernels are compared with XLA as it runs on a GPU, and as it tunes its own kernels in each process.
    jax.config.update("jax_disable_most_optimizations", found == 0)
    if found:
        jax.config.update("jax_enable_compilation_cache", False)
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    for item in items:
        if "every_arch" in item.keywords and "every_arch" not in config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="compiles every row for further GPUs: pytest -m every_arch"))
        if "gpu_compiler" in item.keywords and not _has_gpu_compiler():
            item.add_marker(pytest.mark.skip(reason="needs XLA's compiler for GPUs: sh tests/run gpu-programs"))
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if marker in item.keywords and found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drops compiled programs before they take the 65530 mappings that Linux gives a process: LLVM crashes then."""
    del item
    if next(_ended) % 16 == 0 and Path("/proc/self/maps").read_text().count("\n") > 20_000:
        jax.clear_caches()


def _together(item: pytest.Item) -> str:
    """The same for tests that share work: those of a case, and of all draws of a kind, which share a program."""
    params = item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]
    case = params.get("case")
    if case is None:
        return item.nodeid
    return str(case if getattr(case, "draw", None) is None else dataclasses.replace(case, draw=None))


@pytest.fixture
def key() -> jax.Array:
    """A PRNG key."""
    return jax.random.key(2026)


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """Compiles every program of the test: it reads what only the compiler of this process writes."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture
def every_case(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All cases that were found, those that do not run in this turn included."""
    return request.config.stash[_ITEMS]
