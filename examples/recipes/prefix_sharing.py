# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Sequences of a paged cache share the pages of their common prefix."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention, paged_attention

ROWS, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 2, 64  # ROWS of a page: a multiple of 16
PREFIX = 2 * ROWS  # whole pages of a common prompt, 32 tokens

# Pages 0 and 1 hold the prefix. Each sequence goes on in a page of its own.
table = jnp.array([[0, 1, 2], [0, 1, 3], [0, 1, 4]])
lengths = jnp.array([35, 41, 33])
pages = jnp.zeros((5, ROWS, KV_HEADS, HEAD_DIM), jnp.bfloat16)


def write(pages, table, start, new):
    """Writes rows new [length, kv_heads, head_dim] of a sequence from row `start`."""
    rows = start + jnp.arange(len(new))
    return pages.at[table[rows // ROWS], rows % ROWS].set(new)


draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
prefix = [draw(i, PREFIX, KV_HEADS, HEAD_DIM) for i in (0, 1)]
rest = [draw(i, 3, ROWS, KV_HEADS, HEAD_DIM) for i in (2, 3)]
cache = [write(pages, table[0], 0, x) for x in prefix]  # once for all sequences
for b in range(3):
    own = (x[b, : lengths[b] - PREFIX] for x in rest)
    cache = [write(x, table[b], PREFIX, new) for x, new in zip(cache, own, strict=True)]

q = draw(4, 3, 1, HEADS, HEAD_DIM)  # one new token of each sequence
out = paged_attention(q, *cache, table, lengths)

# The same as three dense caches.
dense = [
    jnp.concatenate([jnp.broadcast_to(x, (3, *x.shape)), y], axis=1)
    for x, y in zip(prefix, rest, strict=True)
]
wanted = attention(q, *dense, key_value_seq_lengths=lengths)
np.testing.assert_allclose(out.astype(float), wanted.astype(float), atol=0.02)
