# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Your own mask function: image tokens see each other, text is causal (prefix-LM)."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import and_masks, attention, causal, or_masks

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 96, 8, 2, 32


def prefix_lm(prefix, padding):
    """Returns a `mask_mod`: rows before `prefix` [batch] see each other.

    Keys of which `padding` [batch, length] says True are hidden.
    """
    return and_masks(
        or_masks(causal(), lambda b, h, q, k: (q < prefix[b]) & (k < prefix[b])),
        lambda b, h, q, k: ~padding[b, k],
    )


@jax.jit
def step(q, k, v, prefix, padding):  # new lengths compile nothing
    return attention(q, k, v, mask_mod=prefix_lm(prefix, padding))


keys, heads = jax.random.split(jax.random.key(0), 3), (HEADS, KV_HEADS, KV_HEADS)
q, k, v = (
    jax.random.normal(key, (BATCH, LENGTH, n, HEAD_DIM), jnp.bfloat16)
    for key, n in zip(keys, heads, strict=True)
)
prefix = jnp.array([30, 64])
padding = jnp.arange(LENGTH) >= jnp.array([[96], [80]])
out = step(q, k, v, prefix, padding)

rows = np.arange(LENGTH)
inside = rows < prefix[:, None]  # [batch, length]
shown = (rows[:, None] >= rows) | (inside[:, :, None] & inside[:, None, :])
shown &= ~padding[:, None, :]
exact = (x.astype(jnp.float32) for x in (q, k, v))
wanted = jax.nn.dot_product_attention(*exact, mask=shown[:, None])
np.testing.assert_allclose(out.astype(float), wanted, atol=0.03)
