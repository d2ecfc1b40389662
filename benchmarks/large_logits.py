# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures errors of dv at large logits, of which a float32 holds few fractions, beside those of peers.

    python benchmarks/large_logits.py --output benchmarks/results/large-logits.json

Each query gives one key the weight 1: queries are multiples of one key, and keys have entries of -1 and 1. So dv is a
sum of cotangents, without any error, and what is measured is how far weights are from 1. Values and cotangents are
small integers. The output is one record with an error for each implementation and magnitude; docs/semantics.md has the
table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from peers import IMPLEMENTATIONS
from run import describe_run

from jax_fastattn.testing.cases import Case

MAGNITUDES = (1.6e5, 1.4e6, 1.6e7)
CASE = Case(batch=2, query_length=1024, key_length=1024, num_kv_heads=4, head_dim=128, dtype="bfloat16")


def draw(magnitude: float, seed: int) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Returns query, key, value and the cotangent `[B, T, N, H]`, and dv."""
    rng = np.random.default_rng(seed)
    shape = (CASE.batch, CASE.query_length, CASE.num_kv_heads, CASE.head_dim)
    key = rng.choice([-1.0, 1.0], size=shape)
    winner = rng.integers(CASE.key_length, size=(shape[0], shape[1], shape[2]))
    batch, _, head = np.indices(winner.shape)
    factor = magnitude / CASE.head_dim**0.5 * rng.uniform(0.5, 1.0, size=(*winner.shape, 1))
    value, dout = (rng.integers(-2, 3, size=shape).astype(np.float64) for _ in range(2))
    dvalue = np.zeros(shape)
    np.add.at(dvalue, (batch, winner, head), dout)
    arrays = {"query": factor * key[batch, winner, head], "key": key, "value": value, "dout": dout}
    return {name: jnp.asarray(x, CASE.dtype) for name, x in arrays.items()}, dvalue


def errors(name: str) -> dict[str, float | str]:
    """Returns the largest error of dv of an implementation by magnitude, or why it has none."""
    found: dict[str, float | str] = {}
    for magnitude in MAGNITUDES:
        arrays, dvalue = draw(magnitude, seed=0)
        operands = CASE.operands(jax.random.key(0))._replace(**{x: arrays[x] for x in ("query", "key", "value")})

        def attend(value: jax.Array, operands=operands) -> jax.Array:  # type: ignore[no-untyped-def]
            return IMPLEMENTATIONS[name].attend(CASE, operands._replace(value=value))

        try:
            _, pull_back = jax.vjp(attend, operands.value)
            (got,) = jax.jit(pull_back)(arrays["dout"])
            found[f"{magnitude:.1e}"] = float(np.abs(np.asarray(got, np.float64) - dvalue).max())
        except Exception as error:  # a peer that is not installed, or that refuses
            found[f"{magnitude:.1e}"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["jax_fastattn"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args()
    record = {"dv_errors": {name: errors(name) for name in options.implementations}} | describe_run(options.commit)
    print(json.dumps(record["dv_errors"], indent=1))
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
