# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times few queries over many keys next to cuDNN and to a copy of the keys and values, in turns in one process.

    python benchmarks/few_queries.py --output few-queries.json
    python benchmarks/few_queries.py --arch sm_90-a100 --cases b64-8k b8-32k --output few-queries-a100.json

`--implementations jax_fastattn jax_fastattn-deterministic` also times `deterministic=True`; `of_...` is what it takes
over the default.

A program has 16 calls with different queries, since a single call of 14 us would measure its launch. A record has
microseconds of a call, TB/s of the keys and values that are visible, and both as shares of cuDNN's speed and of the
copy's. The copy adds one to keys and values; what it reads and writes counts. Times are medians of the rounds.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import turns
from turns import by_turns, elapsed_ms

import jax_fastattn

CALLS = 16


@dataclass(frozen=True)
class Few:
    """A call over a cache.

    Attributes:
        batch, queries, keys, heads, kv_heads, head_dim: sizes.
        lengths: "ragged" for lengths from 1 to all keys, "full" for lengths that hide nothing, or None for no lengths.
    """

    batch: int
    keys: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    lengths: str | None = None

    def seen(self) -> np.ndarray:
        """How many keys each batch entry sees."""
        if self.lengths == "ragged":
            return np.random.default_rng(0).integers(1, self.keys + 1, self.batch).astype(np.int32)
        return np.full(self.batch, self.keys, np.int32)


CASES = {
    "b64-8k": Few(64, 8192),
    "b8-32k": Few(8, 32768),
    "b1-128k": Few(1, 131072),
    "b16-16k-ragged": Few(16, 16384, lengths="ragged"),
    "b32-16k-ragged": Few(32, 16384, lengths="ragged"),
    "b32-8k-28/4": Few(32, 8192, heads=28, kv_heads=4),
    "b10-8k-28/4": Few(10, 8192, heads=28, kv_heads=4),
    "b64-8k-d64": Few(64, 8192, head_dim=64),
    "b16-8k-q4": Few(16, 8192, queries=4),
    "b16-8k-q16": Few(16, 8192, queries=16),
    "b16-8k-q32": Few(16, 8192, queries=32),
    "b16-1k-q32": Few(16, 1024, queries=32),
    "b5-8k": Few(5, 8192),
    "b8-8k": Few(8, 8192),
    "b16-1k": Few(16, 1024),
    "b64-1k": Few(64, 1024),
    "b256-256": Few(256, 256),
    "b1024-1k-ragged": Few(1024, 1024, lengths="ragged"),
    "b16-2k": Few(16, 2048),
    "b16-2k-lengths": Few(16, 2048, lengths="full"),
}


def ours(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None, deterministic: bool = False
) -> jax.Array:
    """Returns the output of `jax_fastattn`."""
    return jax_fastattn.attention(query, key, value, key_value_seq_lengths=lengths, deterministic=deterministic)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Returns the output of cuDNN, which takes lengths of keys together with those of queries alone."""
    options = {}
    if lengths is not None:
        options = {"query_seq_lengths": jnp.full_like(lengths, query.shape[1]), "key_value_seq_lengths": lengths}
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)


# The default takes the implementations of `DEFAULTS`.
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "jax_fastattn": ours,
    "jax_fastattn-deterministic": functools.partial(ours, deterministic=True),
    "jax.nn-cudnn": cudnn,
}
DEFAULTS = ("jax_fastattn", "jax.nn-cudnn")


def measure(case: Few, implementations: list[str], rounds: int, measurement_ms: float) -> dict[str, Any]:
    """Returns the record of a case."""
    keys = jax.random.split(jax.random.key(0), 3)
    cache = [
        jax.random.normal(key, (case.batch, case.keys, case.kv_heads, case.head_dim), jnp.bfloat16) for key in keys[:2]
    ]
    queries = jax.random.normal(keys[2], (CALLS, case.batch, case.queries, case.heads, case.head_dim), jnp.bfloat16)
    lengths = None if case.lengths is None else jnp.asarray(case.seen())

    def calls(attend: Callable[..., jax.Array]) -> Callable[[], Any]:
        program = jax.jit(lambda queries, *others: [attend(query, *others) for query in queries])
        return functools.partial(program, list(queries), *cache, lengths)

    copy = jax.jit(lambda *cache: [x + jnp.ones((), x.dtype) for x in cache])
    programs = {name: calls(IMPLEMENTATIONS[name]) for name in implementations}
    programs["copy"] = functools.partial(copy, *cache)
    record: dict[str, Any] = {"us": {}, "errors": {}}
    running = []
    for name, program in programs.items():
        try:
            elapsed_ms(program, 1)
            running.append(name)
        except Exception as error:  # whatever a peer raises is its record
            record["errors"][name] = f"{type(error).__name__}: {error}"[:300]
    us = record["us"]
    found = by_turns(lambda name, count: elapsed_ms(programs[name], count), running, rounds, measurement_ms)
    for name, times in found.items():
        us[name] = statistics.median(times) * 1e3 / (1 if name == "copy" else CALLS)
    if "jax_fastattn" in us:
        row_nbytes = 2 * case.kv_heads * case.head_dim * cache[0].dtype.itemsize
        rate = int(case.seen().sum()) * row_nbytes / us["jax_fastattn"] / 1e6
        copied = 4 * cache[0].nbytes / us["copy"] / 1e6
        record |= {"tb_per_s": rate, "copy_tb_per_s": copied, "of_copy": rate / copied}
        record |= {f"of_{name}": x / us["jax_fastattn"] for name, x in us.items() if name in IMPLEMENTATIONS}
        del record["of_jax_fastattn"]
    return record


def main(argv: list[str] | None = None) -> None:
    parser = turns.parser(__doc__, CASES, rounds=5)
    parser.add_argument("--implementations", nargs="*", choices=IMPLEMENTATIONS, default=list(DEFAULTS))
    options = parser.parse_args(argv)

    def words(found: dict[str, Any]) -> str:
        shares = " ".join(f"{key} {x:.2f}" for key, x in found.items() if isinstance(x, float))
        return f"{found['us'].get('jax_fastattn', math.nan):8.1f} us  {shares}"

    def of_case(name: str) -> dict[str, Any]:
        return measure(CASES[name], options.implementations, options.rounds, options.measurement_ms)

    turns.record_cases(options, {"calls": CALLS}, of_case, words)


if __name__ == "__main__":
    main()
