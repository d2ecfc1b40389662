# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures implementations of attention side by side and appends one JSON record per line.

    python benchmarks/run.py                                  # every case, every implementation
    python benchmarks/run.py --set quick --budget-seconds 90
    python benchmarks/run.py --cases d128-causal-4k --implementations jax_fastattn jax.nn-cudnn --modes backward
    python benchmarks/run.py --set models --prepare --processes 32    # its kernels, with no GPU
    python benchmarks/run.py --set models --gpus 4                    # a process for each GPU, which share the cases
    python benchmarks/run.py --set close --check pair --best-of RECORD.jsonl   # close cells, next to who led there

A record is a case, an implementation and a mode; what cannot run, is not installed or gives wrong results is a record
with its error. docs/measurements.md says what the fields mean and how times are taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from cases import CASES, CLOSE, FLOP_FORMULA, SETS, flops
from checked import Checked, assert_alike
from clocks import clocks
from peers import IMPLEMENTATIONS, Attend, Unsupported
from report import MODES, RESULTS, are_level, best_peer, load_files, slug
from testing.combinations import wanted

import jax_fastattn
from jax_fastattn.cases.case import Case
from jax_fastattn.ops import dispatch
from jax_fastattn.spec import Operands

CHECKS = ("each", "pair", "none")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="all", help="of cases (default: all)")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, metavar="CASE", help=f"instead of a set: {', '.join(CASES)}"
    )
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--best-of", nargs="+", type=Path, metavar="RECORD", help="of peers only the fastest of a cell in these records"
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="each",
        help="each result by the rule of the tests, or by a comparison with the first one of its cell (default: each)",
    )
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="after which no case is begun")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each implementation, there and back (default: 3)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements in a turn (default: 3)")
    parser.add_argument("--measurement-ms", type=float, default=20.0, help="the least length of one (default: 20)")
    parser.add_argument(
        "--warm-up-seconds", type=float, default=0.3, help="of a turn, until power has set the clock (default: 0.3)"
    )
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<date>-<gpu>[-<arch>].jsonl")
    parser.add_argument("--arch", help="what a Hopper GPU counts as: sm_90-a100, sm_90-rtx or sm_90")
    parser.add_argument("--gpus", type=int, default=1, help="that share the cases, a process each (default: 1)")
    parser.add_argument(
        "--prepare", action="store_true", help="compile our kernels into the cache, and measure nothing"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="of --prepare (default: one for each core)"
    )
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    if options.set == "portable" and not options.arch and not options.cases:
        parser.error("--set portable needs --arch: the tiles of which card")
    return options


def default_output(context: dict[str, Any]) -> Path:
    """Where records go. Those of another card's tiles have a file of their own."""
    parts = [context["date"][:10], slug(context["gpu"]), context["arch"]]
    return RESULTS / f"{'-'.join(filter(None, parts))}.jsonl"


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    names = options.cases or SETS[options.set]
    if options.prepare:
        prepare(names, options.arch or "sm_90a", options.processes)
        return
    if options.gpus > 1:
        share(__file__, "--cases", names, options.gpus, sys.argv[1:] if argv is None else argv)
        return
    if options.arch:
        # As in `prepare`.
        from testing.borrow import borrow

        borrow(options.arch)
    context = {"flop_formula": FLOP_FORMULA} | describe_run(options.commit) | {"arch": options.arch}
    output = options.output or default_output(context)
    output.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    before = load_files(options.best_of or [])
    for i, name in enumerate(names):
        if time.monotonic() - started > options.budget_seconds:
            print(f"out of time: {', '.join(names[i:])} left out")
            break
        records, begun = [], time.monotonic()
        # A process of `share` has the set too, next to its cases.
        modes = [mode for mode in options.modes if options.set != "close" or mode in CLOSE.get(name, MODES)]
        chosen = {mode: implementations(name, mode, options.implementations, before) for mode in modes}
        for record in measure_case(name, CASES[name], chosen, options):
            with output.open("a") as file:
                file.write(json.dumps(record | context) + "\n")
            print(summary(record), flush=True)
            records.append(record)
        for mode in modes:
            print(lead(name, [record for record in records if record["mode"] == mode]), flush=True)
        print(f"{name:34} took {time.monotonic() - begun:.1f} s", flush=True)
    print(f"records are in {output}")


def prepare(names: list[str], arch: str, processes: int) -> None:
    """Compiles the kernels that cases need, unless the cache has them. Needs no GPU."""
    # Not above: `compare.py` runs this file with the package of older trees too.
    from jax_fastattn import ffi
    from jax_fastattn.cases.kernels import kernel_specs

    specs = kernel_specs((CASES[name] for name in names), arch)
    with multiprocessing.get_context("spawn").Pool(min(processes, len(specs))) as pool:
        pool.map(ffi.prepare, specs, chunksize=1)
    print(f"{len(specs)} kernels of {len(names)} cases are compiled")


def share(script: str, option: str, names: list[str], gpus: int, arguments: list[str]) -> None:
    """Runs a script on several GPUs: each process sees one of them and takes every `gpus`-th case.

    Args:
        script: the file, which creates no client before it calls this.
        option: of the script, which takes the names of cases.
        names: of all cases.
        gpus: the number of processes.
        arguments: of the script.
    """
    processes = []
    for i in range(min(gpus, len(names))):
        command = [sys.executable, script, *arguments, "--gpus", "1", option, *names[i::gpus]]
        processes.append(subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": str(i)}))
    if codes := [code for process in processes if (code := process.wait())]:
        sys.exit(f"{len(codes)} of {len(processes)} processes failed")


def implementations(case: str, mode: str, names: list[str], before: dict[Any, dict[str, Any]]) -> list[str]:
    """Returns who is measured in a cell: of peers the one that led in earlier records, or all if there are none."""
    found = [record for key, record in before.items() if key[:2] == (case, mode) and key[2] in names]
    best = best_peer(found)
    return [name for name in names if best is None or name.startswith("jax_fastattn") or name == best["impl"]]


def measure_case(
    name: str, case: Case, chosen: dict[str, list[str]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The records of one case, on the same operands; of each mode those of the chosen implementations."""
    operands_key, cotangent_key = jax.random.split(jax.random.key(2026))
    operands = jax.jit(case.operands)(operands_key)
    dout, _ = case.cotangents(cotangent_key)
    checked = Checked(case, operands, dout)
    for mode, names in chosen.items():
        records, timed, first = [], [], None
        for implementation in names:
            record: dict[str, Any] = {"case": name, "problem": str(case), "impl": implementation, "mode": mode}
            record |= {"version": IMPLEMENTATIONS[implementation].version(), "flops": flops(case, mode), "error": None}
            records.append(record)
            begun = time.monotonic()
            try:
                call, arrays = prepared(record, case, operands, dout)
                result = jax.block_until_ready(jax.tree.map(as_jax, call(*arrays)))
                record["seconds"] = {"compiling": round(time.monotonic() - begun, 2)}
                begun = time.monotonic()
                if options.check == "each":
                    record |= checked.outcome(result, mode)
                elif options.check == "pair":
                    first = first or (implementation, result)
                    record |= assert_alike(result, *first)
                record["seconds"]["checking"] = round(time.monotonic() - begun, 2)
                record["check"] = options.check
                timed.append((record, call, arrays))
            except Exception as error:  # whatever a peer raises is its record
                record["error"] = f"{type(error).__name__}: {error}"[:500]
        for (record, call, arrays), times in zip(timed, by_turns([x[1:] for x in timed], options), strict=True):
            record |= times
            record["tflops"] = record["flops"] / record["ms"]["p50"] / 1e9
            record["tb_per_s"] = moved_bytes(arrays, call(*arrays)) / record["ms"]["p50"] / 1e9
        yield from records


def prepared(
    record: dict[str, Any], case: Case, operands: Operands, dout: jax.Array
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is timed for a record and its arguments."""
    if record["version"] is None:
        raise Unsupported("not installed")
    peer = IMPLEMENTATIONS[record["impl"]]
    if record["impl"].startswith("jax_fastattn"):
        record["ran"] = explained(peer.attend, case, operands)
    return (peer.compiled or partial(compiled, peer.attend))(case, operands, dout, record["mode"])


def compiled(
    attend: Attend, case: Case, operands: Operands, dout: jax.Array, mode: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is timed and its arguments. Backward is the pullback alone: what forward left is an argument of it."""
    names = wanted(case)
    arrays = tuple(getattr(operands, name) for name in names)

    def forward(others: Operands, *arrays: jax.Array) -> jax.Array:
        return attend(case, others._replace(**dict(zip(names, arrays, strict=True))))

    others = operands._replace(**dict.fromkeys(names))
    if mode == "forward":
        return jax.jit(forward), (others, *arrays)
    _, pullback = jax.jit(lambda others, *arrays: jax.vjp(lambda *x: forward(others, *x), *arrays))(others, *arrays)
    return jax.jit(lambda pullback, dout: dict(zip(names, pullback(dout), strict=True))), (pullback, dout)


def as_jax(x: Any) -> jax.Array:
    """An array of JAX; that of a peer (`torch_peer.py`) as one."""
    return x if isinstance(x, jax.Array) else x.to_jax()


def timing(call: Callable[..., Any], arrays: tuple[Any, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one call, which has one turn."""
    settings = argparse.Namespace(**vars(options) | {"rounds": 1})
    return by_turns([(call, arrays)], settings, read_clocks=False)[0]


def by_turns(
    timed: list[tuple[Callable[..., Any], tuple[Any, ...]]], options: argparse.Namespace, *, read_clocks: bool = True
) -> list[dict[str, Any]]:
    """Milliseconds of each of some calls, with their arguments, and the GPU's clocks after each turn.

    In each round every call has one turn, in every second round in reverse order. In a turn it runs until power has set
    the clock, and then some measurements run, each of many asynchronous calls.
    """
    counts = [calibrated(*x, options.measurement_ms) for x in timed]
    times: list[list[float]] = [[] for _ in timed]
    after: list[list[dict[str, str] | None]] = [[] for _ in timed]
    for turn in range(options.rounds):
        for i in range(len(timed))[:: -1 if turn % 2 else 1]:
            started = time.monotonic()
            while time.monotonic() - started < options.warm_up_seconds:
                elapsed_ms(*timed[i], counts[i])
            times[i] += [elapsed_ms(*timed[i], counts[i]) / counts[i] for _ in range(options.repeats)]
            if read_clocks:
                after[i].append(clocks())
    found = []
    for calls, measured, read in zip(counts, times, after, strict=True):
        quantiles = statistics.quantiles(measured, n=10, method="inclusive") if len(measured) > 1 else measured * 9
        ms = {"p20": quantiles[1], "p50": quantiles[4], "p80": quantiles[7]}
        settings = {name: getattr(options, name) for name in ("rounds", "repeats", "warm_up_seconds")}
        found.append({"ms": ms, "calls": calls, **settings} | ({"clocks": read} if read_clocks else {}))
    return found


def elapsed_ms(call: Callable[..., Any], arrays: tuple[Any, ...], count: int) -> float:
    """Milliseconds of some calls, which are issued without waiting."""
    started, result = time.perf_counter(), None
    for _ in range(count):
        result = call(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) * 1e3


def calibrated(call: Callable[..., Any], arrays: tuple[Any, ...], measurement_ms: float) -> int:
    """How many calls last so long."""
    elapsed_ms(call, arrays, 3)
    calls = 1
    while (elapsed := elapsed_ms(call, arrays, calls)) < measurement_ms:
        calls = max(calls + 1, min(int(calls * 1.2 * measurement_ms / elapsed), calls * 10))
    return calls


def moved_bytes(*trees: Any) -> int:
    """Bytes of arguments and results: the least that a call has to move."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def explained(attend: Attend, case: Case, operands: Operands) -> str:
    """What ran a call of ours, as `jax_fastattn.explain` has it."""
    asked = getattr(attend, "keywords", {})
    if asked.get("implementation") == "xla":
        return "XLA path, as asked"
    case = dataclasses.replace(case, deterministic=case.deterministic or asked.get("deterministic", False))
    if case.packed is not None or operands.query_segment_ids is not None:
        return str(dispatch.explain(case.problem()))
    options = {"is_causal": case.is_causal, "local_window_size": case.window, "logits_soft_cap": case.logits_soft_cap}
    options["deterministic"] = case.deterministic
    return str(jax_fastattn.explain(*operands[:5], **options))


def describe_run(commit: str | None) -> dict[str, Any]:
    """What all records of a run share."""
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if driver := command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
        versions["driver"] = driver.splitlines()[0]
    root = str(Path(__file__).parents[1])
    return {
        "gpu": jax.devices()[0].device_kind,
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit or command_output("git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_output(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def lead(name: str, records: list[dict[str, Any]]) -> str:
    """Our speed over that of the fastest peer in one line; "level" if their times overlap, from p20 to p80."""
    right = [record for record in records if "ms" in record and record["error"] is None]
    ours = next((record for record in right if record["impl"] == "jax_fastattn"), None)
    best = best_peer(right)
    if ours is None or best is None:
        return f"{name:34} no peer to compare with"
    found = f"{best['ms']['p50'] / ours['ms']['p50']:.3f} of {best['impl']}"
    return f"{name:34} {records[0]['mode']:9} {found}" + (", level" if are_level(ours, best) else "")


def summary(record: dict[str, Any]) -> str:
    """A record in one line."""
    time_taken = f"{record['ms']['p50']:9.3f} ms {record['tflops']:7.1f} TFLOP/s" if "ms" in record else " " * 29
    error = "" if record["error"] is None else "  " + record["error"].splitlines()[0][:100]
    return f"{record['case']:34} {record['impl']:17} {record['mode']:9}{time_taken}{error}"


if __name__ == "__main__":
    main()
