# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Extends a key/value cache: prefill and decoding are one function, in which `query_offset` places the new tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

BATCH, CAPACITY, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 8, 2, 64


@partial(jax.jit, donate_argnames="cache")  # the step writes into the memory of the cache that it is given
def extend(cache, q, k, v, start):
    """Writes new keys and values at row `start`; lets the new queries see all keys up to their own position."""
    updated = [jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=1) for x, new in zip(cache, (k, v), strict=True)]
    out = attention(q, *updated, is_causal=True, query_offset=start)
    return updated, out


def project(tokens, key=jax.random.key(0)):  # noqa: B008 (a constant; it stands for a model)
    """Returns q [batch, length, heads, head_dim], and k and v with fewer heads."""
    for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)):
        weight = jax.random.normal(jax.random.fold_in(key, i), (tokens.shape[-1], heads, HEAD_DIM), jnp.bfloat16)
        yield jnp.einsum("btc,cnh->btnh", tokens, weight) / 4


tokens = jax.random.normal(jax.random.key(1), (BATCH, 20, 16), jnp.bfloat16)
cache = [jnp.zeros((BATCH, CAPACITY, KV_HEADS, HEAD_DIM), jnp.bfloat16) for _ in range(2)]

cache, out = extend(cache, *project(tokens[:, :17]), 0)  # prefill
outs = [out]
for i in range(17, 20):  # one compiled program for all steps, since `start` is run-time data
    cache, out = extend(cache, *project(tokens[:, i : i + 1]), i)
    outs.append(out)

# The same as attention over the whole text.
whole = jax.nn.dot_product_attention(*project(tokens), is_causal=True)
np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=0.05, err_msg="cache")
