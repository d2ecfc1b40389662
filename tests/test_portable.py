# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable path against the executable specification: forward and every gradient, whole and in chunks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from calls import quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention, portable
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.testing.cases import CPU_CASES, Case
from jax_fastattn.testing.compare import Results, assert_within_budget, expected
from jax_fastattn.testing.poison import poison


def run(spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: jax.Array | None = None) -> Results:
    """All results of the portable path. Traces anew, since chunk sizes are not in a cache key."""

    @jax.jit
    def call(operands: Operands, dout: jax.Array, dlse: jax.Array | None) -> Results:
        out, lse = portable.forward(spec, operands)
        return Results(out, lse, *portable.backward(spec, operands, out, lse, dout, dlse))

    return call(operands, dout, dlse)


def check(case: Case, key: jax.Array) -> None:
    """Compares results from poisoned arrays with those expected of the arrays themselves."""
    spec, operands = case.spec(), case.operands(key)
    dout, dlse = case.cotangents(key)
    found = run(spec, *poison(spec, operands, dout, dlse))
    assert_within_budget(found, *expected(spec, operands, dout, dlse))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks of 13, 13 and 11 queries, four of keys: the last ones overlap."""
    monkeypatch.setattr(portable, "CHUNK", 16)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_chunks(case: Case, key: jax.Array) -> None:
    check(case, key)


@pytest.mark.parametrize("case", CPU_CASES[::4], ids=str)
def test_single_chunk(case: Case, key: jax.Array) -> None:
    check(case, key)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="bfloat16", num_kv_heads=2, group=2, is_causal=True, dlse=True),
        Case(dtype="bfloat16", logits_soft_cap=2.0, sinks="n", bias="nts", window=(100, 20)),
        Case(dtype="float16", key_value_seq_lengths=(257, 100), v_head_dim=48),
    ],
    ids=str,
)
def test_low_precision(case: Case, key: jax.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "CHUNK", 100)
    check(case, key)


# Axes of the arrays that a caller transposes to BTNH. Only the first two failed; the slow ones complete the sweep.
LAYOUTS = ["BNTH", "BNHT", "NBHT", "HTNB"]
LAYOUTS += [
    pytest.param("".join(axes), marks=pytest.mark.slow)
    for axes in itertools.permutations("BTNH")
    if "".join(axes) not in LAYOUTS
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cpu_runs_products_of_transposed_bfloat16(layout: str) -> None:
    """XLA:CPU raised "Unsupported element type for DotThunk::Execute". The programs of a layout are compiled as one."""
    sizes = {"B": 2, "T": 64, "N": 4, "H": 16}
    axes = [layout.index(axis) for axis in "BTNH"]

    def forward(is_causal: bool, *arrays: jax.Array) -> jax.Array:
        out = attention(*(x.transpose(axes) for x in arrays), is_causal=is_causal)
        return out.astype(jnp.float32).sum()

    def programs(calls: list[list[jax.Array]]) -> object:
        backward = jax.grad(forward, argnums=(1, 2, 3))
        mha, mha_gradients, gqa, gqa_gradients, causal = calls
        return (
            forward(False, *mha),
            backward(False, *mha_gradients),
            forward(False, *gqa),
            backward(False, *gqa_gradients),
            backward(True, *causal),
        )

    # Arrays of its own for each program, lest XLA shares what they compute.
    heads = [(4, 4, 4), (4, 4, 4), (4, 2, 2), (4, 2, 2), (4, 4, 4)]
    shapes = [[tuple((sizes | {"N": n})[axis] for axis in layout) for n in group] for group in heads]
    arrays = [[jnp.ones(shape, jnp.bfloat16) for shape in group] for group in shapes]
    total, *_ = jax.tree.leaves(quick_jit(programs)(arrays))
    assert total == 2 * 64 * 4 * 16  # means of ones


@pytest.mark.usefixtures("small_chunks")
def test_float64(key: jax.Array) -> None:
    """A float32 anywhere on the way would show at 1e-7."""
    case = dataclasses.replace(CPU_CASES[0], dtype="float64", is_causal=True, logits_soft_cap=2.0, dlse=True)
    with jax.enable_x64(True):
        spec, operands = case.spec(), case.operands(key)
        dout, dlse = case.cotangents(key)
        oracle, baseline = expected(spec, operands, dout, dlse)
        assert_within_budget(run(spec, operands, dout, dlse), oracle, baseline, rounding=1e-13)


@pytest.mark.parametrize("chunk", [16, 512])
def test_what_is_invisible_is_not_read(chunk: int, key: jax.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "CHUNK", chunk)
    case = dataclasses.replace(
        CPU_CASES[0],
        query_seq_lengths=(0, 23),
        key_value_seq_lengths=(41, 17),
        bias="bnts",
        logits_soft_cap=2.0,
        sinks="n",
        scale_is_array=True,
        is_causal=True,
        dlse=True,
    )
    spec, operands = case.spec(), case.operands(key)
    dout, dlse = case.cotangents(key)
    clean, found = run(spec, operands, dout, dlse), run(spec, *poison(spec, operands, dout, dlse))
    for name, x, y in zip(Results._fields, clean, found, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_keys_without_a_query_are_not_read(key: jax.Array) -> None:
    """NaN in the tail of a packed batch, and in keys right of the causal diagonal."""
    packed = Case(batch=1, query_length=41, key_length=53, head_dim=8, packed=((11, 17), (13, 20)))
    causal = Case(query_length=37, key_length=53, head_dim=8, is_causal=True)
    for case, first in ((packed, 33), (causal, 37)):
        spec, operands = case.spec(), case.operands(key)
        dout, _ = case.cotangents(key)
        poisoned, *cotangents = poison(spec, operands, dout)
        assert not np.isfinite(poisoned.key[:, first:]).any()
        for x, y in zip(run(spec, operands, dout), run(spec, poisoned, *cotangents), strict=True):
            np.testing.assert_array_equal(x, y)


def test_temporaries_are_linear_in_length() -> None:
    """One T x S array of float32 would be 64 MiB."""
    case = Case(batch=1, num_kv_heads=2, query_length=4096, key_length=4096, is_causal=True, bias="n", dlse=True)
    spec, shapes = case.spec(), jax.eval_shape(case.operands, jax.random.key(0))
    dout, dlse = jax.eval_shape(case.cotangents, jax.random.key(0))

    def call(operands: Operands, dout: jax.Array, dlse: jax.Array | None) -> portable.Gradients:
        out, lse = portable.forward(spec, operands)
        return portable.backward(spec, operands, out, lse, dout, dlse)

    memory = jax.jit(call).lower(shapes, dout, dlse).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 32 * 2**20


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("wrap", ["shard_map", "export"])
def test_inside_transformations(wrap: str, key: jax.Array) -> None:
    """Loop states must vary over mesh axes as the operands do; exported code must not depend on this process."""
    case = dataclasses.replace(
        CPU_CASES[0],
        batch=4,
        num_kv_heads=2,
        is_causal=True,
        bias="n",
        sinks="n",
        query_offset=(0, 16, -9, 30),
        dlse=True,
    )
    spec, operands = case.spec(), case.operands(key)
    dout, dlse = case.cotangents(key)
    axes = {name: P("data", None, "model") for name in ("query", "key", "value")}
    axes |= {"bias": P(None, "model"), "sinks": P(None, "model"), "query_offset": P("data")}
    operand_axes = tuple(axes[name] for name in spec.present)
    results_axes = P("data", None, "model")

    def forward(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return portable.forward(spec, spec.operands(arrays))

    def backward(
        out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array, *arrays: jax.Array
    ) -> list[jax.Array]:
        found = portable.backward(spec, spec.operands(arrays), out, lse, dout, dlse)
        if wrap == "shard_map":
            found = found._replace(bias=jax.lax.psum(found.bias, "data"), sinks=jax.lax.psum(found.sinks, "data"))
        return [x for x in found if x is not None]

    def wrapped(function: Callable[..., object], in_specs: object, out_specs: object) -> Callable[..., object]:
        if wrap == "export":
            return lambda *arrays: jax.export.export(jax.jit(function))(*arrays).call(*arrays)
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": True}
        return jax.jit(functools.partial(jax.shard_map, mesh=mesh, **specs)(function))

    out, lse = wrapped(forward, operand_axes, (results_axes,) * 2)(*operands.arrays())
    gradient_axes = [results_axes] * 3 + [P(None, "model")] * 2
    gradients = wrapped(backward, (results_axes,) * 4 + operand_axes, gradient_axes)(
        out, lse, dout, dlse, *operands.arrays()
    )
    assert_within_budget(Results(out, lse, *gradients), *expected(spec, operands, dout, dlse))
