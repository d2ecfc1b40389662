# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A causal layer in equinox with grouped heads, mapped over the batch."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 32


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key_value: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        linear = partial(eqx.nn.Linear, use_bias=False, dtype=jnp.bfloat16)
        self.query = linear(WIDTH, HEADS * HEAD_DIM, key=keys[0])
        self.key_value = linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, key=keys[1])
        self.out = linear(HEADS * HEAD_DIM, WIDTH, key=keys[2])

    def __call__(self, x, attend=attention):
        """Returns the output for one sequence x [length, WIDTH]."""
        q = jax.vmap(self.query)(x).reshape(-1, HEADS, HEAD_DIM)
        kv = jax.vmap(self.key_value)(x).reshape(-1, 2, KV_HEADS, HEAD_DIM)
        out = attend(q, kv[:, 0], kv[:, 1], is_causal=True)
        return jax.vmap(self.out)(out.reshape(-1, HEADS * HEAD_DIM))


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(layer, x, attend):
    out = jax.vmap(lambda x: layer(x, attend))(x)  # one kernel launch for the batch
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


layer = Attention(jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (3, 64, WIDTH), jnp.bfloat16)
value, gradient = loss(layer, x, attention)
wanted_value, wanted = loss(layer, x, jax.nn.dot_product_attention)
np.testing.assert_allclose(value, wanted_value, rtol=1e-2)
for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
    x, y = x.astype(float), y.astype(float)
    np.testing.assert_allclose(x, y, atol=0.03 * float(jnp.abs(y).max()))
