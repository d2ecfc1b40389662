# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""H100s that are described instead of found: XLA's compiler for GPUs needs a description, and no GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# A `GpuTargetConfigProto` of XLA, in text.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 clock_rate_ghz: 1.98 fpus_per_core: 128
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  device_memory_size: 84978434048 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# XLA of jax 0.8 would time products on the GPU, which is not there.
OPTIONS = {"xla_gpu_autotune_level": 0}


@functools.cache
def make_mesh(size: int, name: str = "data") -> Mesh:
    """Returns a mesh of so many described GPUs of one host."""
    shape = f"1x1x{size}"
    found = topologies.get_topology_desc(shape, platform="cuda", target_config=H100, topology=shape)
    return Mesh(np.array(found.devices), (name,), axis_types=(AxisType.Auto,))


def place(array: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Returns the abstract array, laid out over a mesh."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def compiled(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Returns the program that XLA makes of a function of abstract arrays, which lie on described GPUs."""
    return jax.jit(function, compiler_options=OPTIONS, **options).lower(*arrays).compile()
