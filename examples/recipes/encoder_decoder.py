# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of an encoder-decoder, such as a translation model: three kinds of attention,
all with padding by lengths.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

SOURCE, TARGET, WIDTH, HEADS, HEAD_DIM = 72, 40, 128, 4, 32


def layer(weights, x, y, attend, **options):
    """Returns x plus its attention to y; weights [4, WIDTH, HEADS, HEAD_DIM]."""
    *projections, back = weights
    inputs = zip((x, y, y), projections, strict=True)
    q, k, v = (jnp.einsum("btc,cnh->btnh", z, weight) for z, weight in inputs)
    return x + jnp.einsum("btnh,cnh->btc", attend(q, k, v, **options), back)


def model(params, source, target, sources, targets, attend=attention):
    """Returns the decoder's output for source and target [batch, length, WIDTH]."""
    encoder, decoder, cross = params
    own = lambda n: {"query_seq_lengths": n, "key_value_seq_lengths": n}
    source = layer(encoder, source, source, attend, **own(sources))
    target = layer(decoder, target, target, attend, is_causal=True, **own(targets))
    both = {"query_seq_lengths": targets, "key_value_seq_lengths": sources}
    return layer(cross, target, source, attend, **both)


shape = (3, 4, WIDTH, HEADS, HEAD_DIM)
params = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) / 12
draw = lambda i, n: jax.random.normal(jax.random.key(i), (2, n, WIDTH), jnp.bfloat16)
source, target = draw(1, SOURCE), draw(2, TARGET)
lengths = jnp.array([72, 31]), jnp.array([25, 40])  # of sources and of targets


@partial(jax.jit, static_argnums=1)
@partial(jax.grad, argnums=0)
def gradient(params, attend):
    out = model(params, source, target, *lengths, attend).astype(jnp.float32)
    is_token = jnp.arange(TARGET) < lengths[1][:, None]
    return jnp.mean(jnp.square(out), where=is_token[..., None])


found = gradient(params, attention).astype(float)
wanted = gradient(params, jax.nn.dot_product_attention).astype(float)
np.testing.assert_allclose(found, wanted, atol=0.03 * float(jnp.abs(wanted).max()))
