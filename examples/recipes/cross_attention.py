# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Cross attention: queries and keys have two lengths, and a mask may hide more keys."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

BATCH, QUERIES, KEYS, HEADS, HEAD_DIM = 3, 40, 96, 4, 64
query_lengths = jnp.array([40, 23, 7])  # tokens of each target
key_lengths = jnp.array([96, 50, 81])  # tokens of each source
LENGTHS = {
    "query_seq_lengths": query_lengths,
    "key_value_seq_lengths": key_lengths,
}

shapes = ((BATCH, n, HEADS, HEAD_DIM) for n in (QUERIES, KEYS, KEYS))
q, k, v = (
    jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    for i, shape in enumerate(shapes)
)
out = attention(q, k, v, **LENGTHS)  # no mask array; padding queries have output 0

# A mask for the keys that lengths cannot say, such as hidden words of the source.
is_seen = jax.random.bernoulli(jax.random.key(3), 0.8, (BATCH, KEYS)).at[:, 0].set(True)
masked = attention(q, k, v, mask=is_seen[:, None, None, :], **LENGTHS)
gradient = jax.grad(
    lambda k: jnp.sum(
        attention(q, k, v, mask=is_seen[:, None, None, :], **LENGTHS).astype(
            jnp.float32
        )
    )
)(k)
assert not gradient[~is_seen].any()  # hidden keys have no gradient

# The same by one mask [BATCH, 1, QUERIES, KEYS] of jax.nn.
is_query = jnp.arange(QUERIES) < query_lengths[:, None]
is_key = jnp.arange(KEYS) < key_lengths[:, None]
for found, keys in ((out, is_key), (masked, is_key & is_seen)):
    mask = (is_query[:, :, None] & keys[:, None, :])[:, None]
    wanted = jax.nn.dot_product_attention(q, k, v, mask=mask)
    x, y = (x[is_query].astype(float) for x in (found, wanted))
    np.testing.assert_allclose(x, y, atol=0.03)
    assert not found[~is_query].any()
