# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A padding mask by lengths: no mask array is made, and neither padding keys nor
padding queries cost time in the kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

BATCH, LENGTH, HEADS, HEAD_DIM = 3, 128, 4, 64
lengths = jnp.array(
    [128, 37, 70]
)  # tokens of each sequence; the rest of its row is padding

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (
    jax.random.normal(key, (BATCH, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)
    for key in keys
)
is_token = jnp.arange(LENGTH) < lengths[:, None]  # [batch, length]


@jax.jit
def by_lengths(q, k, v):
    """Padding queries have output 0 and no gradient."""
    return attention(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


@jax.jit
def by_mask(q, k, v):
    """The usual mask over keys; padding queries attend, so a loss leaves them out."""
    return jax.nn.dot_product_attention(q, k, v, mask=is_token[:, None, None, :])


def gradient(function):
    loss = lambda *x: jnp.sum(
        jnp.where(is_token[..., None, None], jnp.sin(function(*x)), 0)
    )
    return jax.grad(loss, (0, 1, 2))(q, k, v)


out, wanted = by_lengths(q, k, v), by_mask(q, k, v)
found, wanted = (x[is_token].astype(float) for x in (out, wanted))
np.testing.assert_allclose(found, wanted, atol=0.03)
assert not out[~is_token].any()
for found, wanted in zip(gradient(by_lengths), gradient(by_mask), strict=True):
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), atol=0.1)

# Padding may hold anything, even NaN.
poisoned = [jnp.where(is_token[..., None, None], x, jnp.nan) for x in (q, k, v)]
np.testing.assert_array_equal(by_lengths(*poisoned), out)
