# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism and FSDP under `jit`: the shardings of parameters and batch are
all that it takes. On a CPU, first set
XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 128, 8, 4, 32
devices = len(jax.devices())
model = 2 if devices % 2 == 0 else 1
auto = (AxisType.Auto,) * 2
mesh = jax.make_mesh((devices // model, model), ("data", "model"), axis_types=auto)


def loss(params, x):
    *qkv, projection = params
    q, k, v = (jnp.einsum("btc,cnh->btnh", x, weight) for weight in qkv)
    out = attention(q, k, v, is_causal=True)  # each device: its batch entries and heads
    out = jnp.einsum("btnh,nhc->btc", out, projection)
    return jnp.mean(jnp.square(out).astype(jnp.float32))


shapes = [(WIDTH, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
shapes += [(HEADS, HEAD_DIM, WIDTH)]
params = [
    jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) / 8
    for i, shape in enumerate(shapes)
]
x = jax.random.normal(jax.random.key(9), (8, 64, WIDTH), jnp.bfloat16)

# Heads over "model" (tensor parallelism), and the other large axis over "data" (FSDP):
# XLA gathers that one when the layer runs, and scatters its gradients.
axes = [P("data", "model")] * 3 + [P("model", None, "data")]
shardings = [NamedSharding(mesh, axis) for axis in axes]
step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
split = jax.device_put(x, NamedSharding(mesh, P("data")))
value, gradient = step(jax.device_put(params, shardings), split)

wanted_value, wanted = jax.value_and_grad(loss)(params, x)
np.testing.assert_allclose(value, wanted_value, rtol=1e-2)
for x, y in zip(gradient, wanted, strict=True):
    x, y = x.astype(float), y.astype(float)
    np.testing.assert_allclose(x, y, atol=0.03 * float(jnp.abs(y).max()))
