# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Rows split over several mesh axes, in the order of the mesh and in others; JAX permutes in that of the mesh alone."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import rings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_ring_automatic import BALANCED, CAUSAL, ENDS, SPLIT, STEPS, check
from test_sharding import kinds

import jax_fastattn
from jax_fastattn.ops.ring.permute import permute
from jax_fastattn.ring import Ring

# Sizes of the mesh axes "x", "y" and "z".
SHAPES = [(2, 3), (1, 4), (2, 2, 2), (2, 1, 3), (1, 3, 2)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def make_mesh(shape: tuple[int, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, tuple("xyz"[: len(shape)]), axis_types=(kind,) * len(shape), devices=devices)


@shapes
def test_arrays_go_to_the_device_that_the_order_of_axes_names(shape: tuple[int, ...]) -> None:
    mesh = make_mesh(shape)

    def device_before(order: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        ring = Ring(order, math.prod(mesh.shape[name] for name in order), mesh=tuple(mesh.shape.items()))
        pairs = [(device, (device + 1) % ring.size) for device in range(ring.size)]
        device = jax.lax.axis_index(order).reshape(1)
        return permute(ring, [device], pairs)[0], (device - 1) % ring.size

    def run() -> list[tuple[jax.Array, jax.Array]]:
        counts = range(2, len(shape) + 1)
        return [device_before(order) for count in counts for order in itertools.permutations(mesh.axis_names, count)]

    split = jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False)
    for arrived, expected in jax.jit(split)():
        assert arrived.tolist() == expected.tolist()


@pytest.mark.numbers
@kinds
@shapes
def test_every_order_that_explain_describes_compiles(shape: tuple[int, ...], kind: AxisType) -> None:
    """Two rows of each device, and a window of three: devices meet one other."""
    mesh = make_mesh(shape, kind)
    rows = 2 * math.prod(shape)
    arrays = rings.draw(rows, batch=1, heads=(2, 1))
    given = [arrays[name] for name in ("query", "key", "value")]
    attend = functools.partial(jax_fastattn.attention, is_causal=True, local_window_size=(2, None))
    constrain = jax.reshard if kind == AxisType.Explicit else jax.lax.with_sharding_constraint
    orders = list(itertools.permutations(mesh.axis_names))
    splits = [NamedSharding(mesh, P(None, order)) for order in orders]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return [attend(*(constrain(x, split) for x in arrays)) for split in splits]

    with jax.set_mesh(mesh):
        found = calls.quick_jit(run)(*given)
    expected = attend(*given)
    for order, split, x in zip(orders, splits, found, strict=True):
        note = jax_fastattn.explain(*(jax.device_put(x, split) for x in given), is_causal=True).note
        axes = ", ".join(name for name in order if mesh.shape[name] > 1)
        assert f"devices of mesh axis {axes}: ring attention" in note
        assert x.sharding.is_equivalent_to(split, 4)
        calls.assert_same(jax.device_get(x), jax.device_get(expected))


@kinds
def test_the_order_of_axes_is_not_that_of_the_mesh(kind: AxisType) -> None:
    """Gradients, too, of devices that help each other over Auto axes, and of packed rows over Explicit ones."""
    is_packed = kind == AxisType.Explicit
    mesh = make_mesh((2, 2, 2), kind)
    specs = SPLIT | dict.fromkeys(("query", "key", "value", "dout"), P("y", ("z", "x"))) | {"boundaries": P("y")}
    arrays = rings.draw(20) | {"boundaries": ENDS} if is_packed else rings.draw(24)
    found = check(arrays, mesh, specs, **CAUSAL)
    assert found == (STEPS * 3 if is_packed else BALANCED * 2)


@pytest.mark.parametrize("name", ["ring_attention", "all_to_all_attention"])
def test_a_call_inside_shard_map_takes_axes_in_any_order(name: str) -> None:
    mesh, rows = make_mesh((2, 1, 2)), P(None, ("z", "y", "x"))
    attend = functools.partial(getattr(jax_fastattn, name), axis_name=("z", "y", "x"))
    arrays = rings.draw(20, batch=1, heads=(8, 4)) | {"segment_ids": jnp.arange(20)[None] // 7}

    def split(arrays: calls.Arrays) -> Any:
        return jax.shard_map(lambda arrays: attend(**arrays), mesh=mesh, in_specs=rows, out_specs=rows)(arrays)

    found, expected = (rings.gradients(x, arrays) for x in (split, rings.whole()))
    calls.assert_same(jax.device_get(found), jax.device_get(expected))
