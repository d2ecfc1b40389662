# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Models with float32 parameters: attention alone runs in bfloat16, by one product."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
from flax import nnx

from jax_fastattn import attention
from jax_fastattn.integrations import keras as fused
from jax_fastattn.integrations.flax import attention_fn

x = jax.random.normal(jax.random.key(0), (2, 48, 64))

# Flax: `dtype` is the dtype of the computation; parameters stay float32.
options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
flax_layer = nnx.MultiHeadAttention(
    4, 64, attention_fn=attention_fn, decode=False, **options
)
flax_out = flax_layer(x)
assert flax_layer.query.kernel[...].dtype == jnp.float32

# Keras: the policy of the model or of a layer; the variables are float32.
keras_layer = keras.layers.MultiHeadAttention(4, 16, dtype="mixed_bfloat16")
with fused.installed():
    keras_out = keras_layer(x, x)
assert keras_layer.variables[0].dtype == "float32"


# equinox and plain JAX: cast the operands, and the result back.
def attend(q, k, v, **options):
    out = attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), **options)
    return out.astype(q.dtype)


project = eqx.nn.Linear(64, 3 * 64, key=jax.random.key(1))
q, k, v = jnp.split(jax.vmap(jax.vmap(project))(x).reshape(2, 48, 12, 16), 3, axis=2)
equinox_out = attend(q, k, v)

assert (flax_out.dtype, equinox_out.dtype) == (jnp.bfloat16, jnp.float32)
wanted = jax.nn.dot_product_attention(q, k, v)
np.testing.assert_allclose(equinox_out, wanted, atol=0.01)
np.testing.assert_allclose(np.asarray(keras_layer(x, x)), keras_out, atol=0.01)
