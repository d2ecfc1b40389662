# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times calls with dropout next to the same calls without, and next to PyTorch and Flax with dropout, in turns.

    python benchmarks/dropout_peers.py --output dropout.json
    python benchmarks/dropout_peers.py --arch sm_90-a100 --no-peers --output dropout-portable.json

All calls of a case run in one process. A record has milliseconds of output alone and of its gradients alone, the ratio
of times with dropout to times without, and the speed of each peer as a share of ours. Times are medians of the rounds.
PyTorch has its flash backend. Flax has its own function, whose weights XLA keeps in memory. A peer that fails is its
error. Peers draw masks of their own.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import turns
from turns import by_turns, elapsed_ms, programs_of, torch_ms

import jax_fastattn

Program = Callable[[], Any]

RATE = 0.1
MODES = ("forward", "backward")
PEERS = ("torch", "flax")
MOST_WEIGHTS = 5e9  # bytes of the weights of a call of Flax that is timed


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


def passes(case: Case, call: Callable[..., jax.Array]) -> dict[str, Program]:
    """Returns the two passes of a call of JAX by mode."""
    *qkv, dout = (jax.random.normal(key, case.shape, case.dtype) for key in jax.random.split(jax.random.key(0), 4))
    pull = jax.jit(lambda *qkv: jax.vjp(call, *qkv)[1])(*qkv)
    backward = jax.jit(lambda pull, dout: pull(dout))
    return {"forward": functools.partial(jax.jit(call), *qkv), "backward": functools.partial(backward, pull, dout)}


def ours(case: Case, rate: float) -> dict[str, Program]:
    options: dict[str, Any] = {"dropout_rate": rate, "dropout_key": jax.random.key(1)} if rate else {}
    return passes(case, functools.partial(jax_fastattn.attention, is_causal=case.is_causal, **options))


def of_flax(case: Case, rate: float) -> dict[str, Program]:
    """Returns the passes of `flax.linen.dot_product_attention`, with a mask for each batch entry and head."""
    from flax import linen

    batch, length, heads, _ = case.shape
    weights = batch * heads * length**2 * jax.numpy.dtype(case.dtype).itemsize
    if weights > MOST_WEIGHTS:
        raise MemoryError(f"all weights take {weights / 1e9:.1f} GB, and a call has several arrays of their size")
    options = {"dropout_rate": rate, "dropout_rng": jax.random.key(1), "deterministic": rate == 0}
    causal = linen.make_causal_mask(jax.numpy.ones((1, length), bool), dtype=bool) if case.is_causal else None
    call = functools.partial(linen.dot_product_attention, mask=causal, broadcast_dropout=False, **options)
    return passes(case, call)


def of_torch(case: Case, rate: float) -> dict[str, Program]:
    """Returns the passes of PyTorch's flash backend."""
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
    makers = {"": ours} | ({"torch ": of_torch, "flax ": of_flax} if peers else {})
    kinds = {
        f"{who}{kind}": functools.partial(make, case, rate)
        for who, make in makers.items()
        for kind, rate in (("plain", 0.0), ("dropout", RATE))
    }
    programs, errors = programs_of(kinds, [kind for kind in kinds if " " in kind])

    def elapsed(name: str, count: int) -> float:
        return (torch_ms if name.startswith("torch") else elapsed_ms)(programs[name], count)

    found = by_turns(elapsed, programs, rounds, measurement_ms)
    ms = {name: statistics.median(times) for name, times in found.items()}
    ratios = {mode: ms[f"dropout {mode}"] / ms[f"plain {mode}"] for mode in MODES}
    shares = {
        f"speed of {who}": {
            mode: ms[f"dropout {mode}"] / ms[name] for mode in MODES if (name := f"{who} dropout {mode}") in ms
        }
        for who in PEERS
    }
    return {"ms": ms, "dropout of plain": ratios, **shares, "errors": errors}


def main(argv: list[str] | None = None) -> None:
    parser = turns.parser(__doc__, CASES, rounds=6)
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch and Flax out")
    options = parser.parse_args(argv)

    def words(found: dict[str, Any]) -> str:
        parts = [f"{mode} {found['dropout of plain'][mode]:.3f}" for mode in MODES]
        parts += [f"{who} {mode} {x:.2f}" for who in PEERS for mode, x in found[f"speed of {who}"].items()]
        return " ".join(parts)

    def of_case(name: str) -> dict[str, Any]:
        return measure(CASES[name], options.rounds, options.measurement_ms, peers=not options.no_peers)

    turns.record_cases(options, {"rate": RATE}, of_case, words)


if __name__ == "__main__":
    main()
