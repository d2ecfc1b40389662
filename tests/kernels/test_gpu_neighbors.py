# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""On a GPU, rows of deterministic calls of few queries have the same bits in a batch and alone, dense and in pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention, paged_attention

pytestmark = pytest.mark.gpu

LENGTHS = (4500, 1, 2048, 2049, 0, 4096, 777)
SIZES = {"decoding": (1, 8, 2, 128), "checked tokens": (4, 8, 2, 64), "64 rows": (16, 8, 2, 128)}


@jax.jit
def _dense(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> Any:
    places = {"query_offset": lengths - query.shape[1], "key_value_seq_lengths": lengths, "is_causal": True}
    return attention(query, key, value, **places, deterministic=True, return_residual=True, implementation="cuda")


@jax.jit
def _paged(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, table: jax.Array) -> Any:
    options = {"is_causal": True, "deterministic": True, "return_residual": True, "implementation": "cuda"}
    return paged_attention(query, key, value, table, lengths, **options)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("page", [0, 16, 256])
def test_neighbors_do_not_change_the_bits_of_few_queries(name: str, page: int) -> None:
    queries, heads, kv_heads, head_dim = SIZES[name]
    batch, keys = len(LENGTHS), 4608
    shapes = (batch, queries, heads, head_dim), *[(batch, keys, kv_heads, head_dim)] * 2
    draws = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(x, shape, jnp.bfloat16) for x, shape in zip(draws, shapes, strict=True))
    lengths = jnp.array(LENGTHS, jnp.int32)
    more: tuple[jax.Array, ...] = ()
    if page:
        key, value = (x.reshape(-1, page, kv_heads, head_dim) for x in (key, value))
        more = (jnp.arange(len(key)).reshape(batch, -1),)
    call: Any = _paged if page else _dense
    together = call(query, key, value, lengths, *more)
    for b in range(batch):
        one = slice(b, b + 1)
        kept = (key, value) if page else (key[one], value[one])
        alone = call(query[one], *kept, lengths[one], *(x[one] for x in more))
        for whole, x in zip(together, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(whole[one]), np.asarray(x), err_msg=f"entry {b}")
