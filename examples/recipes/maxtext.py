# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""An attention op with the arguments of MaxText's: segment ids, causal or local masks,
a soft cap, sinks.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention


def attention_op(
    q, k, v, kind="global", window=None, start=0, soft_cap=None, **options
):
    """Returns the output [batch, length, heads, head_dim].

    MaxText's queries come scaled, its padding has id 0, and its window counts the
    query's own key.

    Args:
        q: [batch, length, heads, head_dim]; k and v have fewer heads.
        kind: "global" (causal), "local_sliding" (causal with a window) or "full".
        start: where the queries stand in the cache; with it, no ids.
        options: `sinks`, and `segment_ids` [batch, length] of packed documents. If
            documents are adjacent, boundaries need no prepass: see docs/packed.md.
    """
    options |= {"is_causal": kind != "full", "query_offset": start}
    if kind == "local_sliding":
        options["local_window_size"] = (window - 1, None)
    return attention(q, k, v, scale=1.0, logits_soft_cap=soft_cap, **options)


shapes = ((2, 64, n, 32) for n in (4, 2, 2))
q, k, v = (
    jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    for i, shape in enumerate(shapes)
)
q, ids = q / 32**0.5, jnp.array([[1] * 30 + [2] * 34, [1] * 20 + [2] * 30 + [0] * 14])
out = attention_op(q, k, v, segment_ids=ids, kind="local_sliding", window=16)

before = jnp.arange(64)[:, None] - jnp.arange(64)[None]
mask = (before >= 0) & (before < 16) & (ids[:, :, None] == ids[:, None, :])
wanted = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=1.0)
np.testing.assert_allclose(out.astype(float), wanted.astype(float), atol=0.03)
out = attention_op(q, k, v, kind="full", soft_cap=20.0, sinks=jnp.zeros(4))
assert out.shape == q.shape
