# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout inside of `shard_map`: fold the index of a batch axis into the key, and leave
it alone for an axis of the sequence. On a CPU, first set
XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention, ring_attention

BATCH, LENGTH, HEADS, HEAD_DIM, RATE = 8, 256, 4, 64, 0.1
devices = len(jax.devices())
data = 2 if devices % 2 == 0 else 1
auto = (AxisType.Auto,) * 2
mesh = jax.make_mesh((data, devices // data), ("data", "sequence"), axis_types=auto)
shape, key = (BATCH, LENGTH, HEADS, HEAD_DIM), jax.random.key(0)
q, k, v = (jax.random.normal(x, shape, jnp.bfloat16) for x in jax.random.split(key, 3))


def local(key, *qkv):
    # A share counts its batch entries from 0: without the index, all shares would drop
    # the same weights. Rows count from the start of the sequence on every device.
    key = jax.random.fold_in(key, jax.lax.axis_index("data"))
    dropout = {"dropout_rate": RATE, "dropout_key": key}
    return ring_attention(*qkv, axis_name="sequence", **dropout)


rows = P("data", "sequence")
mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), *[rows] * 3), out_specs=rows)
out = jax.jit(mapped)(key, q, k, v)

whole = functools.partial(attention, dropout_rate=RATE)
for i, share in enumerate(zip(*(jnp.split(x, data) for x in (q, k, v)), strict=True)):
    want = whole(*share, dropout_key=jax.random.fold_in(key, i)).astype(float)
    found = jnp.split(out, data)[i].astype(float)
    np.testing.assert_allclose(found, want, atol=0.02)
