# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU test suite twice, then compute-sanitizer over a small set of cases, and records the outcome.

    python benchmarks/gpu_checks.py --output benchmarks/results/2026-11-21-h100-checks.json

The suite itself runs every case in two orders. A record holds the counts, the GPU, the versions and the commit.

    JAX_FASTATTN_CACHE_DIR=kernels python benchmarks/gpu_checks.py --prepare --arch sm_90-a100 --seed 36 --processes 2

compiles the kernels of such a run into that folder, with no GPU. A machine with one and the same compiler takes them
from there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from run import describe_run

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
# The exit status of pytest after a signal, and how long it may take to end: what XLA compiles is compiled first.
INTERRUPTED, GRACE_SECONDS = 2, 30.0
# One of each structure; instrumented kernels are a hundred times slower.
CASES = (
    "mha-d64-bf16-q193-kv257",
    "mha-causal-d64-f16-q2113-kv2305",
    "gqa2-sinks_n-d72-bf16-q257-kv127",
    "gqa2-causal-d96-bf16-q257-kv127",
    "gqa5-causal-d128-bf16-q257-kv127",
    "gqa2-causal-d256-bf16-q64-kv65",
    "mha-causal-d192v128-bf16-q129-kv128",
    "mha-deterministic-d64-bf16-q257-kv1000",
    "mha-deterministic-d64-bf16-b20-q64-kv257",
    "mha-deterministic-d128-bf16-b3-q193-kv577",
    "gqa2-causal-sinks_bn-dlse-deterministic-d96-bf16-q257-kv1089",
    "gqa2-causal-deterministic-d128-bf16-q2113-kv2305",
    "gqa5-window40.0-cap5-sinks_n-dlse-offset64.-30-qlen193.100-kvlen257.129-d128-bf16-q193-kv257",
    "gqa2-cap30-d96-f16-q257-kv127",
    "mha-causal-scale-0.2-d64-bf16-b60-q193-kv257",
    "mha-causal-d128-bf16-b66-q256-kv256",
    "gqa2-window200.0-cap5-sinks_n-dlse-offset200.-30.0.64-qlen257.193.0.65-kvlen512.129.300.0-d96-bf16-b4-q257-kv512",
    "mha-causal-d64-bf16-b1-q33-kv127",
    "gqa2-causal-sinks_bn-dlse-offset-70.-150-d64-bf16-q193-kv257",
    "mha-window63.7-deterministic-offset200.500-d96-bf16-q129-kv700",
    # Tilings of the portable kernels that no other one has.
    "mha-d32-f16-q193-kv257",
    "mha-causal-cap2-d64-bf16-q193-kv257",
    "gqa2-d256v32-bf16-q193-kv257",
    "gqa2-causal-d112v16-bf16-q193-kv257",
    "gqa2-window64.x-d160-bf16-q193-kv257",
    "gqa2-d192-f16-q193-kv257",
    "mha-d64v256-bf16-q193-kv257",
    # Masks and segment ids, with rows that nothing sees.
    "gqa2-mask_bts-d64-bf16-q257-kv1000",
    "gqa2-window70.30-mask_kts-offset64.-70-d64-bf16-q193-kv257",
    "gqa2-mask_bs-kvlen257.64-d64-bf16-q193-kv257",
    "gqa2-cap5-mask_bnts-density0.05-sinks_n-dlse-d128-bf16-q193-kv257",
    "gqa2-causal-segments4-d128-bf16-q193-kv257",
    "mha-mask_bnts-density0.05-deterministic-d64-bf16-q193-kv257",
    "mha-mask_bnts-density0.05-d192v128-bf16-q193-kv257",
    "gqa2-mask_bnts-density0.05-d160-bf16-q193-kv257",
    # Masks of padding, which say the same of all queries.
    "gqa2-cap5-mask_ks-sinks_n-dlse-d128-bf16-q193-kv257",
    "mha-bias_nts-of_bf16-mask_bs-density0.02-dlse-d64-bf16-q193-kv257",
    "gqa2-bias_nts-of_bf16-mask_bks-density0.3-d32-bf16-b40-q193-kv257",
    # Biases of each kind, with their gradients.
    "mha-bias_nts-of_bf16-dlse-d64-bf16-q193-kv257",
    "gqa2-window150.60-bias_bts-of_bf16-offset300.-40-d128-bf16-q193-kv257",
    "mha-causal-bias_nts-of_bf16-d192v128-bf16-q193-kv257",
    "mha-causal-bias_bts-d256-bf16-q193-kv257",
    "gqa2-bias_nts-of_bf16-mask_bts-density0.05-d64-bf16-q193-kv257",
    "mha-bias_nts-of_bf16-finite0.02-d64-bf16-q193-kv257",
    "mha-causal-bias_bs-of_bf16-d64-bf16-q193-kv257",
    "gqa2-bias_ks-finite0.2-mask_bts-d192-bf16-q193-kv257",
    "gqa2-causal-cap2-bias_nt-sinks_n-d128-bf16-q193-kv257",
    "gqa2-cap50-bias_bt-dlse-d64-bf16-q193-kv257",
    # Packed sequences, whose boundaries decrease and leave the rows.
    "mha-causal-packed1200.-900.500.1e+09.-2e+09.1e+09-and200.1000.0.-300.1097.-400-first-7.3-d128v128-bf16-b1-q1600-kv1600",
)

# Cases of few queries, and the rows of the pages that a second call of each reads, if it can.
FEW = {
    "lengths": 16,
    "ratio 7, causal": 64,
    "window, sinks": 256,
    "64 rows, cap": 16,
    "query lengths": None,
    "d64": 48,
    "d256": 64,
    "128 rows": None,
    "whole units": 16,
    "mask of heads and pairs": None,
    "ids, window": None,
}

# Random boundaries that decrease, are negative or huge, five of each kind; with a CTA for each tile, and with two
# backward kernels.
WILD_SEED = 34
WILD = {"dtypes": ["bfloat16", "float16"], "head_dims": [(64, 64), (192, 128)], "rows": [400, 300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--prepare", action="store_true", help="compile the kernels alone")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    parser.add_argument("--suite-runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=34, help="of random calls; each run of the suite adds 1")
    parser.add_argument(
        "--processes", type=int, default=4, help="that share the GPU, of which 10 fit 80 GiB (default: 4)"
    )
    parser.add_argument("--gpus", type=int, default=1, help="over which the suite's processes are spread (default: 1)")
    parser.add_argument(
        "--suite-seconds", type=float, help="after which a run of the suite is stopped (default: never)"
    )
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--tool-seconds", type=float, help="after which a tool is stopped (default: never)")
    parser.add_argument("--tool-processes", type=int, default=1, help="that share a tool's cases (default: 1)")
    parser.add_argument(
        "--tool-cases", nargs="+", metavar="WORD", help="those of a tool's cases that have one of these words"
    )
    parser.add_argument("--arch", help="what a Hopper GPU counts as: sm_90-a100, sm_90-rtx or sm_90 (portable kernels)")
    parser.add_argument("--inside-sanitizer", metavar="I/N", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside_sanitizer:
        run_cases(options.arch, *map(int, options.inside_sanitizer.split("/")), words=options.tool_cases)
        return
    if options.prepare:
        prepare(options.arch or "sm_90a", range(options.seed, options.seed + options.suite_runs), options.processes)
        return
    if options.output is None:
        parser.error("--output is missing")
    arch = [] if options.arch is None else ["--arch", options.arch]
    words = [] if options.tool_cases is None else ["--tool-cases", *options.tool_cases]
    # Oracles are compiled once per case and run once: tuning their products would take most of the time.
    os.environ.update({"XLA_FLAGS": "--xla_gpu_autotune_level=0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    environment = dict(os.environ)
    record = describe_run(options.commit) | {
        "arch": options.arch,
        "suite": [],
        "sanitizer": {},
        "sanitizer_cases": options.tool_cases or [*CASES, *FEW, "float32", f"wild draws of seed {WILD_SEED}"],
    }

    def write() -> None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")

    # Written as it grows: whoever stops a run keeps what has ended.
    for run in range(options.suite_runs):
        suite = run_suite(environment, options.processes, options.gpus, options.seed + run, arch, options.suite_seconds)
        record["suite"].append(suite)
        write()
    # One after the other: beside the other two racecheck has once reported what it had not reported alone.
    for tool in options.tools:
        record["sanitizer"][tool] = sanitize(
            tool, environment, [*arch, *words], options.tool_processes, options.tool_seconds
        )
        write()
    print(json.dumps(record, indent=1))


def prepare(arch: str, seeds: Iterable[int], processes: int) -> None:
    """Compiles the kernels of the suite's cases and draws, and those of the sanitizers, unless the cache has them."""
    sys.path += [str(ROOT / "tests" / "kernels"), str(ROOT / "tests" / "kernels" / "emulator")]
    import test_gpu
    from testing import draws
    from testing.cases.biases import BIASES
    from testing.cases.few_queries import FEW_QUERIES
    from testing.cases.float32 import FLOAT32
    from testing.cases.gpu import GPU_CASES
    from testing.cases.hidden_rows import HIDDEN_ROWS
    from testing.cases.long_rows import LONG_ROWS

    from jax_fastattn import ffi
    from jax_fastattn.cases.kernels import kernel_specs
    from jax_fastattn.kernels.choose import configured
    from jax_fastattn.kernels.key import KernelSpec
    from jax_fastattn.kernels.support import unsupported_reasons

    cases = [*GPU_CASES, *BIASES.values(), *LONG_ROWS, *wild_draws(), *test_gpu.model_calls()]
    for seed in seeds:
        cases += draws.packed_draws(seed, test_gpu.DRAWS, test_gpu.KINDS, **test_gpu.CHOICES)
        cases += draws.wild_draws(seed, test_gpu.WILD_DRAWS, test_gpu.WILD_KINDS, **test_gpu.CHOICES)
        cases += test_gpu.combined_draws(seed)
    cases = [case for case in cases if not unsupported_reasons(case.problem(), arch)]
    specs: dict[KernelSpec, None] = dict.fromkeys(kernel_specs(cases, arch))
    more = [*(FEW_QUERIES[name] for name in FEW), *FLOAT32.values()]
    sanitized = kernel_specs([*more, *(case for case in [*GPU_CASES, *BIASES.values()] if str(case) in CASES)], arch)
    specs |= {dataclasses.replace(spec, dlse=spec.op == "backward"): None for spec in sanitized}
    if arch == "sm_90a":  # its portable kernels have tests too
        portable = kernel_specs([*HIDDEN_ROWS.values(), *FEW_QUERIES.values()], "sm_80")
        specs |= {configured(dataclasses.replace(spec, arch=arch)): None for spec in portable}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for i, _ in enumerate(pool.map(ffi.prepare, specs), 1):
            print(f"{i} of {len(specs)}", end="\r", flush=True)


def wild_draws() -> list[Any]:
    """The packed calls that the sanitizers run."""
    from testing import draws

    kinds = len(WILD["head_dims"])
    return draws.wild_draws(WILD_SEED, 5 * kinds, kinds, **WILD)


def run_suite(
    environment: dict[str, str], processes: int, gpus: int, seed: int, arch: list[str], seconds: float | None
) -> dict[str, Any]:
    """Counts of one run of `pytest -m gpu` by some processes at a time, each with a part of the tests; and its seconds.

    Processes share a GPU: what should not depend on load is tested under load. After `seconds` they are interrupted,
    and count the tests that have ended.
    """
    cores = sorted(os.sched_getaffinity(0))
    if processes > len(cores):
        raise SystemExit(f"{processes} processes need as many cores, found {len(cores)}")
    with tempfile.TemporaryDirectory() as folder:
        started, running, reports = time.monotonic(), [], []
        for part in range(processes):
            reports.append(Path(folder) / f"{part}.xml")
            command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "tests"]
            command += [f"--part={part}/{processes}", f"--seed={seed}", f"--junitxml={reports[-1]}", *arch]
            mine = ",".join(map(str, cores[part::processes]))
            with reports[-1].with_suffix(".log").open("w") as output:
                arguments = ["taskset", "-c", mine, *command]
                seen = environment | ({"CUDA_VISIBLE_DEVICES": str(part % gpus)} if gpus > 1 else {})
                running.append(subprocess.Popen(arguments, cwd=ROOT, env=seen, stdout=output, stderr=output))
        codes = _exits(running, seconds)
        ended = [(code, report, report.with_suffix(".log")) for code, report in zip(codes, reports, strict=True)]
        crashed = [
            _failed(log.read_text())
            for code, report, log in ended
            if code not in (0, 1, INTERRUPTED) or not report.exists()
        ]
        taken = round(time.monotonic() - started)
        suites = [ElementTree.parse(report).getroot()[0] for report in reports if report.exists()]
    names = ("tests", "failures", "errors", "skipped")
    counts = {name: sum(int(suite.attrib[name]) for suite in suites) for name in names}
    problems = [(case, case.find(kind)) for suite in suites for case in suite for kind in ("failure", "error")]
    failed = {case.attrib["name"]: found.attrib["message"][:500] for case, found in problems if found is not None}
    run = {"crashed": crashed, "interrupted": codes.count(INTERRUPTED), "seconds": taken}
    return counts | run | {"processes": processes, "gpus": gpus, "seed": seed, "failed": failed}


def _failed(log: str) -> str:
    """Returns the tests that failed in the log of a process without a report, and its end."""
    names = re.findall(r"^(tests\S*::.*) (?:FAILED|ERROR)", log, re.MULTILINE)
    return "\n".join([*names, log[-1000:]])


def _exits(processes: list[subprocess.Popen[bytes]], seconds: float | None) -> list[int]:
    """Waits for processes of pytest; after `seconds` it interrupts them, so that they write reports. Exit statuses."""
    started = time.monotonic()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(None if seconds is None else max(0.0, started + seconds - time.monotonic()))
    late = [process for process in processes if process.poll() is None]
    for process in late:
        process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    for process in late:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, begun + GRACE_SECONDS - time.monotonic()))
        process.kill()  # does nothing to one that has ended
    return [process.wait() for process in processes]


def sanitize(
    tool: str, environment: dict[str, str], arguments: list[str], processes: int, seconds: float | None
) -> dict[str, Any]:
    """What a tool of compute-sanitizer says of our kernels, and of those alone, in each of some processes.

    A process that is stopped after `seconds` has no exit status. The record names the cases that have ended.
    """
    script = [sys.executable, str(Path(__file__).resolve()), "--output", os.devnull, *arguments]
    # Return codes of the CUDA API are not ours: JAX probes what the driver can do.
    only = ["--kernel-regex", "kns=kernel_cutlass", *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command = ["compute-sanitizer", "--tool", tool, *only, *script]
    started, running = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for part in range(processes):
            log = Path(folder) / f"{part}.log"
            with log.open("w") as output:
                mine = [*command, f"--inside-sanitizer={part}/{processes}"]
                process = subprocess.Popen(
                    mine, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                running.append((process, log))
        exits: list[int | None] = []
        for process, _ in running:
            try:
                exits.append(process.wait(None if seconds is None else max(0.0, started + seconds - time.monotonic())))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # the tool and what it runs
                exits.append(None)
        logs = [log.read_text() for _, log in running]
    summaries = [re.findall(r"={9} ((?:ERROR|RACECHECK) SUMMARY.*)", log) for log in logs]
    # With where it is, and the other accesses of a hazard, which have lines of their own.
    report = r"={9} ((?:Invalid|Program hit|Error|Warning|Barrier|Race).*(?:\n={9} +(?:at|and) .*)*)"
    printed = "\n".join(logs)
    reports = sorted({" ".join(found.replace("=" * 9, "").split()) for found in re.findall(report, printed)})[:100]
    return {
        "summaries": [found[-1] if found else log[-2000:] for found, log in zip(summaries, logs, strict=True)],
        "reports": reports,
        "finished": re.findall(r"^ran (.*)$", printed, re.MULTILINE),
        "exits": exits,
        "seconds": round(time.monotonic() - started),
    }


def run_cases(arch: str | None, part: int, parts: int, words: list[str] | None = None) -> None:
    """Forward and backward of the cases, on poisoned operands with scores that outgrow those of earlier tiles.

    Cases of few queries read pages as well. Every `parts`-th case runs, from `part` on, of those that have one of the
    words.
    """
    import jax
    from testing import compare, draws
    from testing.borrow import borrow
    from testing.cases.biases import BIASES
    from testing.cases.few_queries import FEW_QUERIES
    from testing.cases.float32 import FLOAT32
    from testing.cases.gpu import GPU_CASES
    from testing.pages import paged_arguments
    from testing.poison import poison

    from jax_fastattn import paged_attention
    from jax_fastattn.ops import vjp

    if arch is not None:
        borrow(arch)

    def attention(spec: Any, operands: Any) -> Any:
        return vjp.attend(spec, operands, True)

    evaluate = jax.jit(lambda spec, *arrays: compare.evaluate(attention, spec, *arrays), static_argnums=0)
    pages = {FEW_QUERIES[name]: page for name, page in FEW.items()}
    cases = [case for case in [*GPU_CASES, *BIASES.values()] if str(case) in CASES] + [*FLOAT32.values()]
    wild = wild_draws()
    chosen = [case for case in [*pages, *cases, *wild] if words is None or any(word in str(case) for word in words)]
    for case in chosen[part::parts]:
        begun = time.monotonic()
        spec = dataclasses.replace(case.spec(), implementation="cuda")
        operands, *cotangents = poison(spec, case.operands(jax.random.key(0)), *case.cotangents(jax.random.key(1)))
        operands = operands._replace(query=operands.query * 30)
        if case in wild:
            jax.block_until_ready(draws.evaluate(case, spec, operands, *cotangents))
        else:
            jax.block_until_ready(evaluate(spec, operands, *cotangents))
        if page := pages.get(case):
            jax.block_until_ready(paged_attention(**paged_arguments(case, operands, page)))
        print(f"ran {str(case)[:100]} in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
