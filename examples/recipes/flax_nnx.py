# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A causal layer with a sliding window in Flax nnx: `bind` holds the options for which
the module has no argument.
"""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_fastattn.integrations.flax import bind

WINDOW = 16


class Block(nnx.Module):
    def __init__(self, attention_fn, rngs):
        self.norm = nnx.LayerNorm(256, dtype=jnp.bfloat16, rngs=rngs)
        options = {"dtype": jnp.bfloat16, "decode": False, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(
            8, 256, attention_fn=attention_fn, **options
        )

    def __call__(self, x, mask=None):
        return x + self.attention(self.norm(x), mask=mask)


@nnx.jit
def loss_and_gradient(block, x, mask=None):
    loss = lambda block: jnp.mean(jnp.square(block(x, mask)))
    return nnx.value_and_grad(loss)(block)


x = jax.random.normal(jax.random.key(0), (2, 64, 256))
attend = bind(is_causal=True, local_window_size=(WINDOW - 1, None))
value, gradient = loss_and_gradient(Block(attend, nnx.Rngs(1)), x)

# Flax's own function needs a mask [length, length] for that.
before = jnp.arange(64)[:, None] - jnp.arange(64)[None]
mask = ((before >= 0) & (before < WINDOW))[None, None]
block = Block(nnx.dot_product_attention, nnx.Rngs(1))
wanted_value, wanted = loss_and_gradient(block, x, mask)
np.testing.assert_allclose(value, wanted_value, rtol=1e-3)
found, wanted = (jax.flatten_util.ravel_pytree(x)[0] for x in (gradient, wanted))
np.testing.assert_allclose(found, wanted, atol=0.03 * float(jnp.abs(wanted).max()))
