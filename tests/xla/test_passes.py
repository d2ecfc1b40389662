# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The XLA path against the executable specification: forward and every gradient, whole and in chunks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from calls import assert_same, quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from testing.cases.cpu import CPU_CASES
from testing.compare import Results, assert_within_budget, evaluate, expected
from testing.poison import poison

from jax_fastattn import attention
from jax_fastattn.cases.case import Case
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla import blocks, chunks
from jax_fastattn.xla import passes as xla
from jax_fastattn.xla.blocks import FEW_QUERIES
from jax_fastattn.xla.chunks import CPU, Tuning

# Three chunks of 13, 13 and 11 queries, four of keys: the last ones overlap.
SMALL_CHUNKS = dataclasses.replace(CPU, whole=0, block=0, chunk=16, min_chunk=16)


def run(
    spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: jax.Array | None = None, tuning: Tuning = CPU
) -> Results:
    """All results of the XLA path."""

    @jax.jit
    def call(operands: Operands, dout: jax.Array, dlse: jax.Array | None) -> Results:
        out, lse = xla.forward(spec, operands, tuning)
        return Results.of(out, lse, xla.backward(spec, operands, out, lse, dout, dlse, tuning=tuning))

    return call(operands, dout, dlse)


def check(case: Case, key: jax.Array, tuning: Tuning = CPU) -> None:
    """Compares results from poisoned arrays with those expected of the arrays themselves.

    Those of float32 have to be as close to the reference as no budget asks for, which saves computing the baseline.
    """
    spec, operands = case.spec(), case.operands(key)
    dout, dlse = case.cotangents(key)
    found = run(spec, *poison(spec, operands, dout, dlse), tuning)
    if case.dtype == "float32":
        assert_same(found, evaluate(attention_reference, spec, operands, dout, dlse))
    else:
        assert_within_budget(found, *expected(spec, operands, dout, dlse))


@pytest.mark.numbers
@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_chunks(case: Case, key: jax.Array) -> None:
    check(case, key, SMALL_CHUNKS)


@pytest.mark.numbers
@pytest.mark.parametrize("case", CPU_CASES[::4], ids=str)
def test_single_chunk(case: Case, key: jax.Array) -> None:
    check(case, key)


@pytest.mark.numbers
@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="bfloat16", num_kv_heads=2, group=2, is_causal=True, dlse=True),
        Case(dtype="bfloat16", logits_soft_cap=2.0, sinks="n", bias="nts", window=(100, 20)),
        Case(dtype="float16", key_value_seq_lengths=(257, 100), v_head_dim=48),
    ],
    ids=str,
)
def test_low_precision(case: Case, key: jax.Array) -> None:
    check(case, key, dataclasses.replace(CPU, whole=0, chunk=100))


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


def test_float64(key: jax.Array) -> None:
    """A float32 anywhere on the way would show at 1e-7."""
    case = dataclasses.replace(CPU_CASES[0], dtype="float64", is_causal=True, logits_soft_cap=2.0, dlse=True)
    with jax.enable_x64(True):
        spec, operands = case.spec(), case.operands(key)
        dout, dlse = case.cotangents(key)
        oracle, baseline = expected(spec, operands, dout, dlse)
        found = run(spec, operands, dout, dlse, SMALL_CHUNKS)
        assert_within_budget(found, oracle, baseline, rounding=1e-13)


@pytest.mark.parametrize("tuning", [SMALL_CHUNKS, CPU], ids=["chunks", "whole"])
def test_what_is_invisible_is_not_read(tuning: Tuning, key: jax.Array) -> None:
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
    clean = run(spec, operands, dout, dlse, tuning)
    found = run(spec, *poison(spec, operands, dout, dlse), tuning)
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
        assert not (np.abs(poisoned.key[:, first:]) < 1e37).any()
        for x, y in zip(run(spec, operands, dout), run(spec, poisoned, *cotangents), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("tuning", [SMALL_CHUNKS, CPU], ids=["chunks", "whole"])
def test_few_queries_get_no_copy_of_values(tuning: Tuning, key: jax.Array) -> None:
    """One query over 128k keys with lengths took 1.85 times as long as in `jax.nn` on an H100: values were copied."""
    case = Case(batch=2, query_length=1, key_length=53, num_kv_heads=2, group=2, key_value_seq_lengths=(31, 7))

    def choices(query_length: int, copied: int = 0) -> int:
        changed = dataclasses.replace(case, query_length=query_length)
        spec, operands = changed.spec(), changed.operands(key)
        forward = functools.partial(xla.forward, spec, tuning=dataclasses.replace(tuning, copied=copied))
        return jax.jit(forward).lower(operands).as_text().count("stablehlo.case")

    assert [choices(1), choices(FEW_QUERIES), choices(FEW_QUERIES + 1), choices(1, copied=1 << 20)] == [1, 1, 0, 0]
    spec, operands = case.spec(), case.operands(key)
    dout, _ = case.cotangents(key)
    poisoned, *cotangents = poison(spec, operands, dout)
    assert not np.isfinite(poisoned.value).all()
    for x, y in zip(run(spec, operands, dout, None, tuning), run(spec, poisoned, *cotangents, tuning), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({"is_causal": True}, 0.6),
        ({"window": (9, 3)}, 0.6),
        ({"window": (5, None), "query_length": 53, "key_length": 37}, 0.7),
        ({"window": (5, 0), "query_length": 90, "key_length": 37}, 0.3),
        ({"is_causal": True, "query_offset": (4, -9)}, 1.0),
        ({"query_length": 0, "is_causal": True}, 1.0),
        ({"key_length": 0, "is_causal": True, "sinks": "n"}, 1.0),
    ],
    ids=["causal", "window", "left", "hidden queries", "offset", "no query", "no key"],
)
def test_bands_skip_what_is_hidden(
    change: dict[str, Any], most: float, key: jax.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bands of queries leave out keys that none of them can see; here they are of 8 queries, in steps of 4 keys."""
    monkeypatch.setattr(blocks, "MIN_BAND", 8)
    monkeypatch.setattr(blocks, "BAND_KEYS", 4)
    case, tuning = dataclasses.replace(CPU_CASES[0], bias="nts", dlse=True, **change), dataclasses.replace(CPU, band=1)
    spec, operands = case.spec(), jax.eval_shape(case.operands, key)
    bands = blocks.bands(spec, operands, tuning)
    computed = sum(queries.size * keys.size for queries, keys in bands)
    assert computed <= most * case.query_length * case.key_length
    check(case, key, tuning)


@pytest.mark.parametrize("tuning", [SMALL_CHUNKS, CPU], ids=["chunks", "whole"])
def test_no_logits_are_transposed(tuning: Tuning, key: jax.Array) -> None:
    """The order of axes in products had logits transposed, which took a CPU longer than the products."""
    case = Case(query_length=37, key_length=53, num_kv_heads=3, group=2, head_dim=8, bias="bnts", mask="ts")
    spec, operands = case.spec(), jax.eval_shape(case.operands, key)
    dout, _ = jax.eval_shape(case.cotangents, key)

    def call(operands: Operands, dout: jax.Array) -> xla.Gradients:
        out, lse = xla.forward(spec, operands, tuning)
        return xla.backward(spec, operands, out, lse, dout, None, tuning=tuning)

    text = jax.jit(call).lower(operands, dout).as_text()
    sizes = {f"{chunks.Axis.cut(length, 16).chunk}" for length in (37, 53)} if tuning is SMALL_CHUNKS else {"37", "53"}
    transposes = [line for line in text.splitlines() if "stablehlo.transpose" in line]
    assert transposes
    assert not [line for line in transposes if sizes <= set(re.findall(r"\d+", line.split("->")[1]))]


def test_temporaries_on_an_accelerator() -> None:
    """Up to 4 GiB of float32 logits are whole; beyond, no array has T x S elements, forward or backward."""

    def text(length: int) -> str:
        x = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
        loss = lambda x: attention(x, x, x, implementation="xla").astype(jnp.float32).sum()
        return jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("tpu",)).as_text()

    whole, chunks = text(1 << 14), text(1 << 15)
    assert f"{1 << 14}x{1 << 14}xf32" in whole
    assert "stablehlo.while" not in whole
    assert f"{1 << 15}x{1 << 15}x" not in chunks
    assert "stablehlo.while" in chunks


def test_temporaries_are_linear_in_length() -> None:
    """One T x S array of float32 would be 64 MiB."""
    case = Case(batch=1, num_kv_heads=2, query_length=4096, key_length=4096, is_causal=True, bias="n", dlse=True)
    spec, shapes = case.spec(), jax.eval_shape(case.operands, jax.random.key(0))
    dout, dlse = jax.eval_shape(case.cotangents, jax.random.key(0))

    def call(operands: Operands, dout: jax.Array, dlse: jax.Array | None) -> xla.Gradients:
        out, lse = xla.forward(spec, operands)
        return xla.backward(spec, operands, out, lse, dout, dlse)

    memory = jax.jit(call).lower(shapes, dout, dlse).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 32 * 2**20


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
        return xla.forward(spec, spec.operands(arrays), SMALL_CHUNKS)

    def backward(
        out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array, *arrays: jax.Array
    ) -> list[jax.Array]:
        found = xla.backward(spec, spec.operands(arrays), out, lse, dout, dlse, tuning=SMALL_CHUNKS)
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


@pytest.mark.parametrize(
    ("dtype", "setting", "found"),
    [
        (jnp.float32, None, "DEFAULT"),
        (jnp.float32, "highest", "HIGHEST"),
        (jnp.float32, "TF32_TF32_F32", "algorithm"),
        (jnp.bfloat16, "highest", "DEFAULT"),
    ],
    ids=["default", "highest", "algorithm", "bfloat16"],
)
def test_products_have_the_precision_of_where_the_call_is_traced(dtype: Any, setting: Any, found: str) -> None:
    """Lowered elsewhere and differentiated there, products had the precision of that place."""
    x = jnp.ones((1, 5, 2, 8), dtype)

    def step(x: jax.Array) -> Any:
        with jax.default_matmul_precision(setting):
            out, vjp = jax.vjp(functools.partial(attention, implementation="xla"), x, x, x)
        return vjp(out)

    with jax.default_matmul_precision("high"):
        text = jax.jit(step).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 7
    assert all(found in line or (found == "DEFAULT" and "precision" not in line) for line in products)
