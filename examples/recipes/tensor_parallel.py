# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism and FSDP under `jit`: shardings of parameters and batch are all that it takes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import attention

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 128, 8, 4, 32
devices = len(jax.devices())  # on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=8
model = 2 if devices % 2 == 0 else 1
mesh = jax.make_mesh((devices // model, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def loss(params, x):
    q, k, v = (jnp.einsum("btc,cnh->btnh", x, params[name]) for name in ("query", "key", "value"))
    out = attention(q, k, v, is_causal=True)  # each device: its part of the batch, and its heads
    return jnp.mean(jnp.square(jnp.einsum("btnh,nhc->btc", out, params["out"])).astype(jnp.float32))


shapes = {"query": (WIDTH, HEADS, HEAD_DIM), "key": (WIDTH, KV_HEADS, HEAD_DIM), "value": (WIDTH, KV_HEADS, HEAD_DIM)}
shapes |= {"out": (HEADS, HEAD_DIM, WIDTH)}
params = {n: jax.random.normal(jax.random.key(i), shapes[n], jnp.bfloat16) / 8 for i, n in enumerate(shapes)}
x = jax.random.normal(jax.random.key(9), (8, 64, WIDTH), jnp.bfloat16)

# Heads over "model" (tensor parallelism), and the other large axis over "data" (FSDP): XLA gathers that one when the
# layer runs, and scatters its gradients.
axes = dict.fromkeys(params, ("data", "model")) | {"out": ("model", None, "data")}
shardings = {name: NamedSharding(mesh, PartitionSpec(*axes[name])) for name in params}
step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
value, gradient = step(jax.device_put(params, shardings), jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))))

wanted_value, wanted_gradient = jax.value_and_grad(loss)(params, x)
np.testing.assert_allclose(value, wanted_value, rtol=1e-2)
for name, found in gradient.items():
    wanted = wanted_gradient[name].astype(float)
    np.testing.assert_allclose(found.astype(float), wanted, atol=0.03 * float(jnp.abs(wanted).max()), err_msg=name)
