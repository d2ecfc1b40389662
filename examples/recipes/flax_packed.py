# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences in `nnx.MultiHeadAttention`: boundaries are data, so a new batch
does not trace the step again.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_fastattn.integrations.flax import Packed, bind

ROWS, MOST = 128, 8  # tokens of a row, and how many documents it may hold

options = {"dtype": jnp.bfloat16, "decode": False, "rngs": nnx.Rngs(0)}
layer = nnx.MultiHeadAttention(4, 64, attention_fn=bind(is_causal=True), **options)


def boundaries(lengths):
    """Returns where the documents of a row begin and end; unused ones are empty."""
    return np.pad(np.cumsum([0, *lengths]), (0, MOST - len(lengths)), mode="edge")


traces = []


@nnx.jit
def step(layer, x, cu_seqlens):
    """Returns loss and gradient; x [batch, ROWS, 64], cu_seqlens [batch, MOST + 1]."""
    traces.append(x.shape)

    def loss(layer):
        out = layer(x, mask=Packed(cu_seqlens=cu_seqlens))
        return jnp.mean(jnp.square(out.astype(jnp.float32))), out

    return nnx.value_and_grad(loss, has_aux=True)(layer)


x = jax.random.normal(jax.random.key(1), (2, ROWS, 64))
for documents in ([[50, 30, 48], [128]], [[7, 64, 20, 37], [100, 20]]):
    cu_seqlens = jnp.stack([jnp.array(boundaries(lengths)) for lengths in documents])
    (value, out), gradient = step(layer, x, cu_seqlens)
assert len(traces) == 1

# A document sees what it sees by itself.
alone = layer(x[:1, 7:71])
np.testing.assert_allclose(out[:1, 7:71].astype(float), alone.astype(float), atol=0.02)
