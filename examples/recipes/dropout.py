# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning with dropout of attention weights, as in BERT: a new key in each step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import dropout_mask
from jax_fastattn.integrations.flax import attention_fn

LENGTH, WIDTH, HEADS, RATE = 32, 64, 4, 0.1  # BERT large has 512, 1024, 16, 0.1


class Classifier(nn.Module):
    attention_fn: object

    @nn.compact
    def __call__(self, x):
        options = {"dropout_rate": RATE, "broadcast_dropout": False}
        options["attention_fn"] = self.attention_fn
        attend = nn.MultiHeadDotProductAttention(HEADS, **options)
        x = nn.LayerNorm()(x + attend(x, deterministic=False))
        return nn.log_softmax(nn.Dense(2)(x[:, 0]))


def explicit(query, key, value, dropout_rng=None, dropout_rate=0.0):
    """Computes what `attention_fn` does, with all weights in memory."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(logits) / (1 - dropout_rate)
    keep = dropout_mask(dropout_rng, dropout_rate, weights.shape)
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights, 0), value)


def train(attention_fn, x, labels, steps=10):
    model, losses = Classifier(attention_fn), []
    parameters = model.init(dict.fromkeys(["params", "dropout"], jax.random.key(1)), x)

    @jax.jit
    def step(parameters, key):
        loss = lambda p: -jnp.mean(labels * model.apply(p, x, rngs={"dropout": key}))
        value, gradient = jax.value_and_grad(loss)(parameters)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient)

    for key in jax.random.split(jax.random.key(2), steps):
        loss, parameters = step(parameters, key)
        losses.append(loss)
    return np.array(losses)


x = jax.random.normal(jax.random.key(0), (16, LENGTH, WIDTH))
labels = jax.nn.one_hot(jnp.arange(16) % 2, 2)
losses = train(attention_fn, x, labels)
assert losses[-1] < 0.8 * losses[0]
np.testing.assert_allclose(losses, train(explicit, x, labels), rtol=1e-3)
