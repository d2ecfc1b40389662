# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs random calls on the XLA path of a CPU, and records the outcome.

    python benchmarks/cpu_checks.py --output benchmarks/results/2026-11-26-cpu-draws.json

`jax_fastattn.testing.combinations` draws the calls: by default every pair and triple of features that a call can have
is a kind. Each call runs twice, on arrays with NaN and infinities in everything that is hidden. A record holds the
seed, the counts, the failures, how often each feature was drawn, the versions and the commit.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from run import describe_run

from jax_fastattn.testing import combinations
from jax_fastattn.testing.cases import Case

# Compiled programs of more kinds than these are dropped, so that the memory of a process stays in bounds.
KINDS_AT_ONCE = 20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--draws", type=int, default=5000, help="calls (default: %(default)s)")
    parser.add_argument("--kinds", type=int, help="programs (default: one for each pair and triple of features)")
    parser.add_argument("--seed", type=int, default=34, help="of the calls (default: %(default)s)")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    # As in the tests: a program runs a few times, and LLVM's optimization takes most of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    kinds = options.kinds or len(combinations.allowed())
    drawn = combinations.combined_draws(options.seed, options.draws, kinds, combinations.SMALL)
    settings = {"seed": options.seed, "draws": len(drawn), "kinds": min(kinds, len(drawn)), "features": counts(drawn)}
    # What is there now: the run takes an hour, and the checkout may change.
    record, started = describe_run(options.commit) | settings, time.monotonic()
    failed = failures([drawn[i::kinds] for i in range(kinds)])
    record |= {"seconds": round(time.monotonic() - started), "failures": len(failed), "failed": failed}
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(failed)} of {len(drawn)} failed in {record['seconds']} s; the record is in {options.output}")


def counts(drawn: Iterable[Case]) -> dict[str, int]:
    """Returns how many calls have each feature."""
    return dict(collections.Counter(name for case in drawn for name in sorted(combinations.features_of(case))))


def failures(kinds: list[list[Case]]) -> dict[str, str]:
    """Returns what is wrong with calls, by name."""
    found: dict[str, str] = {}
    for number, cases in enumerate(kinds, 1):
        for case in cases:
            if error := failure(case):
                found[str(case)] = error
                print(f"{case}: {error}", flush=True)
        if number % KINDS_AT_ONCE == 0:
            jax.clear_caches()
            print(f"{number} of {len(kinds)} kinds, {len(found)} failures", flush=True)
    return found


def failure(case: Any) -> str | None:
    """Returns what is wrong with a call; None if it is right."""
    try:
        combinations.check(case)
    except Exception as error:  # a call that raises is a failure too
        return f"{type(error).__name__}: {error}"[:500]
    return None


if __name__ == "__main__":
    main()
