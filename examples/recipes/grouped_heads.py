# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention: keys and values keep their few heads in both passes."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 8, 2, 64
GROUP = HEADS // KV_HEADS  # query head n reads key/value head n // GROUP

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (
    jax.random.normal(key, (BATCH, LENGTH, heads, HEAD_DIM), jnp.bfloat16)
    for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True)
)


def loss(k, v, attend):
    return jnp.sum(jnp.sin(attend(q, k, v, is_causal=True).astype(jnp.float32)))


def attend_repeated(q, k, v, **options):
    """What to avoid: this copies keys and values, and their gradients, GROUP times."""
    k, v = (jnp.repeat(x, GROUP, axis=2) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, **options)


dk, dv = jax.grad(loss, (0, 1))(k, v, attention)
assert dk.shape == dv.shape == (BATCH, LENGTH, KV_HEADS, HEAD_DIM)

# The head axis of a mask or bias has size 1, HEADS or KV_HEADS.
mask = jax.random.bernoulli(jax.random.key(1), 0.7, (BATCH, KV_HEADS, LENGTH, LENGTH))
mask = mask.at[..., 0].set(True)
out = attention(q, k, v, mask=mask)

wanted = jax.grad(loss, (0, 1))(k, v, attend_repeated)
for x, y in zip((dk, dv), wanted, strict=True):
    x, y = x.astype(float), y.astype(float)
    np.testing.assert_allclose(x, y, atol=0.02 * float(jnp.abs(y).max()))
wanted = attend_repeated(q, k, v, mask=jnp.repeat(mask, GROUP, axis=1))
np.testing.assert_allclose(out.astype(float), wanted.astype(float), atol=0.05)
