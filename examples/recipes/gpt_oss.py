# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The attention of gpt-oss: a learned sink for each head, and a window of 128 in every other layer."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64  # gpt-oss 20B has 64, 8, 64
WINDOW = 128  # `sliding_window`: the query's own key and 127 before it


def attend(q, k, v, sinks, layer):
    """Returns the output [batch, length, heads, head_dim]; layers 0, 2, 4, ... have the window."""
    window = (WINDOW - 1, None) if layer % 2 == 0 else None
    return attention(q, k, v, sinks=sinks, is_causal=True, local_window_size=window)


def in_words(q, k, v, sinks, layer):
    """Computes the same with all logits in memory: a sink is one more logit, whose weight is dropped."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * HEAD_DIM**-0.5
    before = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    visible = (before >= 0) & ((before < WINDOW) | (layer % 2 == 1))
    sink = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([jnp.where(visible, logits, -jnp.inf), sink], axis=-1))
    return jnp.einsum("bnts,bsnh->btnh", weights[..., :-1], v)


def loss(function, sinks, layer, dtype):
    out = function(*(x.astype(dtype) for x in qkv), sinks, layer)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out


keys = jax.random.split(jax.random.key(0), 4)
qkv = [jax.random.normal(key, (1, 200, n, HEAD_DIM)) for key, n in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=False)]
sinks = jax.random.normal(keys[3], (HEADS,))  # a float32 parameter of the model
gradient = jax.grad(loss, argnums=1, has_aux=True)
for layer in range(2):
    (dsinks, out), (wanted_dsinks, wanted) = (
        gradient(function, sinks, layer, dtype) for function, dtype in ((attend, jnp.bfloat16), (in_words, jnp.float32))
    )
    np.testing.assert_allclose(out.astype(float), wanted, atol=0.03)
    np.testing.assert_allclose(dsinks, wanted_dsinks, atol=0.03 * float(jnp.abs(wanted_dsinks).max()))
