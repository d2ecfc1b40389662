# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Rematerialization (gradient checkpointing) by names: a layer keeps the output and the
log-sum-exp of attention, and never attends twice.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import attention

LAYERS, WIDTH, HEADS, HEAD_DIM = 3, 128, 4, 32
# Save both: else the backward pass runs the forward kernel again.
NAMES = "jax_fastattn_out", "jax_fastattn_lse"


def layer(weights, x):
    q, k, v = (jnp.einsum("btc,cnh->btnh", x, w) for w in weights)
    return x + attention(q, k, v, is_causal=True).reshape(x.shape)


def loss(params, x, layer):
    x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, params)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
# Under a scan, CSE needs no prevention.
frugal = jax.checkpoint(layer, policy=policy, prevent_cse=False)
frugal_but_slow = jax.checkpoint(layer, prevent_cse=False)

shape = (LAYERS, 3, WIDTH, HEADS, HEAD_DIM)
params = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) / 12
x = jax.random.normal(jax.random.key(1), (2, 64, WIDTH), jnp.bfloat16)


def forward_calls(layer):
    """Returns how often the bodies of the scans attend, over both passes."""
    jaxpr = jax.make_jaxpr(jax.grad(loss), static_argnums=2)(params, x, layer)
    return str(jaxpr).count("jax_fastattn_attend[")


assert [forward_calls(f) for f in (layer, frugal, frugal_but_slow)] == [1, 1, 2]
wanted = jax.grad(loss)(params, x, layer).astype(float)
for function in (frugal, frugal_but_slow):
    found = jax.grad(loss)(params, x, function).astype(float)
    np.testing.assert_allclose(found, wanted, atol=0.01 * float(np.abs(wanted).max()))
