# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times masks as functions next to the flags and ids that say the same, in turns in one process.

    python benchmarks/mask_functions.py --output mask-functions.json

Each case has up to four calls of ours: by a flag or ids, by a `mask_mod` with its prepass in each call, by a
`BlockMask` with lists that are kept, and up to length 8192 by the XLA path. Peers are the `mask_mod` of fa4-jax and
FlexAttention (PyTorch on the same card), whose block mask is kept. A record has milliseconds of output alone and of its
gradient alone, of lists and block masks, and the speed of calls as shares of the speed with a flag. "kept lists" are
the prepasses of both passes in one program, "lists forward" and "lists backward" are prepasses of one pass. Times are
medians of the rounds. A peer that fails is its error.
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
from jax_fastattn import and_masks, block_mask, causal

Mod = Callable[..., Any]
Program = Callable[[], Any]
PEERS = ("xla", "fa4", "flex")


@dataclass(frozen=True)
class Masked:
    """A call of B = 2 rows, or of more.

    Attributes:
        own: returns a function, given the ids of documents `[B, T]`; written for JAX, PyTorch and CuTe.
        flag: the arguments that say the same, given the ids; None if there are none.
        is_causal: whether pairs count only if they also do under a causal mask.
        reads_ids, reads_heads: what the function reads.
        batch, length, heads, kv_heads, head_dim, documents: sizes.
    """

    own: Callable[[Any], Mod]
    flag: Callable[[jax.Array], dict[str, Any]] | None = None
    is_causal: bool = True
    reads_ids: bool = False
    reads_heads: bool = False
    batch: int = 2
    length: int = 8192
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    documents: int = 8

    def mod(self, ids: jax.Array) -> Mod:
        """Returns the whole function, for JAX."""
        return and_masks(causal(), self.own(ids)) if self.is_causal else self.own(ids)

    def ids(self) -> jax.Array:
        """Returns ids of documents of one length."""
        ids = jnp.arange(self.length, dtype=jnp.int32) * self.documents // self.length
        return jnp.broadcast_to(ids, (self.batch, self.length))


def _all(_: Any) -> Mod:
    return lambda b, h, q, k: q >= k


def _same(ids: Any) -> Mod:
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def _near(_: Any) -> Mod:
    return lambda b, h, q, k: q - k < 1024


def _in_documents(ids: jax.Array) -> dict[str, Any]:
    return {"is_causal": True, "segment_ids": ids}


CASES = {
    "causal": Masked(_all, lambda ids: {"is_causal": True}),
    "causal-d64": Masked(_all, lambda ids: {"is_causal": True}, heads=32, kv_heads=32, head_dim=64),
    "causal-d96": Masked(_all, lambda ids: {"is_causal": True}, head_dim=96),
    "causal-d256": Masked(_all, lambda ids: {"is_causal": True}, heads=8, kv_heads=8, head_dim=256),
    "causal-128k": Masked(_all, lambda ids: {"is_causal": True}, batch=1, length=1 << 17, heads=8, kv_heads=8),
    "window-1024": Masked(_near, lambda ids: {"is_causal": True, "local_window_size": (1023, None)}),
    "documents": Masked(_same, _in_documents, reads_ids=True),
    "documents-gqa": Masked(_same, _in_documents, reads_ids=True, kv_heads=4),
    "documents-d64": Masked(_same, _in_documents, reads_ids=True, heads=32, kv_heads=32, head_dim=64),
    "documents-128k": Masked(
        _same, _in_documents, reads_ids=True, batch=1, length=1 << 17, heads=8, kv_heads=8, documents=32
    ),
    "prefix": Masked(lambda ids: lambda b, h, q, k: (q >= k) | (k < 2048), is_causal=False),
    "window-globals": Masked(lambda ids: lambda b, h, q, k: (q - k < 1024) | (k < 64)),
    "dilated": Masked(lambda ids: lambda b, h, q, k: (q - k) % 4 == 0),
    "window-of-heads": Masked(lambda ids: lambda b, h, q, k: q - k < 128 * (h + 1), reads_heads=True),
}


def of_fa4(case: Masked) -> dict[str, Program]:
    """Returns both passes of fa4-jax by mode."""
    from fa4_jax import FnMask, document_mask, flash_attn

    *qkv, dout = _arrays(case)
    ids, own = case.ids(), FnMask(case.own(None), label="own")

    def output(ids: jax.Array, *qkv: jax.Array) -> jax.Array:
        return flash_attn(*qkv, causal=case.is_causal, mask_mod=document_mask(ids) if case.reads_ids else own)

    pull = jax.jit(lambda ids, *qkv: jax.vjp(functools.partial(output, ids), *qkv)[1])(ids, *qkv)
    return {
        "forward": functools.partial(jax.jit(output), ids, *qkv),
        "backward": functools.partial(jax.jit(lambda pull, dout: pull(dout)), pull, dout),
    }


def of_torch(case: Masked) -> dict[str, Program]:
    """Returns both passes of FlexAttention by mode, and its block mask."""
    import numpy as np
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    counts = case.heads, case.kv_heads, case.kv_heads, case.heads
    shapes = [(case.batch, count, case.length, case.head_dim) for count in counts]
    *arrays, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    qkv, own = [x.requires_grad_(True) for x in arrays], case.own(torch.tensor(np.asarray(case.ids()), device="cuda"))

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return own(b, h, q, k) & (q >= k) if case.is_causal else own(b, h, q, k)

    sizes = case.batch if case.reads_ids else None, case.heads if case.reads_heads else None
    make = functools.partial(create_block_mask, mod, *sizes, case.length, case.length, _compile=True)
    mask = make()
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # gradients are taken again and again
    attend = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        return attend(*qkv, block_mask=mask, enable_gqa=case.heads != case.kv_heads)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    out = call()
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True),
        "lists": make,
    }


def _arrays(case: Masked) -> list[jax.Array]:
    """Returns query, key, value, and the cotangent of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.batch, case.length, count, case.head_dim) for count in heads]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def measure(case: Masked, rounds: int, measurement_ms: float, *, peers: Collection[str]) -> dict[str, Any]:
    """Returns the record of a case."""
    *qkv, dout = _arrays(case)
    ids = case.ids()
    make = jax.jit(lambda ids: block_mask(case.mod(ids), *qkv))

    def lists_of(first: str) -> Program:
        """Returns a program of the prepasses of one pass, "forward" or "backward": XLA drops the others."""

        def lists(ids: jax.Array) -> list[jax.Array]:
            found = block_mask(case.mod(ids), *qkv).lists
            return [x for name, x in found.items() if name.startswith("forward") == (first == "forward")]

        return functools.partial(jax.jit(lists), ids)

    def by(options: Callable[[Any], dict[str, Any]], given: Any) -> dict[str, Program]:
        def output(given: Any, *qkv: jax.Array) -> jax.Array:
            return jax_fastattn.attention(*qkv, **options(given))

        def both(given: Any, dout: jax.Array, *qkv: jax.Array) -> Any:
            return jax.vjp(functools.partial(output, given), *qkv)[1](dout)

        pull = jax.jit(lambda given, *qkv: jax.vjp(functools.partial(output, given), *qkv)[1])(given, *qkv)
        return {
            "forward": functools.partial(jax.jit(output), given, *qkv),
            "backward": functools.partial(jax.jit(lambda pull, dout: pull(dout)), pull, dout),
            "both": functools.partial(jax.jit(both), given, dout, *qkv),
        }

    kinds: dict[str, Callable[[], dict[str, Program]]] = {}
    if (flag := case.flag) is not None:
        kinds["flag"] = lambda: by(flag, ids)
    kinds["mask_mod"] = lambda: by(lambda ids: {"mask_mod": case.mod(ids)}, ids)
    kinds["kept"] = lambda: by(lambda mask: {"mask_mod": mask}, make(ids)) | {"lists": functools.partial(make, ids)}
    kinds["lists"] = lambda: {name: lists_of(name) for name in ("forward", "backward")}
    if "xla" in peers and case.length <= 8192:
        kinds["xla"] = lambda: by(lambda ids: {"mask_mod": case.mod(ids), "implementation": "xla"}, ids)
    others = {"fa4": functools.partial(of_fa4, case), "flex": functools.partial(of_torch, case)}
    kinds |= {name: make for name, make in others.items() if name in peers}
    programs, errors = turns.programs_of(kinds, PEERS)

    def elapsed(name: str, count: int) -> float:
        return (torch_ms if name.startswith("flex") else elapsed_ms)(programs[name], count)

    found = by_turns(elapsed, programs, rounds, measurement_ms)
    ms = {name: statistics.median(times) for name, times in found.items()}
    shares = {f"{name} of flag": ms[f"flag {name.split()[1]}"] / x for name, x in ms.items() if _has_flag(name, ms)}
    return {"ms": ms, "shares": shares, "errors": errors}


def _has_flag(name: str, ms: dict[str, float]) -> bool:
    return not name.startswith(("flag", "lists")) and f"flag {name.split()[1]}" in ms


def main(argv: list[str] | None = None) -> None:
    parser = turns.parser(__doc__, CASES, rounds=7)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="which peers (default: all)")
    options = parser.parse_args(argv)

    def words(found: dict[str, Any]) -> str:
        return " ".join(f"{key} {x:.2f}" for key, x in found["shares"].items())

    def of_case(name: str) -> dict[str, Any]:
        return measure(CASES[name], options.rounds, options.measurement_ms, peers=options.peers)

    turns.record_cases(options, {}, of_case, words)


if __name__ == "__main__":
    main()
