# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""T5's relative position bias: a learned table of buckets and heads, with gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

LENGTH, HEADS, HEAD_DIM, BUCKETS, FARTHEST = 96, 4, 32, 32, 128  # T5's last two


def buckets(distance):
    """Returns the bucket of each distance, key minus query, in both directions."""
    half, size = BUCKETS // 2, jnp.abs(distance)
    exact = (
        half // 2
    )  # small distances have a bucket each, large ones share by logarithm
    ratio = jnp.log(jnp.maximum(size, 1) / exact) / np.log(FARTHEST / exact)
    far = jnp.minimum(exact + (ratio * (half - exact)).astype(int), half - 1)
    return jnp.where(distance > 0, half, 0) + jnp.where(size < exact, size, far)


def loss(table, qkv, attend):
    """Uses table [BUCKETS, HEADS], a float32 parameter that all layers share."""
    positions = jnp.arange(LENGTH)
    bias = table[buckets(positions - positions[:, None])]  # [query, key, head]
    bias = jnp.moveaxis(bias, 2, 0)[None]  # [1, head, query, key]; keep it float32
    out = attend(*qkv, bias, scale=1.0)  # T5 does not scale its logits
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


keys = jax.random.split(jax.random.key(0), 4)
shape = (2, LENGTH, HEADS, HEAD_DIM)
qkv = [jax.random.normal(key, shape, jnp.bfloat16) / 2 for key in keys[:3]]
table = jax.random.normal(keys[3], (BUCKETS, HEADS))

step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
value, dtable = step(table, qkv, attention)
exact = [x.astype(jnp.float32) for x in qkv]
wanted_value, wanted = step(table, exact, jax.nn.dot_product_attention)
np.testing.assert_allclose(value, wanted_value, atol=0.5)
np.testing.assert_allclose(dtable, wanted, atol=0.02 * float(jnp.abs(wanted).max()))
