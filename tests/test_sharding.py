# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""jit with a mesh: batch and heads split with no gather of query, key and value; the compiled HLO says so."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

# B, K divide by the mesh axes (2 and 4); sizes stay pairwise distinct.
CASE = dataclasses.replace(
    calls.EVERYTHING,
    batch=6,
    num_kv_heads=4,
    group=3,
    query_seq_lengths=(5, 4, 3, 2, 5, 1),
    key_value_seq_lengths=(6, 7, 2, 3, 4, 5),
    query_offset=(3, 2, 0, -1, 4, 5),
    scale=None,
    scale_is_array=False,
)
PLAIN = dataclasses.replace(
    CASE,
    bias=None,
    mask=None,
    sinks=None,
    segments=0,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_offset=None,
)

SPLIT = {
    "query": ("data", None, "model", None),
    "key": ("data", None, "model", None),
    "value": ("data", None, "model", None),
    "bias": ("data", "model", None, None),
    "mask": ("data", "model", None, None),
    "query_seq_lengths": ("data",),
    "key_value_seq_lengths": ("data",),
    "query_offset": ("data",),
    "segment_ids": ("data", None),
    "sinks": ("model",),
    "scale": (),
}


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "gspmd" and JAX_VERSION >= (0, 9):
        pytest.skip("this jax has Shardy alone, or GSPMD for what is left of it")
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)


def make_mesh(data: int = 2, model: int = 4, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind, kind))


def placed(mesh: Mesh, arrays: calls.Arrays, split: Any = SPLIT) -> calls.Arrays:
    def place(name: str, x: jax.Array) -> jax.Array:
        entries = [e if size > 1 else None for e, size in zip(split[name], x.shape, strict=True)]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*entries)))

    return {name: jax.tree.map(functools.partial(place, name), x) for name, x in arrays.items()}


def collectives(compiled: Any) -> list[str]:
    """The kinds of collective operations in the optimised HLO of one device."""
    kinds = r"all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    return re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text())


def compile_gradients(case: calls.Case, arrays: calls.Arrays) -> tuple[Any, Any]:
    """Gradients of an unweighted loss: without weights from elsewhere, every collective is attention's own."""
    spec, names = case.spec(), [name for name in calls.DIFFERENTIABLE if name in arrays]

    def run(arrays: calls.Arrays, dout: jax.Array, dlse: jax.Array) -> Any:
        def results(wanted: calls.Arrays) -> Any:
            return calls.attention(**arrays | wanted, **calls.options_of(spec), return_residual=True)

        (out, lse), vjp = jax.vjp(results, {name: arrays[name] for name in names})
        return out, lse, vjp((dout, dlse))[0]

    rows = NamedSharding(arrays["query"].sharding.mesh, PartitionSpec(*arrays["query"].sharding.spec[:3]))
    dout, dlse = jax.device_put(case.cotangents(jax.random.key(1)), rows)
    compiled = jax.jit(run).lower(arrays, dout, dlse).compile()
    return compiled, compiled(arrays, dout, dlse)


def on_one_device(case: calls.Case) -> Any:
    arrays = jax.device_put(calls.arrays_of(case.operands(jax.random.key(0))), jax.devices()[0])
    mesh = Mesh([[jax.devices()[0]]], ("data", "model"))
    return compile_gradients(case, placed(mesh, arrays))[1]


def assert_right_and_split(case: calls.Case, result: Any) -> None:
    calls.assert_same(jax.device_get(result), jax.device_get(on_one_device(case)))


@pytest.mark.parametrize("mesh_shape", [(2, 4), (2, 1), (1, 4)], ids=["both", "batch", "heads"])
def test_batch_and_heads_need_no_communication(partitioner: str, mesh_shape: tuple[int, int]) -> None:
    del partitioner
    mesh = make_mesh(*mesh_shape)
    compiled, result = compile_gradients(PLAIN, placed(mesh, calls.arrays_of(PLAIN.operands(jax.random.key(0)))))
    assert collectives(compiled) == []
    out, lse, gradients = result
    expected = PartitionSpec(*("data" if mesh_shape[0] > 1 else None, None, "model" if mesh_shape[1] > 1 else None))
    for x in (out, lse, *gradients.values()):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, expected), x.ndim)
    assert_right_and_split(PLAIN, result)


# What the gradient of an operand is summed over: an all-reduce each, and nothing else.
REDUCTIONS = {
    "all-operands": ({}, ["all-reduce"]),
    "no-sinks": ({"sinks": None}, []),
    "bias-without-batch": ({"sinks": None, "bias": "nts"}, ["all-reduce"]),
    "bias-without-heads": ({"sinks": None, "bias": "bts"}, ["all-reduce"]),
    "bias-without-both": ({"sinks": None, "bias": "ts"}, ["all-reduce"]),
    "mask-without-batch": ({"sinks": None, "mask": "nt"}, []),
    "scale": ({"sinks": None, "bias": None, "scale": -0.6, "scale_is_array": True}, ["all-reduce"]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_other_operands_are_split_alike(partitioner: str, name: str) -> None:
    del partitioner
    change, expected = REDUCTIONS[name]
    case = dataclasses.replace(CASE, **change)
    compiled, result = compile_gradients(case, placed(make_mesh(), calls.arrays_of(case.operands(jax.random.key(0)))))
    assert collectives(compiled) == expected
    assert_right_and_split(case, result)


ODD = {
    "kv-heads-do-not-divide": {"num_kv_heads": 3, "group": 4},
    "one-kv-head": {"num_kv_heads": 1, "group": 8},
    "no-group": {"group": 1},
}


@pytest.mark.parametrize("name", ODD)
def test_heads_that_do_not_divide_are_right(partitioner: str, name: str) -> None:
    del partitioner
    case = dataclasses.replace(CASE, **ODD[name])
    split = SPLIT
    if case.num_kv_heads % 4:
        split = split | {name: ("data", None, None, None) for name in ("key", "value")}
    arrays = placed(make_mesh(), calls.arrays_of(case.operands(jax.random.key(0))), split)
    assert_right_and_split(case, compile_gradients(case, arrays)[1])


@pytest.mark.parametrize("axis", ["query-length", "head-dim"])
def test_other_axes_are_gathered_and_right(partitioner: str, axis: str) -> None:
    del partitioner
    case = dataclasses.replace(PLAIN, query_length=8)
    entries = ("data", "model", None, None) if axis == "query-length" else ("data", None, None, "model")
    arrays = placed(make_mesh(), calls.arrays_of(case.operands(jax.random.key(0))), SPLIT | {"query": entries})
    spec = case.spec()
    run = jax.jit(lambda arrays: calls.attention(**arrays, **calls.options_of(spec)))
    plain = calls.arrays_of(case.operands(jax.random.key(0)))
    calls.assert_same(jax.device_get(run(arrays)), jax.device_get(run(plain)))


def test_vmap_splits_too() -> None:
    """The mapped axis is folded into the batch: the batch alone is split, and with it both."""
    case = dataclasses.replace(PLAIN, batch=2)
    mesh = make_mesh()
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    arrays = {name: jnp.stack([x, 2 * x, -x, x + 1]) for name, x in arrays.items()}
    sharding = NamedSharding(mesh, PartitionSpec("data", None, None, "model"))
    run = jax.jit(jax.vmap(lambda arrays: calls.attention(**arrays, is_causal=True)))
    compiled = run.lower(jax.device_put(arrays, sharding)).compile()
    assert collectives(compiled) == []
    split = compiled(jax.device_put(arrays, sharding))
    calls.assert_same(jax.device_get(split), jax.device_get(run(arrays)))


@pytest.mark.skipif(JAX_VERSION < (0, 9), reason="jax 0.8 itself fails on custom_partitioning under AxisType.Explicit")
@pytest.mark.parametrize("name", ["plain", "all-operands", "bias-without-batch", "scale"])
def test_explicit_axes(name: str) -> None:
    case = PLAIN if name == "plain" else dataclasses.replace(CASE, **REDUCTIONS[name][0])
    mesh = make_mesh(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, calls.arrays_of(case.operands(jax.random.key(0))))
        compiled, result = compile_gradients(case, arrays)
        assert jax.typeof(result[0]).sharding.spec == PartitionSpec("data", None, "model", None)
    if name == "plain":
        assert collectives(compiled) == []
    assert_right_and_split(case, result)
