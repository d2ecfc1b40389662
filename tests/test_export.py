# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that leave the process: `jax.export` with symbolic sizes and without the flag, serialized executables.

tests/test_transforms.py has exports of known sizes.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import calls
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import attention, attention_varlen, explain, target_arch
from jax_fastattn.cases.case import Case
from jax_fastattn.ffi import TARGET_NAME
from jax_fastattn.spec import OPERANDS, Operands
from jax_fastattn.xla import passes as xla
from jax_fastattn.xla.chunks import CPU

CHECKS = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
OPERAND_AXES = {name: x.letters for name, x in OPERANDS.items()}
AXES = OPERAND_AXES | {"segment_ids": ("BT", "BS"), "sinks": "N", "scale": ""}

# A call of every size is exported once and runs at both.
SIZES = ({"B": 2, "T": 5, "S": 7}, {"B": 3, "T": 13, "S": 11})
CASES = {
    "grouped": Case(num_kv_heads=3, group=2, head_dim=8, v_head_dim=4),
    "causal": Case(num_kv_heads=2, head_dim=8, is_causal=True),
    "window-wider-than-any-offset": Case(num_kv_heads=2, head_dim=8, window=((1 << 29) - 4, 2), query_offset=(1, 4)),
    "broadcast-bias-and-mask": Case(num_kv_heads=2, head_dim=8, bias="n", mask="ts"),
    "everything": calls.EVERYTHING,
}
SMALL_CHUNKS = dataclasses.replace(CPU, whole=0, block=0, chunk=3, min_chunk=3)


def at(case: Case, sizes: dict[str, int]) -> Case:
    """The case with other sizes, and as many lengths and offsets as it has batch entries then."""
    per_batch = {
        "query_seq_lengths": (sizes["T"], sizes["T"] - 2, 1),
        "key_value_seq_lengths": (sizes["S"] - 2, sizes["S"], 4),
        "query_offset": (3, 2, 5),
    }
    given = {name: x[: sizes["B"]] for name, x in per_batch.items() if getattr(case, name) is not None}
    return dataclasses.replace(case, batch=sizes["B"], query_length=sizes["T"], key_length=sizes["S"], **given)


def symbolic(arrays: Any, axes: Any, letters: str) -> Any:
    """The shapes of `arrays` at SIZES[0], with a symbolic size for each of `letters`."""
    found = jax.export.symbolic_shape(", ".join(letters.lower()))
    size_of = dict(zip(letters, found, strict=True))

    def one(x: jax.Array, letters: str) -> jax.ShapeDtypeStruct:
        shape = [size_of.get(a, n) if n == SIZES[0].get(a) else n for a, n in zip(letters, x.shape, strict=True)]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(one, arrays, {name: axes[name] for name in arrays})


def loss(arrays: calls.Arrays, **options: Any) -> jax.Array:
    """Weighs each element of both results by its value."""
    out, lse = attention(**arrays, **options, return_residual=True)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0.0)))


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("name", "letters"), [(name, "BTS") for name in CASES] + [("everything", letter) for letter in "BTS"]
)
def test_one_export_runs_at_every_symbolic_size(name: str, letters: str) -> None:
    """Comparing a symbolic size raised `InconclusiveDimensionOperation`."""
    cases = [at(CASES[name], SIZES[0] | {a: sizes[a] for a in letters}) for sizes in SIZES]
    run = functools.partial(calls.gradients, functools.partial(loss, **calls.options_of(cases[0].spec())))
    given = [calls.arrays_of(case.operands(jax.random.key(0))) for case in cases]
    exported = jax.export.export(jax.jit(run))(symbolic(given[0], AXES, letters))
    exported = jax.export.deserialize(exported.serialize())
    for arrays in given:
        calls.assert_same(calls.quick_jit(exported.call)(arrays), calls.quick_jit(run)(arrays))


@pytest.mark.numbers
@pytest.mark.parametrize("letters", ["B", "T", "S"])
def test_known_lengths_are_cut_where_another_size_is_symbolic(letters: str) -> None:
    cases = [at(calls.EVERYTHING, SIZES[0] | {a: sizes[a] for a in letters}) for sizes in SIZES]
    spec, tuning = cases[0].spec(), SMALL_CHUNKS

    def run(arrays: Any) -> Any:
        operands = Operands(**arrays)
        out, lse = xla.forward(spec, operands, tuning)
        return out, lse, xla.backward(spec, operands, out, lse, jnp.cos(out), None, tuning=tuning)

    given = [
        {name: x for name, x in case.operands(jax.random.key(0))._asdict().items() if x is not None} for case in cases
    ]
    exported = jax.export.export(jax.jit(run))(symbolic(given[0], OPERAND_AXES, letters))
    assert exported.mlir_module().count("stablehlo.while") >= 2
    for arrays in given:
        calls.assert_same(calls.quick_jit(exported.call)(arrays), calls.quick_jit(run)(arrays))


def test_the_derivative_of_an_export_has_symbolic_sizes_too() -> None:
    case = CASES["grouped"]
    given = [calls.arrays_of(at(case, sizes).operands(jax.random.key(0))) for sizes in SIZES]
    exported = jax.export.export(jax.jit(lambda arrays: attention(**arrays)))(symbolic(given[0], AXES, "BTS"))
    exported = jax.export.deserialize(exported.serialize(vjp_order=1))
    for arrays in given:
        found = jax.grad(lambda arrays: jnp.sum(jnp.sin(exported.call(arrays))))(arrays)
        calls.assert_same(found, jax.grad(lambda arrays: jnp.sum(jnp.sin(attention(**arrays))))(arrays))


def test_vmap_over_symbolic_sizes() -> None:
    """Whether a mapped bias is repeated compared its batch with that of the query."""

    def run(query: jax.Array, key: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.vmap(lambda query, bias: attention(query, key, key, bias, is_causal=True))(query, bias)

    def arrays(b: int, t: int) -> list[jax.Array]:
        shapes = (4, b, t, 2, 8), (b, t, 2, 8), (4, 1, 2, t, t)
        return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]

    b, t = jax.export.symbolic_shape("b, t")
    shapes = (4, b, t, 2, 8), (b, t, 2, 8), (4, 1, 2, t, t)
    exported = jax.export.export(jax.jit(run))(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    for sizes in ((2, 5), (3, 7)):
        calls.assert_same(exported.call(*arrays(*sizes)), run(*arrays(*sizes)))


@pytest.mark.parametrize("letters", ["T", "TSC"])
def test_packed_sequences_of_symbolic_lengths(letters: str) -> None:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, cu_q: jax.Array, cu_k: jax.Array) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            out = attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, query_offset="bottom_right")
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    def arrays(sizes: dict[str, int]) -> list[jax.Array]:
        q, k, v = (jax.random.normal(jax.random.key(i), (sizes["TSS"[i]], 4 - 2 * (i > 0), 8)) for i in range(3))
        return [q, k, v, *(jnp.linspace(1, sizes[a] - 1, sizes["C"]).astype(jnp.int32) for a in "TS")]

    small, large = {"T": 9, "S": 11, "C": 4}, {"T": 14, "S": 13, "C": 5}
    size_of = small | dict(zip(letters, jax.export.symbolic_shape(", ".join(letters.lower())), strict=True))
    shapes = [jax.ShapeDtypeStruct((size_of["TSSCC"[i]], *x.shape[1:]), x.dtype) for i, x in enumerate(arrays(small))]
    exported = jax.export.export(jax.jit(run))(*shapes)
    for given in (arrays(small), arrays(small | {a: large[a] for a in letters})):
        calls.assert_same(exported.call(*given), run(*given))


B, T = jax.export.symbolic_shape("b, t")
SYMBOLIC = [jax.ShapeDtypeStruct((B, T, 4, 8), jnp.bfloat16)] * 3


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=" ".join)
def test_symbolic_sizes_for_kernels_say_what_to_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platforms: tuple[str, ...]
) -> None:
    """In words, where comparing them raised `InconclusiveDimensionOperation`; `explain` says the same."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    export = functools.partial(jax.export.export, platforms=platforms, disabled_checks=CHECKS)
    words = r'sizes are symbolic: B = b, T = t, S = t \(export one program for each set of sizes, .*"xla"`\)'
    with pytest.raises(NotImplementedError, match=words):
        export(jax.jit(attention))(*SYMBOLIC)
    with pytest.raises(NotImplementedError, match=words), target_arch("sm_90a"):
        explain(*SYMBOLIC)
    with pytest.raises(NotImplementedError, match="sizes are symbolic: B = b, T = t, S = t"):
        export(jax.jit(functools.partial(attention, implementation="cuda")))(*SYMBOLIC)
    exported = export(jax.jit(functools.partial(attention, implementation="xla")))(*SYMBOLIC)
    assert TARGET_NAME not in exported.mlir_module()
    if "cpu" in platforms:
        x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8), jnp.bfloat16)
        calls.assert_same(exported.call(x, x, x), attention(x, x, x))


def test_symbolic_sizes_take_the_xla_path_where_kernels_cannot_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    calls.refuse_float32(monkeypatch)
    export = jax.export.export(jax.jit(attention), platforms=["cuda"])
    symbolic = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in SYMBOLIC]
    with pytest.warns(UserWarning, match=r"the dtype is float32.*; sizes are symbolic: "):
        assert TARGET_NAME not in export(*symbolic).mlir_module()
    bias = jax.ShapeDtypeStruct((B, 1, T, T), jnp.float32)
    biased = jax.export.export(jax.jit(lambda q, k, v, bias: attention(q, k, v, bias=bias)), platforms=["cuda"])
    with pytest.raises(NotImplementedError, match="sizes are symbolic"):
        biased(*SYMBOLIC, bias)


@pytest.mark.parametrize(("axis", "name", "letter"), [(2, "query", "N"), (3, "query", "H")])
def test_symbolic_heads_and_head_dims_are_refused(axis: int, name: str, letter: str) -> None:
    shape = [2, 5, 4, 8]
    (shape[axis],) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(ValueError, match=f"`{name}` has the symbolic size {letter} = n, expected a number; export one"):
        jax.export.export(jax.jit(attention))(x, x, x)


def test_an_export_without_the_flag_fails_in_one_screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JAX prints each custom call with its kernel: 20,579 characters for a forward pass."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arrays = [jax.ShapeDtypeStruct((2, 5, 4, 8), jnp.bfloat16)] * 3
    step = jax.jit(jax.grad(lambda *arrays: attention(*arrays).astype(jnp.float32).sum()))

    def refused(**options: Any) -> str:
        with pytest.raises(ValueError, match=r'DisabledSafetyCheck\.custom_call\("jax_fastattn_launch"\)') as caught:
            jax.export.export(step, platforms=["cuda"], **options)(*arrays)
        return str(caught.value)

    assert len(refused()) < 500
    other = [jax.export.DisabledSafetyCheck.custom_call("another_target")]
    assert refused(disabled_checks=other) == refused()
    exported = jax.export.export(step, platforms=["cuda"], disabled_checks=[*other, *CHECKS])(*arrays)
    assert TARGET_NAME in exported.mlir_module()
    assert len(refused()) < 500  # not from what JAX lowered with the flag


@pytest.mark.usefixtures("compiles_anew")  # what JAX has read from its cache cannot be serialized again
def test_an_executable_of_shard_map_is_serialized_and_one_under_a_mesh_is_not() -> None:
    """JAX pickles the callbacks by which a program under a mesh was split."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")
    x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 5, 4, 8)), NamedSharding(mesh, split))
    mapped = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=split, out_specs=split)).lower(x, x, x).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(mapped))
    np.testing.assert_array_equal(loaded(x, x, x), mapped(x, x, x))
    with pytest.raises(AttributeError, match="local object 'partitioned"):
        serialize_executable.serialize(jax.jit(attention).lower(x, x, x).compile())
