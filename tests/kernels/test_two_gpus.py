# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels and collectives in one program, on two GPUs."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import sys
import parallel
found = parallel.block(int(sys.argv[1]), 512)
assert not found["gathered"], found
assert max(found["relative_difference"].values()) < 0.01, found
"""


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kv_heads", (1, 3))
def test_kernels_that_are_first_used_beside_a_collective(kv_heads: int) -> None:
    """Two H100s waited for each other for ever where a kernel was loaded while a collective ran."""
    command = [sys.executable, "-c", PROGRAM, str(kv_heads)]
    subprocess.run(command, cwd=BENCHMARKS, timeout=300, check=True)


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("how", ["set_mesh", "constraint", "vmap", "shard_map", "some axes"])
def test_under_a_mesh(how: str, kind: AxisType) -> None:
    """What a call on one GPU gives, in bits; jax passes no mesh for these, or refused them."""
    attend = functools.partial(attention, is_causal=True, implementation="cuda")
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(key, (4, 257, heads, 64), jnp.bfloat16) for key, heads in zip(keys, (8, 4, 4), strict=True)
    ]
    wanted = np.asarray(jax.jit(attend)(*arrays))
    arrays = jax.device_get(arrays)
    mesh = jax.make_mesh((2, 1), ("data", "other"), axis_types=(kind,) * 2, devices=jax.devices()[:2])

    def constrained(*arrays: jax.Array) -> jax.Array:
        put = jax.reshard if kind == AxisType.Explicit else jax.lax.with_sharding_constraint
        return attend(*(put(x, P("data")) for x in arrays))

    with jax.set_mesh(mesh):
        if how == "set_mesh":
            found = jax.jit(attend)(*arrays)
        elif how == "constraint":
            found = jax.jit(constrained)(*arrays)
            assert len(found.sharding.device_set) == 2 and not found.is_fully_replicated
        elif how == "vmap":
            examples = [jax.device_put(np.stack([x, x]), P(None, "data")) for x in arrays]
            found = jax.jit(jax.vmap(attend))(*examples)[1]
        else:
            axes = {"data"} if how == "some axes" else set(mesh.axis_names)
            mapped = jax.shard_map(attend, in_specs=P("data"), out_specs=P("data"), axis_names=axes)
            found = (jax.jit(mapped) if how == "some axes" else mapped)(*arrays)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), wanted.view(np.uint16))
