# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What edge tiles compare in the place of bits, against the visible pairs of the reference."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.choose import list_sizes
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.ops.cuda.compared import ComparedRowsArrays, compared_rows
from jax_fastattn.reference import visible_pairs
from jax_fastattn.spec import AttentionSpec, Operands, Problem

B, T, S, N, K = 3, 70, 83, 4, 2
LENGTHS = {"query_seq_lengths": [70, 0, 41], "key_value_seq_lengths": [50, 83, 0]}
EXTREME = (1 << 31) - 1

CASES: dict[str, dict[str, Any]] = {
    "ids": {"ids": 3},
    "ids-causal-offset": {"ids": 2, "is_causal": True, "query_offset": [20, -30, 0]},
    "ids-window-lengths": {"ids": 2, "local_window_size": (13, 7), **LENGTHS},
    "extreme-offsets": {"ids": 1, "local_window_size": (EXTREME, 5), "query_offset": [EXTREME, -EXTREME, 60]},
    "b11s-lengths": {"mask": (B, 1, 1, S), **LENGTHS},
    "1n1s-causal": {"mask": (1, N, 1, S), "is_causal": True},
    "bk1s-ids": {"mask": (B, K, 1, S), "ids": 2},
    "b1t1-ids-window": {"mask": (B, 1, T, 1), "ids": 2, "local_window_size": (9, None)},
    "1n11": {"mask": (1, N, 1, 1)},
}


def draw(ids: int = 0, mask: tuple[int, ...] | None = None, **more: Any) -> tuple[AttentionSpec, Operands]:
    """Returns a call; ids are negative, too."""
    random = np.random.default_rng(0)
    query, key = (jnp.zeros((B, *shape, 8), jnp.bfloat16) for shape in ((T, N), (S, K)))
    if ids:
        more["segment_ids"] = tuple(jnp.asarray(random.integers(-1, ids, (B, rows)), jnp.int32) for rows in (T, S))
    if mask is not None:
        more["mask"] = jnp.asarray(random.random(mask) < 0.6)
    more = {name: jnp.asarray(x, jnp.int32) if isinstance(x, list) else x for name, x in more.items()}
    return canonicalize(query, key, key, **more)


def seen_by(rows: ComparedRowsArrays, own: int, visited: int) -> np.ndarray:
    """Returns `[planes, own, visited]`: which own row sees which visited row. Padding sees nothing, and is not seen."""
    low, high, columns = rows.records[..., 1], rows.records[..., 2], np.arange(rows.ids.shape[1])
    same = np.asarray(rows.records[..., :1]) == np.asarray(rows.ids)[:, None]
    found = same & (columns >= np.asarray(low)[..., None]) & (columns < np.asarray(high)[..., None])
    assert not found[:, own:].any() and not found[..., visited:].any()
    return found[:, :own, :visited]


@pytest.mark.parametrize("transposed", [False, True], ids=["key-lists", "query-lists"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_see_what_the_reference_sees(case: dict[str, Any], transposed: bool) -> None:
    spec, operands = draw(**case)
    config = PrepassConfig(32, 48, transposed, bits=False)
    sizes = list_sizes(Problem.of(spec, operands), config)
    rows = compared_rows(spec, operands, config, sizes)
    found = seen_by(rows, S, T).swapaxes(1, 2) if transposed else seen_by(rows, T, S)
    found = np.broadcast_to(found.reshape(sizes.batch, sizes.heads, T, S), (B, sizes.heads, T, S))
    wanted = np.asarray(visible_pairs(spec, operands))
    if operands.query_seq_lengths is not None and not transposed:
        # What padding sees does not matter where queries have lists.
        found = found & (np.arange(T)[:, None] < np.asarray(operands.query_seq_lengths)[:, None, None, None])
    np.testing.assert_array_equal(found.repeat(N // sizes.heads, 1), wanted.repeat(N // wanted.shape[1], 1))
    assert wanted.any() and not wanted.all()
