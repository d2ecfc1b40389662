# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times calls with dropout next to the same calls without, and next to PyTorch's flash backend with dropout, in turns.

    python benchmarks/dropout_peers.py --output dropout.json

All calls of a case run in one process. A record has milliseconds of output alone and of its gradients alone, the ratio
of times with dropout to times without, and the speed of the peer as a share of ours. Times are medians of the rounds.
A peer that fails is its error. The masks of both differ: PyTorch draws its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from few_queries import elapsed_ms
from run import describe_run

import jax_fastattn

Program = Callable[[], Any]

RATE = 0.1
MODES = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """A call with as many query heads as key/value heads.

    Attributes:
        tokens: rows of all batch entries together.
        hidden: columns of all heads together.
    """

    head_dim: int
    length: int
    is_causal: bool = False
    tokens: int = 32768
    hidden: int = 2048
    dtype: str = "bfloat16"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of query, key and value."""
        return self.tokens // self.length, self.length, self.hidden // self.head_dim, self.head_dim


CASES = {
    f"d{head_dim}-{length}-{'causal' if is_causal else 'full'}": Case(head_dim, length, is_causal)
    for head_dim in (64, 128)
    for length in (512, 2048, 8192)
    for is_causal in (False, True)
}


def ours(case: Case, rate: float) -> dict[str, Program]:
    """Returns the two passes of a call by mode."""
    *qkv, dout = (jax.random.normal(key, case.shape, case.dtype) for key in jax.random.split(jax.random.key(0), 4))
    options: dict[str, Any] = {"dropout_rate": rate, "dropout_key": jax.random.key(1)} if rate else {}
    call = functools.partial(jax_fastattn.attention, is_causal=case.is_causal, **options)
    pull = jax.jit(lambda *qkv: jax.vjp(call, *qkv)[1])(*qkv)
    backward = jax.jit(lambda pull, dout: pull(dout))
    return {"forward": functools.partial(jax.jit(call), *qkv), "backward": functools.partial(backward, pull, dout)}


def of_torch(case: Case, rate: float) -> dict[str, Program]:
    """Returns the same of PyTorch's flash backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, length, heads, head_dim = case.shape
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=dtype) for _ in range(4))
    qkv = [x.requires_grad_(True) for x in (q, k, v)]

    def call() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=case.is_causal, dropout_p=rate)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    out = call()
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)}


def torch_ms(program: Program, count: int) -> float:
    """Returns the milliseconds of a call of PyTorch, in the mean of `count`."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        program()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e3


def measure(case: Case, rounds: int, measurement_ms: float, *, peers: bool = True) -> dict[str, Any]:
    """Returns the record of a case."""
    kinds: dict[str, tuple[Callable[[Case, float], dict[str, Program]], float]] = {
        "plain": (ours, 0.0),
        "dropout": (ours, RATE),
    }
    if peers:
        kinds |= {"torch plain": (of_torch, 0.0), "torch dropout": (of_torch, RATE)}
    programs: dict[tuple[str, str], Program] = {}
    errors: dict[str, str] = {}
    for kind, (make, rate) in kinds.items():
        try:
            programs |= {(kind, mode): program for mode, program in make(case, rate).items()}
        except Exception as error:  # of a peer: a record, not a gap
            if make is ours:
                raise
            errors[kind] = str(error)[:300]

    def elapsed(name: tuple[str, str], count: int) -> float:
        return (torch_ms if name[0].startswith("torch") else elapsed_ms)(programs[name], count)

    counts: dict[tuple[str, str], int] = {}
    for name in programs:
        elapsed(name, 2)
        counts[name] = min(200, max(1, math.ceil(measurement_ms / elapsed(name, 2))))
    found: dict[tuple[str, str], list[float]] = {name: [] for name in programs}
    for turn in range(rounds):
        for name in list(programs)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(elapsed(name, counts[name]))
    ms = {name: statistics.median(times) for name, times in found.items()}
    ratios = {mode: ms["dropout", mode] / ms["plain", mode] for mode in MODES}
    shares = {mode: ms["dropout", mode] / ms[name] for mode in MODES if (name := ("torch dropout", mode)) in ms}
    return {
        "ms": {" ".join(name): x for name, x in ms.items()},
        "dropout of plain": ratios,
        "speed of torch": shares,
        "errors": errors,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--measurement-ms", type=float, default=30.0, help="the least length of one (default: 30)")
    parser.add_argument("--arch", help="what a Hopper GPU counts as: sm_90-a100, sm_90-rtx or sm_90")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    if options.arch:
        from testing.borrow import borrow

        borrow(options.arch)
    record: dict[str, Any] = {**describe_run(options.commit), "arch": options.arch, "rate": RATE, "cases": {}}
    for name in options.cases:
        found = measure(CASES[name], options.rounds, options.measurement_ms, peers=not options.no_peers)
        record["cases"][name] = found
        options.output.write_text(json.dumps(record, indent=1) + "\n")  # as it grows
        parts = [f"{mode} {found['dropout of plain'][mode]:.3f}" for mode in MODES]
        parts += [f"torch {mode} {x:.2f}" for mode, x in found["speed of torch"].items()]
        print(f"{name:18} {' '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
