# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of BERT in Flax nnx with padding: `Packed` has lengths in place of a mask."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_fastattn.integrations.flax import Packed, attention_fn

LENGTH, WIDTH, HEADS = 64, 128, 4  # BERT large has 512, 1024, 16


class Layer(nnx.Module):
    def __init__(self, attention_fn, rngs):
        options = {"dtype": jnp.bfloat16, "decode": False, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=attention_fn, **options
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        return self.norm(x + self.attention(x, mask=mask))


@nnx.jit  # lengths are run-time data: it is traced once for all batches
def loss_and_gradient(layer, x, lengths, mask):
    is_token = jnp.arange(LENGTH) < lengths[:, None]
    loss = lambda layer: jnp.mean(jnp.square(layer(x, mask)[..., 0]), where=is_token)
    return nnx.value_and_grad(loss)(layer)


x = jax.random.normal(jax.random.key(0), (3, LENGTH, WIDTH))
lengths = jnp.array([64, 17, 40])

# One document of each row has `length` tokens, from 0; what is past it is padding.
packed = Packed(cu_seqlens=jnp.stack([jnp.zeros_like(lengths), lengths], axis=1))
layer = Layer(attention_fn, nnx.Rngs(1))
value, gradient = loss_and_gradient(layer, x, lengths, packed)

# Flax's own function takes a mask array.
mask = (jnp.arange(LENGTH) < lengths[:, None])[:, None, None, :]
layer = Layer(nnx.dot_product_attention, nnx.Rngs(1))
wanted_value, wanted = loss_and_gradient(layer, x, lengths, mask)
np.testing.assert_allclose(value, wanted_value, rtol=1e-2)
found, wanted = (jax.flatten_util.ravel_pytree(x)[0] for x in (gradient, wanted))
np.testing.assert_allclose(found, wanted, atol=0.03 * float(jnp.abs(wanted).max()))
