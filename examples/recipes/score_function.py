# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Your own score function: KERPLE's decay with distance, learned for each head."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

LENGTH, HEADS, HEAD_DIM = 128, 4, 32


def decay(params):
    """Returns a `score_mod`; the arrays that it captures are trained."""
    strength, rate = jax.nn.softplus(params)  # [2, heads], float32

    def score_mod(score, b, h, q, k):  # JAX scalars: entry, head, and the two rows
        return score - strength[h] * jnp.log1p(rate[h] * jnp.abs(q - k))

    return score_mod


def loss(params, q, k, v):
    out = attention(q, k, v, is_causal=True, score_mod=decay(params))
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def loss_with_bias(params, q, k, v):
    """Says the same by an array [heads, query, key], which a score function avoids."""
    strength, rate = jax.nn.softplus(params)[..., None, None]
    rows = jnp.arange(LENGTH)
    bias = -strength * jnp.log1p(rate * jnp.abs(rows[:, None] - rows))
    out = jax.nn.dot_product_attention(q, k, v, bias[None], is_causal=True)
    return jnp.sum(jnp.sin(out))


params = jax.random.normal(jax.random.key(0), (2, HEADS))
keys, shape = jax.random.split(jax.random.key(1), 3), (2, LENGTH, HEADS, HEAD_DIM)
qkv = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
found = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, *qkv)  # of params and of q

exact = [x.astype(jnp.float32) for x in qkv]
wanted = jax.jit(jax.grad(loss_with_bias, argnums=(0, 1)))(params, *exact)
for x, y in zip(found, wanted, strict=True):
    np.testing.assert_allclose(x.astype(float), y, atol=0.03 * float(np.abs(y).max()))
