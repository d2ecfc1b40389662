# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of two source trees on one GPU, by processes that alternate between them.

    python benchmarks/compare.py --before ../before --after . --output benchmarks/results/compare.json

A card's power limit sets its clock over a long run, so times of different runs do not compare; times of neighboring
processes do. In each round one process of each tree measures every case, forward and backward. The record holds all
times, the ratio of the medians of each cell (after / before, below 1 is faster), their geometric mean, and the worst.

With `--deterministic after` and one tree on both sides it tells what deterministic gradients cost. Each tree needs its
C++ extension. Kernels and XLA programs are compiled before the first round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from cases import CASES, GRID
from peers import IMPLEMENTATIONS
from run import MODES, compiled, describe_run, timing
from testing.borrow import borrow

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.kernels.architectures import BORROWED

SIDES = ("before", "after")


def main() -> None:
    options = parse_arguments()
    if options.one_side:
        if options.arch:
            borrow(options.arch)
        print(json.dumps({"prepare": prepare, "measure": measure}[options.one_side[1]](options)))
        return
    record: dict[str, Any] = {"commits": {side: getattr(options, f"{side}_commit") for side in SIDES}}
    record |= {"deterministic": options.deterministic, "arch": options.arch}
    with tempfile.TemporaryDirectory() as cache:
        for side in SIDES:
            record |= run_side(side, options, cache, "prepare")
        record |= {"rounds": 0, "ms": {}}
        for _ in range(options.rounds):
            for side in SIDES:
                for cell, ms in run_side(side, options, cache, "measure").items():
                    record["ms"].setdefault(cell, {side: [] for side in SIDES})[side].append(ms)
            # Written as it grows: a run that is stopped keeps its whole rounds.
            record["rounds"] += 1
            options.output.write_text(json.dumps(record | summary(record["ms"]), indent=1) + "\n")
    print(json.dumps(summary(record["ms"]), indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for side in SIDES:
        parser.add_argument(f"--{side}", type=Path, help="root of a source tree")
        parser.add_argument(f"--{side}-commit", help="to record")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(GRID), metavar="CASE")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each time (default: 5)")
    parser.add_argument("--measurement-ms", type=float, default=20.0, help="the least length of one (default: 20)")
    parser.add_argument("--warm-up-seconds", type=float, default=0.2, help="of calls before (default: 0.2)")
    parser.add_argument("--arch", choices=BORROWED, help="the portable kernels, with tiles of which card")
    parser.add_argument("--deterministic", nargs="*", choices=SIDES, default=[], help="who asks for such gradients")
    parser.add_argument("--one-side", nargs=2, metavar=("SIDE", "STEP"), help=argparse.SUPPRESS)
    return parser.parse_args()


def run_side(side: str, options: argparse.Namespace, cache: str, step: str) -> dict[str, Any]:
    """Runs `prepare` or `measure` in a process that imports the package of one tree, and returns its result."""
    tree = str(getattr(options, side).resolve())
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": f"{cache}/{side}-xla",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_FASTATTN_CACHE_DIR": f"{cache}/{side}-kernels",
    }
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one-side", side, step],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Fills the caches and describes the run."""
    if jax.default_backend() == "gpu":
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.map(ffi.prepare, kernel_specs(chosen_cases(options).values(), ffi.arch() or ""), chunksize=1)
    for _, call, arrays in cells(options):
        jax.block_until_ready(call(*arrays))
    return describe_run(options.after_commit)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measures the median milliseconds of each cell."""
    return {cell: timing(call, arrays, options)["ms"]["p50"] for cell, call, arrays in cells(options)}


def cells(options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yields the name of each cell, what is timed, and its arguments."""
    for name, case in chosen_cases(options).items():
        operands_key, cotangent_key = jax.random.split(jax.random.key(2026))
        operands, (dout, _) = jax.jit(case.operands)(operands_key), case.cotangents(cotangent_key)
        for mode in options.modes:
            yield f"{name} {mode}", *compiled(IMPLEMENTATIONS["jax_fastattn"].attend, case, operands, dout, mode)


def chosen_cases(options: argparse.Namespace) -> dict[str, Case]:
    """Returns the cases of the side that this process measures, by name."""
    deterministic = options.one_side[0] in options.deterministic
    return {name: dataclasses.replace(CASES[name], deterministic=deterministic) for name in options.cases}


def summary(times: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns the ratio of medians (after / before) of each cell, their geometric means, and the worst."""
    ratios = {
        cell: statistics.median(sides["after"]) / statistics.median(sides["before"]) for cell, sides in times.items()
    }
    means = {
        mode: math.exp(statistics.mean(math.log(ratio) for cell, ratio in ratios.items() if cell.endswith(mode)))
        for mode in MODES
        if any(cell.endswith(mode) for cell in ratios)
    }
    worst = max(ratios, key=lambda cell: ratios[cell])
    return {"ratios": ratios, "geometric_means": means, "worst": {worst: ratios[worst]}}


if __name__ == "__main__":
    main()
