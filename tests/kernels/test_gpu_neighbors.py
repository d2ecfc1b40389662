# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""On a GPU, rows of deterministic calls have the same bits in a batch and alone.

These are calls of few queries, dense and in pages, and both passes of calls of many, with masks and packed. Forward
results of many queries do not depend on `deterministic`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention, attention_varlen, paged_attention

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


# Batch, queries, keys, query heads, key/value heads, head dim, dtype, and what the call has.
MANY = {
    "full-d64": (5, 700, 900, 4, 2, 64, "bfloat16", ()),
    "causal-d128": (3, 2500, 2500, 4, 2, 128, "bfloat16", ("causal",)),
    "mask-d128": (4, 500, 600, 4, 4, 128, "bfloat16", ("mask",)),
    "ids-d64": (4, 1300, 1300, 4, 2, 64, "bfloat16", ("causal", "ids")),
    "lengths-d64": (5, 800, 1000, 4, 2, 64, "bfloat16", ("lengths",)),
    "causal-d192": (3, 400, 400, 4, 2, 192, "bfloat16", ("causal",)),
    "causal-float16": (3, 1200, 1200, 4, 2, 128, "float16", ("causal",)),
    "causal-float32": (3, 500, 500, 4, 2, 64, "float32", ("causal",)),
}


def _draw(name: str) -> tuple[list[jax.Array], dict[str, jax.Array], dict[str, Any]]:
    """Returns query, key, value and the cotangent; arrays with a batch axis; and static arguments."""
    batch, queries, keys, heads, kv_heads, head_dim, dtype, features = MANY[name]
    draws = jax.random.split(jax.random.key(7), 6)
    rows, columns = (batch, queries, heads, head_dim), (batch, keys, kv_heads, head_dim)
    arrays = [jax.random.normal(x, y, dtype) for x, y in zip(draws[:4], (rows, columns, columns, rows), strict=True)]
    more: dict[str, jax.Array] = {}
    if "mask" in features:
        more["mask"] = jax.random.bernoulli(draws[4], 0.8, (batch, 1, queries, keys))
    if "ids" in features:
        more["segment_ids"] = jnp.sort(jax.random.randint(draws[4], (batch, queries), 0, 4), axis=1)
    if "lengths" in features:
        more["query_seq_lengths"] = jax.random.randint(draws[4], (batch,), 1, queries + 1)
        more["key_value_seq_lengths"] = jax.random.randint(draws[5], (batch,), 1, keys + 1)
    return arrays, more, {"is_causal": "causal" in features, "deterministic": True, "implementation": "cuda"}


@pytest.mark.parametrize("name", MANY)
def test_neighbors_do_not_change_the_bits_of_both_passes(name: str) -> None:
    arrays, more, options = _draw(name)

    @jax.jit
    def call(query: Any, key: Any, value: Any, dout: Any, more: dict[str, Any]) -> Any:
        def attend(*arrays: Any) -> Any:
            return attention(*arrays, **more, **options, return_residual=True)

        (out, lse), pullback = jax.vjp(attend, query, key, value)
        return out, lse, *pullback((dout, jnp.zeros_like(lse)))

    together = call(*arrays, more)
    for b in range(len(arrays[0])):
        one = slice(b, b + 1)
        alone = call(*(x[one] for x in arrays), {name: x[one] for name, x in more.items()})
        for whole, x in zip(together, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(whole[one]), np.asarray(x), err_msg=f"entry {b}")


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_neighbors_do_not_change_the_bits_of_a_packed_sequence(head_dim: int) -> None:
    """The array has the same length each time, since it decides which tiles a kernel has; the place is another."""
    total, length = 1500, 411
    draws = jax.random.split(jax.random.key(8), 4)
    arrays = [
        jax.random.normal(x, (total, heads, head_dim), jnp.bfloat16)
        for x, heads in zip(draws, (4, 2, 2, 4), strict=True)
    ]

    @jax.jit
    def call(query: Any, key: Any, value: Any, dout: Any, bounds: Any) -> Any:
        def attend(*arrays: Any) -> Any:
            return attention_varlen(*arrays, bounds, bounds, is_causal=True, deterministic=True, implementation="cuda")

        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    together = call(*arrays, jnp.array([0, 300, 300 + length, total], jnp.int32))
    moved = [jnp.roll(x, -300, axis=0) for x in arrays]
    alone = call(*moved, jnp.array([0, length, length, length], jnp.int32))
    for whole, x in zip(together, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(whole[300 : 300 + length]), np.asarray(x[:length]))
