# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that share a mask share its prepass: XLA merges equal ones, and XLA for CPUs hoists them out of loops.

Programs are lowered for CUDA and compiled by XLA for CPUs, with a stand-in as the target of custom calls. They are not
run. XLA for GPUs merges as well, and hoists nothing: tests/test_gpu_programs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import layers
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import ffi
from jax_fastattn.ffi import _ffi


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    jax.ffi.register_ffi_target(ffi.TARGET_NAME, _ffi.launch_on_host, platform="cpu")


def compiled(function: Any, *arrays: Any) -> str:
    """Returns the optimized HLO of a function that is lowered for CUDA."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text is not None
    return text


# Launches of a run, of both passes: prepasses, and attention kernels.
GRADIENTS = {
    "unrolled": (2, 2 * layers.LAYERS),
    # In the backward pass the mask of a layer comes out of a barrier. Nobody needs the output of the last layer.
    "unrolled-checkpoint": (1 + 2 * layers.LAYERS, 3 * layers.LAYERS - 1),
    "scan": (2, 2 * layers.LAYERS),
    "scan-unrolled": (2, 2 * layers.LAYERS),
    "checkpoint": (2, 3 * layers.LAYERS),
    # For the same barrier both prepasses of the backward pass stay in the loop.
    "checkpoint-prevent-cse": (1 + 2 * layers.LAYERS, 3 * layers.LAYERS),
}

if jax.__version_info__ < (0, 9):
    # XLA for CPUs drops the barrier there, and merges what the layers compute again.
    GRADIENTS["unrolled-checkpoint"] = GRADIENTS["unrolled"]


@pytest.mark.parametrize("name", layers.STACKS)
def test_all_layers_share_one_prepass_forward(name: str) -> None:
    found = layers.launches(compiled(layers.STACKS[name], *layers.shapes()))
    assert found == {"prepass": 1, "attention": layers.LAYERS}


@pytest.mark.parametrize("name", layers.STACKS)
def test_gradient(name: str) -> None:
    prepasses, kernels = GRADIENTS[name]
    found = layers.launches(compiled(layers.gradient(layers.STACKS[name]), *layers.shapes()))
    assert found == {"prepass": prepasses, "attention": kernels}


@pytest.mark.parametrize("name", ["unrolled", "scan", "checkpoint"])
def test_mesh(name: str) -> None:
    """Each device makes the lists of its own batch entries, once in each pass."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    specs = PartitionSpec("data", None, "model"), PartitionSpec(), PartitionSpec("data")
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(layers.shapes(batch=4), specs, strict=True)
    ]
    prepasses, kernels = GRADIENTS[name]
    text = compiled(layers.gradient(layers.STACKS[name]), *arrays)
    assert layers.launches(text) == {"prepass": prepasses, "attention": kernels}
    assert "bf16[2,512,1,64]" in text and "bf16[4,512,4,64]" not in text


def test_masks_of_two_values_are_not_merged() -> None:
    """Shows that the tests above can fail."""
    x, weights, mask = layers.shapes()

    def two(x: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
        x = layers.layer(x, weights[0], mask)
        return layers.layer(x, weights[1], jnp.logical_not(mask))

    assert layers.launches(compiled(two, x, weights, mask)) == {"prepass": 2, "attention": 2}
