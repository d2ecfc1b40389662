# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures tangents and Hessian-vector products next to `jax.nn.dot_product_attention` and fa4-jax, in turns.

    python benchmarks/forward_mode.py --set gpu --gpus 4     # a process for each GPU, which share the cases
    python benchmarks/forward_mode.py --set gpu --implementations jax_fastattn fa4-jax jax.nn-xla --modes forward jvp
    python benchmarks/forward_mode.py --set cpu

Appends one JSON record per line, for each case and mode: all times, their medians, the ratios of the medians to that of
jax.nn's XLA implementation, CPU time, temporary memory, and the largest difference of results. `jvp` returns output and
tangent, with tangents of query, key and value. `hvp` is the jvp of the gradient of a scalar loss that is not linear in
the output. An implementation that cannot run a mode has an error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_nn import elapsed_ms, memory
from peers import IMPLEMENTATIONS
from report import RESULTS, slug
from run import describe_run, share

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs, tangent_specs
from jax_fastattn.ops import dispatch
from jax_fastattn.spec import Operands

OURS, THEIRS, CUDNN = "jax_fastattn", "jax.nn-xla", "jax.nn-cudnn"
MODES = ("forward", "grad", "jvp", "hvp")
QKV = tuple[jax.Array, jax.Array, jax.Array]


def _cases(dtype: str, tokens: int, lengths: tuple[int, ...], head_dims: tuple[int, ...]) -> dict[str, Case]:
    """Returns cases of 8 heads; four neighbors differ in head dim and mask, so that four GPUs compile other kernels."""
    return {
        f"d{head_dim}-{'causal' if is_causal else 'full'}-{length}-{dtype}": Case(
            dtype, max(tokens // length, 1), length, length, num_kv_heads=8, head_dim=head_dim, is_causal=is_causal
        )
        for length in lengths
        for head_dim in head_dims
        for is_causal in (False, True)
    }


SETS = {
    "gpu": _cases("bfloat16", 8192, (2048, 8192, 1024), (64, 128)),
    "cpu": _cases("float32", 0, (512, 2048), (64,)) | _cases("bfloat16", 0, (512, 2048), (64,)),
    "tiny": _cases("float32", 32, (16, 32), (8,)),
}


def function_of(implementation: str, mode: str, case: Case) -> Callable[..., Any]:
    """Returns the function of query, key and value, and of their tangents, that is timed."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return IMPLEMENTATIONS[implementation].attend(case, Operands(query, key, value))

    def loss(*x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(*x).astype(jnp.float32)))

    gradient = jax.grad(loss, (0, 1, 2))
    functions: dict[str, Callable[[QKV, QKV], Any]] = {
        "forward": lambda x, u: attend(*x),
        "grad": lambda x, u: gradient(*x),
        "jvp": lambda x, u: jax.jvp(attend, x, u),
        "hvp": lambda x, u: jax.jvp(gradient, x, u)[1],
    }
    return functions[mode]


def program(implementation: str, mode: str, case: Case) -> tuple[Any, Any]:
    """Returns the jitted function, which is timed since JAX calls it in C++, and its compiled program."""
    function = jax.jit(function_of(implementation, mode, case))
    return function, function.lower(*jax.eval_shape(functools.partial(draw, case))).compile()


def draw(case: Case) -> tuple[QKV, QKV]:
    """Returns query, key and value, and their tangents."""
    x, u = (case.operands(key) for key in jax.random.split(jax.random.key(2026)))
    return (x.query, x.key, x.value), (u.query, u.key, u.value)


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    names = options.rows or list(SETS[options.set])
    if options.gpus > 1:
        share(__file__, "--rows", names, options.gpus, sys.argv[1:] if argv is None else argv)
        return
    context = describe_run(options.commit)
    output = options.output or RESULTS / f"forward-mode-{context['date'][:10]}-{slug(context['gpu'])}.jsonl"
    cases, begun = {name: SETS[options.set][name] for name in names}, time.monotonic()
    if jax.default_backend() == "gpu":
        with multiprocessing.get_context("spawn").Pool(4) as pool:
            arch = ffi.arch() or ""
            specs = kernel_specs(cases.values(), arch) + tangent_specs(cases.values(), arch)
            pool.map(ffi.prepare, specs, chunksize=1)
    for name, case in cases.items():
        if time.monotonic() - begun > options.budget_seconds:
            print(f"out of time before {name}")
            break
        for record in measure_case(case, options):
            with output.open("a") as file:
                file.write(json.dumps({"row": name, **record, **context}) + "\n")
            print(
                f"{name:26} {record['mode']:8}{record['ms']} {record['ratio']} {record['temporaries_mib']}", flush=True
            )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, required=True)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of the set (default: all)")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=[OURS, THEIRS, CUDNN])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--gpus", type=int, default=1, help="that share the rows, a process each (default: 1)")
    parser.add_argument(
        "--budget-seconds", type=float, default=140.0, help="after which no row is begun (default: 140)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each time (default: 9)")
    parser.add_argument("--measurement-ms", type=float, default=20.0, help="the least length of one (default: 20)")
    parser.add_argument("--warm-up-seconds", type=float, default=0.3, help="of rounds before (default: 0.3)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/forward-mode-<date>-<device>.jsonl")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    return parser.parse_args(argv)


def measure_case(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the records of a case, one for each mode."""
    arrays, records = jax.jit(functools.partial(draw, case))(), []
    with concurrent.futures.ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 2, 1)) as pool:
        futures = {
            mode: {name: pool.submit(program, name, mode, case) for name in options.implementations}
            for mode in options.modes
        }
    for mode, of_mode in futures.items():
        programs, outputs, errors = dict[str, Any](), dict[str, Any](), dict[str, str]()
        for name, future in of_mode.items():
            try:
                programs[name] = future.result()
                outputs[name] = [np.asarray(x, np.float32) for x in jax.tree.leaves(programs[name][0](*arrays))]
            except Exception as error:  # whatever an implementation raises is its record
                programs.pop(name, None)
                errors[name] = f"{type(error).__name__}: {error}"[:300]
        record = {"mode": mode, "case": str(case), "errors": errors} | measure(programs, arrays, options)
        if THEIRS in outputs:
            differences = {name: largest_difference(x, outputs[THEIRS]) for name, x in outputs.items()}
            record["largest_difference"] = differences
        records.append(record | {"ran": str(dispatch.explain(case.problem()))})
    return records


def measure(programs: dict[str, Any], arrays: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of programs that run in turns, in milliseconds per call.

    The CPU time of all threads, `cpu_ms`, says more than `ms` where other work shares the cores of a CPU.
    """
    functions, calls = {name: pair[0] for name, pair in programs.items()}, dict[str, int]()
    for name, function in functions.items():
        calls[name] = max(round(options.measurement_ms / max(elapsed_ms(function, arrays, 1), 1e-3)), 1)
    begun = time.monotonic()
    while time.monotonic() - begun < options.warm_up_seconds:
        for name, function in functions.items():
            elapsed_ms(function, arrays, calls[name])
    times: dict[str, list[float]] = {name: [] for name in functions}
    cpu_times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(options.rounds):
        for name, function in functions.items():
            cpu = time.process_time()
            times[name].append(elapsed_ms(function, arrays, calls[name]))
            cpu_times[name].append((time.process_time() - cpu) * 1e3 / calls[name])
    medians = {name: statistics.median(found) for name, found in times.items()}
    theirs = medians.get(THEIRS)
    return {
        "ms": {name: round(ms, 4) for name, ms in medians.items()},
        "ratio": {name: round(ms / theirs, 3) for name, ms in medians.items() if theirs and name != THEIRS},
        "cpu_ms": {name: round(statistics.median(found), 4) for name, found in cpu_times.items()},
        "temporaries_mib": {name: memory(pair[1]) for name, pair in programs.items()},
        "times_ms": times,
        "cpu_times_ms": cpu_times,
        "calls": calls,
    }


def largest_difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Returns the largest difference of results, in units of the largest element of each."""
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(found, expected, strict=True))


if __name__ == "__main__":
    main()
