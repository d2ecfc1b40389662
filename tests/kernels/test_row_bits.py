# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Bits of rows say what the reference says, wherever a decoding kernel looks for them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.features.visible.row_planes import RowPlanes
from jax_fastattn.ops.cuda.row_bits import row_bits
from jax_fastattn.reference import visible_pairs

B, T, S, N, K = 3, 5, 83, 6, 2

# Shapes of masks, and other arguments.
CASES: dict[str, dict[str, Any]] = {
    "keys": {"mask": (1, 1, 1, S)},
    "keys-of-entries": {"mask": (B, 1, 1, S)},
    "queries": {"mask": (1, 1, T, 1)},
    "pairs": {"mask": (1, 1, T, S)},
    "heads": {"mask": (B, N, 1, S)},
    "heads-and-pairs": {"mask": (1, N, T, S)},
    "kv-heads": {"mask": (B, K, T, S)},
    "causal": {"mask": (1, 1, 1, S), "is_causal": True, "query_offset": (70, 3, -2)},
    "lengths": {"mask": (1, K, 1, S), "key_value_seq_lengths": (83, 0, 40), "query_seq_lengths": (5, 3, 0)},
    "ids": {"ids": jnp.int32, "local_window_size": (20, 30)},
    "ids-of-16-bits": {"ids": jnp.int16, "mask": (1, N, 1, 1)},
    "dark": {"mask": (B, 1, T, S), "density": 0.0},
}


@pytest.mark.parametrize("name", CASES)
def test_bits_of_rows_are_those_of_the_reference(name: str) -> None:
    random, case = np.random.default_rng(0), dict(CASES[name])
    density = case.pop("density", 0.1)
    if "mask" in case:
        case["mask"] = jnp.asarray(random.random(case["mask"]) < density)
    if dtype := case.pop("ids", None):
        case["segment_ids"] = tuple(jnp.asarray(random.integers(0, 3, (B, rows)), dtype) for rows in (T, S))
    case = {name: jnp.asarray(x, jnp.int32) if isinstance(x, tuple) and len(x) == B else x for name, x in case.items()}
    spec, operands = canonicalize(*(jnp.zeros((B, rows, heads, 8)) for rows, heads in ((T, N), (S, K), (S, K))), **case)
    seen = np.asarray(visible_pairs(spec, operands))
    bits = row_bits(spec, operands)
    words = np.asarray(bits.words).view(np.uint32)
    assert words.shape[-1] == -(-S // 32)
    rows = words.reshape(-1, words.shape[-1])[..., None] >> np.arange(32, dtype=np.uint32) & 1
    rows = rows.reshape(len(rows), -1).astype(bool)
    planes = RowPlanes(*bits.planes)
    group = N // K
    for b, k, row in np.ndindex(B, K, T * group):
        found = rows[planes.row((b, k), row, T, group)]
        np.testing.assert_array_equal(found[:S], seen[b, k * group + row % group, row // group])
        assert not found[S:].any()
    visible = seen.any((1, 2))
    for begin, end, keys in zip(bits.begin.tolist(), bits.end.tolist(), visible, strict=True):
        some = np.flatnonzero(keys)
        assert (begin, end) == ((some[0] // 32 * 32, min(some[-1] // 32 * 32 + 32, S)) if len(some) else (0, 0))


def test_bits_take_no_copy_of_keys() -> None:
    """Nothing of the size of the keys is read or written, and the bits of heads that share a mask are one plane."""
    mask = jnp.ones((B, 1, 1, S), bool)
    spec, operands = canonicalize(
        *(jnp.zeros((B, rows, heads, 8)) for rows, heads in ((T, N), (S, K), (S, K))), mask=mask
    )
    arrays = {"query": operands.query, "key": operands.key}

    def bits(query: jax.Array, key: jax.Array) -> jax.Array:
        return row_bits(spec, operands._replace(query=query, key=key)).words

    jaxpr = jax.make_jaxpr(bits)(**arrays)
    assert jaxpr.out_avals[0].shape == (B, 1, -(-S // 32))
    used = {id(x) for equation in jaxpr.jaxpr.eqns for x in equation.invars}
    assert not any(id(x) in used for x in jaxpr.jaxpr.invars)
