# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages under `vmap`: all stages run at once, each on its microbatch, and one kernel launch serves them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import attention

STAGES, MICROBATCHES, WIDTH, HEADS, HEAD_DIM = 4, 6, 128, 4, 32
devices = STAGES if len(jax.devices()) >= STAGES else 1  # on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=8
mesh = jax.make_mesh((devices,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
by_stage = NamedSharding(mesh, PartitionSpec("stage"))


def stage(weights, x):
    """Returns the activations [batch, length, WIDTH] after one stage; here a stage is one layer of attention."""
    q, k, v = (jnp.einsum("btc,cnh->btnh", x, w) for w in weights)
    return x + attention(q, k, v, is_causal=True).reshape(x.shape)


@jax.jit
def pipeline(params, microbatches):
    """Returns the microbatches [MICROBATCHES, batch, length, WIDTH] after all stages."""
    run = jax.vmap(stage, spmd_axis_name="stage")  # the mesh axis that splits the mapped one

    def tick(active, t):  # active [STAGES, batch, length, WIDTH]: what each stage works on
        active = active.at[0].set(microbatches[jnp.minimum(t, MICROBATCHES - 1)])
        active = jax.lax.with_sharding_constraint(run(params, active), by_stage)
        return jnp.roll(active, 1, axis=0), active[-1]  # results go on to the next stage

    idle = jnp.zeros((STAGES, *microbatches.shape[1:]), microbatches.dtype)
    _, last = jax.lax.scan(tick, idle, jnp.arange(MICROBATCHES + STAGES - 1))
    return last[STAGES - 1 :]


params = jax.random.normal(jax.random.key(0), (STAGES, 3, WIDTH, HEADS, HEAD_DIM), jnp.bfloat16) / 12
microbatches = jax.random.normal(jax.random.key(1), (MICROBATCHES, 2, 64, WIDTH), jnp.bfloat16)
out = pipeline(jax.device_put(params, by_stage), microbatches)

wanted = microbatches
for weights in params:  # one stage after the other
    wanted = jax.vmap(partial(stage, weights))(wanted)
np.testing.assert_allclose(out.astype(float), wanted.astype(float), atol=0.1)
