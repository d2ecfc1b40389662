# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Draws 2^33 decisions of dropout by the package's generator, and records how far they are from chance.

    python benchmarks/dropout_quality.py --output dropout_quality.json      # a GPU, under a minute

32 heads of 16384 x 16384 decisions at rates 0.1 and 0.5, then keys that differ in a bit and keys that users make of
each other. A figure is a deviation from chance in units of its standard deviation. A family of figures has its greatest
one, and which one chance gives in half of all runs: the prediction. `tests/dropout/test_quality.py` has further tests,
of 2^24 decisions. XLA draws here; tests on a GPU compare the masks of kernels with these, decision by decision.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from run import describe_run

from jax_fastattn import dropout

HEADS, LENGTH, LIMIT = 32, 1 << 14, 5.0
RATES = 0.1, 0.5
MOVES = 0, 1, 2, 7, 8, 9, 16, 64, 1024
CORNERS = 1, 2, 8, 16, 1000
QUARTERS = 0.25, 0.5, 0.75
Figures = dict[str, float]


@jax.jit
def dropped(head: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns which weights a head drops, bool `[rows, rows]`."""
    return ~dropout.kept(head, rows, rows)


@functools.partial(jax.jit, static_argnums=2)
def heads_of(words: Any, rate: float, count: int = 1) -> jax.Array:
    """Returns the operand of the first heads of a call, int32 `[count, SIZE]`."""
    return dropout.numbers(jnp.asarray(words, jnp.uint32), rate, 1, count)[0]


def count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)


@jax.jit
def shared(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns how many places both masks drop, and how many each drops."""
    return jnp.stack([count(x & y), count(x), count(y)])


def moves_of(length: int, moves: Iterable[int]) -> np.ndarray:
    """Returns pairs of distances in rows and columns, int32 `[count, 2]`."""
    return np.int32([x for x in itertools.product(moves, repeat=2) if any(x) and max(x) < length])


@jax.jit
def neighbors(mask: jax.Array, moves: jax.Array) -> jax.Array:
    """Returns how many pairs at each distance are both dropped."""
    wide = _around(mask)
    return lax.map(lambda move: count(mask & lax.dynamic_slice(wide, move, mask.shape)), moves)


@jax.jit
def rectangles(plane: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns how many rectangles of each size have an odd number of corners in the plane."""
    wide = _around(plane)

    def odd(size: jax.Array) -> jax.Array:
        corners = [size * np.int32(x) for x in ((0, 0), (0, 1), (1, 0), (1, 1))]
        return count(functools.reduce(jnp.bitwise_xor, (lax.dynamic_slice(wide, x, plane.shape) for x in corners)))

    return lax.map(odd, sizes)


def _around(plane: jax.Array) -> jax.Array:
    """Returns a plane with its first rows and columns once more after its last ones: all moved planes have its size."""
    return jnp.pad(plane, (0, max(*MOVES, *CORNERS)), mode="wrap")


@jax.jit
def sums(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(mask, 0, dtype=jnp.int32), jnp.sum(mask, 1, dtype=jnp.int32)


def deviation(events: int, size: int, share: float) -> float:
    return abs(events - size * share) / math.sqrt(size * share * (1 - share))


def in_common(both: int, x: int, y: int, size: int, share: float) -> float:
    """Deviation of how many places two masks drop both, given how many each drops."""
    return abs(int(both) - x * y / size) / (share * (1 - share) * math.sqrt(size))


def share_of(rate: float) -> float:
    return round(rate * dropout.STEPS) / dropout.STEPS


def of_heads(words: Any, heads: int, length: int) -> tuple[dict[str, Figures], dict[str, int]]:
    """Returns figures of heads of a call by family, and how many decisions are dropped by rate."""
    rows, moves, size = jnp.arange(length, dtype=jnp.int32), moves_of(length, MOVES), length**2
    names = "counts", "sums", "neighbors", "heads", "count of all heads", "neighbors of all heads"
    found: dict[str, Figures] = {name: {} for name in names}
    totals = {}
    for rate in RATES:
        share = share_of(rate)
        spread = share * (1 - share)
        operand, counts, common = heads_of(words, rate, heads), [], np.zeros(len(moves))
        masks: dict[int, jax.Array] = {}  # of the first head and of the one before
        for n in range(heads):
            mask, name = dropped(operand[n], rows), f"{rate} head {n}"
            by_axis = [np.asarray(x, np.int64) for x in sums(mask)]
            counts.append(int(by_axis[0].sum()))
            found["counts"][name] = deviation(counts[n], size, share)
            for axis, x in enumerate(by_axis):
                ratio = ((x - length * share) ** 2).mean() / (length * spread)
                found["sums"][f"{name} axis {axis}"] = float(abs(ratio - 1) / math.sqrt(2 / length))
            both = np.asarray(neighbors(mask, moves), np.int64)
            common += both - counts[n] ** 2 / size
            for move, x in zip(moves, both, strict=True):
                found["neighbors"][f"{name} {move}"] = in_common(int(x), counts[n], counts[n], size, share)
            for other, y in masks.items():
                both, *each = np.asarray(shared(mask, y)).tolist()
                found["heads"][f"{name} and {other}"] = in_common(both, *each, size, share)
            masks = {0: masks.get(0, mask), n: mask}
        totals[str(rate)] = sum(counts)
        found["count of all heads"][str(rate)] = deviation(sum(counts), heads * size, share)
        for move, x in zip(moves, common, strict=True):
            found["neighbors of all heads"][f"{rate} {move}"] = float(abs(x) / (spread * math.sqrt(heads * size)))
    return found, totals


def of_rectangles(words: Any, heads: int, length: int) -> dict[str, Figures]:
    """Returns figures of the two upper bits of draws: three rates tell them."""
    rows, sizes = jnp.arange(length, dtype=jnp.int32), moves_of(length, CORNERS)
    events = {bit: np.zeros(len(sizes), np.int64) for bit in (14, 13)}
    found: dict[str, Figures] = {"rectangles": {}, "rectangles of all heads": {}}
    operands = {rate: heads_of(words, rate, heads) for rate in QUARTERS}
    for n in range(heads):
        quarters = [dropped(operands[rate][n], rows) for rate in QUARTERS]
        planes = {14: quarters[1], 13: quarters[0] ^ quarters[1] ^ quarters[2]}
        for bit, plane in planes.items():
            counts = np.asarray(rectangles(plane, sizes), np.int64)
            events[bit] += counts
            for at, x in zip(sizes, counts, strict=True):
                found["rectangles"][f"bit {bit} head {n} {at}"] = deviation(int(x), length**2, 0.5)
    for bit, counts in events.items():
        for at, x in zip(sizes, counts, strict=True):
            found["rectangles of all heads"][f"bit {bit} {at}"] = deviation(int(x), heads * length**2, 0.5)
    return found


def of_keys(words: Any, length: int, rate: float = 0.1) -> dict[str, Figures]:
    """Returns figures of a key and of keys close to it: a bit differs, seeds follow, `fold_in` makes one of another."""
    rows, words = jnp.arange(length, dtype=jnp.int32), np.asarray(words, np.uint32)
    own: dict[str, Any] = {}
    for word, bit in itertools.product(range(2), range(32)):
        own[f"word {word} bit {bit}"] = words ^ np.uint32([(1 - word) << bit, word << bit])
    for seed in range(1, 9):
        own[f"seed {seed}"] = words + np.uint32([0, seed])
        own[f"fold_in {seed}"] = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(words), seed))
    mask = dropped(heads_of(words, rate)[0], rows)
    found = {}
    for name, other in own.items():
        both, *each = np.asarray(shared(mask, dropped(heads_of(other, rate)[0], rows))).tolist()
        found[name] = in_common(both, *each, length**2, share_of(rate))
    return {"keys": found}


def summary(figures: Figures) -> dict[str, Any]:
    """The greatest figure of a family, and which one chance gives in half of all runs."""
    worst = max(figures, key=lambda name: figures[name])
    chance = statistics.NormalDist().inv_cdf((1 + 0.5 ** (1 / len(figures))) / 2)
    return {"figures": len(figures), "greatest": figures[worst], "at": worst, "predicted": chance}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--length", type=int, default=LENGTH, help="rows and columns of a head")
    parser.add_argument("--seed", type=int, default=123)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    begun, words = time.perf_counter(), np.uint32([0, options.seed])
    families, totals = of_heads(words, options.heads, options.length)
    families |= of_rectangles(words, options.heads, options.length) | of_keys(words, options.length)
    found = {name: summary(figures) for name, figures in families.items()}
    record = describe_run(options.commit) | {
        "seed": options.seed,
        "heads": options.heads,
        "length": options.length,
        "decisions": options.heads * options.length**2,
        "dropped": totals,
        "limit": LIMIT,
        "families": found,
        "seconds": time.perf_counter() - begun,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    for name, x in found.items():
        print(f"{name:24} {x['figures']:6} figures, {x['greatest']:.2f} at {x['at']}; predicted {x['predicted']:.2f}")
    print(f"{record['decisions']:,} decisions, {record['seconds']:.0f} s")
    bad = [name for name, x in found.items() if x["greatest"] > LIMIT]
    if bad:
        raise SystemExit(f"figures above {LIMIT}: {', '.join(bad)}")


if __name__ == "__main__":
    main()
