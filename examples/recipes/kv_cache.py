# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Extends a KV cache: prefill and decoding are one function, in which `query_offset`
places the new tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

BATCH, CAPACITY, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 8, 2, 64


@partial(jax.jit, donate_argnames="cache")  # it writes into the memory of the old cache
def extend(cache, q, k, v, start):
    """Writes new keys and values at row `start`; query i sees keys up to start + i."""
    write = jax.lax.dynamic_update_slice_in_dim
    cache = [
        write(old, new, start, axis=1) for old, new in zip(cache, (k, v), strict=True)
    ]
    return cache, attention(q, *cache, is_causal=True, query_offset=start)


def project(tokens):  # stands for a model
    """Returns q [batch, length, heads, head_dim], and k and v with fewer heads."""
    for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)):
        shape = (tokens.shape[-1], heads, HEAD_DIM)
        weight = jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        yield jnp.einsum("btc,cnh->btnh", tokens, weight) / 4


tokens = jax.random.normal(jax.random.key(9), (BATCH, 20, 16), jnp.bfloat16)
shape = (BATCH, CAPACITY, KV_HEADS, HEAD_DIM)
cache = [jnp.zeros(shape, jnp.bfloat16) for _ in range(2)]

cache, out = extend(cache, *project(tokens[:, :17]), 0)  # prefill
outs = [out]
for i in range(17, 20):  # `start` is run-time data: one program serves all steps
    cache, out = extend(cache, *project(tokens[:, i : i + 1]), i)
    outs.append(out)

# The same as attention over the whole text.
whole = jax.nn.dot_product_attention(*project(tokens), is_causal=True)
np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=0.05)
