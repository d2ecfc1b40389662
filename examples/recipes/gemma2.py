# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The attention of Gemma 2: logits with a soft cap of 50, and a window of 4096 in every other layer."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

HEADS, KV_HEADS, HEAD_DIM, CAP = 8, 4, 64, 50.0  # Gemma 2 9B has 16, 8, 256
WINDOW = 32  # Gemma 2 has 4096 (`sliding_window`), the query's own key among them
SCALE = HEAD_DIM**-0.5  # `query_pre_attn_scalar` ** -0.5


def attention_layer(params, x, layer):
    """Returns the output of one layer for x [batch, length, width], without norms and rotary embedding."""
    q, k, v = (jnp.einsum("btc,cnh->btnh", x, params[name]) for name in ("query", "key", "value"))
    window = (WINDOW - 1, None) if layer % 2 == 0 else None  # so many keys before the query's own
    out = attention(q, k, v, scale=SCALE, is_causal=True, local_window_size=window, logits_soft_cap=CAP)
    return jnp.einsum("btnh,nhc->btc", out, params["out"])


def in_words(params, x, layer):
    """Computes the same with all logits in memory, in float32."""
    q, k, v = (jnp.einsum("btc,cnh->btnh", x, params[name]) for name in ("query", "key", "value"))
    k, v = (jnp.repeat(y, HEADS // KV_HEADS, axis=2) for y in (k, v))
    logits = CAP * jnp.tanh(SCALE * jnp.einsum("btnh,bsnh->bnts", q, k) / CAP)
    before = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None]
    visible = (before >= 0) & ((before < WINDOW) | (layer % 2 == 1))
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(visible, logits, -jnp.inf)), v)
    return jnp.einsum("btnh,nhc->btc", out, params["out"])


shapes = {"query": (128, HEADS, HEAD_DIM), "key": (128, KV_HEADS, HEAD_DIM), "value": (128, KV_HEADS, HEAD_DIM)}
shapes |= {"out": (HEADS, HEAD_DIM, 128)}
params = {name: jax.random.normal(jax.random.key(i), shapes[name]) / 8 for i, name in enumerate(shapes)}
x = jax.random.normal(jax.random.key(9), (2, 96, 128))
for layer in range(2):
    out = attention_layer(*jax.tree.map(lambda y: y.astype(jnp.bfloat16), (params, x)), layer)
    wanted = in_words(params, x, layer)
    np.testing.assert_allclose(out.astype(float), wanted, atol=0.03 * float(jnp.abs(wanted).max()))
