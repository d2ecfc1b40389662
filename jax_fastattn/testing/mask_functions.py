# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random functions of positions, which calls take as `mask_mod` in addition to their other arguments."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical.programs import mask_planes
from jax_fastattn.cases.case import Case
from jax_fastattn.programs import planes
from jax_fastattn.spec import AttentionSpec, Operands

Mod = Callable[..., Any]

# Conjunctions and disjunctions of up to four conditions.
_DEPTH = 2


def has_random_mask(case: Case) -> bool:
    """Returns whether `with_random_mask` adds a function: to half of the calls that are not packed."""
    return case.packed is None and zlib.crc32(str(case).encode()) % 2 == 1


def with_random_mask(case: Case, spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns spec and operands of a case with a random function, the same one in every run; see `has_random_mask`."""
    if not has_random_mask(case):
        return spec, operands
    random = np.random.default_rng(zlib.crc32(str(case).encode()))
    sizes: Any = {name: case.shape[name] for name in "BNTS"}
    program, arrays = mask_planes(sizes, case.dtype, random_mask(random, case.shape, _DEPTH))
    operands = operands._replace(**planes.stack((None, program), ([], arrays)))
    return dataclasses.replace(spec, mask_mod=program, present=operands.present()), operands


def random_mask(random: np.random.Generator, sizes: dict[str, int], depth: int) -> Mod:
    """Returns a random function, given the sizes of a call by axis letter."""
    if depth == 0:
        conditions = _conditions(random, sizes)
        return conditions[int(random.integers(len(conditions)))]
    parts = [random_mask(random, sizes, depth - 1) for _ in range(2)]
    kind = int(random.integers(3))

    def mask(*at: Any) -> Any:
        x, y = (part(*at) for part in parts)
        return [x & y, x | y, x | ~y][kind]

    return mask


def _conditions(random: np.random.Generator, sizes: dict[str, int]) -> list[Mod]:
    """Returns conditions of positions, and of captured numbers of each kind of plane and of a table."""
    batch, heads, rows, columns = (sizes[name] for name in "BNTS")
    low, high, period = (int(x) for x in random.integers(1, 60, 3))
    longest = max(rows, columns)
    ids = jnp.asarray(np.sort(random.integers(0, 4, (batch, longest)), axis=1), jnp.int32)
    widths = jnp.asarray(random.integers(0, longest, (batch, heads)), jnp.int32)
    shown = jnp.asarray(random.random((heads, rows + columns)) < 0.8)
    blocks = jnp.asarray(random.random((batch, heads, rows // 16 + 1, columns // 32 + 1)) < 0.7)
    return [
        lambda b, h, q, k: k <= q + low,
        lambda b, h, q, k: q - k < high,
        lambda b, h, q, k: (k - q) % period != 0,
        lambda b, h, q, k: k < low,
        lambda b, h, q, k: ids[b, q] == ids[b, k],
        lambda b, h, q, k: jnp.abs(q - k) <= widths[b, h],
        lambda b, h, q, k: shown[h, k - q + rows],
        lambda b, h, q, k: blocks[b, h, q // 16, k // 32],
    ]
