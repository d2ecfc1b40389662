# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention weights in equinox: a key for each example, under `vmap`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention, dropout_mask

WIDTH, HEADS, HEAD_DIM, RATE = 64, 4, 16, 0.1


class Attention(eqx.Module):
    qkv: eqx.nn.Linear
    inference: bool = False  # `eqx.nn.inference_mode` changes it

    def __call__(self, x, key=None):
        """Returns the output for one sequence x [length, WIDTH]."""
        qkv = jax.vmap(self.qkv)(x).reshape(-1, 3, HEADS, HEAD_DIM)
        rate = 0.0 if self.inference else RATE
        out = attention(*jnp.moveaxis(qkv, 1, 0), dropout_rate=rate, dropout_key=key)
        return out.reshape(-1, WIDTH)


layer = Attention(eqx.nn.Linear(WIDTH, 3 * WIDTH, key=jax.random.key(0)))
x = jax.random.normal(jax.random.key(1), (3, 24, WIDTH))
keys = jax.random.split(jax.random.key(2), 3)
out = eqx.filter_jit(lambda layer, x, keys: jax.vmap(layer)(x, keys))(layer, x, keys)

# The same for the last example, with all of its weights.
qkv = jax.vmap(layer.qkv)(x[-1]).reshape(-1, 3, HEADS, HEAD_DIM)
query, key, value = jnp.moveaxis(qkv, 1, 0)
logits = jnp.einsum("tnh,snh->nts", query, key) / HEAD_DIM**0.5
keep = dropout_mask(keys[-1], RATE, (1, *logits.shape))[0]
weights = jnp.where(keep, jax.nn.softmax(logits) / (1 - RATE), 0)
wanted = jnp.einsum("nts,snh->tnh", weights, value).reshape(-1, WIDTH)
np.testing.assert_allclose(out[-1], wanted, atol=1e-4)

layer = eqx.nn.inference_mode(layer)
np.testing.assert_array_equal(layer(x[0]), layer(x[0], keys[0]))
