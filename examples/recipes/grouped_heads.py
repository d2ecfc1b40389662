# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention: keys and values keep their few heads, in the forward and the backward pass."""

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
    return jax.nn.dot_product_attention(q, jnp.repeat(k, GROUP, axis=2), jnp.repeat(v, GROUP, axis=2), **options)


dk, dv = jax.grad(loss, (0, 1))(k, v, attention)
assert dk.shape == dv.shape == (BATCH, LENGTH, KV_HEADS, HEAD_DIM)

# A mask or a bias has a head axis of 1 or HEADS; a mask may also have one row for each key/value head.
mask = jax.random.bernoulli(jax.random.key(1), 0.7, (BATCH, KV_HEADS, LENGTH, LENGTH)).at[..., 0].set(True)
out = attention(q, k, v, mask=mask)

for found, wanted in zip((dk, dv), jax.grad(loss, (0, 1))(k, v, attend_repeated), strict=True):
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), atol=0.02 * float(jnp.abs(wanted).max()))
wanted = attend_repeated(q, k, v, mask=jnp.repeat(mask, GROUP, axis=1))
np.testing.assert_allclose(out.astype(float), wanted.astype(float), atol=0.05)
