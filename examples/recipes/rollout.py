# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout from a cache, and a policy gradient whose ratios begin at exactly 1."""

import jax
import jax.numpy as jnp

from jax_fastattn import attention

BATCH, LENGTH, HEADS, DIM, WIDTH, WORDS = 8, 24, 4, 16, 64, 50
SHAPES = {"in": (WORDS, WIDTH), "qkv": (WIDTH, 3, HEADS, DIM), "out": (WIDTH, WORDS)}
draw, key = jax.random.normal, jax.random.key(0)
params = {name: draw(key, shape, jnp.bfloat16) / 4 for name, shape in SHAPES.items()}


def project(params, tokens):  # [B, T] to q, k, v, each [B, T, HEADS, DIM]
    return jnp.einsum("btc,cinh->ibtnh", params["in"][tokens], params["qkv"])


def log_softmax(params, out):
    logits = out.reshape(*out.shape[:2], WIDTH) @ params["out"]
    return jax.nn.log_softmax(logits.astype(jnp.float32))


@jax.jit
def rollout(params, first, key):
    def step(carry, key):
        cache, token, at = carry
        q, *new = project(params, token[:, None])
        cache = [x.at[:, at].set(row[:, 0]) for x, row in zip(cache, new, strict=True)]
        out = attention(q, *cache, is_causal=True, query_offset=at, deterministic=True)
        every = log_softmax(params, out)[:, 0]
        token = jax.random.categorical(key, every)
        return (cache, token, at + 1), (token, every[jnp.arange(BATCH), token])

    cache = [jnp.zeros((BATCH, LENGTH, HEADS, DIM), jnp.bfloat16)] * 2
    _, found = jax.lax.scan(step, (cache, first, 0), jax.random.split(key, LENGTH))
    return jnp.concatenate([first[None], found[0]]).T, found[1].T  # tokens, log-probs


@jax.jit
def update(params, tokens, old, advantages):
    def loss(params):
        out = attention(*project(params, tokens[:, :-1]), is_causal=True)
        every, chosen = log_softmax(params, out), tokens[:, 1:, None]
        new = jnp.take_along_axis(every, chosen, axis=2)[..., 0]
        ratio = jnp.exp(new - (jax.lax.stop_gradient(new) if old is None else old))
        return -(ratio * advantages).mean(), (new, ratio)

    return jax.grad(loss, has_aux=True)(params)


tokens, sampled = rollout(params, jnp.zeros(BATCH, int), key)
advantages = (tokens[:, 1:] % 2 - 0.5).mean(axis=1, keepdims=True)
grads, (old, ratio) = update(params, tokens, None, advantages)
assert (ratio == 1).all()  # the first update makes `old`, later ones take it
assert abs(sampled - old).max() < 0.1  # by which the ratios would be off
