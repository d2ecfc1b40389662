# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Workers: which kernels they are asked for, and that one which fails, loads, starves or hangs costs half a second.

Real ones run in few tests. In the others a shell takes a worker's place.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import stand_in
from stand_in import SPEC

from jax_fastattn import attention
from jax_fastattn.compilation import cache, failures, workers
from jax_fastattn.compilation.worker import LOADED
from jax_fastattn.ffi import call
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda import ahead
from jax_fastattn.spec import AttentionSpec

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None, reason="nvidia-cutlass-dsl is not installed"
)
OTHER = dataclasses.replace(SPEC, arch="sm_80")
SAYS_THAT_IT_HAS_LOADED = f"echo '{json.dumps(LOADED)}'; "


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, workers that may start, and a compiler that returns the same for a kernel in each test."""
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_FASTATTN_WORKERS", "1")
    monkeypatch.setattr(workers, "most", lambda: 1)
    for name in ("_waiting", "_running", "_given"):
        monkeypatch.setattr(workers, name, type(getattr(workers, name))())
    stand_in.stand_in_compiler(monkeypatch)
    ahead._notes.clear()  # of calls that other tests have traced, under settings that are gone
    yield tmp_path
    workers._end()
    wait_until(is_idle)


def takes_the_place(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes a shell the worker."""
    monkeypatch.setattr(workers, "command", lambda niceness: ["sh", "-c", script])


def delivers(
    monkeypatch: pytest.MonkeyPatch, spec: KernelSpec, kernel: bytes, seconds: float, begins: str = ""
) -> None:
    """Makes a shell the worker, which delivers the kernel of `spec` some time after it has run `begins`."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("JAX_FASTATTN_CACHE_DIR", str(cache.directory()) + "-made")
        cache.store(cache.kernel_key(spec), kernel)
        made = cache.directory()
    ends = f"sleep {seconds}; cp -p {made}/* {cache.directory()}; echo '{{\"seconds\": 1}}'; cat"
    takes_the_place(monkeypatch, begins + ends)


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Returns the list of what this process compiles."""
    specs: list[KernelSpec] = []
    compile_kernel = call._compile
    monkeypatch.setattr(call, "_compile", lambda spec: specs.append(spec) or compile_kernel(spec))
    return specs


def is_idle() -> bool:
    with workers._lock:
        return not workers._waiting and not workers._running


def wait_until(is_true: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def children() -> list[str]:
    """Returns the state of each child of this process: `Z` is a zombie."""
    found: list[str] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [state] if int(parent) == os.getpid() else []
    return found


def test_a_kernel_comes_from_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    delivers(monkeypatch, OTHER, stand_in.elf_object(content=b"of the worker"), 0.2)
    here = compiled(monkeypatch)
    call._kernel(SPEC, lambda: [SPEC, OTHER])
    found = call._kernel(OTHER, tuple)
    assert here == [SPEC]
    assert found.size == len(stand_in.elf_object(content=b"of the worker"))
    wait_until(is_idle)
    assert "Z" not in children() and failures.noted() == ""


@pytest.mark.parametrize("begins", ["", SAYS_THAT_IT_HAS_LOADED], ids=["loading", "loaded"])
def test_a_worker_that_is_killed_costs_nothing(begins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    takes_the_place(monkeypatch, f"head -c 1 > /dev/null; {begins}kill -9 $$")
    here = compiled(monkeypatch)
    call._kernel(SPEC, lambda: [OTHER])
    call._kernel(OTHER, tuple)
    assert here == [SPEC, OTHER]
    wait_until(failures.noted)
    assert failures.noted() == "its process ended by SIGKILL, perhaps out of memory"
    wait_until(is_idle)
    assert "Z" not in children()


@pytest.mark.parametrize("begins", ["", SAYS_THAT_IT_HAS_LOADED], ids=["loading", "loaded"])
def test_a_worker_that_hangs_is_waited_for_half_a_second_and_ended(
    begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_the_place(monkeypatch, begins + "exec sleep 600")
    here = compiled(monkeypatch)
    call._kernel(SPEC, lambda: [OTHER])
    begin = time.monotonic()
    call._kernel(OTHER, tuple)
    assert workers.PATIENCE <= time.monotonic() - begin < workers.MOST_PATIENCE
    assert here == [SPEC, OTHER]
    wait_until(is_idle)
    assert failures.noted() == "", "this process ended it"
    assert "Z" not in children()


@pytest.mark.parametrize("begins", ["", "sleep 0.1; "], ids=["before", "during-the-wait"])
def test_a_worker_that_has_loaded_is_waited_for(begins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it had half a CPU, and so delivers sooner than this process would."""
    begins += SAYS_THAT_IT_HAS_LOADED
    delivers(monkeypatch, OTHER, stand_in.elf_object(content=b"of the worker"), 4 * workers.PATIENCE, begins)
    monkeypatch.setattr(workers.Worker, "cpu_seconds", lambda self: time.monotonic())
    here = compiled(monkeypatch)
    call._kernel(SPEC, lambda: [OTHER])
    call._kernel(OTHER, tuple)
    assert here == [SPEC]


def test_a_worker_that_loads_the_compiler_is_waited_for_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much CPU time it had: this process would compile a small kernel meanwhile."""
    delivers(monkeypatch, OTHER, stand_in.elf_object(content=b"of the worker"), 4 * workers.PATIENCE)
    monkeypatch.setattr(workers.Worker, "cpu_seconds", lambda self: time.monotonic())
    here = compiled(monkeypatch)
    call._kernel(SPEC, lambda: [OTHER])
    begin = time.monotonic()
    call._kernel(OTHER, tuple)
    assert workers.PATIENCE <= time.monotonic() - begin < 4 * workers.PATIENCE
    assert here == [SPEC, OTHER]
    wait_until(is_idle)


def test_no_worker_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_the_place(monkeypatch, SAYS_THAT_IT_HAS_LOADED + "exec sleep 60")
    monkeypatch.setattr(workers.Worker, "cpu_seconds", lambda self: time.monotonic())
    monkeypatch.setattr(workers, "MOST_PATIENCE", 2 * workers.PATIENCE)
    here = compiled(monkeypatch)
    call._kernel(SPEC, lambda: [OTHER])
    begin = time.monotonic()
    call._kernel(OTHER, tuple)
    assert workers.MOST_PATIENCE <= time.monotonic() - begin < 10
    assert here == [SPEC, OTHER]
    wait_until(is_idle)


def test_a_worker_says_once_that_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`warmup` has several kernels compiled by one worker, and the line is the outcome of none of them."""
    lines = [{"problem": "another version"}, LOADED, {"seconds": 1}, {"seconds": 2}]
    takes_the_place(monkeypatch, "; ".join(f"echo '{json.dumps(line)}'" for line in lines) + "; exec cat > /dev/null")
    worker = workers.Worker()
    found = [(worker.compile("key", SPEC), worker.loaded.is_set()) for _ in range(3)]
    assert found == [({"problem": "another version"}, False), ({"seconds": 1}, True), ({"seconds": 2}, True)]
    worker.kill()
    assert worker.compile("key", SPEC) == {"problem": "its process ended by SIGKILL, perhaps out of memory"}
    worker.close()


def test_the_cpu_time_of_a_worker_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_the_place(monkeypatch, "while true; do :; done")
    worker = workers.Worker()
    wait_until(lambda: worker.cpu_seconds() > 0.05)
    worker.kill()
    worker.close()


def test_a_kernel_that_its_worker_delivers_while_another_compiles_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads: one compiles for longer than the patience of the other."""
    delivers(monkeypatch, OTHER, stand_in.elf_object(content=b"of the worker"), 1)
    here: list[KernelSpec] = []
    waits = threading.Event()

    def compile_slowly(spec: KernelSpec) -> bytes:
        here.append(spec)
        waits.set()
        wait_until(lambda: cache.load(cache.kernel_key(OTHER)))
        return stand_in.elf_object()

    monkeypatch.setattr(call, "_compile", compile_slowly)
    first = threading.Thread(target=call._kernel, args=(SPEC, lambda: [OTHER]))
    first.start()
    waits.wait()
    call._kernel(OTHER, tuple)
    first.join()
    assert here == [SPEC]


def test_a_kernel_in_memory_waits_for_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lowering of every thread waited for a kernel that one of them compiled."""
    call._kernel(OTHER, tuple)
    begins, ends = threading.Event(), threading.Event()

    def compile_slowly(spec: KernelSpec) -> bytes:
        begins.set()
        assert ends.wait(60)
        return stand_in.elf_object()

    monkeypatch.setattr(call, "_compile", compile_slowly)
    thread = threading.Thread(target=call._kernel, args=(SPEC, tuple))
    thread.start()
    begins.wait()
    call._kernel(OTHER, tuple)
    assert thread.is_alive()
    ends.set()
    thread.join()


def test_a_kernel_that_waits_for_a_worker_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker may run, and has another kernel."""
    takes_the_place(monkeypatch, "exec sleep 600")
    third = dataclasses.replace(SPEC, arch="sm_89")
    call._kernel(SPEC, lambda: [OTHER, third])
    assert [*workers._waiting.values()] == [third]
    monkeypatch.setattr(workers, "PATIENCE", 600)
    call._kernel(third, tuple)
    assert not workers._waiting


def test_the_next_kernel_has_its_turn_when_a_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_the_place(monkeypatch, "kill -9 $$")
    workers.start([SPEC, OTHER])
    wait_until(is_idle)
    assert workers._given == {cache.kernel_key(SPEC), cache.kernel_key(OTHER)}
    workers.start([SPEC])
    assert is_idle(), "what fails is not tried again"


REFUSALS: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "off": lambda patch, path: patch.setenv("JAX_FASTATTN_WORKERS", "0"),
    "no-memory": lambda patch, path: patch.setattr(workers, "most", lambda: 0),
    "frozen-program": lambda patch, path: patch.setattr(sys, "frozen", True, raising=False),
    "embedded": lambda patch, path: patch.setattr(sys, "executable", "/usr/bin/blender"),
    "others-may-write": lambda patch, path: path.chmod(0o777),
    "no-directory": lambda patch, path: patch.setenv("JAX_FASTATTN_CACHE_DIR", "/proc/none"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_no_worker_is_started(refusal: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(niceness: int) -> list[str]:
        raise AssertionError

    monkeypatch.setattr(workers, "command", start)
    with monkeypatch.context() as patch:
        REFUSALS[refusal](patch, directory)
        workers.start([SPEC])
        assert not workers._given
    directory.chmod(0o700)
    assert failures.noted() == ""


def test_a_process_that_cannot_be_started_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "command", lambda niceness: ["/no/such/python"])
    here = compiled(monkeypatch)
    call._kernel(SPEC, lambda: [OTHER])
    call._kernel(OTHER, tuple)
    assert here == [SPEC, OTHER]
    assert failures.noted().startswith("it cannot be started: FileNotFoundError")


@pytest.mark.parametrize(
    ("cpus", "quota", "free", "expected"),
    [
        (8, "max 100000", 64 << 30, 7),
        (1, "max 100000", 64 << 30, 0),
        (64, "max 100000", 256 << 30, workers.MOST_WORKERS),
        (64, "300000 100000", 256 << 30, 2),
        (64, "50000 100000", 256 << 30, 0),
        (8, "", 5 * workers.WORKER_BYTES, 2),
        (8, "", workers.WORKER_BYTES, 0),
    ],
)
def test_as_many_workers_as_cpus_and_memory_allow(cpus: int, quota: str, free: int, expected: int) -> None:
    files = {"/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {free // 1024} kB\n", "/sys/fs/cgroup/cpu.max": quota}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: range(cpus))
        patch.setattr(workers, "_text", lambda path: files.get(path, ""))
        assert MOST() == expected


MOST = workers.most


def test_a_container_limits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemAvailable: 100000000 kB\n"}
    files |= {"/sys/fs/cgroup/memory.max": "3000\n", "/sys/fs/cgroup/memory.current": "1000\n"}
    monkeypatch.setattr(workers, "_text", lambda path: files.get(path, ""))
    assert workers._free_memory() == 2000


def test_a_worker_imports_from_where_this_process_does_and_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not import from the current directory, where others may write."""
    monkeypatch.setattr(sys, "path", ["", "here", "/one", "/two"])
    environment = workers._environment()
    assert environment["PYTHONPATH"] == "/one:/two" and environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "-P" in workers.command(0)


# What a lowering foresees.


def foreseen(monkeypatch: pytest.MonkeyPatch, directory: Path, run: Callable[[], Any]) -> list[list[str]]:
    """Returns the ops of the kernels that workers are asked for, at each kernel that is not on disk."""
    calls.lower_for_cuda(monkeypatch, directory)
    found: list[list[str]] = []
    monkeypatch.setattr(workers, "start", lambda specs: found.append(sorted(spec.op for spec in specs)))
    run()
    return found


X = jax.ShapeDtypeStruct((2, 192, 4, 64), jnp.bfloat16)
MASK = jax.ShapeDtypeStruct((2, 1, 192, 192), jnp.bool)


def loss(x: Any, **options: Any) -> Any:
    return attention(x, x, x, is_causal=True, **options).astype(jnp.float32).sum()


def lowered(function: Any, *arrays: Any) -> Callable[[], Any]:
    return lambda: jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


# The first kernel is compiled here. These are the others.
PROGRAMS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "forward": (lowered(loss, X), []),
    "gradient": (lowered(jax.grad(loss), X), ["backward"]),
    "mask": (lowered(jax.grad(lambda x, mask: loss(x, mask=mask)), X, MASK), ["backward", "forward", "prepass"]),
    "two kinds of layers": (
        lowered(jax.grad(lambda x: loss(x) + loss(x, logits_soft_cap=5.0)), X),
        ["backward", "backward", "forward"],
    ),
    "vmap": (lowered(jax.vmap(jax.grad(loss)), jax.ShapeDtypeStruct((3, *X.shape), X.dtype)), ["backward"]),
    "remat": (lowered(jax.grad(jax.checkpoint(loss)), X), ["backward"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_workers_compile_what_a_lowering_asks_for(
    program: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass's kernel while the forward pass's is compiled here."""
    run, expected = PROGRAMS[program]
    found = foreseen(monkeypatch, directory, run)
    assert found[0] == expected and len(found) == 1 + len(expected)


def test_a_call_on_the_xla_path_asks_for_no_kernel(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lowered(jax.grad(functools.partial(loss, implementation="xla")), X)
    assert foreseen(monkeypatch, directory, run) == []
    assert ahead._notes and ahead.foreseen() == []


def test_the_gradient_of_an_eager_call_is_foreseen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass runs before its backward pass is traced."""

    def run() -> None:
        jax.vjp(loss, jnp.ones(X.shape, X.dtype))
        lowered(functools.partial(loss, implementation="cuda"), X)()

    assert foreseen(monkeypatch, directory, run) == [["backward"]]


def test_a_call_that_cannot_be_traced_hides_no_other_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker has failed, so `info` has nothing to say about it."""

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("unforeseen")

    def run() -> None:
        ahead.note(fail, [X], spec=AttentionSpec(scale=1.0))
        lowered(jax.grad(loss), X)()

    assert foreseen(monkeypatch, directory, run)[0] == ["backward"]
    assert failures.noted() == ""


# Real workers.


def worker(*requests: tuple[str, KernelSpec], command: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    """Runs a real worker to its end."""
    given = b"".join(map(pickle.dumps, requests))
    command = (*command, *workers.command(19))
    return subprocess.run(
        command, input=given, env=workers._environment(), capture_output=True, timeout=300, check=False
    )


@pytest.fixture
def real_keys(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(directory))


def test_a_worker_that_finds_another_version_compiles_nothing(real_keys: None, directory: Path) -> None:
    done = worker(("ab" * 32, SPEC))
    assert json.loads(done.stdout) == {"problem": "it finds another version of jax_fastattn or of its compiler"}
    assert done.returncode == 0 and not [*directory.iterdir()]


def test_a_worker_that_cannot_read_its_request_says_so(real_keys: None) -> None:
    given = pickle.dumps((1, 2, 3))
    done = subprocess.run(workers.command(0), input=given, env=workers._environment(), capture_output=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith(b"ValueError: too many values")


def test_a_worker_without_memory_ends(real_keys: None, directory: Path) -> None:
    done = worker((cache.kernel_key(SPEC), SPEC), command=("sh", "-c", 'ulimit -v 60000; exec "$@"', "sh"))
    assert done.returncode != 0 or "problem" in json.loads(done.stdout.splitlines()[-1])
    assert not [path for path in directory.iterdir() if not path.name.startswith(".")]


def test_what_a_worker_loads_imports_no_jax(real_keys: None) -> None:
    code = "import sys, jax_fastattn.compilation.worker; print('jax' in sys.modules, 'jax_fastattn.api' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=workers._environment(), capture_output=True, check=True
    )
    assert done.stdout == b"False False\n"


@needs_compiler
def test_a_worker_says_that_it_has_loaded_the_compiler_before_its_first_kernel(real_keys: None) -> None:
    """The kernels are of an architecture that the compiler does not know, so that they take no time."""
    unknown = dataclasses.replace(SPEC, arch="sm_1")
    request = (cache.kernel_key(unknown), unknown)
    done = worker(("ab" * 32, SPEC), request, request)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line if line == LOADED else [*line] for line in lines] == [["problem"], LOADED, ["problem"], ["problem"]]


@needs_compiler
@pytest.mark.slow
def test_a_worker_compiles_what_this_process_would(real_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, without JAX."""
    from jax_fastattn.compilation import compiler

    monkeypatch.setenv("JAX_FASTATTN_WORKERS", "1")
    monkeypatch.setattr(workers, "most", lambda: 1)
    workers.start([SPEC])
    key = cache.kernel_key(SPEC)
    assert workers._running.keys() == {key}
    job = workers._running[key]
    job.ended.wait(300)
    assert failures.noted() == "" and job.worker.loaded.is_set()
    assert workers.delivered(key) == compiler.compile_kernel(SPEC)
