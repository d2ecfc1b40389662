# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A causal layer in equinox, mapped over the batch; grouped heads, which `eqx.nn.MultiheadAttention` lacks."""

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
        self.query = eqx.nn.Linear(WIDTH, HEADS * HEAD_DIM, use_bias=False, dtype=jnp.bfloat16, key=keys[0])
        self.key_value = eqx.nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, use_bias=False, dtype=jnp.bfloat16, key=keys[1])
        self.out = eqx.nn.Linear(HEADS * HEAD_DIM, WIDTH, use_bias=False, dtype=jnp.bfloat16, key=keys[2])

    def __call__(self, x, attend=attention):
        """Returns the output for one sequence x [length, WIDTH]: `attention` needs no batch axis."""
        q = jax.vmap(self.query)(x).reshape(-1, HEADS, HEAD_DIM)
        k, v = jnp.split(jax.vmap(self.key_value)(x).reshape(-1, 2 * KV_HEADS, HEAD_DIM), 2, axis=1)
        return jax.vmap(self.out)(attend(q, k, v, is_causal=True).reshape(-1, HEADS * HEAD_DIM))


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(layer, x, attend):
    out = jax.vmap(lambda x: layer(x, attend))(x)  # one kernel launch for the batch
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


layer = Attention(jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (3, 64, WIDTH), jnp.bfloat16)
value, gradient = loss(layer, x, attention)
wanted_value, wanted_gradient = loss(layer, x, jax.nn.dot_product_attention)
np.testing.assert_allclose(value, wanted_value, rtol=1e-2)
for found, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), atol=0.03 * float(jnp.abs(wanted).max()))
