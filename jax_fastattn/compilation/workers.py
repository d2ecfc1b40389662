# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that compile kernels while this process traces and compiles others.

Threads cannot: the compiler holds Python's lock, and keeps state in the process. A worker is a fresh Python, neither a
fork of this process nor one that runs the user's script again. It delivers through the disk cache, from which nothing
is read that another user may write. A thread that needs a kernel waits for its worker, and looks every `PATIENCE`
seconds whether the worker has loaded the compiler and gets half a CPU. A worker that still loads, starves or hangs thus
costs no more. The failure of a worker is silent here: `failures.py` keeps it for `info`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_fastattn.compilation import cache, failures, settings
from jax_fastattn.compilation.worker import LOADED
from jax_fastattn.kernels.key import KernelSpec

# Seconds from one look at an awaited worker to the next, and the most that a kernel waits for its worker. Most kernels
# take 2 to 8 seconds. The compiler takes about 3 to load, and this process has often loaded it, so a worker that still
# loads it would deliver later than this process.
PATIENCE, MOST_PATIENCE = 0.5, 10.0

# A worker takes up to this much memory. More workers than this are never needed at once.
WORKER_BYTES = 400 << 20
MOST_WORKERS = 16

_NICENESS = 19


class Worker:
    """One process that compiles kernels, one after the other.

    Attributes:
        loaded: set when the process has said that it has loaded the compiler, which `compile` reads.
    """

    def __init__(self, niceness: int = 0) -> None:
        """Starts the process.

        Raises:
            OSError: it cannot be started.
        """
        self.loaded = threading.Event()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        pipe = subprocess.PIPE
        try:
            self._process: Any = subprocess.Popen(
                command(niceness), stdin=pipe, stdout=pipe, stderr=self._errors, env=_environment()
            )
        except BaseException:
            self._errors.close()
            raise

    def compile(self, key: str, spec: KernelSpec) -> dict[str, Any]:
        """Returns what became of a kernel: the "seconds" that it took, or a "problem"."""
        try:
            self._process.stdin.write(pickle.dumps((key, spec)))
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"problem": self._end()}
        except Exception as error:  # of a feature that a test defines, for example, and that pickle cannot find
            return {"problem": f"it cannot be asked for the kernel: {type(error).__name__}: {error}"}
        report = self._report()
        if report == LOADED:  # before its first kernel
            self.loaded.set()
            report = self._report()
        return report or {"problem": self._end()}

    def _report(self) -> dict[str, Any]:
        """Returns the next line that the process writes, which is empty if it has ended."""
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def _end(self) -> str:
        """Waits for the end of the process, and returns how it ended, with the last line that it printed."""
        status = self._process.wait()
        ended = f"its process ended by {signal.Signals(-status).name}" if status < 0 else "its process ended early"
        if status == -signal.SIGKILL:
            ended += ", perhaps out of memory"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return ": ".join([ended, *[line for line in lines if line.strip()][-1:]])

    def cpu_seconds(self) -> float:
        """Returns how much CPU time the process has had; 0 where the system does not say."""
        times = _text(f"/proc/{self._process.pid}/stat").rpartition(") ")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Ends the process at once. Nothing half-written is left in the cache."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, which has nothing to do, and waits for its end."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def command(niceness: int) -> list[str]:
    """Returns the command of a worker. `-P` keeps the current directory, where others may write, off Python's path."""
    return [sys.executable, "-P", "-W", "ignore", "-m", "jax_fastattn", "worker", str(niceness)]


def _environment() -> dict[str, str]:
    """Returns the environment of a worker: it imports from where this process does, and sees no GPU."""
    paths = [path for path in sys.path if Path(path).is_absolute()]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class _Job:
    """A kernel that a worker compiles.

    Attributes:
        ended: set when the worker has ended.
        is_needed: whether its result is still of use.
    """

    worker: Worker
    ended: threading.Event = field(default_factory=threading.Event)
    is_needed: bool = True


_lock = threading.Lock()
_waiting: dict[str, KernelSpec] = {}  # by key, in the order in which workers take them
_running: dict[str, _Job] = {}
_given: set[str] = set()  # keys that workers were started for


def are_possible() -> bool:
    """Returns whether this process may start workers, and they could deliver."""
    # A program that embeds or freezes Python would start itself again.
    is_python = Path(sys.executable or "").name.startswith("python") and not hasattr(sys, "frozen")
    return settings.has_workers() and is_python and cache.takes_entries()


def start(specs: Iterable[KernelSpec]) -> None:
    """Has workers compile the kernels that the cache lacks, as many at a time as `most` says."""
    try:
        if not are_possible() or most() < 1:
            return
        for spec in specs:
            key = cache.kernel_key(spec)
            if key not in _given and cache.load(key) is None:
                with _lock:
                    _waiting.setdefault(key, spec)
        _fill()
    except Exception as error:  # the kernels are compiled where they are needed
        failures.note(f"it cannot be started: {type(error).__name__}: {error}")


def take(key: str) -> bytes | None:
    """Returns a kernel that is needed now, if a worker that is worth the wait delivers it; else None.

    A kernel that waits for a worker is not given to one any more.
    """
    with _lock:
        _waiting.pop(key, None)
        job = _running.get(key)
    if job is not None:
        _wait(job)
    return delivered(key)


def _wait(job: _Job) -> None:
    """Waits for a worker to end, as long as each look finds that it has loaded the compiler and had half a CPU."""
    begin = time.monotonic()
    while time.monotonic() - begin < MOST_PATIENCE:
        before = job.worker.cpu_seconds()
        if job.ended.wait(PATIENCE) or not job.worker.loaded.is_set():
            return
        if job.worker.cpu_seconds() - before < PATIENCE / 2:
            return


def delivered(key: str) -> bytes | None:
    """Returns a kernel that a worker has delivered."""
    return cache.load(key) if key in _given else None


def abandon(key: str) -> None:
    """Ends the worker of a kernel that this process has compiled."""
    with _lock:
        job = _running.get(key)
    if job is not None:
        job.is_needed = False
        job.worker.kill()


def most() -> int:
    """Returns how many workers may run: one for each CPU that this process leaves free, in half of the free memory."""
    return min(_cpus() - 1, _free_memory() // 2 // WORKER_BYTES, MOST_WORKERS)


def _cpus() -> int:
    """Returns how many CPUs this process may use, by its affinity mask and the quota of its container."""
    cpus = len(os.sched_getaffinity(0))
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cpus, max(1, int(quota) // int(period))) if quota.isdigit() and period.strip().isdigit() else cpus


def _free_memory() -> int:
    """Returns the bytes that are free on this machine, and in its container."""
    lines = dict(line.split(":") for line in _text("/proc/meminfo").splitlines() if ":" in line)
    free = int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _fill() -> None:
    """Starts workers for kernels that wait, up to `most`."""
    with _lock:
        while _waiting and len(_running) < most():
            key = next(iter(_waiting))
            spec = _waiting.pop(key)
            _given.add(key)  # once, so that what fails is not tried again
            job = _Job(Worker(_NICENESS))
            threading.Thread(target=_watch, args=(key, spec, job), daemon=True).start()
            _running[key] = job


def _watch(key: str, spec: KernelSpec, job: _Job) -> None:
    """Waits for a worker, so that no zombie is left; then the next kernel that waits has its turn."""
    outcome = job.worker.compile(key, spec)
    if "problem" not in outcome:
        failures.forget()
    elif job.is_needed:
        failures.note(outcome["problem"])
    job.ended.set()
    job.worker.close()
    with _lock:
        _running.pop(key, None)
    with contextlib.suppress(Exception):  # as in `start`
        _fill()


def _forget() -> None:
    """Makes a child of this process, which has forked, leave its workers alone."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()
    _running.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _end() -> None:
    """Ends all workers with this process."""
    with _lock:
        _waiting.clear()
        jobs = list(_running.values())
    for job in jobs:
        job.is_needed = False
        job.worker.kill()
    for job in jobs:
        job.ended.wait(1)
