# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A block of a vision transformer in Flax nnx: full attention over 14 x 14 patches and
a class token, 197 tokens, which kernels take without padding.
"""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_fastattn.integrations.flax import attention_fn

WIDTH, HEADS, PATCH, SIDE = 128, 2, 16, 14  # ViT-L has 1024, 16, 16, 14


class Block(nnx.Module):
    def __init__(self, attention_fn, rngs):
        bf16 = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.embed = nnx.Linear(PATCH * PATCH * 3, WIDTH, **bf16)
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.norm = nnx.LayerNorm(WIDTH, **bf16)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=attention_fn, decode=False, **bf16
        )
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = images.reshape(-1, SIDE, PATCH, SIDE, PATCH, 3).swapaxes(2, 3)
        x = self.embed(x.reshape(len(images), SIDE * SIDE, -1))
        token = jnp.broadcast_to(self.token[...], (len(images), 1, WIDTH))
        x = jnp.concatenate([token.astype(x.dtype), x], axis=1)  # [batch, 197, WIDTH]
        return self.head(x + self.attention(self.norm(x)))[:, 0]


@nnx.jit
def loss_and_gradient(block, images):
    return nnx.value_and_grad(lambda block: jnp.mean(jnp.square(block(images))))(block)


images = jax.random.normal(jax.random.key(0), (2, 224, 224, 3))
value, gradient = loss_and_gradient(Block(attention_fn, nnx.Rngs(1)), images)
block = Block(nnx.dot_product_attention, nnx.Rngs(1))
wanted_value, wanted = loss_and_gradient(block, images)
np.testing.assert_allclose(value, wanted_value, rtol=1e-2)
found, wanted = (jax.flatten_util.ravel_pytree(x)[0] for x in (gradient, wanted))
np.testing.assert_allclose(found, wanted, atol=0.03 * float(jnp.abs(wanted).max()))
