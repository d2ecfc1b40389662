# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times what a small call costs the host: eager, jitted, its gradient, and one more call in a program, by turns.

    python benchmarks/host.py --output host.json
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python benchmarks/host.py --output without-command-buffers.json

A round times each row of each implementation once, every second round in reverse order. A record has microseconds of a
call: medians of the rounds, and the least and the greatest of them. Calls are issued one after the other, and the last
result is waited for, so a figure is the greater of the host's time and the GPU's. "dependent" and "independent" are
what a program of 33 calls takes more than a program of one, for each of 32 calls that read the result of the one before
or the same operands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from peers import IMPLEMENTATIONS
from run import describe_run

from jax_fastattn.cases.case import Case
from jax_fastattn.spec import Operands

CASE = Case("bfloat16", 1, 256, 256, num_kv_heads=2, head_dim=64)
MORE = 32


def programs(attend: Callable[[Operands], jax.Array], operands: Operands) -> dict[str, tuple[Callable[[], Any], int]]:
    """Returns what is timed by name, each with the number of calls in it."""

    def loss(query: jax.Array) -> jax.Array:
        return jnp.sum(attend(operands._replace(query=query)).astype(jnp.float32))

    def dependent(count: int, query: jax.Array) -> jax.Array:
        for _ in range(count):
            query = attend(operands._replace(query=query))
        return query

    def independent(count: int, query: jax.Array) -> list[jax.Array]:
        return [attend(operands._replace(query=query + i)) for i in range(count)]

    def jitted(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        program = jax.jit(function, static_argnums=tuple(range(len(arguments))))
        return lambda: program(*arguments, operands.query)

    return {
        "eager": (lambda: attend(operands), 1),
        "jitted": (jitted(lambda query: attend(operands._replace(query=query))), 1),
        "eager gradient": (lambda: jax.grad(loss)(operands.query), 1),
        "jitted gradient": (jitted(jax.grad(loss)), 1),
        **{f"dependent {count}": (jitted(dependent, count), count) for count in (1, MORE + 1)},
        **{f"independent {count}": (jitted(independent, count), count) for count in (1, MORE + 1)},
    }


def elapsed_us(program: Callable[[], Any], count: int) -> float:
    """Returns the microseconds of one of `count` runs."""
    result = None
    started = time.perf_counter()
    for _ in range(count):
        result = program()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / count * 1e6


def measure(names: list[str], rounds: int, runs: int) -> dict[str, Any]:
    """Returns the record of each implementation, or its error."""
    operands = CASE.operands(jax.random.key(0))
    found: dict[str, Any] = {}
    rows: dict[tuple[str, str], tuple[Callable[[], Any], int]] = {}
    for name in names:
        try:
            made = programs(lambda x, name=name: IMPLEMENTATIONS[name].attend(CASE, x), operands)
            for program, _ in made.values():
                elapsed_us(program, 2)
        except Exception as error:  # a peer's own
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        rows |= {(name, row): x for row, x in made.items()}
    times: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
    for turn in range(rounds):
        for row in list(rows)[:: -1 if turn % 2 else 1]:
            program, calls = rows[row]
            times[row].append(elapsed_us(program, max(runs // calls, 2)))
    for (name, row), us in times.items():
        found.setdefault(name, {})[row] = {"us": statistics.median(us), "least": min(us), "greatest": max(us)}
    for record in found.values():
        for kind in ("dependent", "independent"):
            if "error" not in record:
                one, many = (record[f"{kind} {count}"]["us"] for count in (1, MORE + 1))
                record[kind] = {"us": (many - one) / MORE}
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["jax_fastattn", "fa4-jax", "jax.nn-cudnn"]
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--runs", type=int, default=300, help="of a program with one call in a round (default: 300)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    found = measure(options.implementations, options.rounds, options.runs)
    options.output.write_text(json.dumps(describe_run(options.commit) | {"us": found}, indent=1) + "\n")
    for name, record in found.items():
        print(f"{name:14}", *[f"{row} {x['us']:.1f}" if row != "error" else x for row, x in record.items()], flush=True)


if __name__ == "__main__":
    main()
