# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times variants of a kernel beside each other and beside peers: what the tables in kernels/sm90 and sm80 rest on.

    python benchmarks/tune.py --cases d64-causal-4k d64-full-16k --peers dew-flash-attn \\
        --configs "3, 128, 10, ping_pong=True" "3, 112, 10, ping_pong=True, walks=True"
    python benchmarks/tune.py --mode backward --cases d64-full-4k --configs table "128, 2, dq_registers=72"
    python benchmarks/tune.py --arch sm_90-rtx --mode backward --cases d256-full-4k \\
        --configs table "3, 1, 16, keys_per_warp=16, dq_row_warps=1"

Each argument of `--configs` holds the arguments of a `ForwardConfig`, or for the backward pass of a `BackwardConfig`
(Hopper) or a `DkdvDqConfig` (portable); "table" names the row that is the default. The variants take turns in short
measurements, forwards and then backwards, so that a clock that drops under load drops for all. If the results of a
variant differ from those of the first, or if it does not end, its record has an error.

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
from cases import CASES, FLOP_FORMULA, flops
from peers import IMPLEMENTATIONS
from run import MODES, clocks, compiled, describe_run

from jax_fastattn import ffi
from jax_fastattn.ffi import cache, call
from jax_fastattn.kernels.architectures import BORROWED
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80 import config as sm80_config
from jax_fastattn.kernels.sm80 import forward as sm80_forward
from jax_fastattn.kernels.sm80.backward import config as sm80_backward_config
from jax_fastattn.kernels.sm80.backward import launches as sm80_backward
from jax_fastattn.kernels.sm90.backward import config as sm90_backward_config
from jax_fastattn.kernels.sm90.backward import launches as sm90_backward
from jax_fastattn.kernels.sm90.forward import config as sm90_config
from jax_fastattn.kernels.sm90.forward import kernel as sm90_forward
from jax_fastattn.testing.borrow import borrow

KERNEL_KEY = cache.kernel_key
# By family and pass: the modules that choose a variant, by which function, that function, and the type of a variant.
TABLES = {
    ("sm90", "forward"): (
        (sm90_config, sm90_forward),
        "forward_config",
        sm90_config.forward_config,
        sm90_config.ForwardConfig,
    ),
    ("sm90", "backward"): (
        (sm90_backward_config, sm90_backward),
        "backward_config",
        sm90_backward_config.backward_config,
        sm90_backward_config.BackwardConfig,
    ),
    ("sm80", "forward"): (
        (sm80_config, sm80_forward),
        "forward_config",
        sm80_config.forward_config,
        sm80_config.ForwardConfig,
    ),
    ("sm80", "backward"): (
        (sm80_backward_config, sm80_backward),
        "dkdv_dq_config",
        sm80_backward_config.dkdv_dq_config,
        sm80_backward_config.DkdvDqConfig,
    ),
}
# A variant that hangs holds the GPU until its process ends.
LONGEST_STEP_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", required=True)
    parser.add_argument("--mode", choices=MODES, default="forward")
    parser.add_argument("--arch", choices=BORROWED, help="the portable kernels, with tiles of which card")
    parser.add_argument("--configs", nargs="+", required=True)
    parser.add_argument("--peers", nargs="*", choices=IMPLEMENTATIONS, default=[])
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: 7)")
    parser.add_argument("--measurement-ms", type=float, default=20.0, help="the length of one (default: 20)")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args()
    if options.arch:
        borrow(options.arch)
    specs = {kernel_spec(CASES[name].problem(), options.mode, ffi.arch() or "") for name in options.cases}
    (family,) = {spec.family for spec in specs}
    options.table = family, options.mode
    options.configs = [parse_config(options.table, text) for text in options.configs]
    compile_all(specs, options.configs)
    context = {"flop_formula": FLOP_FORMULA, "arch": options.arch} | describe_run(options.commit)
    for name in options.cases:
        for record in tune(name, options):
            line = f"{name:24} {record['variant']:70} {record.get('tflops', 0):6.0f} {record.get('ratio', 0):6.3f}"
            print(line, record["error"] or "", flush=True)
            with options.output.open("a") as file:
                file.write(json.dumps(record | context) + "\n")


def parse_config(table: tuple[str, str], text: str) -> Any:
    """A config from the arguments of its constructor; None for "table"."""
    return None if text == "table" else eval(f"Config({text})", {"Config": TABLES[table][3]})


def select(table: tuple[str, str], variant: Any) -> None:
    """Makes the kernels of a family and pass, in this process, those of a variant."""
    modules, name, choose_by_table, _ = TABLES[table]

    def choose(spec: KernelSpec) -> Any:
        return choose_by_table(spec) if variant is None else variant

    def key(spec: KernelSpec) -> str:
        label = choose(spec) if (spec.family, spec.op) == table else ""
        return hashlib.sha256(f"{KERNEL_KEY(spec)} {label}".encode()).hexdigest()

    for module in modules:
        setattr(module, name, choose)
    cache.kernel_key = key
    call._kernels.clear()
    jax.clear_caches()


def compile_all(specs: set[KernelSpec], variants: list[Any]) -> None:
    """Fills the kernel cache, on all cores."""
    jobs = [(spec, variant) for spec in specs for variant in variants]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def compile_one(job: tuple[KernelSpec, Any]) -> None:
    """Compiles one variant; its error, if any, comes again where it is measured."""
    spec, variant = job
    select((spec.family, spec.op), variant)
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
                select(options.table, variant)
                call, arrays = compiled(IMPLEMENTATIONS[implementation].attend, case, operands, dout, options.mode)
                # Compiled for good: a function traced again would run the variant selected last.
                call = call.lower(*arrays).compile()
                result = [x.astype(jnp.float32) for x in jax.tree.leaves(call(*arrays))]
                first = result if first is None else first
                pairs = zip(result, first, strict=True)
                difference = max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)
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
    work = flops(case, options.mode) / 1e12
    rates = {run.variant: work / statistics.median(run.seconds) for run in runs}
    best_peer = max((rates[peer] for peer in options.peers if peer in rates), default=None)
    for run in runs:
        rate = rates[run.variant]
        record = {"case": name, "mode": options.mode, "variant": run.variant, "error": run.error, "tflops": rate}
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
