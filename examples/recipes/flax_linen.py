# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A masked encoder layer of Flax linen: `attention_fn` replaces Flax's own function."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.integrations.flax import attention_fn


class Encoder(nn.Module):
    """One layer over x [batch, length, width] with a padding mask from is_token.

    The mask may be any mask of Flax. Where causality or a window says the same, use
    `bind` (flax_nnx.py), and for padding `Packed` (bert_flax.py): kernels then skip
    what is hidden without reading a mask.
    """

    attention_fn: object = attention_fn

    @nn.compact
    def __call__(self, x, is_token):
        mask = nn.make_attention_mask(jnp.ones_like(is_token), is_token)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        attend = nn.MultiHeadDotProductAttention(
            8, dtype=jnp.bfloat16, attention_fn=self.attention_fn
        )
        return x + attend(y, mask=mask)


x = jax.random.normal(jax.random.key(0), (2, 64, 256))
is_token = jnp.arange(64) < jnp.array([[64], [41]])
model = Encoder()
params = model.init(jax.random.key(1), x, is_token)
out = jax.jit(model.apply)(params, x, is_token)

# Flax's own function gives the same, from the same parameters.
wanted = Encoder(nn.dot_product_attention).apply(params, x, is_token)
np.testing.assert_allclose(out, wanted, atol=0.03)
