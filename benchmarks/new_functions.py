# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what a function that no call has seen costs: seconds to compile its kernels, milliseconds to trace it.

    python benchmarks/new_functions.py --output new-functions.json    # needs the compiler and no GPU

Each row lowers the gradient of one call for an H100, in a process of its own with an empty cache, which compiles all
kernels itself. A record has seconds by the clock and of the process's cores. It also has milliseconds of the cores, as
medians of 40: of JAX's trace of the function, and of all that an eager call does with it each time, planes on this
machine's processor included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import ROOT
from run import describe_run

import jax_fastattn
from jax_fastattn import ffi
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.programs.trace import MASK_ARGUMENTS, SCORE_ARGUMENTS, trace_call

ARCH = "sm_90a"
HEADS, LENGTH, HEAD_DIM = 16, 4096, 128


def t5(table: jax.Array) -> Callable[..., Any]:
    half, far = len(table) // 2, 128

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = jnp.abs(k - q)
        wide = jnp.log(jnp.maximum(distance, 1) / (half // 2)) / jnp.log(far / (half // 2))
        wide = half // 2 + (wide * (half - half // 2)).astype(jnp.int32)
        bucket = jnp.where(distance < half // 2, distance, jnp.minimum(wide, half - 1))
        return s + table[bucket + half * (k > q), h]

    return mod


# By row: the argument, what makes its function of an array, the shape of the array, and whether it is learned.
ROWS: dict[str, tuple[str, Callable[[jax.Array], Any], tuple[int, ...], bool]] = {
    "none": ("score_mod", lambda x: None, (1,), False),
    "alibi": ("score_mod", lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), (HEADS,), False),
    "alibi-learned": ("score_mod", lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), (HEADS,), True),
    "t5-learned": ("score_mod", t5, (32, HEADS), True),
    "mask": ("mask_mod", lambda x: lambda b, h, q, k: (q >= k) & (q - k < 1000 * x[0]), (1,), False),
}


def lowered(name: str) -> dict[str, Any]:
    """Returns the seconds of a row in this process, and how many kernels it compiled."""
    argument, make, shape, is_learned = ROWS[name]
    query = jax.ShapeDtypeStruct((4, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)

    def loss(arrays: list[jax.Array], captured: jax.Array) -> jax.Array:
        given: Any = {argument: make(captured)}
        return jax_fastattn.attention(*arrays, is_causal=True, **given).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1) if is_learned else 0))
    begin, begin_cpu = time.perf_counter(), _cpu_seconds()
    with jax.numpy_dtype_promotion("standard"), jax_fastattn.target_arch(ARCH):
        captured = jax.ShapeDtypeStruct(shape, jnp.float32)
        gradient.trace([query] * 3, captured).lower(lowering_platforms=("cuda",))
    seconds, cpu = time.perf_counter() - begin, _cpu_seconds() - begin_cpu
    found: dict[str, Any] = {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "compiled": ffi.compile_count(),
    }
    if name != "none":
        found |= {"trace_ms": round(trace_ms(name), 2), "eager_ms": round(eager_ms(name), 2)}
    return found


def trace_ms(name: str, runs: int = 40) -> float:
    """Returns the milliseconds of the process's cores in which a new function is traced."""
    argument, make, shape, _ = ROWS[name]
    captured, times = jnp.ones(shape), list[float]()
    names = SCORE_ARGUMENTS if argument == "score_mod" else MASK_ARGUMENTS
    arguments = {x: np.float32 if x == "score" else np.int32 for x in names}
    for _ in range(runs):
        begin = time.process_time()
        with jax.numpy_dtype_promotion("standard"):
            trace_call(argument, make(captured), arguments)
        times.append(time.process_time() - begin)
    return 1e3 * statistics.median(times)


def eager_ms(name: str, runs: int = 40) -> float:
    """Returns the milliseconds of the process's cores in which an eager call prepares a new function."""
    argument, make, shape, _ = ROWS[name]
    x, captured = jnp.zeros((1, 64, HEADS, 8)), jnp.ones(shape)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(runs):
        for side, functions in (("with", {argument: make(captured)}), ("without", {})):
            begin = time.process_time()
            with jax.numpy_dtype_promotion("standard"):
                canonicalize(x, x, x, **functions)
            times[side].append(time.process_time() - begin)
    return 1e3 * (statistics.median(times["with"]) - statistics.median(times["without"]))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(name: str) -> dict[str, Any]:
    """Returns the record of a row in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAX_FASTATTN_CACHE_DIR": cache,
            "JAX_PLATFORMS": "cpu",
            "JAX_FASTATTN_WORKERS": "0",
        }
        command = [sys.executable, __file__, "--row", name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--row", choices=ROWS, help="lower one row in this process, and print its times")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    if options.row:
        print(json.dumps(lowered(options.row)))
        return
    found: dict[str, Any] = {}
    for name in options.rows:
        found[name] = measured(name)
        print(name, found[name], flush=True)
    if options.output:
        record = {"arch": ARCH, "cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": found}
        options.output.write_text(json.dumps(record | describe_run(options.commit), indent=1) + "\n")


if __name__ == "__main__":
    main()
