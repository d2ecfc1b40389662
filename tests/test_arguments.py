# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The definition of a launch's arguments, on which custom calls, host functions and kernels rely."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import jax.numpy as jnp
import pytest

from jax_fastattn import ffi
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.present import (
    absent_scalars,
    buffers_type,
    launch_buffers,
    named_buffers,
    present_buffers,
)
from jax_fastattn.kernels.arguments.scalars import BIAS_SCALARS, SCALAR_DTYPES, VISIT_SCALARS, Scalars, Sizes
from jax_fastattn.kernels.choose import configured, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.launch import launch_p, launch_scalars, persistent_blocks
from jax_fastattn.ops.cuda.launch_plan import LaunchPlan
from jax_fastattn.spec import QKV, AttentionSpec, Operands, Problem

ROLES = ("operand", "result", "scratch")
SPECS = [
    configured(KernelSpec(op, arch, "float16", head_dim, head_dim, family=family, moved=QKV * (op == "tangent")))
    for op in ("forward", "decode", "backward", "tangent")
    for arch, family in (("sm_80", "sm80"), ("sm_90a", "sm90"))
    for head_dim in (64, 192)
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda x: f"{x.family}-{x.op}-{x.head_dim}")
def test_operands_come_before_results_and_results_before_scratch(spec: KernelSpec) -> None:
    """Custom calls pass operands, then results. Readers of results take those before scratch."""
    buffers = present_buffers(spec)
    assert tuple(buffers) == tuple(name for name in buffers_type(spec)._fields if name in buffers)
    order = [ROLES.index(buffer.role) for buffer in buffers.values() if buffer is not None]
    assert order == sorted(order)


@pytest.mark.parametrize("spec", SPECS, ids=lambda x: f"{x.family}-{x.op}-{x.head_dim}")
def test_a_launch_has_one_definition_of_each_buffer(spec: KernelSpec) -> None:
    """Of two, the one that happens to come last would hold."""
    rows = get_type_hints(buffers_type(spec), include_extras=True)
    found = {
        name: [x for x in getattr(row, "__metadata__", ()) if x.is_of(spec.op, spec.family)]
        for name, row in rows.items()
    }
    assert {name for name, definitions in found.items() if definitions} == {*present_buffers(spec)}
    assert max(map(len, found.values())) == 1


@pytest.mark.parametrize("features", [(), (codes.SINKS,), (codes.SOFT_CAP, codes.SINKS, codes.DROPOUT)])
@pytest.mark.parametrize("spec", SPECS, ids=lambda x: f"{x.family}-{x.op}-{x.head_dim}")
def test_a_host_function_takes_each_buffer_once(spec: KernelSpec, features: tuple[Any, ...]) -> None:
    """One that it takes twice moves all later arguments, and the process crashes in its first launch on a GPU."""
    backward = spec.op == "backward"
    features = tuple(x for x in features if not backward or x is not codes.SINKS)
    spec = dataclasses.replace(spec, features=features, dsinks=backward)
    names = [name for name, dtype in launch_buffers(spec).items() if dtype is not None]
    taken: list[Any] = []
    for x in named_buffers(spec, {name: name for name in names}):
        taken += x if isinstance(x, tuple) else () if x is None else (x,)
    assert taken == names


def test_buffers_are_there_if_the_compile_key_says_so() -> None:
    plain = configured(KernelSpec("backward", "sm_90a", "float16", 64, 64, family="sm90"))
    absent = {"query_seq_lengths", "key_value_seq_lengths", "query_offset", "dlse"}
    listed = {"query_lists", "query_bits", "key_tile_counts"}
    rows = {"key_records", "query_ids"}, {"query_records", "key_ids"}
    tiles = {"query_tiles", "key_tiles", "key_lists", "key_bits", *listed, *rows[0], *rows[1]}
    sinks = {"sinks", "dsinks_terms"}
    bias = {"bias", "key_bias", "row_bias", "dbias", "dkey_bias", "key_classes", "delta", "row_means", "out_rests"}
    assert {name for name, dtype in launch_buffers(plain).items() if dtype is None} == absent | tiles | sinks | bias
    full = dataclasses.replace(plain, **dict.fromkeys(absent, True))
    assert {name for name, dtype in launch_buffers(full).items() if dtype is None} == tiles | sinks | bias
    full = dataclasses.replace(full, dsinks=True)
    assert {name for name, dtype in launch_buffers(full).items() if dtype is None} == tiles | bias
    packed = launch_buffers(dataclasses.replace(plain, packed=True, query_offset=True))
    assert packed["query_tiles"] == packed["key_tiles"] == "int32" and packed["query_offset"] is None
    assert launch_buffers(full)["dq"] == "float16" and launch_buffers(full)["head_ready"] == "int32"
    dkdv = launch_buffers(configured(dataclasses.replace(full, head_dim=192)))
    assert dkdv["dq_accum"] is dkdv["dq_semaphore"] is None
    # A kernel that computes dq alone visits keys.
    lists = [configured(dataclasses.replace(plain, listed=True, head_dim=head_dim)) for head_dim in (64, 192)]
    assert all(launch_buffers(spec)[name] == "int32" for spec in lists for name in listed)
    assert [launch_buffers(spec)["key_lists"] for spec in lists] == [None, "int32"]
    # So does one that computes dbias alone, which finds its tiles by their classes.
    biased = dataclasses.replace(plain, listed=True, bias="matrix", bias_dtype="float16")
    biased = [launch_buffers(configured(dataclasses.replace(biased, dbias=dbias))) for dbias in (False, True)]
    assert [{x[name] for name in ("key_lists", "key_bits", "key_classes")} for x in biased] == [{None}, {"int32"}]
    # Where there are no bits, edge tiles of each list compare rows.
    compared = [launch_buffers(dataclasses.replace(spec, compared=True)) for spec in lists]
    assert [{x[name] for name in rows[0]} for x in compared] == [{"int32"}, {"int32"}]
    assert [{x[name] for name in rows[1]} for x in compared] == [{None}, {"int32"}]


def test_a_bias_has_the_buffer_of_its_kind() -> None:
    """Each kind has one operand, and a gradient only if that is asked for."""
    plain = configured(KernelSpec("backward", "sm_90a", "float16", 64, 64, family="sm90"))

    def found(op: str, **fields: Any) -> dict[str, str | None]:
        buffers = launch_buffers(dataclasses.replace(plain, op=op, **fields))
        return {name: dtype for name, dtype in buffers.items() if dtype is not None and "bias" in name}

    matrix = {"bias": "matrix", "bias_dtype": "float16"}
    assert found("forward", **matrix) == {"bias": "float16"}
    assert found("forward", bias="matrix", bias_dtype="float32") == {"bias": "bfloat16"}
    assert found("forward", bias="keys") == {"key_bias_parts": "bfloat16"}
    assert found("forward", bias="keys", family="sm80") == {"key_bias": "float32"}
    assert found("forward", bias="rows") == {"row_bias": "float32"}
    assert found("backward", **matrix, dbias=True) == {"bias": "float16", "dbias": "float16"}
    assert found("backward", **matrix, dbias=True, splits_dbias=True) == {"bias": "float16", "dbias": "float32"}
    assert found("backward", bias="keys", dbias=True) == {"key_bias": "float32", "dkey_bias": "float32"}
    assert found("backward", bias="rows", dbias=True) == {}
    rows = {"bias": "rows", "features": (codes.SOFT_CAP,)}
    assert found("backward", **rows) == {"row_bias": "float32"}
    assert found("backward", **rows, dbias=True) == {"row_bias": "float32", "dbias": "float32"}


def test_integers_come_before_floats() -> None:
    """A custom call has an array of either, and passes all integers first."""
    scalars = Scalars(*Scalars._fields)
    assert set(SCALAR_DTYPES.values()) == {"int32", "float32"}
    assert scalars.of_dtype("int32") + scalars.of_dtype("float32") == tuple(scalars)
    assert Sizes.of(scalars) == Sizes._fields


def test_scalars_of_some_launches_are_no_parameters_of_others() -> None:
    bias = (*BIAS_SCALARS, "bias_parts")
    absent = dict.fromkeys((*VISIT_SCALARS, "side_heads", "pages", *bias))
    plain = KernelSpec("forward", "sm_90a", "float16", 64, 64, family="sm90")
    assert absent_scalars(plain) == tuple(absent)
    assert absent_scalars(dataclasses.replace(plain, listed=True)) == ("side_heads", "pages", *bias)
    assert absent_scalars(dataclasses.replace(plain, op="decode")) == (*VISIT_SCALARS, "pages", *bias)
    assert absent_scalars(dataclasses.replace(plain, op="decode", page=16)) == (*VISIT_SCALARS, *bias)
    assert absent_scalars(dataclasses.replace(plain, op="decode", row_bits=True)) == ("pages", *bias)
    matrix = dataclasses.replace(plain, bias="matrix", bias_dtype="float32")
    assert absent_scalars(matrix) == (*VISIT_SCALARS, "side_heads", "pages", "bias_parts")
    assert "bias_parts" not in absent_scalars(dataclasses.replace(matrix, op="backward", dbias=True))
    scalars = Scalars(**{name: name for name in Scalars._fields} | absent)
    assert scalars.of_dtype("int32") == tuple(
        x for x in Scalars._fields if SCALAR_DTYPES[x] == "int32" and x not in absent
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda x: f"{x.family}-{x.op}-{x.head_dim}")
def test_the_extension_takes_a_launch_with_every_feature(spec: KernelSpec) -> None:
    """Also with features that exclude each other; the extension has room for a fixed number of arguments."""
    source = (Path(__file__).parents[1] / "csrc" / "module.cc").read_text()
    most = dict(re.findall(r"constexpr size_t (kMax\w+) = (\d+);", source))
    flags = [field.name for field in dataclasses.fields(KernelSpec) if isinstance(field.default, bool)]
    everything: Any = {name: name != "packed" for name in flags} | {"bias": "matrix", "bias_dtype": "float32"}
    everything |= {"features": () if spec.op == "backward" else (codes.SINKS,)}
    buffers = [name for name, dtype in launch_buffers(dataclasses.replace(spec, **everything)).items() if dtype]
    assert {"query_offset", "sinks", "lse", *(() if spec.op == "decode" else ("bias",))} <= {*buffers}
    assert len(buffers) <= int(most["kMaxBuffers"])
    assert len(buffers) + len(Scalars._fields) + len(("stream", "error code")) <= int(most["kMaxArguments"])


def test_a_launch_takes_all_operands_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the kernel lacks would be dropped without a word."""
    x = jnp.zeros((2, 3, 4, 64), jnp.bfloat16)
    operands = Operands(x, x, x, query_offset=jnp.zeros(2, jnp.int32))
    problem = Problem.of(AttentionSpec(0.5, present=operands.present()), operands)
    kernel = kernel_spec(problem, "forward", "sm_90a")
    bound: list[dict[str, Any]] = []
    monkeypatch.setattr(ffi, "multiprocessors", lambda: 7)
    monkeypatch.setattr(launch_p, "bind", lambda *xs, **params: bound.append({"xs": xs, **params}) or [1, 2])
    shapes = {"out": x.shape, "lse": x.shape[:3]}
    plan = LaunchPlan(kernel, problem, operands._asdict(), shapes)
    found = plan.bind()
    assert found == {"out": 1, "lse": 2}
    (call,) = bound
    assert [id(a) for a in call["xs"]] == [id(a) for a in operands.arrays()]
    assert call["results"] == ((x.shape, "bfloat16"), (x.shape[:3], "float32"))
    scalars = launch_scalars(problem, 7)
    assert (*call["ints"], *call["floats"]) == tuple(x for x in scalars if x is not None)
    floats = {name for name, value in scalars._asdict().items() if isinstance(value, float)}
    assert floats == {name for name, dtype in SCALAR_DTYPES.items() if dtype == "float32"}
    for wrong in (operands._replace(sinks=jnp.zeros((1, 4))), operands._replace(query_offset=None)):
        with pytest.raises(AssertionError):
            dataclasses.replace(plan, operands=wrong._asdict()).bind()
    with pytest.raises(AssertionError):
        dataclasses.replace(plan, shapes=shapes | {"dq": x.shape}).bind()


def test_persistent_blocks_are_more_than_sms_where_each_would_take_long() -> None:
    """A collective may hold SMs, and a CTA without an SM begins when another one ends."""

    def problem(length: int, present: tuple[str, ...] = (), **spec: Any) -> Problem:
        given = AttentionSpec(0.1, present=present, **{"is_part": True, **spec})
        return Problem(given, "bfloat16", 1, length, length, 32, 8, 128, 128)

    causal = {"is_causal": True, "window": (None, 0)}
    long = [persistent_blocks(problem(length, **causal), 132) for length in (2048, 4096, 8192, 16384)]
    assert long == [132, 256, 1024, 4096]
    # Without causality there are twice as many pairs.
    assert persistent_blocks(problem(8192), 132) == 2048
    # Nothing runs next to a call that is no block of a ring.
    assert persistent_blocks(problem(16384, is_part=False), 132) == 132
    # A grid is an int32.
    assert persistent_blocks(problem(1 << 22), 132) == 1 << 20
    for present in ("mask", "query_segment_ids", "sequences"):
        assert persistent_blocks(problem(16384, (present,)), 132) == 132
    assert persistent_blocks(problem(16384, window=(4096, 0)), 132) == 132


def test_a_range_of_keys_that_a_mask_leaves_begins_at_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider window would read keys that the mask hides, and no result would show it."""
    x = jnp.zeros((2, 1, 4, 64), jnp.bfloat16)
    key = jnp.zeros((2, 300, 4, 64), jnp.bfloat16)
    operands = Operands(x, key, key, mask=jnp.ones((2, 1, 1, 300), bool))
    spec = AttentionSpec(0.5, window=(7, 3), present=operands.present())
    bound: list[dict[str, Any]] = []
    monkeypatch.setattr(ffi, "multiprocessors", lambda: 7)
    monkeypatch.setattr(ffi, "arch", lambda: "sm_90a")
    monkeypatch.setattr(launch_p, "bind", lambda *xs, **params: bound.append(params) or [x, x[..., 0]])
    cuda.forward(spec, operands)
    (call,) = bound
    absent = absent_scalars(call["kernel"])
    names = [name for name, dtype in SCALAR_DTYPES.items() if dtype == "int32" and name not in absent]
    scalars = dict(zip(names, call["ints"], strict=True))
    assert call["kernel"].row_bits and scalars["window_left"] == 0
