# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The attention of Gemma 2: a soft cap of 50, and in every other layer a sliding window
of 4096.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

HEADS, KV_HEADS, HEAD_DIM, CAP = 8, 4, 64, 50.0  # Gemma 2 9B has 16, 8, 256
WINDOW = 32  # Gemma 2 has 4096 (`sliding_window`), the query's own key among them
SCALE = HEAD_DIM**-0.5  # `query_pre_attn_scalar` ** -0.5


def attend(q, k, v, layer):
    """Returns [batch, length, heads, head_dim]; even layers have a window."""
    options = {"scale": SCALE, "logits_soft_cap": CAP, "is_causal": True}
    if layer % 2 == 0:
        options["local_window_size"] = (WINDOW - 1, None)  # before the query's own key
    return attention(q, k, v, **options)


def in_words(q, k, v, layer):
    """Computes the same with all logits in memory."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    logits = CAP * jnp.tanh(SCALE * jnp.einsum("btnh,bsnh->bnts", q, k) / CAP)
    before = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    visible = (before >= 0) & ((before < WINDOW) | (layer % 2 == 1))
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


shapes = ((2, 96, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
q, k, v = (
    4 * jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    for i, shape in enumerate(shapes)
)
for layer in range(2):
    out = attend(q, k, v, layer)
    wanted = in_words(*(x.astype(jnp.float32) for x in (q, k, v)), layer)
    np.testing.assert_allclose(out.astype(float), wanted, atol=0.1)
