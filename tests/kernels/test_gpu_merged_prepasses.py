# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""How often layers that share a mask run its prepass on a GPU: once where they are unrolled, once a layer in a scan.

XLA for GPUs merges equal calls of one computation. Unlike XLA for CPUs it moves nothing out of a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import layers
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import ffi

# XLA of jaxlib 0.11.2 launches a kernel twice if its results leave a scan and are used in it as well.
OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}

# Launches of a run in the gradient: prepasses, and attention kernels.
GRADIENTS = {
    "unrolled": (2, 2 * layers.LAYERS),
    # In the backward pass the mask of a layer comes out of a barrier. Nobody needs the output of the last layer.
    "unrolled-checkpoint": (1 + 2 * layers.LAYERS, 3 * layers.LAYERS - 1),
    "scan": (2 * layers.LAYERS, 2 * layers.LAYERS),
    "scan-unrolled": (2, 2 * layers.LAYERS),
    "checkpoint": (3 * layers.LAYERS, 3 * layers.LAYERS),
    "checkpoint-prevent-cse": (3 * layers.LAYERS, 3 * layers.LAYERS),
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if ffi.arch() != "sm_90a":
        pytest.skip(f"the numbers are those of Hopper's kernels, and the architecture is {ffi.arch()}")


def launches(function: Any, arrays: Sequence[Any]) -> dict[str, int]:
    """Returns how many launches of each kind a run of the compiled function makes."""
    text = jax.jit(function, compiler_options=OPTIONS).lower(*arrays).compile().as_text()
    assert text is not None
    return layers.launches(text)


@pytest.mark.gpu
@pytest.mark.parametrize("name", layers.STACKS)
def test_forward(name: str) -> None:
    prepasses = 1 if "unrolled" in name else layers.LAYERS
    assert launches(layers.STACKS[name], layers.shapes()) == {"prepass": prepasses, "attention": layers.LAYERS}


@pytest.mark.gpu
@pytest.mark.parametrize("name", layers.STACKS)
def test_gradient(name: str) -> None:
    prepasses, kernels = GRADIENTS[name]
    found = launches(layers.gradient(layers.STACKS[name]), layers.shapes())
    assert found == {"prepass": prepasses, "attention": kernels}


@pytest.mark.multi_gpu
def test_mesh() -> None:
    """Each device makes the lists of its own batch entries, once in each pass."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec("data"), PartitionSpec(), PartitionSpec("data")
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(layers.shapes(batch=4), specs, strict=True)
    ]
    prepasses, kernels = GRADIENTS["unrolled"]
    found = launches(layers.gradient(layers.STACKS["unrolled"]), arrays)
    assert found == {"prepass": prepasses, "attention": kernels}
