# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times functions of scores next to the same call without one, in turns in one process.

    python benchmarks/score_functions.py --output score-functions.json

Each case has a call without a function, a call with it, and the same with the gradient of what it captures, whose
forward pass saves what that gradient takes. Some have a built-in argument or a bias that says the same. Peers are the
XLA path, that bias with the gradient of what it is made of, and FlexAttention (PyTorch on the same card). A record has
milliseconds of output alone and of its gradients alone, and the speed of calls as shares of the speed without a
function. Times are medians of the rounds, which run there and back. A peer that fails is its error.

On an H200 FlexAttention asked for more shared memory than there is. By its sizes a backward pass at head dim 128 takes
162 KB with three stages, and a captured float32 number of each pair of a tile takes 96 KB more in three stages (not
measured). If it asks for too much, it gets fewer stages, and the record says how many.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import turns
from turns import by_turns, elapsed_ms, torch_ms

import jax_fastattn

Mod = Callable[..., Any]
Program = Callable[[], Any]


@dataclass(frozen=True)
class Scored:
    """A call with as many query heads as key/value heads.

    Attributes:
        mod: returns the function, given what it captures; written for JAX and PyTorch.
        captured: returns what it captures, given the sizes.
        same: returns the arguments that say the same, given what it captures; None if there are none.
        is_causal, batch, length, heads, head_dim: facts and sizes.
    """

    mod: Callable[[Any], Mod]
    captured: Callable[[Scored], jax.Array]
    same: Callable[[Scored, jax.Array], dict[str, Any]] | None = None
    is_causal: bool = True
    batch: int = 4
    length: int = 4096
    heads: int = 16
    head_dim: int = 128


def _slopes(case: Scored) -> jax.Array:
    return 2.0 ** -(jnp.arange(1, case.heads + 1, dtype=jnp.float32) * 8 / case.heads)


def _alibi(slopes: Any) -> Mod:
    return lambda s, b, h, q, k: s - slopes[h] * (q - k)


def _alibi_bias(case: Scored, slopes: jax.Array) -> dict[str, Any]:
    rows = jnp.arange(case.length, dtype=jnp.float32)
    return {"bias": (slopes[:, None, None] * (rows[None, :] - rows[:, None]))[None].astype(jnp.bfloat16)}


def _table(case: Scored) -> jax.Array:
    return 0.3 * jax.random.normal(jax.random.key(7), (2 * case.length, case.heads), jnp.float32)


def _relative(table: Any) -> Mod:
    half = table.shape[0] // 2
    return lambda s, b, h, q, k: s + table[k - q + half, h]


def _relative_bias(case: Scored, table: jax.Array) -> dict[str, Any]:
    rows = jnp.arange(case.length)
    distances = rows[None, :] - rows[:, None] + table.shape[0] // 2
    return {"bias": jnp.moveaxis(table[distances], 2, 0)[None].astype(jnp.bfloat16)}


def _relative_factor(table: Any) -> Mod:
    half = table.shape[0] // 2
    return lambda s, b, h, q, k: s * (1 + 0.5 * _tanh(table[k - q + half, h]))


def _tanh(x: Any) -> Any:
    return jnp.tanh(x) if isinstance(x, jax.Array) else x.tanh()


def _temperature(factors: Any) -> Mod:
    return lambda s, b, h, q, k: s * factors[h]


def _capped(_: Any) -> Mod:
    def mod(s: Any, *at: Any) -> Any:
        del at
        return 30.0 * _tanh(s / 30.0)

    return mod


CASES = {
    "cap": Scored(_capped, _slopes, lambda case, _: {"logits_soft_cap": 30.0}),
    "cap-d64": Scored(_capped, _slopes, lambda case, _: {"logits_soft_cap": 30.0}, head_dim=64, heads=32),
    "alibi": Scored(_alibi, _slopes, _alibi_bias),
    "alibi-d64": Scored(_alibi, _slopes, _alibi_bias, head_dim=64, heads=32, batch=2),
    "alibi-16k": Scored(_alibi, _slopes, batch=1, length=16384),
    "alibi-d96": Scored(_alibi, _slopes, head_dim=96),
    "alibi-d256": Scored(_alibi, _slopes, head_dim=256, batch=2),
    "temperature": Scored(_temperature, _slopes),
    "distances": Scored(_relative, _table, _relative_bias, is_causal=False),
    "distances-1k-d64": Scored(_relative, _table, _relative_bias, is_causal=False, batch=16, length=1024, head_dim=64),
    "factors-of-distances": Scored(_relative_factor, _table, is_causal=False),
}
# Those whose function has captured arrays.
CAPTURING = [name for name in CASES if not name.startswith("cap")]


def ours(case: Scored, options: Callable[[jax.Array], dict[str, Any]], *, differentiates: bool) -> dict[str, Program]:
    """Returns the two passes of a call by mode."""
    shape = (case.batch, case.length, case.heads, case.head_dim)
    *qkv, dout = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))
    captured = case.captured(case)

    def call(captured: jax.Array, *qkv: jax.Array) -> jax.Array:
        return jax_fastattn.attention(*qkv, is_causal=case.is_causal, **options(captured))

    def saving(captured: jax.Array, *qkv: jax.Array) -> jax.Array:
        return jax.vjp(call, captured, *qkv)[0]

    def pullback(captured: jax.Array, *qkv: jax.Array) -> Any:
        if differentiates:
            return jax.vjp(call, captured, *qkv)[1]
        return jax.vjp(functools.partial(call, captured), *qkv)[1]

    pull = jax.jit(pullback)(captured, *qkv)
    return {
        "forward": functools.partial(jax.jit(saving if differentiates else call), captured, *qkv),
        "backward": functools.partial(jax.jit(lambda pull, dout: pull(dout)), pull, dout),
    }


def of_torch(case: Scored, stages: int | None, *, differentiates: bool) -> dict[str, Program]:
    """Returns the same of FlexAttention, compiled with a number of stages; None leaves it."""
    import numpy as np
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = (case.batch, case.heads, case.length, case.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    qkv = [x.requires_grad_(True) for x in (q, k, v)]
    captured = torch.tensor(np.asarray(case.captured(case)), device="cuda", requires_grad=differentiates)
    mod, mask = case.mod(captured), None
    if case.is_causal:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, case.length, case.length)
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # gradients are taken again and again
    attend = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        options = None if stages is None else {"num_stages": stages}
        return attend(*qkv, score_mod=mod, block_mask=mask, kernel_options=options)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    out, wanted = call(), [*qkv, *([captured] if differentiates else [])]
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)}


def with_few_stages(case: Scored, found: dict[str, Any], name: str, *, differentiates: bool) -> dict[str, Program]:
    """Returns both passes of FlexAttention with the most stages that run, which `found` gets under a name."""
    for stages in (None, 2, 1):
        try:
            programs = of_torch(case, stages, differentiates=differentiates)
            for program in programs.values():
                program()  # the backward pass is compiled here
        except Exception as error:
            if stages == 1 or "out of resource" not in str(error).lower():
                raise
            continue
        found[name] = stages
        return programs
    raise AssertionError


PEERS = ("xla", "same", "flex")


def measure(name: str, rounds: int, measurement_ms: float, *, peers: Collection[str]) -> dict[str, Any]:
    """Returns the record of a case."""
    case = CASES[name]
    stages: dict[str, int | None] = {}

    def function(captured: jax.Array) -> dict[str, Any]:
        return {"score_mod": case.mod(captured)}

    def by_xla(captured: jax.Array) -> dict[str, Any]:
        return function(captured) | {"implementation": "xla"}

    kinds: dict[str, Callable[[], dict[str, Program]]] = {
        "plain": lambda: ours(case, lambda _: {}, differentiates=False),
        "function": lambda: ours(case, function, differentiates=False),
    }
    if (same := case.same) is not None:
        kinds["same"] = lambda: ours(case, functools.partial(same, case), differentiates=False)
    if name in CAPTURING:
        kinds["gradient"] = lambda: ours(case, function, differentiates=True)
    others: dict[str, Callable[[], dict[str, Program]]] = {
        "xla": lambda: ours(case, by_xla, differentiates=False),
        "flex": lambda: with_few_stages(case, stages, "flex", differentiates=False),
    }
    if name in CAPTURING:
        others["xla gradient"] = lambda: ours(case, by_xla, differentiates=True)
        others["flex gradient"] = lambda: with_few_stages(case, stages, "flex gradient", differentiates=True)
        if same is not None:
            others["same gradient"] = lambda: ours(case, functools.partial(same, case), differentiates=True)
    kinds |= {kind: make for kind, make in others.items() if kind.split()[0] in peers}
    programs, errors = turns.programs_of(kinds, others)

    def elapsed(name: str, count: int) -> float:
        return (torch_ms if name.startswith("flex") else elapsed_ms)(programs[name], count)

    times = by_turns(elapsed, programs, rounds, measurement_ms)
    ms = {name: statistics.median(x) for name, x in times.items()}
    plain = {name: ms[f"plain {name.split()[-1]}"] for name in ms if not name.startswith("plain")}
    return {
        "ms": ms,
        "spread": {name: (max(x) - min(x)) / ms[name] for name, x in times.items()},
        "speed of plain": {name: x / ms[name] for name, x in plain.items()},
        "stages": stages,
        "errors": errors,
    }


def main(argv: list[str] | None = None) -> None:
    parser = turns.parser(__doc__, CASES, rounds=6)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="which peers (default: all)")
    options = parser.parse_args(argv)

    def words(found: dict[str, Any]) -> str:
        return " ".join(f"{key} {x:.3f}" for key, x in found["speed of plain"].items())

    def of_case(name: str) -> dict[str, Any]:
        return measure(name, options.rounds, options.measurement_ms, peers=options.peers)

    turns.record_cases(options, {}, of_case, words)


if __name__ == "__main__":
    main()
