# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random functions of positions, which cases take as `mask_mod` in addition to their other arguments.

A number fixes the code of a function, and a key the values of the arrays that it captures: calls with the same number
share kernels. Tests alone draw such cases; `Case`, by which commands describe calls, builds the functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical.packed import packed_rows
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


def mask_function(number: int, rows: int, arrays: dict[str, jax.Array], *, is_packed: bool = False) -> Mod:
    """Returns the function of a number.

    Args:
        number: fixes the code.
        rows: the number of queries.
        arrays: what it captures, see `captured`.
        is_packed: whether sequences are packed. The number of a sequence belongs to a query then, so that a function
            with floats of a key and a sequence has no code.
    """
    return _function(np.random.default_rng(number), rows, arrays, is_packed, _DEPTH)


def _function(random: np.random.Generator, rows: int, arrays: dict[str, jax.Array], is_packed: bool, depth: int) -> Mod:
    if depth == 0:
        conditions = _conditions(random, rows, arrays, is_packed)
        return conditions[int(random.integers(len(conditions)))]
    parts = [_function(random, rows, arrays, is_packed, depth - 1) for _ in range(2)]
    kind = int(random.integers(3))

    def mask(*at: Any) -> Any:
        x, y = (part(*at) for part in parts)
        return [x & y, x | y, x | ~y][kind]

    return mask


def _conditions(random: np.random.Generator, rows: int, arrays: dict[str, jax.Array], is_packed: bool) -> list[Mod]:
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
        lambda b, h, q, k: points[b, q] <= points[0 if is_packed else b, k],
    ]


def mask_operands(
    number: int, sizes: dict[str, int], dtype: str, arrays: dict[str, jax.Array], sequences: jax.Array | None = None
) -> tuple[Program | None, dict[str, jax.Array]]:
    """Returns the program of a number, and the operands that it reads by name.

    Args:
        number: fixes the code.
        sizes: of the call, by axis letter.
        dtype: the dtype of the query.
        arrays: what the function captures. For packed sequences, a batch entry in it is a sequence.
        sequences: packed sequences `[M, R]`; None without.
    """
    axes: Any = {name: sizes[name] for name in "BNTS"}
    function = mask_function(number, sizes["T"], arrays, is_packed=sequences is not None)
    rows = None if sequences is None else packed_rows(sequences, (sizes["T"], sizes["S"]))
    program, found = mask_planes(axes, dtype, function, rows=rows)
    return program, planes.stack((None, program), ([], found))


@functools.lru_cache(1024)
def mask_shapes(
    number: int, sizes: tuple[tuple[str, int], ...], dtype: str, num_sequences: int = 0
) -> tuple[Program | None, dict[str, Any]]:
    """Returns the program of a number, and shapes and dtypes of the operands that it reads, without values."""
    found: list[Program | None] = []

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        sequences = jnp.zeros((num_sequences + 2, 4), jnp.int32) if num_sequences else None
        arrays = captured(dict(sizes) | ({"B": num_sequences} if num_sequences else {}), key)
        program, planes = mask_operands(number, dict(sizes), dtype, arrays, sequences)
        found.append(program)
        return planes

    shapes = jax.eval_shape(operands, jax.eval_shape(lambda: jax.random.key(0)))
    return found[0], shapes
