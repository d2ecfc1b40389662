# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times calls with `precise_gradients` next to the same calls without, in turns in one process.

    python benchmarks/precise_gradients.py --output precise-gradients.json      # under a minute on a GPU

A record has milliseconds of a forward pass that is differentiated and of the backward pass alone, and the ratio of
times with the argument to times without. Times are medians of the rounds, which run there and back. The prediction of a
pass counts the bytes of the output's rests at 4 TB/s, and nothing else.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import turns
from turns import by_turns, elapsed_ms, programs_of

import jax_fastattn

Program = Callable[[], Any]

TOKENS, HIDDEN = 16384, 2048
BYTES_PER_MS = 4e9
# By name: head dim, length, whether it is causal.
CASES = {
    f"d{head_dim}-{length // 1024}k-{'causal' if is_causal else 'full'}": (head_dim, length, is_causal)
    for head_dim in (64, 128)
    for length in (1024, 4096, 16384)
    for is_causal in (False, True)
}


def passes(name: str, *, precise: bool) -> dict[str, Program]:
    """Returns the two passes of a call by mode. The forward pass returns all that the backward pass takes."""
    head_dim, length, is_causal = CASES[name]
    shape = (TOKENS // length, length, HIDDEN // head_dim, head_dim)
    *qkv, dout = (jax.random.normal(key, shape, "bfloat16") for key in jax.random.split(jax.random.key(0), 4))
    call = functools.partial(jax_fastattn.attention, is_causal=is_causal, precise_gradients=precise)
    forward = jax.jit(lambda *qkv: jax.vjp(call, *qkv))
    _, pull = forward(*qkv)
    backward = jax.jit(lambda pull, dout: pull(dout))
    return {"forward": functools.partial(forward, *qkv), "backward": functools.partial(backward, pull, dout)}


def measure(name: str, rounds: int, measurement_ms: float) -> dict[str, Any]:
    """Returns the record of a case."""
    kinds = {kind: functools.partial(passes, name, precise=kind == "precise") for kind in ("plain", "precise")}
    programs, _ = programs_of(kinds, ())
    found = by_turns(lambda kind, count: elapsed_ms(programs[kind], count), programs, rounds, measurement_ms)
    ms = {kind: statistics.median(times) for kind, times in found.items()}
    rests = TOKENS * HIDDEN / BYTES_PER_MS
    return {
        "ms": ms,
        "spread": {kind: (max(times) - min(times)) / ms[kind] for kind, times in found.items()},
        "precise of plain": {x: ms[f"precise {x}"] / ms[f"plain {x}"] for x in ("forward", "backward")},
        "predicted": {x: 1 + rests / ms[f"plain {x}"] for x in ("forward", "backward")},
    }


def main(argv: list[str] | None = None) -> None:
    options = turns.parser(__doc__, CASES, rounds=8).parse_args(argv)

    def words(found: dict[str, Any]) -> str:
        return " ".join(
            f"{x} {found['precise of plain'][x]:.3f} (predicted {found['predicted'][x]:.3f})"
            for x in ("forward", "backward")
        )

    turns.record_cases(options, {}, lambda name: measure(name, options.rounds, options.measurement_ms), words)


if __name__ == "__main__":
    main()
