# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times programs by turns in one process, and has the command line of benchmarks that write a JSON file as it grows."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from run import describe_run


def parser(description: str | None, cases: Collection[str], rounds: int) -> argparse.ArgumentParser:
    """Returns a parser of the options that these benchmarks share."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--cases", nargs="+", choices=cases, metavar="CASE", default=list(cases))
    found.add_argument("--rounds", type=int, default=rounds)
    found.add_argument("--measurement-ms", type=float, default=30.0, help="the least length of one (default: 30)")
    found.add_argument("--arch", help="what a Hopper GPU counts as: sm_90-a100, sm_90-rtx or sm_90")
    found.add_argument("--output", type=Path, required=True, help="JSON file to write")
    found.add_argument("--commit", help="to record, where this is not a git checkout")
    return found


def record_cases(
    options: argparse.Namespace,
    facts: dict[str, Any],
    measure: Callable[[str], dict[str, Any]],
    words: Callable[[dict[str, Any]], str],
) -> None:
    """Writes the record of each case, and prints it in words.

    Args:
        options: what the parser has found.
        facts: what the record says of all cases.
        measure: returns the record of a case, given its name.
        words: says what to print of one.
    """
    if options.arch:
        from testing.borrow import borrow

        borrow(options.arch)
    record = describe_run(options.commit) | {"arch": options.arch} | facts | {"cases": {}}
    for name in options.cases:
        found = record["cases"][name] = measure(name)
        options.output.write_text(json.dumps(record, indent=1) + "\n")  # as it grows
        print(f"{name:18} {words(found)}", flush=True)


def programs_of(
    kinds: Mapping[str, Callable[[], Mapping[str, Callable[[], Any]]]], peers: Collection[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Returns the programs of all kinds, named by kind and mode, each after a run, and errors of peers.

    Args:
        kinds: each makes its programs by mode.
        peers: kinds that may fail, which is a record and no gap.
    """
    programs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, str] = {}
    for kind, make in kinds.items():
        try:
            found = {f"{kind} {mode}": program for mode, program in make().items()}
            for program in found.values():
                program()  # FlexAttention compiles its backward pass here
            programs |= found
        except Exception as error:
            if kind not in peers:
                raise
            errors[kind] = f"{type(error).__name__}: {error}"[:300]
    return programs, errors


def by_turns(
    elapsed: Callable[[str, int], float], names: Iterable[str], rounds: int, measurement_ms: float
) -> dict[str, list[float]]:
    """Returns milliseconds of a run of each program by round. Rounds go through the programs there and back.

    Args:
        elapsed: returns milliseconds of a run of a program, given its name, in the mean of a number of runs.
        names: of the programs.
        rounds: how many there are, after runs that do not count.
        measurement_ms: the least length of a measurement; 200 runs are the most.
    """
    runs: dict[str, int] = {}
    for name in names:
        elapsed(name, 2)
        runs[name] = min(200, max(1, math.ceil(measurement_ms / elapsed(name, 2))))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(elapsed(name, runs[name]))
    return found


def elapsed_ms(program: Callable[[], Any], count: int) -> float:
    """Returns milliseconds of a run of a program, of `count` that follow each other."""
    begun = time.perf_counter()
    for _ in range(count):
        found = program()
    jax.block_until_ready(found)
    return (time.perf_counter() - begun) * 1e3 / count


def torch_ms(program: Callable[[], Any], count: int) -> float:
    """Returns the same of a program of PyTorch."""
    import torch

    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        program()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3 / count
