# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random functions of positions, which cases take as `mask_mod` in addition to their other arguments.

A number fixes the code of a function, and a key the values of the arrays that it captures: calls with the same number
share kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical.programs import mask_planes
from jax_fastattn.programs import planes
from jax_fastattn.programs.function import Program

Mod = Callable[..., Any]

# Conjunctions and disjunctions of up to four conditions.
_DEPTH = 2
# These arrays have an axis of batch entries; it is the first one.
PER_ENTRY = frozenset(("ids", "widths", "blocks", "points"))
# Conditions read blocks of this many queries and keys.
_BLOCK = 16, 32


def captured(sizes: dict[str, int], key: jax.Array) -> dict[str, jax.Array]:
    """Draws the arrays that functions capture, given the sizes of a call by axis letter.

    They make planes of heads, of queries, of keys and of distances, and a table.
    """
    batch, heads, rows, columns = (sizes[name] for name in "BNTS")
    longest = max(rows, columns)
    keys = iter(jax.random.split(key, 5))
    blocks = batch, heads, rows // _BLOCK[0] + 1, columns // _BLOCK[1] + 1
    return {
        "ids": jnp.sort(jax.random.randint(next(keys), (batch, longest), 0, 4, jnp.int32), axis=1),
        "widths": jax.random.randint(next(keys), (batch, heads), 0, longest, jnp.int32),
        "shown": jax.random.bernoulli(next(keys), 0.8, (heads, rows + columns)),
        "blocks": jax.random.bernoulli(next(keys), 0.7, blocks),
        "points": jax.random.normal(next(keys), (batch, longest)),
    }


def mask_function(number: int, rows: int, arrays: dict[str, jax.Array]) -> Mod:
    """Returns the function of a number.

    Args:
        number: fixes the code.
        rows: the number of queries.
        arrays: what it captures, see `captured`.
    """
    return _function(np.random.default_rng(number), rows, arrays, _DEPTH)


def _function(random: np.random.Generator, rows: int, arrays: dict[str, jax.Array], depth: int) -> Mod:
    if depth == 0:
        conditions = _conditions(random, rows, arrays)
        return conditions[int(random.integers(len(conditions)))]
    parts = [_function(random, rows, arrays, depth - 1) for _ in range(2)]
    kind = int(random.integers(3))

    def mask(*at: Any) -> Any:
        x, y = (part(*at) for part in parts)
        return [x & y, x | y, x | ~y][kind]

    return mask


def _conditions(random: np.random.Generator, rows: int, arrays: dict[str, jax.Array]) -> list[Mod]:
    low, high, period = (int(x) for x in random.integers(1, 60, 3))
    ids, widths, shown, blocks, points = (arrays[name] for name in ("ids", "widths", "shown", "blocks", "points"))
    return [
        lambda b, h, q, k: k <= q + low,
        lambda b, h, q, k: q - k < high,
        lambda b, h, q, k: (k - q) % period != 0,
        lambda b, h, q, k: k < low,
        lambda b, h, q, k: ids[b, q] == ids[b, k],
        lambda b, h, q, k: jnp.abs(q - k) <= widths[b, h],
        lambda b, h, q, k: shown[h, k - q + rows],
        lambda b, h, q, k: blocks[b, h, q // _BLOCK[0], k // _BLOCK[1]],
        lambda b, h, q, k: points[b, q] <= points[b, k],
    ]


def mask_operands(
    number: int, sizes: dict[str, int], dtype: str, arrays: dict[str, jax.Array]
) -> tuple[Program | None, dict[str, jax.Array]]:
    """Returns the program of a number, and the operands that it reads by name, given what it captures."""
    axes: Any = {name: sizes[name] for name in "BNTS"}
    program, found = mask_planes(axes, dtype, mask_function(number, sizes["T"], arrays))
    return program, planes.stack((None, program), ([], found))


@functools.lru_cache(1024)
def mask_shapes(number: int, sizes: tuple[tuple[str, int], ...], dtype: str) -> tuple[Program | None, dict[str, Any]]:
    """Returns the program of a number, and shapes and dtypes of the operands that it reads, without values."""
    found: list[Program | None] = []

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        program, arrays = mask_operands(number, dict(sizes), dtype, captured(dict(sizes), key))
        found.append(program)
        return arrays

    shapes = jax.eval_shape(operands, jax.eval_shape(lambda: jax.random.key(0)))
    return found[0], shapes
