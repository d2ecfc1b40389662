# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures errors of dv at large logits, of which a float32 holds few fractions, beside those of peers.

    python benchmarks/large_logits.py --output benchmarks/results/large-logits.json

Queries and keys are normal numbers times a factor, so that each query gives one key a weight of exactly 1. dv is then a
sum of cotangents, without any error, and what is measured is how far weights are from 1. Cotangents are small integers.
The output is one record with an error for each implementation and magnitude; docs/semantics.md has the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peers import IMPLEMENTATIONS
from run import describe_run

from jax_fastattn.cases.case import Case

MAGNITUDES = (1.6e5, 1.4e6, 1.6e7)
SEEDS = 4
CASE = Case(batch=2, query_length=1024, key_length=1024, num_kv_heads=4, head_dim=128, dtype="bfloat16")


def draw(magnitude: float, seed: int) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Returns query, key, value and the cotangent `[B, T, N, H]`, and dv. The largest logits are about `magnitude`."""
    rng = np.random.default_rng(seed)
    shape = (CASE.batch, CASE.query_length, CASE.num_kv_heads, CASE.head_dim)
    factor = (magnitude / 5) ** 0.5
    drawn = {name: jnp.asarray(factor * rng.standard_normal(shape), CASE.dtype) for name in ("query", "key")}
    query, key = (np.asarray(x, np.float64) for x in drawn.values())
    logits = np.einsum("btnh,bsnh->bnts", query, key) / CASE.head_dim**0.5
    winner, best = logits.argmax(3), np.sort(logits, axis=3)[..., -2:]
    value, dout = (rng.integers(-2, 3, size=shape).astype(np.float64) for _ in range(2))
    # Rows in which another weight than 1 is not 0 have no cotangents; they are few.
    dout[(best[..., 1] - best[..., 0] < 30).swapaxes(1, 2)] = 0.0
    drawn |= {"value": jnp.asarray(value, CASE.dtype), "dout": jnp.asarray(dout, CASE.dtype)}
    dvalue = np.zeros(shape)
    batch, head, row = np.indices(winner.shape)
    np.add.at(dvalue, (batch, winner, head), dout[batch, row, head])
    return drawn, dvalue


def errors(name: str) -> dict[str, float | str]:
    """Returns the largest error of dv of an implementation by magnitude, over some draws, or why it has none."""
    found: dict[str, Any] = {f"{magnitude:.1e}": 0.0 for magnitude in MAGNITUDES}
    for magnitude, seed in itertools.product(MAGNITUDES, range(SEEDS)):
        arrays, dvalue = draw(magnitude, seed)
        operands = CASE.operands(jax.random.key(0))._replace(**{x: arrays[x] for x in ("query", "key", "value")})

        def attend(value: jax.Array, operands=operands) -> jax.Array:  # type: ignore[no-untyped-def]
            return IMPLEMENTATIONS[name].attend(CASE, operands._replace(value=value))

        try:
            _, pull_back = jax.vjp(attend, operands.value)
            (got,) = jax.jit(pull_back)(arrays["dout"])
            error = float(np.abs(np.asarray(got, np.float64) - dvalue).max())
            found[f"{magnitude:.1e}"] = max(found[f"{magnitude:.1e}"], error)
        except Exception as error:  # a peer that is not installed, or that refuses
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["jax_fastattn"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args()
    record = {"seeds": SEEDS, "dv_errors": {name: errors(name) for name in options.implementations}} | describe_run(
        options.commit
    )
    print(json.dumps(record["dv_errors"], indent=1))
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
