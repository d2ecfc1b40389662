# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Programs of some rows of a call: the code that they get, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import mods
import numpy as np
import pytest
from mods import B, N, S, T

from jax_fastattn.canonical.programs import programs
from jax_fastattn.programs.code import Code
from jax_fastattn.programs.parts import Part, of_part
from jax_fastattn.spec import QKV, AttentionSpec, Operands
from jax_fastattn.xla import mods as xla_mods
from jax_fastattn.xla.chunks import Span

Mod = Callable[..., Any]
# The second part of three of the queries, and 10 keys from the 21st on.
PART = Part(8, 21, 8, 10, T)
COUNT = jnp.int32(-5)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


MASKS: dict[str, Mod] = mods.MASKS | {
    "few keys": lambda b, h, q, k: k < 25,
    "late keys": lambda b, h, q, k: k >= 25,
    "few queries": lambda b, h, q, k: (q < 11) | (q == 13),
    "window": lambda b, h, q, k: (q - k <= -10) & (k - q > 8),
    "far": lambda b, h, q, k: (q - k + 2**30 > 2**30 - 12) | (k > q + 2**29),
    "one distance": lambda b, h, q, k: (k - 13 == q) | (k != q + 14) & (2 * q > k),
    "both signs": lambda b, h, q, k: (q + k > 35) & (-k < -22),
    "captured": lambda b, h, q, k: (q - k > COUNT - 9) | (k - h < 23 - COUNT),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_some_rows_is_a_part_of_the_mask(name: str) -> None:
    found, planes = programs({"B": B, "N": N, "T": T, "S": S}, jnp.float32, None, MASKS[name])  # pyright: ignore[reportArgumentType]
    x = jnp.zeros((B, T, N, 1)), *(jnp.zeros((B, S, 2, 1)),) * 2
    of_pairs = np.broadcast_to(_counts(found["mask_mod"], Operands(*x, **planes), T, S), (B, 2, 2, T, S))
    (_, mask), planes = of_part((None, found["mask_mod"]), planes, PART)
    x = jnp.zeros((B, 8, N, 1)), *(jnp.zeros((B, 10, 2, 1)),) * 2
    of_part_alone = np.broadcast_to(_counts(mask, Operands(*x, **planes), 8, 10), (B, 2, 2, 8, 10))
    np.testing.assert_array_equal(of_part_alone, of_pairs[..., 8:16, 21:31])


def _counts(mask: Any, operands: Operands, queries: int, keys: int) -> jax.Array:
    spec = AttentionSpec(1.0, mask_mod=mask, present=QKV)
    return xla_mods.counts(spec, operands, Span(0, queries), Span(0, keys), (queries, keys))


# The function, and its code in a part, of which plane 0 is the first query, 1 the first key and 2 their distance.
CODES: dict[str, tuple[Mod, str]] = {
    "causal": (lambda b, h, q, k: q >= k, "0:i = plane 2; 1:i = affine 1 -1 0; 2:b = ge 1 0; return 2"),
    "window": (lambda b, h, q, k: k - q < 7, "0:i = plane 2; 1:i = affine 1 -1 7; 2:b = lt 0 1; return 2"),
    "keys": (lambda b, h, q, k: k < 7, "0:i = plane 1; 1:i = affine 0 -1 7; 2:b = lt 0 1; return 2"),
    "queries": (lambda b, h, q, k: q > 7, "0:i = plane 0; 1:i = affine -1 0 7; 2:b = gt 0 1; return 2"),
}


@pytest.mark.parametrize("name", CODES)
def test_a_comparison_of_positions_stays_one(name: str) -> None:
    """The prepass decides whole tiles by it: one side is a number of the head, the other one a sum of positions."""
    mod, text = CODES[name]
    found, planes = programs({"B": B, "N": N, "T": T, "S": S}, jnp.float32, None, mod)  # pyright: ignore[reportArgumentType]
    (_, mask), planes = of_part((None, found["mask_mod"]), planes, PART)
    assert isinstance(mask, Code) and str(mask) == text
    assert planes["head_integers"].tolist() == [[[8, 21, 13]]]


def test_a_function_that_asks_for_no_row_stays_as_it_is() -> None:
    slopes = mods.array("alibi")
    found, planes = programs(
        {"B": B, "N": N, "T": T, "S": S},  # pyright: ignore[reportArgumentType]
        jnp.float32,
        lambda s, b, h, q, k: s * slopes[h],
        lambda b, h, q, k: mods.IDS[b, q] == mods.IDS[b, k],
    )
    before = found["score_mod"], found["mask_mod"]
    after, planes = of_part(before, planes, PART)
    assert before == tuple(after)
    assert {name: x.shape[3] for name, x in planes.items() if x.ndim == 4} == {"query_integers": 8, "key_integers": 10}
