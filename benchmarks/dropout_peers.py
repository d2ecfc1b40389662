# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times calls with dropout next to the same calls without, and next to PyTorch's flash backend with dropout, in turns.

    python benchmarks/dropout_peers.py --output dropout.json

All calls of a case run in one process. A record has milliseconds of output alone and of its gradients alone, the ratio
of times with dropout to times without, and the speed of the peer as a share of ours. Times are medians of the rounds.
A peer that fails is its error. The masks of both differ: PyTorch draws its own.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import turns
from turns import by_turns, elapsed_ms, torch_ms

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


def measure(case: Case, rounds: int, measurement_ms: float, *, peers: bool = True) -> dict[str, Any]:
    """Returns the record of a case."""
    kinds: dict[str, tuple[Callable[[Case, float], dict[str, Program]], float]] = {
        "plain": (ours, 0.0),
        "dropout": (ours, RATE),
    }
    if peers:
        kinds |= {"torch plain": (of_torch, 0.0), "torch dropout": (of_torch, RATE)}
    programs: dict[str, Program] = {}
    errors: dict[str, str] = {}
    for kind, (make, rate) in kinds.items():
        try:
            programs |= {f"{kind} {mode}": program for mode, program in make(case, rate).items()}
        except Exception as error:  # of a peer: a record, not a gap
            if make is ours:
                raise
            errors[kind] = str(error)[:300]

    def elapsed(name: str, count: int) -> float:
        return (torch_ms if name.startswith("torch") else elapsed_ms)(programs[name], count)

    found = by_turns(elapsed, programs, rounds, measurement_ms)
    ms = {name: statistics.median(times) for name, times in found.items()}
    ratios = {mode: ms[f"dropout {mode}"] / ms[f"plain {mode}"] for mode in MODES}
    shares = {mode: ms[f"dropout {mode}"] / ms[name] for mode in MODES if (name := f"torch dropout {mode}") in ms}
    return {"ms": ms, "dropout of plain": ratios, "speed of torch": shares, "errors": errors}


def main(argv: list[str] | None = None) -> None:
    parser = turns.parser(__doc__, CASES, rounds=6)
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out")
    options = parser.parse_args(argv)

    def words(found: dict[str, Any]) -> str:
        parts = [f"{mode} {found['dropout of plain'][mode]:.3f}" for mode in MODES]
        return " ".join([*parts, *(f"torch {mode} {x:.2f}" for mode, x in found["speed of torch"].items())])

    def of_case(name: str) -> dict[str, Any]:
        return measure(CASES[name], options.rounds, options.measurement_ms, peers=not options.no_peers)

    turns.record_cases(options, {"rate": RATE}, of_case, words)


if __name__ == "__main__":
    main()
