# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times variants of the Hopper forward kernel beside each other and beside peers: what the table in config.py rests on.

    python benchmarks/tune.py --cases d64-causal-4k d64-full-16k --peers dew-flash-attn \\
        --configs "3, 128, 10, ping_pong=True" "3, 112, 10, ping_pong=True, walks=True"

Each argument of `--configs` is the inside of a `ForwardConfig(...)`; "table" is the one that would be chosen. They all
take turns in short measurements, forwards and then backwards, so that a clock that drops under load drops for all. A
variant that differs from the first in its results, or that does not end, is a record with its error.

Variants are compiled first, in processes of their own. One record per line goes to the output: config, case, median and
best TFLOP/s, ratio to the best peer, clocks.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from cases import CASES, flops
from peers import IMPLEMENTATIONS
from run import clocks, compiled, describe_run

from jax_fastattn import ffi
from jax_fastattn.ffi import cache, call
from jax_fastattn.kernels.sm90 import config, forward
from jax_fastattn.kernels.sm90.config import ForwardConfig
from jax_fastattn.kernels.spec import KernelSpec, kernel_spec

TABLE, KERNEL_KEY = config.forward_config, cache.kernel_key
# A variant that hangs holds the GPU until its process ends.
LONGEST_STEP_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", required=True)
    parser.add_argument("--configs", nargs="+", type=parse_config, required=True)
    parser.add_argument("--peers", nargs="*", choices=IMPLEMENTATIONS, default=[])
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: 7)")
    parser.add_argument("--measurement-ms", type=float, default=20.0, help="the length of one (default: 20)")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args()
    compile_all(options)
    context = describe_run(options.commit)
    for name in options.cases:
        for record in tune(name, options):
            line = f"{name:24} {record['variant']:70} {record.get('tflops', 0):6.0f} {record.get('ratio', 0):6.3f}"
            print(line, record["error"] or "", flush=True)
            with options.output.open("a") as file:
                file.write(json.dumps(record | context) + "\n")


def parse_config(text: str) -> ForwardConfig | None:
    """A config from the arguments of its constructor; None for "table"."""
    return None if text == "table" else eval(f"ForwardConfig({text})", {"ForwardConfig": ForwardConfig})


def select(variant: ForwardConfig | None) -> None:
    """Makes the forward kernels of this process those of a variant."""

    def choose(spec: KernelSpec) -> ForwardConfig:
        return TABLE(spec) if variant is None else variant

    def key(spec: KernelSpec) -> str:
        return hashlib.sha256(f"{KERNEL_KEY(spec)} {choose(spec)}".encode()).hexdigest()

    config.forward_config = forward.forward_config = choose
    cache.kernel_key = key
    call._kernels.clear()
    jax.clear_caches()


def compile_all(options: argparse.Namespace) -> None:
    """Fills the kernel cache, on all cores."""
    specs = {kernel_spec(CASES[name].problem(), "forward", ffi.arch() or "") for name in options.cases}
    jobs = [(spec, variant) for spec in specs for variant in options.configs]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def compile_one(job: tuple[KernelSpec, ForwardConfig | None]) -> None:
    """Compiles one variant; its error, if any, comes again where it is measured."""
    spec, variant = job
    select(variant)
    try:
        ffi.prepare(spec)
    except Exception as error:
        print(f"{variant}: {error}")


@dataclasses.dataclass
class Run:
    """A compiled call with its measurements."""

    variant: str
    call: Callable[..., Any]
    arrays: Any
    error: str | None
    seconds: list[float] = dataclasses.field(default_factory=list)


def tune(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Records of one case."""
    case = CASES[name]
    operands = jax.jit(case.operands)(jax.random.key(2026))
    dout, _ = case.cotangents(jax.random.key(1))
    attempts = [(str(variant or "table"), "jax_fastattn", variant) for variant in options.configs]
    attempts += [(peer, peer, None) for peer in options.peers]
    runs, first = [], None
    for label, implementation, variant in attempts:
        try:
            with deadline(f"{name}: {label}"):
                select(variant)
                call, arrays = compiled(IMPLEMENTATIONS[implementation].attend, case, operands, dout, "forward")
                result = call(*arrays).astype(jnp.float32)
                first = result if first is None else first
                difference = float(jnp.linalg.norm(result - first) / jnp.linalg.norm(first))
            error = None if difference < 8e-3 else f"differs from the first by {difference:.1e}"
            runs.append(Run(label, call, arrays, error))
        except Exception as error:
            yield {"case": name, "variant": label, "error": f"{type(error).__name__}: {error}"[:300]}
    for turn in range(-1, options.rounds):
        for run in runs if turn % 2 else runs[::-1]:
            with deadline(f"{name}: {run.variant}"):
                seconds = measure(run, options.measurement_ms)
            if turn >= 0:  # the one before is to warm up
                run.seconds.append(seconds)
    work = flops(case, "forward") / 1e12
    rates = {run.variant: work / statistics.median(run.seconds) for run in runs}
    best_peer = max((rates[peer] for peer in options.peers if peer in rates), default=None)
    for run in runs:
        rate = rates[run.variant]
        record = {"case": name, "variant": run.variant, "error": run.error, "tflops": rate}
        record |= {"best_tflops": work / min(run.seconds), "rounds": options.rounds, "clocks": clocks()}
        yield record | ({} if best_peer is None else {"ratio": rate / best_peer})


def measure(run: Run, milliseconds: float) -> float:
    """Seconds per call, over as many asynchronous calls as fill the time."""
    started = time.perf_counter()
    jax.block_until_ready(run.call(*run.arrays))
    calls = max(1, int(milliseconds / 1e3 / (time.perf_counter() - started)))
    started = time.perf_counter()
    for _ in range(calls):
        result = run.call(*run.arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / calls


class deadline:
    """Ends the process when the block takes too long: nothing else frees a GPU from a kernel that hangs."""

    def __init__(self, what: str):
        def give_up() -> None:
            print(f"does not end: {what}", flush=True)
            os._exit(3)

        self._timer = threading.Timer(LONGEST_STEP_SECONDS, give_up)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: Any) -> None:
        self._timer.cancel()


if __name__ == "__main__":
    main()
