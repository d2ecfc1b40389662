# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The attention of gpt-oss: a learned sink for each head, and in every other layer a
sliding window of 128.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64  # gpt-oss 20B has 64, 8, 64
WINDOW = 128  # `sliding_window`: the query's own key and 127 before it


def attend(q, k, v, sinks, layer):
    """Returns [batch, length, heads, head_dim]; even layers have a window."""
    window = (WINDOW - 1, None) if layer % 2 == 0 else None
    return attention(q, k, v, sinks=sinks, is_causal=True, local_window_size=window)


def in_words(q, k, v, sinks, layer):
    """Computes the same: a sink is one more logit, whose weight is dropped."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * HEAD_DIM**-0.5
    before = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    visible = (before >= 0) & ((before < WINDOW) | (layer % 2 == 1))
    sink = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
    logits = jnp.where(visible, logits, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1))
    return jnp.einsum("bnts,bsnh->btnh", weights[..., :-1], v)


def loss(function, sinks, layer, dtype):
    out = function(*(x.astype(dtype) for x in qkv), sinks, layer)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out


shapes = ((1, 200, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
qkv = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
sinks = jax.random.normal(jax.random.key(3), (HEADS,))  # a float32 parameter
gradient = jax.grad(loss, argnums=1, has_aux=True)
for layer in range(2):
    dsinks, out = gradient(attend, sinks, layer, jnp.bfloat16)
    want, want_out = gradient(in_words, sinks, layer, jnp.float32)
    np.testing.assert_allclose(out.astype(float), want_out, atol=0.03)
    np.testing.assert_allclose(dsinks, want, atol=0.03 * float(jnp.abs(want).max()))
