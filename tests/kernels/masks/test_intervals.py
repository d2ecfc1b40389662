# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What intervals say of the pairs of a tile, against the function of every pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn.canonical.programs import mask_planes
from jax_fastattn.cases import mask_functions
from jax_fastattn.kernels.tiles.intervals import Interval, Tile, Truth
from jax_fastattn.programs.code import Code

SIZES: Any = {"B": 2, "N": 2, "T": 61, "S": 90}
ROWS, KEYS = 16, 32
IDS = jnp.asarray(np.repeat(np.arange(3), 30))
WIDTHS = jnp.array([7, 40])


class PythonArithmetic:
    """Of Python integers, which must not leave int32."""

    def minimum(self, x: int, y: int) -> int:
        return min(x, y)

    def maximum(self, x: int, y: int) -> int:
        return max(x, y)

    def where(self, condition: bool, x: int, y: int) -> int:
        return x if condition else y

    def quotient(self, x: int, divisor: int) -> int:
        return abs(x) // divisor * (1 if x >= 0 else -1)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def said(mod: Any, entry: int, head: int) -> tuple[list[Truth], np.ndarray]:
    """Returns what intervals say of each tile of a batch entry and a head, and the pairs `[T, S]`."""
    code, planes = mask_planes(SIZES, "float32", mod)
    assert isinstance(code, Code)
    arrays = [np.asarray(x)[entry % x.shape[0], head % x.shape[1]] for x in planes]
    found = []
    for first_query in range(0, SIZES["T"], ROWS):
        for first_key in range(0, SIZES["S"], KEYS):
            ends = {
                "query": (first_query, min(first_query + ROWS, SIZES["T"]) - 1),
                "key": (first_key, min(first_key + KEYS, SIZES["S"]) - 1),
                "head": (0, 0),
            }

            def plane(i: int, ends: Any = ends) -> Interval | None:
                if code.planes[i].kind not in ends:
                    return None
                low, high = ends[code.planes[i].kind]
                x = arrays[i][low : high + 1]
                return Interval(int(x.min()), int(x.max()))

            found.append(Tile(code, ends["query"], ends["key"], plane, PythonArithmetic()).result())
    rows, keys = np.meshgrid(np.arange(SIZES["T"]), np.arange(SIZES["S"]), indexing="ij")
    of_pairs = jax.vmap(jax.vmap(lambda q, k: mod(entry, head, q, k)))
    return found, np.asarray(of_pairs(jnp.asarray(rows, jnp.int32), jnp.asarray(keys, jnp.int32)))


def tiles(pairs: np.ndarray) -> list[np.ndarray]:
    return [pairs[i : i + ROWS, j : j + KEYS] for i in range(0, SIZES["T"], ROWS) for j in range(0, SIZES["S"], KEYS)]


# Intervals decide each tile of these functions that is hidden, or visible as a whole.
DECIDED = {
    "causal": lambda b, h, q, k: q >= k,
    "strict": lambda b, h, q, k: ~(k > q - 1),
    "window": lambda b, h, q, k: (q - k < WIDTHS[h]) & (k <= q),
    "around": lambda b, h, q, k: jnp.abs(q - k) <= 20,
    "prefix": lambda b, h, q, k: (q >= k) | (k < WIDTHS[b]),
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "not this document": lambda b, h, q, k: IDS[q] != IDS[k],
    "blocks": lambda b, h, q, k: q // 16 == k // 32,
    "of heads": lambda b, h, q, k: jnp.where(h == 0, q >= k, k - q > -30),
    "between": lambda b, h, q, k: jnp.clip(k, 16, 40) > jnp.minimum(q, 50) // 2 * 2,
    "everything": lambda b, h, q, k: q >= 0,
    "nothing": lambda b, h, q, k: (q < 0) ^ (k > 1000),
}


@pytest.mark.parametrize("name", DECIDED)
def test_tiles_are_decided(name: str) -> None:
    for entry, head in ((0, 0), (1, 1)):
        found, pairs = said(DECIDED[name], entry, head)
        for truth, tile in zip(found, tiles(pairs), strict=True):
            assert (truth.may, truth.must) == (int(tile.any()), int(tile.all()))


# Of these, and of random functions, no tile may be decided wrongly.
OTHERS = {
    "dilated": lambda b, h, q, k: (q - k) % 3 == 0,
    "remainders": lambda b, h, q, k: (q % 16 < 8) & (jax.lax.rem(k - 40, 64) > -25),
    "far": lambda b, h, q, k: (q - jnp.int32(2**31 - 1) < k) & (k - 2**30 < q),
    "wraps": lambda b, h, q, k: IDS[q] * 2**30 + IDS[k] > IDS[k] * 2**29,
    "products": lambda b, h, q, k: q * k > 200,
    "largest": lambda b, h, q, k: jnp.abs(IDS[q] * -(2**30)) >= k,
    "flags": lambda b, h, q, k: (q > 20).astype(jnp.int32) + (k > 40) * 2 - (q >= k) == 1,
    "same": lambda b, h, q, k: (q > 20) == (k > 40),
    "ordered": lambda b, h, q, k: ((q > 20) < (k > 40)) | ((q > 40) >= (k > 20)),
}


@pytest.mark.parametrize("name", [*OTHERS, *(f"random {number}" for number in range(12))])
def test_no_tile_is_decided_wrongly(name: str) -> None:
    mod = OTHERS.get(name)
    if mod is None:
        arrays = mask_functions.captured(SIZES, jax.random.key(0))
        mod = mask_functions.mask_function(int(name.split()[1]), SIZES["T"], arrays)
    found, pairs = said(mod, 1, 1)
    for truth, tile in zip(found, tiles(pairs), strict=True):
        assert truth.may or not tile.any()
        assert not truth.must or tile.all()
        assert {truth.may, truth.must} <= {0, 1}
