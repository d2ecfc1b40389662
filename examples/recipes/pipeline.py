# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages under `vmap`: all stages run at once, each on its microbatch, and one
kernel launch serves them. On a CPU, first set
XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import attention

STAGES, MICROBATCHES, WIDTH, HEADS, HEAD_DIM = 4, 6, 128, 4, 32
devices = jax.devices()[: STAGES if len(jax.devices()) >= STAGES else 1]
auto = (AxisType.Auto,)
mesh = jax.make_mesh((len(devices),), ("stage",), axis_types=auto, devices=devices)
by_stage = NamedSharding(mesh, PartitionSpec("stage"))


def stage(weights, x):
    """Returns the activations [batch, length, WIDTH] after one layer of attention."""
    q, k, v = (jnp.einsum("btc,cnh->btnh", x, w) for w in weights)
    return x + attention(q, k, v, is_causal=True).reshape(x.shape)


@jax.jit
def pipeline(params, microbatches):
    """Returns microbatches [MICROBATCHES, batch, length, WIDTH] after all stages."""
    run = jax.vmap(stage, spmd_axis_name="stage")  # the mesh axis of the mapped one

    def tick(active, t):  # active [STAGES, batch, length, WIDTH]
        active = active.at[0].set(microbatches[jnp.minimum(t, MICROBATCHES - 1)])
        active = jax.lax.with_sharding_constraint(run(params, active), by_stage)
        return jnp.roll(active, 1, axis=0), active[-1]  # results go to the next stage

    idle = jnp.zeros((STAGES, *microbatches.shape[1:]), microbatches.dtype)
    _, last = jax.lax.scan(tick, idle, jnp.arange(MICROBATCHES + STAGES - 1))
    return last[STAGES - 1 :]


shape = (STAGES, 3, WIDTH, HEADS, HEAD_DIM)
params = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) / 12
shape = (MICROBATCHES, 2, 64, WIDTH)
microbatches = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
out = pipeline(jax.device_put(params, by_stage), microbatches)

wanted = microbatches
for weights in params:  # one stage after the other
    wanted = jax.vmap(partial(stage, weights))(wanted)
np.testing.assert_allclose(out.astype(float), wanted.astype(float), atol=0.1)
