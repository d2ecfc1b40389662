# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""jit with a mesh: batch and heads split with no gather of query, key and value; the compiled HLO says so."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_fastattn.xla.blocks import Blocks
from jax_fastattn.xla.chunks import CPU

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


# Where the mesh axis does not divide the key/value heads.
WHOLE_KEY_HEADS = SPLIT | {name: ("data", None, None, None) for name in ("key", "value")}


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
    """The kinds of collective operations in the optimized HLO of one device."""
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
    compiled = calls.quick_jit(run).lower(arrays, dout, dlse).compile()
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


def test_the_bound_on_logits_is_for_one_device(partitioner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is too large for one device to compute at once, and small enough for each of eight."""
    del partitioner
    logits = PLAIN.batch * PLAIN.num_kv_heads * PLAIN.group * PLAIN.query_length * PLAIN.key_length
    cut, tuning = Blocks.of, dataclasses.replace(CPU, whole=logits // 8, block=0, chunk=4, min_chunk=4)
    monkeypatch.setattr(Blocks, "of", lambda spec, operands, _: cut(spec, operands, tuning))
    arrays = calls.arrays_of(PLAIN.operands(jax.random.key(0)))
    whole, split = (compile_gradients(PLAIN, placed(mesh, arrays)) for mesh in (make_mesh(1, 1), make_mesh()))
    assert " while(" in whole[0].as_text()
    assert " while(" not in split[0].as_text()
    calls.assert_same(jax.device_get(split[1]), jax.device_get(whole[1]))


# What the gradient of an operand is summed over: an all-reduce each, and nothing else.
REDUCTIONS = {
    "all-operands": ({}, ["all-reduce"]),
    "no-sinks": ({"sinks": None}, []),
    "bias-without-batch": ({"sinks": None, "bias": "nts"}, ["all-reduce"]),
    "bias-without-heads": ({"sinks": None, "bias": "bts"}, ["all-reduce"]),
    "bias-without-both": ({"sinks": None, "bias": "ts"}, ["all-reduce"]),
    "mask-without-batch": ({"sinks": None, "mask": "nt"}, []),
    "mask-per-kv-head": ({"sinks": None, "mask": "bkts"}, []),
    "scale": ({"sinks": None, "bias": None, "scale": -0.6, "scale_is_array": True}, ["all-reduce"]),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", REDUCTIONS)
def test_other_operands_are_split_alike(partitioner: str, name: str) -> None:
    del partitioner
    change, expected = REDUCTIONS[name]
    case = dataclasses.replace(CASE, **change)
    compiled, result = compile_gradients(case, placed(make_mesh(), calls.arrays_of(case.operands(jax.random.key(0)))))
    assert collectives(compiled) == expected
    assert_right_and_split(case, result)


# Key/value heads, size of a group, and the axis that splits the query heads. 6 heads in groups of 2 on 2 devices: the
# first device reads heads 0 and 1, the second 1 and 2.
UNEVEN = {"three-on-four": (3, 4, 4), "three-on-two": (3, 2, 2), "no-group": (4, 1, 4)}


@pytest.mark.numbers
@pytest.mark.parametrize("name", UNEVEN)
def test_heads_that_do_not_divide_are_right(partitioner: str, name: str) -> None:
    del partitioner
    num_kv_heads, group, model = UNEVEN[name]
    case = dataclasses.replace(CASE, num_kv_heads=num_kv_heads, group=group)
    split = SPLIT if num_kv_heads % model == 0 else WHOLE_KEY_HEADS
    arrays = placed(make_mesh(model=model), calls.arrays_of(case.operands(jax.random.key(0))), split)
    assert_right_and_split(case, compile_gradients(case, arrays)[1])


def flops(compiled: Any) -> float:
    """Floating-point operations of one device."""
    return compiled.cost_analysis()["flops"]


@pytest.mark.numbers
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_query_heads_split_further_than_key_heads(partitioner: str, num_kv_heads: int) -> None:
    """Each of 8 devices has one query head: the only communication adds up dk and dv."""
    del partitioner
    case = dataclasses.replace(PLAIN, num_kv_heads=num_kv_heads, group=8 // num_kv_heads)
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    compiled, result = compile_gradients(case, placed(make_mesh(1, 8), arrays, WHOLE_KEY_HEADS))
    assert collectives(compiled) == ["all-reduce"]
    assert result[2]["query"].sharding.spec[2] == "model"
    one_device, expected = compile_gradients(case, placed(make_mesh(1, 1), arrays))
    assert flops(compiled) < 1.5 * flops(one_device) / 8
    calls.assert_same(jax.device_get(result), jax.device_get(expected))


# A call, its mesh, and the shapes of the shares that devices add up.
SHARES = {
    "key-heads": ({"num_kv_heads": 2, "group": 4}, (1, 8), WHOLE_KEY_HEADS, ["6,7,2,8", "6,7,2,4"]),
    "whole-keys": (
        {"query_length": 8},
        (2, 4),
        WHOLE_KEY_HEADS | {"query": ("data", "model", None, None)},
        ["3,7,4,8", "3,7,4,4"],
    ),
    "bias-and-sinks": ({"bias": "nts", "bias_dtype": "bfloat16", "sinks": "n"}, (2, 4), SPLIT, ["1,3,5,7", "1,3"]),
}


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("name", SHARES)
def test_shares_are_added_up_in_float32(partitioner: str, name: str, tmp_path: Path) -> None:
    """XLA for CPUs turns an all-reduce of bfloat16 into one of float32, so this reads what the partitioner wrote."""
    del partitioner
    change, mesh_shape, split, shapes = SHARES[name]
    case = dataclasses.replace(PLAIN, dtype="bfloat16", **change)
    arrays = placed(make_mesh(*mesh_shape), calls.arrays_of(case.operands(jax.random.key(0))), split)
    lowered = jax.jit(functools.partial(calls.gradients, calls.loss_of(case))).lower(arrays)
    lowered.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"})
    (text,) = (path.read_text() for path in tmp_path.glob("*.after_spmd-partitioning.*"))
    dtypes = {shape: dtype for dtype, shape in re.findall(r" (\w+)\[([\d,]+)\]\S* all-reduce\(", text)}
    assert [dtypes[shape] for shape in shapes] == ["f32", "f32"], dtypes


def test_heads_split_further_with_every_operand(partitioner: str) -> None:
    """Two all-reduces: of dk and dv over the heads, of the gradient of sinks over the batch."""
    del partitioner
    case = dataclasses.replace(CASE, num_kv_heads=2, group=2)
    arrays = placed(make_mesh(), calls.arrays_of(case.operands(jax.random.key(0))), WHOLE_KEY_HEADS)
    compiled, result = compile_gradients(case, arrays)
    assert collectives(compiled) == ["all-reduce"] * 2
    assert_right_and_split(case, result)


def test_key_heads_are_split_over_the_axes_that_divide_them(partitioner: str) -> None:
    """Both mesh axes split the query heads: the first one splits the key heads too, the second one shares them."""
    del partitioner
    case = dataclasses.replace(PLAIN, num_kv_heads=2, group=4)
    split = SPLIT | {name: (None, None, "data", None) for name in ("key", "value")}
    split["query"] = (None, None, ("data", "model"), None)
    arrays = placed(make_mesh(), calls.arrays_of(case.operands(jax.random.key(0))), split)
    compiled, result = compile_gradients(case, arrays)
    assert collectives(compiled) == ["all-reduce"]
    assert result[2]["key"].sharding.spec[2] == "data"
    assert_right_and_split(case, result)


HEAD_DIM, WIDTH, LENGTH = 16, 128, 64


def megatron_block(attend: Any) -> Any:
    """The gradients of attention and a perceptron, each after a product that splits and before one that sums."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        query, key, value = (
            (x @ weights[name]).reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("query", "key", "value")
        )
        x = x + attend(query, key, value, is_causal=True).reshape(*x.shape[:2], -1) @ weights["out"]
        return jnp.sum(jnp.sin(x + jnp.tanh(x @ weights["up"]) @ weights["down"]))

    return jax.grad(loss, argnums=(0, 1))


def megatron_weights(num_kv_heads: int, key_axis: str | None) -> tuple[Any, jax.Array]:
    """Weights and input on a mesh of 8; `key_axis` splits the columns of the key and value weights."""
    mesh = make_mesh(1, 8)
    columns = {"query": 8 * HEAD_DIM, "key": num_kv_heads * HEAD_DIM, "value": num_kv_heads * HEAD_DIM, "up": 4 * WIDTH}
    shapes = {name: (WIDTH, size) for name, size in columns.items()}
    shapes |= {"out": (8 * HEAD_DIM, WIDTH), "down": (4 * WIDTH, WIDTH)}
    specs = dict.fromkeys(columns, (None, "model")) | dict.fromkeys(["out", "down"], ("model", None))
    specs |= dict.fromkeys(["key", "value"], (None, key_axis))
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    weights = {
        name: jax.device_put(
            jax.random.normal(k, shape) / shape[0] ** 0.5, NamedSharding(mesh, PartitionSpec(*specs[name]))
        )
        for k, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    x = jax.random.normal(keys[0], (2, LENGTH, WIDTH))
    return weights, jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def test_megatron_block_with_one_key_head() -> None:
    """Against `jax.nn`: at most one all-reduce more, no all-gather, and no more work."""
    arguments = megatron_weights(num_kv_heads=1, key_axis=None)
    ours, theirs = (
        calls.quick_jit(megatron_block(f)).lower(*arguments).compile()
        for f in (calls.attention, jax.nn.dot_product_attention)
    )
    assert set(collectives(ours)) == {"all-reduce"}
    assert len(collectives(ours)) <= len(collectives(theirs)) + 1
    assert flops(ours) < 1.05 * flops(theirs)
    calls.assert_same(ours(*arguments), theirs(*arguments), tolerance=1e-4)


def test_key_weights_split_within_a_head(partitioner: str) -> None:
    """8 devices split the columns of 2 key heads: a part of the mesh axis splits the heads, the rest the head dim."""
    del partitioner
    arguments = megatron_weights(num_kv_heads=2, key_axis="model")
    ours, theirs = (calls.quick_jit(megatron_block(f)) for f in (calls.attention, jax.nn.dot_product_attention))
    calls.assert_same(jax.device_get(ours(*arguments)), jax.device_get(theirs(*arguments)), tolerance=1e-4)


@pytest.mark.parametrize("mapped", ["all", "query"])
def test_pipeline_stages_need_no_communication(mapped: str) -> None:
    """A stage axis, mapped with `spmd_axis_name`, beside axes that split batch and heads: forward and gradients."""
    mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    case = dataclasses.replace(PLAIN, num_kv_heads=2)
    names = list(PLAIN.spec().present) if mapped == "all" else ["query"]
    arrays = {}
    for name, x in calls.arrays_of(case.operands(jax.random.key(0))).items():
        entries = ("stage",) * (name in names) + ("data", None, "model")
        x = jnp.stack([x, -x]) if name in names else x
        arrays[name] = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*entries)))

    def stage(arrays: calls.Arrays) -> Any:
        return jax.vjp(lambda arrays: calls.attention(**arrays, is_causal=True), arrays)

    def run(arrays: calls.Arrays) -> Any:
        out, vjp = stage(arrays)
        return out, vjp(out)

    axes = ({name: 0 if name in names else None for name in arrays},)
    mapped_run = calls.quick_jit(jax.vmap(run, in_axes=axes, spmd_axis_name="stage"))
    compiled = mapped_run.lower(arrays).compile()
    assert collectives(compiled) == []
    one_device = jax.device_put(arrays, jax.devices()[0])
    calls.assert_same(jax.device_get(compiled(arrays)), jax.device_get(mapped_run(one_device)))
    forward_alone = calls.quick_jit(jax.vmap(lambda x: stage(x)[0], in_axes=axes, spmd_axis_name="stage"))
    compiled = forward_alone.lower(arrays).compile()
    assert collectives(compiled) == []
    assert flops(compiled) < 1.2 * flops(forward_alone.lower(one_device).compile()) / 8


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


@pytest.mark.numbers
@pytest.mark.skipif(JAX_VERSION < (0, 9), reason="jax 0.8 itself fails on custom_partitioning under AxisType.Explicit")
@pytest.mark.parametrize("name", ["plain", "all-operands", "bias-without-batch", "scale", "heads-split-further"])
def test_explicit_axes(name: str) -> None:
    case, split = CASE, SPLIT
    if name == "plain":
        case = PLAIN
    elif name == "heads-split-further":
        case, split = dataclasses.replace(CASE, num_kv_heads=2, group=2), WHOLE_KEY_HEADS
    else:
        case = dataclasses.replace(CASE, **REDUCTIONS[name][0])
    mesh = make_mesh(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, calls.arrays_of(case.operands(jax.random.key(0))), split)
        compiled, result = compile_gradients(case, arrays)
        assert jax.typeof(result[0]).sharding.spec == PartitionSpec("data", None, "model", None)
    if name == "plain":
        assert collectives(compiled) == []
    assert_right_and_split(case, result)


KINDS = {
    "auto": AxisType.Auto,
    "explicit": pytest.param(
        AxisType.Explicit,
        marks=pytest.mark.skipif(JAX_VERSION < (0, 9), reason="jax 0.8 fails on custom_partitioning under Explicit"),
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize("wrap", ["eager", "jit", "grad", "vmap"])
def test_set_mesh_with_arguments_that_have_no_mesh(partitioner: str, kind: AxisType, wrap: str) -> None:
    """jax tells the partitioner of no mesh here; GSPMD does not even tell it of shardings."""
    del partitioner
    arrays = calls.arrays_of(PLAIN.operands(jax.random.key(0)))
    arrays = jax.tree.map(lambda x: x[None], arrays) if wrap == "vmap" else arrays
    run = {
        "eager": lambda arrays: calls.attention(**arrays),
        "jit": jax.jit(lambda arrays: calls.attention(**arrays)),
        "grad": jax.jit(jax.grad(lambda arrays: jnp.sin(calls.attention(**arrays)).sum())),
        "vmap": jax.jit(jax.vmap(lambda arrays: calls.attention(**arrays))),
    }[wrap]
    with jax.set_mesh(make_mesh(kind=kind)):
        found = run(arrays)
    calls.assert_same(jax.device_get(found), jax.device_get(run(arrays)))


# What splits query, key and value within the jitted function, and the mesh.
CONSTRAINTS = {
    "batch": (("data",), (6, 1)),
    "heads": ((None, None, "model"), (2, 4)),
    "both": (("data", None, "model"), (2, 4)),
    "both-by-the-other-axis": (("model", None, "data"), (4, 2)),
    "batch-by-both": ((("model", "data"),), (3, 2)),
    "three-and-two": (("data", None, "model"), (3, 2)),
    "two-and-three": (("data", None, "model"), (2, 3)),
}


@pytest.mark.numbers
@kinds
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_within_jit_split_too(partitioner: str, kind: AxisType, name: str) -> None:
    del partitioner
    entries, mesh_shape = CONSTRAINTS[name]
    num_kv_heads, group = (6, 2) if 3 in mesh_shape else (4, 3)
    case = dataclasses.replace(PLAIN, batch=12, num_kv_heads=num_kv_heads, group=group)
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    sharding = NamedSharding(make_mesh(*mesh_shape, kind), PartitionSpec(*entries))
    constrain = jax.reshard if kind == AxisType.Explicit else jax.lax.with_sharding_constraint

    def run(arrays: calls.Arrays) -> Any:
        out, vjp = jax.vjp(lambda arrays: calls.attention(**arrays), arrays)
        return out, vjp(jnp.sin(out))[0]

    with jax.set_mesh(sharding.mesh):
        compiled = calls.quick_jit(lambda arrays: run(constrain(arrays, sharding.spec))).lower(arrays).compile()
        found = compiled(arrays)
    assert collectives(compiled) == []
    for x in jax.tree.leaves(found):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    calls.assert_same(jax.device_get(found), jax.device_get(calls.quick_jit(run)(arrays)))


# What is mapped, how the mapped axis and the batch of the query are split, and whether that takes no communication.
EXPLICIT_VMAPS = {
    "all": (("query", "key", "value"), (None, "data"), True),
    "query": (("query",), (None, "data"), True),
    "key-value": (("key", "value"), (None, "data"), True),
    "mask": (("mask",), (None, "data"), True),
    "query-by-both": (("query",), ("model", "data"), True),
    "mask-by-both": (("mask",), ("model", "data"), False),
}


@pytest.mark.numbers
@pytest.mark.skipif(JAX_VERSION < (0, 9), reason="jax 0.8 fails on custom_partitioning under Explicit")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", EXPLICIT_VMAPS)
def test_vmap_with_an_explicit_batch(name: str, axis: int) -> None:
    """The mapped axis is folded into a batch that is split. The mesh axis of heads splits V in some cases."""
    mapped, (v_axis, b_axis), is_local = EXPLICIT_VMAPS[name]
    case = dataclasses.replace(PLAIN, mask="bnts" if "mask" in mapped else None)
    mesh = make_mesh(kind=AxisType.Explicit)
    one_device = calls.arrays_of(case.operands(jax.random.key(0)))
    examples = [1, 2, -1, 3]
    for x in mapped:
        one = one_device[x]
        one_device[x] = jnp.stack([jnp.roll(one, i, 2) if x == "mask" else i * one for i in examples], axis)

    def put(name: str, x: jax.Array) -> jax.Array:
        entries = [b_axis, None]
        if name in mapped:
            entries.insert(axis, v_axis)
        return jax.device_put(x, PartitionSpec(*entries))

    def run(arrays: calls.Arrays) -> Any:
        def results(wanted: calls.Arrays) -> jax.Array:
            return calls.attention(**arrays | wanted)

        out, vjp = jax.vjp(results, {name: arrays[name] for name in ("query", "key", "value")})
        return out, vjp(out)[0]

    mapped_run = calls.quick_jit(jax.vmap(run, in_axes=({x: axis if x in mapped else None for x in one_device},)))
    expected = jax.device_get(mapped_run(one_device))
    with jax.set_mesh(mesh):
        arrays = {x: put(x, array) for x, array in one_device.items()}
        compiled = mapped_run.lower(arrays).compile()
        found = compiled(arrays)
    assert (collectives(compiled) == []) == is_local
    out_axis = v_axis if "query" in mapped else None
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(out_axis, b_axis)), found[0].ndim)
    calls.assert_same(jax.device_get(found), expected)
