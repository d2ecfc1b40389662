# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""ALiBi with fixed and with learned slopes: slopes and positions stay float32."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

LENGTH, HEADS, HEAD_DIM = 400, 4, 32  # bfloat16 has no odd integers above 256


def alibi(slopes):
    """Returns the bias [heads, query, key]: slopes [heads] times key minus query."""
    positions = jnp.arange(LENGTH, dtype=jnp.float32)  # float32 in any model
    return slopes[:, None, None] * (positions - positions[:, None])


def loss(slopes, qkv, attend):
    bias = alibi(slopes)[None]  # all batch entries share it
    out = attend(*qkv, bias, is_causal=True)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out


shape = (2, LENGTH, HEADS, HEAD_DIM)
qkv = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(3)]
fixed = 2.0 ** (-8 * jnp.arange(1, HEADS + 1) / HEADS)  # a constant
out = attention(*qkv, alibi(fixed), is_causal=True)

log_slopes = jnp.log(fixed)  # a float32 parameter of the model
train = jax.grad(lambda x, *rest: loss(jnp.exp(x), *rest), has_aux=True)
train = jax.jit(train, static_argnums=2)
dlog_slopes, learned_out = train(log_slopes, qkv, attention)

exact = [x.astype(jnp.float32) for x in qkv]
wanted, wanted_out = train(log_slopes, exact, jax.nn.dot_product_attention)
for found in (out, learned_out):
    np.testing.assert_allclose(found.astype(float), wanted_out, atol=0.03)
np.testing.assert_allclose(dlog_slopes, wanted, atol=0.03 * float(np.abs(wanted).max()))
