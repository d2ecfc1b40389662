# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times masks as functions next to the flags and ids that say the same, in turns in one process.

    python benchmarks/mask_functions.py --output mask-functions.json

Each case has up to three calls: by a flag or ids, by a `mask_mod` with its prepass in each call, and by a `BlockMask`
with lists that are kept. A record has milliseconds of output alone and of its gradient alone, of the lists of both
passes, and the speed of calls as shares of the speed with a flag. Times are medians of the rounds.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import turns
from turns import by_turns, elapsed_ms

import jax_fastattn
from jax_fastattn import and_masks, block_mask, causal, or_masks

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Masked:
    """A call of B = 2 rows, or of more.

    Attributes:
        mod: returns the function, given the ids of documents `[B, T]`.
        flag: the arguments that say the same, given the ids; None if there are none.
        batch, length, heads, kv_heads, head_dim, documents: sizes.
    """

    mod: Callable[[jax.Array], Mod]
    flag: Callable[[jax.Array], dict[str, Any]] | None = None
    batch: int = 2
    length: int = 8192
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    documents: int = 8

    def ids(self) -> jax.Array:
        """Returns ids of documents of one length."""
        ids = jnp.arange(self.length, dtype=jnp.int32) * self.documents // self.length
        return jnp.broadcast_to(ids, (self.batch, self.length))


def _same(ids: jax.Array) -> Mod:
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def _near(width: int) -> Mod:
    return lambda b, h, q, k: q - k < width


CASES = {
    "causal": Masked(lambda ids: causal(), lambda ids: {"is_causal": True}),
    "window-1024": Masked(
        lambda ids: and_masks(causal(), _near(1024)), lambda ids: {"is_causal": True, "local_window_size": (1023, None)}
    ),
    "documents": Masked(
        lambda ids: and_masks(causal(), _same(ids)), lambda ids: {"is_causal": True, "segment_ids": ids}
    ),
    "documents-gqa": Masked(
        lambda ids: and_masks(causal(), _same(ids)), lambda ids: {"is_causal": True, "segment_ids": ids}, kv_heads=4
    ),
    "documents-d64": Masked(
        lambda ids: and_masks(causal(), _same(ids)),
        lambda ids: {"is_causal": True, "segment_ids": ids},
        heads=32,
        kv_heads=32,
        head_dim=64,
    ),
    "prefix": Masked(lambda ids: or_masks(causal(), lambda b, h, q, k: k < 2048)),
    "window-globals": Masked(lambda ids: and_masks(causal(), or_masks(_near(1024), lambda b, h, q, k: k < 64))),
    "dilated": Masked(lambda ids: and_masks(causal(), lambda b, h, q, k: (q - k) % 4 == 0)),
    "window-of-heads": Masked(lambda ids: and_masks(causal(), lambda b, h, q, k: q - k < 128 * (h + 1))),
}


def measure(case: Masked, rounds: int, measurement_ms: float) -> dict[str, Any]:
    """Returns the record of a case."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.batch, case.length, count, case.head_dim) for count in heads]
    *qkv, dout = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    ids = case.ids()
    make = jax.jit(lambda ids: block_mask(case.mod(ids), *qkv))

    def by(options: Callable[[Any], dict[str, Any]], given: Any) -> dict[str, Callable[[], Any]]:
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

    kinds = {} if case.flag is None else {"flag": by(case.flag, ids)}
    kinds["mask_mod"] = by(lambda ids: {"mask_mod": case.mod(ids)}, ids)
    kinds["kept"] = by(lambda mask: {"mask_mod": mask}, make(ids))
    programs = {f"{kind} {mode}": x for kind, modes in kinds.items() for mode, x in modes.items()}
    programs["lists"] = functools.partial(make, ids)
    found = by_turns(lambda name, count: elapsed_ms(programs[name], count), programs, rounds, measurement_ms)
    ms = {name: statistics.median(times) for name, times in found.items()}
    shares = {f"{name} of flag": ms[f"flag {name.split()[1]}"] / x for name, x in ms.items() if _has_flag(name, ms)}
    return {"ms": ms, "shares": shares}


def _has_flag(name: str, ms: dict[str, float]) -> bool:
    return name != "lists" and not name.startswith("flag") and f"flag {name.split()[1]}" in ms


def main(argv: list[str] | None = None) -> None:
    options = turns.parser(__doc__, CASES, rounds=7).parse_args(argv)

    def words(found: dict[str, Any]) -> str:
        return " ".join(f"{key} {x:.2f}" for key, x in found["shares"].items())

    def of_case(name: str) -> dict[str, Any]:
        return measure(CASES[name], options.rounds, options.measurement_ms)

    turns.record_cases(options, {}, of_case, words)


if __name__ == "__main__":
    main()
