# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs random calls on a CPU, on the XLA path or through the emulators of the kernels, and records the outcome.

    python benchmarks/cpu_checks.py --output benchmarks/results/2026-11-26-cpu-draws.json
    python benchmarks/cpu_checks.py --output emulated.json --emulate sm_90a --draws 60

`testing.combinations` draws the calls: by default every pair and triple of features that a call can have
is a kind. On the XLA path each call runs twice. All arrays have NaN and infinities in everything that is hidden. A
record holds the seed, the counts, the failures, how often each feature was drawn, the versions and the commit.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
from run import describe_run
from testing import combinations, draw_sizes

from jax_fastattn.cases.case import Case

# Compiled programs of more kinds than these are dropped, so that the memory of a process stays in bounds.
KINDS_AT_ONCE = 20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--draws", type=int, default=5000, help="calls (default: %(default)s)")
    parser.add_argument("--kinds", type=int, help="programs (default: one for each pair and triple of features)")
    parser.add_argument("--seed", type=int, default=34, help="of the calls (default: %(default)s)")
    parser.add_argument("--emulate", choices=("sm_90a", "sm_80"), help="its kernels; each call is of another kind then")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    # As in the tests: a program runs a few times, and LLVM's optimization takes most of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    kinds, check = options.kinds or len(combinations.allowed()), combinations.check
    if options.emulate:
        kinds, check, drawn = options.draws, *emulated(options.emulate, options.seed, options.draws)
    else:
        drawn = combinations.combined_draws(options.seed, options.draws, kinds, draw_sizes.SMALL)
    settings = {"emulated": options.emulate, "seed": options.seed, "draws": len(drawn)}
    settings |= {"kinds": min(kinds, len(drawn)), "features": counts(drawn)}
    # What is there now: the run takes an hour, and the checkout may change.
    record, started = describe_run(options.commit) | settings, time.monotonic()
    failed = failures([drawn[i::kinds] for i in range(kinds)], check)
    record |= {"seconds": round(time.monotonic() - started), "failures": len(failed), "failed": failed}
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(failed)} of {len(drawn)} failed in {record['seconds']} s; the record is in {options.output}")


def emulated(arch: str, seed: int, count: int) -> tuple[Callable[[Case], None], list[Case]]:
    """Returns what checks a call in the emulator of an architecture, and calls for it."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "kernels" / "emulator"))
    import emulated_draws

    return functools.partial(emulated_draws.check, arch=arch), emulated_draws.draws(seed, count, arch)


def counts(drawn: Iterable[Case]) -> dict[str, int]:
    """Returns how many calls have each feature."""
    return dict(collections.Counter(name for case in drawn for name in sorted(combinations.features_of(case))))


def failures(kinds: list[list[Case]], check: Callable[[Case], None]) -> dict[str, str]:
    """Returns what is wrong with calls, by name."""
    found: dict[str, str] = {}
    for number, cases in enumerate(kinds, 1):
        for case in cases:
            if error := failure(case, check):
                found[str(case)] = error
                print(f"{case}: {error}", flush=True)
        if number % KINDS_AT_ONCE == 0:
            jax.clear_caches()
            print(f"{number} of {len(kinds)} kinds, {len(found)} failures", flush=True)
    return found


def failure(case: Case, check: Callable[[Case], None]) -> str | None:
    """Returns what is wrong with a call; None if it is right."""
    try:
        check(case)
    except Exception as error:  # a call that raises is a failure too
        return f"{type(error).__name__}: {error}"[:500]
    return None


if __name__ == "__main__":
    main()
