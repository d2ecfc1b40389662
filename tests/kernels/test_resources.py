# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture, within its registers and shared memory. No GPU needed."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import resources
from resources import KernelResources, kept_resources

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.cases.coverage import ALL_ROWS, COVERAGE, ONE_ROW
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.architectures import shared_memory_limit
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.decode.config import BLOCK_ROWS
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.programs.code import Code, Plane
from jax_fastattn.spec import Problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
]

CAUSAL = {"window_right": True}
EVERYTHING = {
    **CAUSAL,
    "window_left": True,
    "group": 3,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
    "features": (codes.SOFT_CAP,),
}
SINKS = {**CAUSAL, "dlse": True, "dsinks": True}
FEATURES = {
    "full": {},
    "causal": CAUSAL,
    "soft-cap": {**CAUSAL, "features": (codes.SOFT_CAP,)},
    "groups": {**CAUSAL, "group": 4},
    "everything": EVERYTHING,
    "sinks": SINKS,
    "listed": {"listed": True},
    "compared": {"listed": True, "compared": True},
    "alike": {"listed": True, "alike": True},
    "bias": {"bias": "matrix", "bias_dtype": "bfloat16"},
    "bias-causal": {**CAUSAL, "bias": "matrix", "bias_dtype": "bfloat16"},
    "bias-float32": {"bias": "matrix", "bias_dtype": "float32"},
    "bias-listed": {"listed": True, "bias": "matrix", "bias_dtype": "bfloat16"},
    "bias-alike": {"listed": True, "alike": True, "bias": "matrix", "bias_dtype": "bfloat16"},
    "key-bias": {"bias": "keys"},
    "row-bias": {"bias": "rows"},
    "capped-row-bias": {**CAUSAL, "bias": "rows", "features": (codes.SOFT_CAP,)},
}
# How dq is added up where one kernel computes all gradients.
BACKWARD_VARIANTS = [{}, {"ordered": True}]
# Portable rows that visit tiles by lists: forward 32 and 16 rows a warp; backward one role, two roles, and two roles in
# 99 KB of shared memory.
LISTED = {"listed": True, "group": 3}
LISTED_ROWS = [
    ("sm_80", "forward", (64, 64)),
    ("sm_86", "forward", (256, 256)),
    ("sm_80", "backward", (64, 64)),
    ("sm_80", "backward", (128, 128)),
    ("sm_86", "backward", (128, 128)),
]
# GPUs whose calls run the portable family: those that every run compiles all rows for, and those that it compiles one
# row of each kind for. Of sm_89 one row per operation is compiled, see `test_sm_89_has_the_machine_code_of_sm_86`.
PORTABLE_ARCHITECTURES = tuple(arch for arch, x in COVERAGE.items() if x.compiled == ALL_ROWS and arch != "sm_90a")
OTHER_ARCHITECTURES = tuple(arch for arch, x in COVERAGE.items() if x.compiled == ONE_ROW)
# Of the portable family the order is compiled for one architecture of each size of shared memory.
ORDERED_ARCHITECTURES = ("sm_80", "sm_86", "sm_90a", "sm_100a")
# Local memory of the kernels with every feature at once, bytes per thread: values kept across the loop, most of them
# in the portable backward at head dims 192 and 128, and at 64.
EVERYTHING_LOCAL_BYTES = {arch: 96 if arch == "sm_103a" else 88 for arch in COVERAGE}
# Of the portable backward with a causal mask: at head dim 64 where warps keep sums of dK and of dV; at those from 136
# to 192, whose warps keep sums of up to 192 columns, most of it in semaphore order; and on sm_100a, sm_103a and
# sm_110a at most head dims, though the tiles are the same.
LOCAL_BYTES = {
    "sm_80": {(64, 64): 24, (160, 160): 88, (192, 128): 128},
    "sm_86": {(192, 128): 64, (192, 192): 120},
    "sm_87": {(64, 64): 24, (160, 160): 88, (192, 128): 16},
    "sm_100a": {(64, 64): 64, (128, 128): 80, (160, 160): 104, (192, 128): 48, (256, 256): 8},
    "sm_103a": {(64, 64): 40, (128, 128): 48, (160, 160): 72, (192, 128): 8, (256, 256): 8},
    "sm_110a": {(64, 64): 40, (128, 128): 48, (160, 160): 72, (192, 128): 8},
    "sm_120a": {(192, 128): 48, (192, 192): 136, (256, 256): 16},
    "sm_121a": {(192, 128): 48, (192, 192): 136, (256, 256): 16},
}
FORWARD_LOCAL_BYTES = {
    "sm_100a": {(128, 128): 24, (192, 128): 48, (256, 256): 16},
    "sm_103a": {(128, 128): 16, (192, 128): 24, (256, 256): 24},
    "sm_110a": {(128, 128): 16, (192, 128): 24, (256, 256): 24},
}


def _local_bytes(arch: str, op: str, dims: tuple[int, int], features: str) -> int:
    if features == "everything":
        return EVERYTHING_LOCAL_BYTES[arch]
    return (LOCAL_BYTES if op == "backward" else FORWARD_LOCAL_BYTES).get(arch, {}).get(dims, 0)


def _spec(family: str, op: str, arch: str, dims: tuple[int, int], features: dict[str, object]) -> KernelSpec:
    spec = KernelSpec(op, arch, "bfloat16", *dims, family=family, **features)  # pyright: ignore[reportArgumentType]
    if features is EVERYTHING:
        sinks = (codes.SINKS,) if op == "forward" else ()
        spec = dataclasses.replace(spec, features=(*spec.features, *sinks), dlse=op == "backward")
    return configured(spec)


def _launches(spec: KernelSpec) -> int:
    """Returns how many kernels there are. The gradient of a bias of pairs has its own."""
    more = int(spec.sums_dbias)
    if spec.op == "decode":
        return 1 + int(spec.config.splits)
    return {"forward": 1 + int(spec.has_tile_counter), "backward": 3 + more, "tangent": 1}[spec.op]


def _assert_fits(spec: KernelSpec, kernels: Sequence[KernelResources], local_bytes: int) -> None:
    # Where CTAs get tiles by a counter, a kernel resets it.
    assert len(kernels) == _launches(spec), spec
    for kernel in kernels:
        assert kernel.registers <= 255, (spec, kernel)
        assert kernel.local_bytes <= local_bytes, (spec, kernel)
        assert kernel.shared_bytes <= shared_memory_limit(spec.arch), (spec, kernel)


DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
# Head dims and features of tangents, none of which may spill.
TANGENT_DIMS = [(64, 64), (96, 96), (128, 128)]
TANGENTS = ("full", "everything", "listed", "compared")


def _tangent_specs(family: str, arch: str, features: str) -> list[KernelSpec]:
    moved = {**FEATURES[features], "moved": ("query", "key", "value")}
    return [_spec(family, "tangent", arch, dims, moved) for dims in TANGENT_DIMS]


def _portable_rows(architectures: Sequence[str]) -> list[tuple[str, str, str, str]]:
    return [
        ("sm80", arch, op, features)
        for arch in architectures
        for op in ("forward", "backward")
        for features in ("causal", "everything")
    ]


# Those of Hopper that are causal only are among `HOPPER_ROWS`.
COMPILED = [
    *(("sm90", "sm_90a", op, "everything") for op in ("forward", "backward")),
    *_portable_rows(PORTABLE_ARCHITECTURES),
]

# One head dim of each tiling of the portable kernels that those of `DIMS` do not have, by KB of shared memory.
OTHER_DIMS = {
    163: [("backward", (96, 96)), ("backward", (160, 160)), ("backward", (256, 64))],
    227: [("forward", (160, 160)), ("backward", (96, 96)), ("backward", (160, 160))],
    99: [
        ("forward", (80, 80)),
        ("forward", (192, 192)),
        ("backward", (32, 32)),
        ("backward", (96, 96)),
        ("backward", (112, 16)),
        ("backward", (160, 16)),
        ("backward", (192, 192)),
        ("backward", (256, 32)),
        ("backward", (256, 128)),
    ],
}


def _other_tilings(architectures: Sequence[str]) -> list[tuple[str, str, tuple[int, int]]]:
    """Architecture, operation and head dims of rows with a causal mask."""
    return [(arch, op, dims) for arch in architectures for op, dims in OTHER_DIMS[shared_memory_limit(arch) // 1024]]


def _if_asked(rows: Sequence[tuple[object, ...]]) -> list[object]:
    return [pytest.param(*row, marks=pytest.mark.every_arch) for row in rows]


def _variants(spec: KernelSpec) -> list[KernelSpec]:
    adds_dq = spec.op == "backward" and spec.config.adds_dq
    variants = BACKWARD_VARIANTS if adds_dq and spec.arch in ORDERED_ARCHITECTURES else [{}]
    return [dataclasses.replace(spec, **variant) for variant in variants]


@pytest.mark.parametrize("dims", DIMS, ids=lambda x: "v".join(map(str, x)))
@pytest.mark.parametrize(
    ("family", "arch", "op", "features"), [*COMPILED, *_if_asked(_portable_rows(OTHER_ARCHITECTURES))]
)
def test_kernels_fit(family: str, arch: str, op: str, features: str, dims: tuple[int, int]) -> None:
    allowed = _local_bytes(arch, op, dims, features)
    for spec in _variants(_spec(family, op, arch, dims, FEATURES[features])):
        _assert_fits(spec, kept_resources(spec), allowed)


@pytest.mark.parametrize(
    ("arch", "op", "dims"),
    [*_other_tilings(PORTABLE_ARCHITECTURES), *_if_asked(_other_tilings(OTHER_ARCHITECTURES))],
)
def test_other_tilings_fit(arch: str, op: str, dims: tuple[int, int]) -> None:
    spec = _spec("sm80", op, arch, dims, CAUSAL)
    _assert_fits(spec, kept_resources(spec), _local_bytes(arch, op, dims, "causal"))


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("arch", OTHER_ARCHITECTURES)
def test_one_row_of_each_kind_fits(arch: str, op: str) -> None:
    """`pytest -m every_arch` compiles every row for these GPUs."""
    spec = _spec("sm80", op, arch, (64, 64), EVERYTHING)
    _assert_fits(spec, kept_resources(spec), _local_bytes(arch, op, (64, 64), "everything"))


def test_every_portable_tiling_is_compiled() -> None:
    named = [*rows().values(), *rows(every_arch=True).values()]
    compiled = {(spec.arch, spec.op, spec.config) for spec in named if spec.family == "sm80"}
    head_dims, ops = range(8, 257, 8), ("forward", "backward")
    architectures = PORTABLE_ARCHITECTURES + OTHER_ARCHITECTURES
    assert {*architectures, "sm_89", "sm_90a"} == set(COVERAGE)
    for arch, op, *dims in itertools.product(architectures, ops, head_dims, head_dims):
        spec = _spec("sm80", op, arch, tuple(dims), CAUSAL)
        assert (arch, op, spec.config) in compiled, spec
        if arch == "sm_86":
            assert configured(dataclasses.replace(spec, arch="sm_89")).config == spec.config


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_sm_89_has_the_machine_code_of_sm_86(op: str) -> None:
    """The same bytes, so that rows of sm_86 count for sm_89 too."""
    from jax_fastattn.compilation.compiler import compile_kernel

    texts = []
    for arch in ("sm_86", "sm_89"):
        sections = resources._sections(resources.cubin(compile_kernel(_spec("sm80", op, arch, (64, 64), EVERYTHING))))
        texts.append({name: code for name, code in sections.items() if name.startswith(".text.")})
    assert texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize("arch", COVERAGE)
def test_every_gpu_from_9_0_on_adds_four_floats_at_once(arch: str) -> None:
    """With single additions the backward pass has four times as many instructions for dq."""
    from jax_fastattn.kernels.sm80.backward.dq_reduce import adds_chunks

    assert adds_chunks(arch) == (int(arch.removeprefix("sm_").removesuffix("a")) >= 90)


# The code of ALiBi, and of numbers of queries and of keys that are added, with the operands that they read.
_ALIBI = Code(
    (
        *(("score",), ("plane", 0), ("affine", 1, -1, 0), ("to_float", 2), ("mul", 1, 3), ("sub", 0, 4)),
        *(("const", "1.0"), ("const", "-1.0"), ("mul", 7, 3)),
    ),
    "ffiffffff",
    (5, 6, 8),
    (Plane("head", "f", False, True),),
)
_ROWS = Code(
    (("score",), ("plane", 0), ("plane", 1), ("add", 0, 1), ("add", 3, 2), ("const", "1.0")),
    "ffffff",
    (4, 5, 5, 5),
    (Plane("query", "f", False, True), Plane("key", "f", False, True)),
)
FUNCTIONS = {"alibi": _ALIBI, "rows": _ROWS}
# Local memory of their kernels for packed sequences, by function, architecture, operation and head dim; 0 elsewhere.
# Without packed sequences it is 56, 72, 56 and 48 bytes.
FUNCTION_LOCAL_BYTES = {
    ("alibi", "sm_80", "backward", 64): 72,
    ("rows", "sm_80", "backward", 64): 112,
    ("rows", "sm_80", "forward", 64): 56,
    ("rows", "sm_90a", "forward", 128): 64,
}


def _functions(name: str, family: str) -> tuple[codes.Code, ...]:
    shapes = tuple((f"{plane.kind}_numbers", 1, 2) for plane in FUNCTIONS[name].planes)
    return codes.score_function(FUNCTIONS[name], shapes, exact=family == "sm80")


@pytest.mark.parametrize(("family", "arch"), [("sm90", "sm_90a"), ("sm80", "sm_80")])
@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize(("name", "head_dim"), [("alibi", 64), ("rows", 64), ("rows", 128)])
def test_score_functions_of_packed_sequences_fit(name: str, family: str, arch: str, op: str, head_dim: int) -> None:
    features = {**CAUSAL, "packed": True, "features": _functions(name, family)}
    spec = _spec(family, op, arch, (head_dim, head_dim), features)
    _assert_fits(spec, kept_resources(spec), FUNCTION_LOCAL_BYTES.get((name, arch, op, head_dim), 0))


# Local memory of backward kernels with mean keys of rows, by architecture and head dim; 0 elsewhere. Without them it is
# 56 and 80 bytes.
MEANS_LOCAL_BYTES = {("sm_80", 64): 88, ("sm_80", 160): 80, ("sm_120a", 256): 16}
MEANS_ROWS = [
    *(("sm90", "sm_90a", head_dim) for head_dim in (64, 128)),
    *(("sm80", "sm_80", head_dim) for head_dim in (64, 128, 160, 256)),
    *(("sm80", arch, head_dim) for arch in ("sm_86", "sm_120a") for head_dim in (64, 128, 256)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "arch", "head_dim"), MEANS_ROWS)
def test_kernels_with_mean_keys_of_rows_fit(family: str, arch: str, head_dim: int) -> None:
    features = {**CAUSAL, "features": _functions("alibi", family), "mean_plane": 0}
    # Without means of rows the forward kernel for head dim 256 has 8 bytes, too.
    forward_bytes = 8 if (arch, head_dim) == ("sm_80", 256) else 0
    for op, allowed in (("forward", forward_bytes), ("backward", MEANS_LOCAL_BYTES.get((arch, head_dim), 0))):
        spec = _spec(family, op, arch, (head_dim, head_dim), features)
        _assert_fits(spec, kept_resources(spec), allowed)


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_with_rests_of_the_output_spill_nothing(dtype: Any, head_dim: int, op: Any) -> None:
    dims = head_dim, head_dim
    spec = configured(KernelSpec(op, "sm_90a", dtype, *dims, family="sm90", window_right=True, out_rests=True))
    _assert_fits(spec, kept_resources(spec), 0)


@pytest.mark.parametrize(("family", "arch"), [("sm90", "sm_90a"), ("sm80", "sm_80")])
@pytest.mark.parametrize(("name", "head_dim", "rows"), [("alibi", 64, 64), ("rows", 64, 8), ("rows", 128, 64)])
def test_score_functions_of_few_queries_fit(name: str, family: str, arch: str, head_dim: int, rows: int) -> None:
    """None of them has local memory."""
    features = {**CAUSAL, "group": 8, "query_offset": True, "key_value_seq_lengths": True}
    found = _functions(name, family)
    key = KernelSpec("decode", arch, "bfloat16", head_dim, head_dim, family=family, features=found, **features)  # pyright: ignore[reportArgumentType]
    spec = configured(key, rows=rows)
    _assert_fits(spec, kept_resources(spec), 0)


# Portable rows for float32 operands: each tiling once. None of them has local memory.
SPLIT_ROWS = [
    ("sm_80", "forward", (64, 64)),
    ("sm_80", "forward", (96, 96)),
    ("sm_80", "forward", (128, 128)),
    ("sm_80", "forward", (192, 192)),
    ("sm_80", "forward", (256, 256)),
    ("sm_80", "backward", (64, 64)),
    ("sm_80", "backward", (96, 96)),
    ("sm_80", "backward", (128, 128)),
    ("sm_80", "backward", (192, 192)),
    ("sm_80", "backward", (256, 256)),
    ("sm_86", "forward", (64, 64)),
    ("sm_86", "forward", (128, 128)),
    ("sm_86", "forward", (160, 160)),
    ("sm_86", "backward", (64, 64)),
    ("sm_86", "backward", (128, 128)),
    ("sm_90a", "forward", (192, 192)),
    ("sm_90a", "forward", (256, 256)),
    ("sm_90a", "backward", (128, 128)),
]


@pytest.mark.parametrize(("arch", "op", "dims"), SPLIT_ROWS)
def test_kernels_for_float32_fit(arch: str, op: str, dims: tuple[int, int]) -> None:
    spec = _spec("sm80", op, arch, dims, {**CAUSAL, "products": "bf16x3"})
    _assert_fits(spec, kept_resources(spec), 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize(("family", "arch"), [("sm90", "sm_90a"), ("sm80", "sm_80")])
def test_kernels_for_float32_in_float16_fit(family: str, arch: str, op: str, head_dim: int) -> None:
    key = KernelSpec(op, arch, "float16", head_dim, head_dim, family=family, window_right=True, products="half")  # pyright: ignore[reportArgumentType]
    spec = configured(key)
    _assert_fits(spec, kept_resources(spec), 0)


# Local memory of the same kernels next to dropout.
DROPPED_HALVES = {
    ("sm_90a", "forward", 64): 0,
    ("sm_90a", "forward", 128): 24,
    ("sm_90a", "backward", 64): 0,
    ("sm_90a", "backward", 128): 56,
    ("sm_80", "forward", 64): 0,
    ("sm_80", "forward", 128): 8,
    ("sm_80", "backward", 64): 0,
    ("sm_80", "backward", 128): 32,
}


@pytest.mark.parametrize(("arch", "op", "head_dim"), DROPPED_HALVES)
def test_kernels_for_float32_in_float16_with_dropout_spill_little(arch: str, op: str, head_dim: int) -> None:
    family, features = "sm90" if arch == "sm_90a" else "sm80", (codes.DROPOUT,)
    key = KernelSpec(op, arch, "float16", head_dim, head_dim, family=family, window_right=True, features=features)  # pyright: ignore[reportArgumentType]
    spec = configured(dataclasses.replace(key, products="half"))
    _assert_fits(spec, kept_resources(spec), DROPPED_HALVES[arch, op, head_dim])


# Rows of products of float16, by family, GPU, operation, head dim and features. Two have local memory.
HALF_FEATURES = {name: FEATURES[name] for name in ("causal", "bias-float32")}
HALF_FEATURES |= {"packed": {**CAUSAL, "packed": True}, "listed": LISTED}
HALF_FEATURES |= {"sinks": {**CAUSAL, "features": (codes.SOFT_CAP,), "dlse": True, "dsinks": True}}
HALF_ROWS = [
    *(("sm90", "sm_90a", op, dim, "causal") for op in ("forward", "backward") for dim in (96, 192, 256)),
    *(("sm80", "sm_80", op, dim, "causal") for op in ("forward", "backward") for dim in (96, 192, 256)),
    *(("sm80", "sm_86", op, 128, "causal") for op in ("forward", "backward")),
    *(
        (family, arch, op, dim, features)
        for family, arch, dim in (("sm90", "sm_90a", 128), ("sm80", "sm_80", 64))
        for op in ("forward", "backward")
        for features in ("packed", "listed", "bias-float32", "sinks")
    ),
]


@pytest.mark.parametrize(("family", "arch", "op", "head_dim", "features"), HALF_ROWS)
def test_kernels_for_float32_in_float16_with_features_fit(
    family: str, arch: str, op: str, head_dim: int, features: str
) -> None:
    facts: dict[str, object] = dict(HALF_FEATURES[features])
    if features == "sinks" and op == "forward":
        facts = {**CAUSAL, "features": (codes.SOFT_CAP, codes.SINKS)}
    spec = KernelSpec(op, arch, "float16", head_dim, head_dim, family=family, products="half", **facts)  # pyright: ignore[reportArgumentType]
    spec = configured(spec)
    allowed = {("forward", 64, "bias-float32"): 64, ("forward", 256, "causal"): 16} if family == "sm80" else {}
    _assert_fits(spec, kept_resources(spec), allowed.get((op, head_dim, features), 0))


@pytest.mark.parametrize(("op", "local_bytes"), [("forward", 8), ("backward", 24)])
def test_kernels_for_float32_with_a_bias_fit(op: str, local_bytes: int) -> None:
    """The forward kernel of 32 rows a warp has local memory, and the kernel of the bias's gradient."""
    features = {**CAUSAL, "bias": "matrix", "bias_dtype": "float32", "dbias": op == "backward", "products": "bf16x3"}
    spec = _spec("sm80", op, "sm_80", (64, 64), features)
    _assert_fits(spec, kept_resources(spec), local_bytes)


# Features of Hopper's kernels for float32 operands. None of the forward ones has local memory.
SPLIT_HOPPER = ("full", "causal", "everything", "listed", "compared", "bias-float32", "bias-listed", "key-bias")
SPLIT_HOPPER_DIMS = [(64, 64), (96, 96), (128, 128)]
# Local memory of the backward ones; of the kernel of a bias's gradient more.
SPLIT_LOCAL_BYTES = dict.fromkeys(("listed", "compared", "bias-listed"), 8)
SPLIT_BIAS_GRADIENT_LOCAL_BYTES = 24


def _split_hopper_spec(op: str, dims: tuple[int, int], features: str) -> KernelSpec:
    spec = _spec("sm90", op, "sm_90a", dims, FEATURES[features])
    return configured(dataclasses.replace(spec, products="bf16x3"))


@pytest.mark.parametrize("dims", SPLIT_HOPPER_DIMS, ids=lambda x: "v".join(map(str, x)))
@pytest.mark.parametrize("features", SPLIT_HOPPER)
def test_hopper_kernels_for_float32_fit(features: str, dims: tuple[int, int]) -> None:
    spec = _split_hopper_spec("forward", dims, features)
    _assert_fits(spec, kept_resources(spec), 0)


@pytest.mark.parametrize("dims", SPLIT_HOPPER_DIMS, ids=lambda x: "v".join(map(str, x)))
@pytest.mark.parametrize("features", [*SPLIT_HOPPER, "sinks"])
def test_hopper_gradients_for_float32_fit(features: str, dims: tuple[int, int]) -> None:
    spec = _split_hopper_spec("backward", dims, features)
    _assert_fits(spec, kept_resources(spec), SPLIT_LOCAL_BYTES.get(features, 0))


@pytest.mark.parametrize("features", ["bias-float32", "bias-listed"])
def test_hopper_bias_gradients_for_float32_fit(features: str) -> None:
    spec = configured(dataclasses.replace(_split_hopper_spec("backward", (128, 128), features), dbias=True))
    _assert_fits(spec, kept_resources(spec), SPLIT_BIAS_GRADIENT_LOCAL_BYTES)


# A head dim of every row of `sm90.config`, and where lengths differ both of them.
HOPPER_ROWS = [
    *((dims, short) for dims in ((64, 64), (32, 16)) for short in (True, False)),
    *((dims, False) for dims in ((96, 96), (128, 128), (72, 128), (160, 160), (192, 128), (256, 256))),
]
# Those of packed sequences: forward a CTA for each tile, and persistent CTAs; backward one kernel, and two.
PACKED_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
# Features of those rows, all of which have to do without local memory.
HOPPER = ("full", "causal", "soft-cap", "groups", "listed", "compared", "alike")
# Local memory of forward rows: two registers of head dim 64, outside of the loop over full tiles.
HOPPER_LOCAL_BYTES = dict.fromkeys((("listed", "forward"), ("alike", "forward")), 8)
# Head dims of features of which one row of each kernel is enough: other kernels do the same with all rows.
ONE_OF_EACH_KERNEL = {"compared": DIMS[:3], "alike": ((64, 64), (128, 128))}
ONE_OF_EACH_KERNEL |= dict.fromkeys(("soft-cap", "listed", "bias-causal", "bias-float32", "bias-listed"), DIMS)
# Kernels load less of a bias of keys or of rows than of one of pairs, which has all rows.
ONE_OF_EACH_KERNEL |= dict.fromkeys(("key-bias", "row-bias", "capped-row-bias"), DIMS)
# The same of forward rows with a bias.
BIASES = ("bias", "bias-causal", "bias-float32", "bias-listed", "key-bias", "row-bias", "capped-row-bias")
# Local memory of those with a bias of pairs, by features: values that live across the loops of head dims up to 64.
BIAS_LOCAL_BYTES = {"bias-listed": 32}
# Backward rows with a bias and its gradient: features, and head dims of those that add some code.
BIAS_GRADIENTS = {
    "bias-causal": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
    "bias-float32": ((64, 64), (128, 128), (256, 256)),
    "bias-listed": ((64, 64), (128, 128), (192, 128)),
    "bias-alike": ((64, 64), (96, 96), (128, 128)),
    "key-bias": ((64, 64), (128, 128), (192, 128), (256, 256)),
    "capped-row-bias": ((64, 64), (128, 128), (192, 128)),
}
# Local memory of those: with lists in the kernel of dk, dv and dq at head dim 128, and up to 16 bytes in that of dbias;
# with two terms in that of dbias at head dim 128, and 16 bytes in that of dq at 256; with rows under a soft cap in that
# of dk, dv and dq at head dim 128.
BIAS_GRADIENT_LOCAL_BYTES = {"bias-listed": 32, "bias-alike": 16, "bias-float32": 32, "capped-row-bias": 128}
# In that of dbias at head dim 256 under a causal mask, since its loader skips hidden items by ballot.
BIAS_GRADIENT_LOCAL_BYTES |= {"bias-causal": 16}
# Portable rows with a bias, and how much local memory a kernel of each may have: most have that of dk, dv and dq at
# head dim 64, the forward kernels of 32 rows a warp, and those of a bias over lists.
PORTABLE_BIASES = {
    ("sm_80", "forward", "bias-causal", (64, 64)): 56,
    ("sm_80", "forward", "bias-causal", (128, 128)): 80,
    ("sm_80", "backward", "bias-causal", (64, 64)): 104,
    ("sm_80", "backward", "bias-causal", (256, 256)): 24,
    ("sm_86", "backward", "bias-causal", (64, 64)): 80,
    ("sm_86", "backward", "bias-float32", (128, 128)): 8,
    ("sm_80", "backward", "bias-listed", (128, 128)): 64,
    ("sm_80", "backward", "key-bias", (64, 64)): 88,
    ("sm_86", "backward", "key-bias", (256, 256)): 0,
    ("sm_80", "backward", "capped-row-bias", (128, 128)): 72,
}


def _hopper_specs(op: str, features: str) -> list[KernelSpec]:
    if features == "groups":
        return _interleaved_specs() if op == "backward" else []
    specs = []
    if features == "alike" and op == "forward":
        return []
    for dims, short in HOPPER_ROWS:
        if features in ONE_OF_EACH_KERNEL and (short or dims not in ONE_OF_EACH_KERNEL[features]):
            continue
        spec = _spec("sm90", op, "sm_90a", dims, FEATURES[features])
        is_packed = dims in PACKED_DIMS and features == "causal" and not short
        if op == "forward":
            if short and configured(spec, short=True) == spec:
                continue  # one row for all lengths
            specs.append(configured(spec, short=short))
            if is_packed:
                specs.append(dataclasses.replace(spec, packed=True))
        elif not short:
            # Kernels with a causal mask have the code of those without one, in semaphore order too.
            specs += [spec] if features == "full" else _variants(spec)
            if is_packed:
                specs += _variants(dataclasses.replace(spec, packed=True))
    return specs


def _bias_gradient_specs(features: str) -> list[KernelSpec]:
    """Returns Hopper's backward passes with a bias and its gradient; of a small result in parts, as float32."""
    specs = [_spec("sm90", "backward", "sm_90a", dims, FEATURES[features]) for dims in BIAS_GRADIENTS[features]]
    splits = features == "bias-listed"
    return [configured(dataclasses.replace(spec, dbias=True, splits_dbias=splits)) for spec in specs]


def _portable_bias_specs() -> dict[KernelSpec, int]:
    """Returns portable forward passes with a bias, backward passes with its gradient too, and their local memory."""
    found = {}
    for (arch, op, features, dims), local_bytes in PORTABLE_BIASES.items():
        spec = dataclasses.replace(_spec("sm80", op, arch, dims, FEATURES[features]), dbias=op == "backward")
        found[configured(spec)] = local_bytes
    return found


def _interleaved_specs() -> list[KernelSpec]:
    """Kernels whose CTAs add in one order, and visit a tile of queries with all heads of a group."""
    specs = [_spec("sm90", "backward", "sm_90a", dims, FEATURES["groups"]) for dims in ((64, 64), (96, 96), (128, 128))]
    specs = [configured(dataclasses.replace(spec, ordered=True)) for spec in specs]
    assert all(spec.config.main.interleaves_heads for spec in specs)
    return specs


def _sinks_specs() -> list[KernelSpec]:
    """Each kernel that computes the gradient of sinks."""
    specs = [_spec("sm90", "backward", "sm_90a", dims, SINKS) for dims in ((64, 64), (192, 128))]
    specs.append(_spec("sm80", "backward", "sm_80", (64, 64), SINKS))
    return [*specs, dataclasses.replace(specs[0], packed=True, ordered=True)]


@pytest.mark.parametrize("spec", _sinks_specs(), ids=lambda spec: _row_name("sinks", spec))
def test_gradient_of_sinks_spills_nothing(spec: KernelSpec) -> None:
    """Other kernels of the launch have the local memory that they have without it."""
    kernels = kept_resources(spec)
    _assert_fits(spec, kernels, _local_bytes(spec.arch, spec.op, (spec.head_dim, spec.v_head_dim), "causal"))
    found = [kernel.local_bytes for kernel in kernels if "preprocess" in kernel.name]
    assert found == [0] * (2 if spec.family == "sm90" and spec.config.adds_dq else 1), kernels


# Local memory of kernels with dropout and a causal mask: values that live across the loops.
DROPOUT = {
    ("sm_90a", "forward", (64, 64)): 0,
    ("sm_90a", "forward", (96, 96)): 0,
    ("sm_90a", "forward", (128, 128)): 0,
    ("sm_90a", "forward", (192, 128)): 0,
    ("sm_90a", "forward", (256, 256)): 0,
    ("sm_90a", "backward", (64, 64)): 0,
    ("sm_90a", "backward", (96, 96)): 0,
    ("sm_90a", "backward", (128, 128)): 56,
    ("sm_90a", "backward", (192, 128)): 0,
    ("sm_90a", "backward", (256, 256)): 0,
    ("sm_80", "forward", (64, 64)): 0,
    ("sm_80", "forward", (128, 128)): 48,
    ("sm_80", "forward", (256, 256)): 40,
    ("sm_80", "backward", (64, 64)): 80,
    ("sm_80", "backward", (128, 128)): 16,
    ("sm_80", "backward", (256, 256)): 16,
}


def _dropout_specs() -> dict[KernelSpec, int]:
    """Returns kernels with dropout, and the local memory of each; Hopper's short forward row is one of its own."""
    features = {**CAUSAL, "features": (codes.DROPOUT,)}
    found = {
        _spec("sm90" if arch == "sm_90a" else "sm80", op, arch, dims, features): local_bytes
        for (arch, op, dims), local_bytes in DROPOUT.items()
    }
    return found | {configured(next(iter(found)), short=True): 0}


@pytest.mark.parametrize("spec", _dropout_specs(), ids=lambda spec: _row_name("dropout", spec))
def test_kernels_with_dropout_spill_little(spec: KernelSpec) -> None:
    _assert_fits(spec, kept_resources(spec), _dropout_specs()[spec])


# Local memory of kernels with dropout, a causal mask and a function of scores: one that adds a term, and one whose
# slopes have both signs. Backward passes have the gradient of its array.
DROPPED_SCORES = {
    ("alibi", "sm_90a", "forward", (64, 64)): 16,
    ("alibi", "sm_90a", "forward", (128, 128)): 0,
    ("alibi", "sm_90a", "backward", (64, 64)): 0,
    ("alibi", "sm_90a", "backward", (128, 128)): 112,
    ("alibi", "sm_80", "backward", (64, 64)): 80,
    ("turned", "sm_90a", "forward", (128, 128)): 0,
    ("turned", "sm_90a", "backward", (64, 64)): 0,
    ("turned", "sm_90a", "backward", (128, 128)): 64,
    ("turned", "sm_90a", "backward", (192, 128)): 0,
    ("turned", "sm_80", "backward", (128, 128)): 80,
}


def _dropped_score_specs() -> dict[KernelSpec, int]:
    """Returns kernels with dropout and a function of scores, and the local memory of each."""
    slopes, rows = jnp.zeros(2), jnp.zeros(64)
    mods = {
        "alibi": lambda s, b, h, q, k: s - slopes[h] * (q - k),
        "turned": lambda s, b, h, q, k: s * jnp.tanh(rows[q]),
    }
    found, x = {}, jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
    for (name, arch, op, dims), local_bytes in DROPPED_SCORES.items():
        with jax.numpy_dtype_promotion("standard"):
            spec, operands = canonicalize(x, x, x, score_mod=mods[name])
        family = "sm90" if arch == "sm_90a" else "sm80"
        functions = codes.score_function(spec.score_mod, Problem.of(spec, operands).planes, exact=family == "sm80")
        features = {**CAUSAL, "features": (*functions, codes.DROPOUT), "dplane": 0 if op == "backward" else None}
        found[_spec(family, op, arch, dims, features)] = local_bytes
    return found


@pytest.mark.parametrize(
    ("spec", "local_bytes"),
    _dropped_score_specs().items(),
    ids=["-".join(map(str, x)) for x in DROPPED_SCORES],
)
def test_kernels_with_dropout_of_scores_spill_little(spec: KernelSpec, local_bytes: int) -> None:
    _assert_fits(spec, kept_resources(spec), local_bytes)


def _listed_specs() -> list[KernelSpec]:
    """Each portable kernel with lists, and one that adds in semaphore order."""
    specs = [_spec("sm80", op, arch, dims, LISTED) for arch, op, dims in LISTED_ROWS]
    return [*specs, dataclasses.replace(specs[3], ordered=True)]


def _compared_specs() -> list[KernelSpec]:
    """Each portable kernel with lists whose edge tiles have no bits."""
    return [dataclasses.replace(_spec("sm80", op, arch, dims, LISTED), compared=True) for arch, op, dims in LISTED_ROWS]


@pytest.mark.parametrize("spec", _compared_specs(), ids=lambda spec: _row_name("compared", spec))
def test_portable_kernels_that_compare_rows_spill_little(spec: KernelSpec) -> None:
    """At head dim 64 a warp keeps sums of dK and of dV, and makes two words at a time."""
    is_single_role = spec.op == "backward" and spec.config.roles == 1
    _assert_fits(spec, kept_resources(spec), 40 if is_single_role else 0)


@pytest.mark.parametrize("spec", _listed_specs(), ids=lambda spec: _row_name("listed", spec))
def test_portable_kernels_with_lists_spill_no_more_than_with_a_causal_mask(spec: KernelSpec) -> None:
    allowed = _local_bytes(spec.arch, spec.op, (spec.head_dim, spec.v_head_dim), "causal")
    _assert_fits(spec, kept_resources(spec), allowed)


@pytest.mark.parametrize(
    ("spec", "local_bytes"), _portable_bias_specs().items(), ids=["-".join(map(str, x)) for x in PORTABLE_BIASES]
)
def test_portable_kernels_with_a_bias_spill_little(spec: KernelSpec, local_bytes: int) -> None:
    _assert_fits(spec, kept_resources(spec), local_bytes)


# Architecture, head dims and rows of decoding kernels, and how many bytes of local memory they may have. At head dim
# 256 a warp asks for the next Q while it still has its outputs, and values live across segments: none is stored or
# loaded in the loop over tiles.
DECODE_ROWS = {
    **{("sm_90a", dims, count): 0 for dims in ((64, 64), (128, 128), (192, 128)) for count in (16, 32, 64)},
    **{("sm_90a", (256, 256), count): nbytes for count, nbytes in ((16, 88), (32, 88), (64, 160))},
    **{("sm_80", dims, count): 0 for dims in ((64, 64), (128, 128), (192, 128)) for count in (16, 32, 64)},
    **{(arch, (256, 256), count): 144 if count == 16 else 128 for arch in ("sm_80", "sm_86") for count in (16, 64)},
    **{(arch, dims, 128): 0 for arch in ("sm_90a", "sm_80") for dims in ((64, 64), (128, 128))},
    ("sm_86", (128, 128), 16): 0,
}
DECODE = {
    "lengths": {"key_value_seq_lengths": True, "group": 4},
    "everything": {**EVERYTHING, "features": (codes.SOFT_CAP, codes.SINKS)},
}
DECODE["pages"] = {**DECODE["everything"], "page": 16}
DECODE["whole"] = DECODE["portions"] = DECODE["lengths"]
BITS = {"row_bits": True, "window_left": True, "query_offset": True, "key_value_seq_lengths": True}
DECODE["bits"] = {**BITS, "group": 4, "query_seq_lengths": True, "features": (codes.SOFT_CAP, codes.SINKS)}


def _decode_specs(features: str) -> dict[KernelSpec, int]:
    """Returns decoding kernels, and how many bytes of local memory each may have."""
    found = {}
    for (arch, dims, count), local_bytes in DECODE_ROWS.items():
        family = "sm90" if arch == "sm_90a" else "sm80"
        spec = KernelSpec("decode", arch, "bfloat16", *dims, family=family, **DECODE[features])  # pyright: ignore[reportArgumentType]
        if features == "lengths" or dims == (128, 128) or (features == "pages" and dims == (64, 64)):
            spec = configured(spec, rows=count)
            cut = {"whole": {"splits": False}, "portions": {"portion": 2048 // spec.config.keys}}.get(features, {})
            found[dataclasses.replace(spec, config=dataclasses.replace(spec.config, **cut))] = local_bytes
    return found


@pytest.mark.parametrize("features", DECODE)
def test_decoding_kernels_fit(features: str) -> None:
    for spec, local_bytes in _decode_specs(features).items():
        _assert_fits(spec, kept_resources(spec), local_bytes)


def rows(every_arch: bool = False) -> dict[str, KernelSpec]:
    """What is compiled in every run, by name: what `benchmarks/machine_code.py` compares between commits.

    Args:
        every_arch: whether to return instead the rows that are compiled on demand.
    """
    architectures = OTHER_ARCHITECTURES if every_arch else PORTABLE_ARCHITECTURES
    named = [
        (features, spec)
        for family, arch, op, features in (_portable_rows(architectures) if every_arch else COMPILED)
        for dims in DIMS
        for spec in _variants(_spec(family, op, arch, dims, FEATURES[features]))
    ]
    named += [("causal", _spec("sm80", op, arch, dims, CAUSAL)) for arch, op, dims in _other_tilings(architectures)]
    if not every_arch:
        named += [("sinks", spec) for spec in _sinks_specs()]
        named += [("listed", spec) for spec in _listed_specs()]
        named += [("compared", spec) for spec in _compared_specs()]
        named += [("dropout", spec) for spec in _dropout_specs()]
        named += [
            (f"{name}-dropout", spec) for spec, (name, *_) in zip(_dropped_score_specs(), DROPPED_SCORES, strict=True)
        ]
        named += [
            (features, spec) for spec, (_, _, features, _) in zip(_portable_bias_specs(), PORTABLE_BIASES, strict=True)
        ]
        named += [(features, spec) for features in DECODE for spec in _decode_specs(features)]
        named += [
            (features, x) for op in ("forward", "backward") for features in HOPPER for x in _hopper_specs(op, features)
        ]
        named += [(features, x) for features in TANGENTS for x in _tangent_specs("sm90", "sm_90a", features)]
        named += [(features, x) for features in BIASES for x in _hopper_specs("forward", features)]
        named += [(features, x) for features in BIAS_GRADIENTS for x in _bias_gradient_specs(features)]
    found = {_row_name(features, spec): spec for features, spec in named}
    assert len(found) == len(named)
    return found


def _row_name(features: str, spec: KernelSpec) -> str:
    dims = f"d{spec.head_dim}" + (f"v{spec.v_head_dim}" if spec.v_head_dim != spec.head_dim else "")
    if spec.op == "decode":
        flags = {f"{BLOCK_ROWS * spec.config.row_blocks}-rows": True}
    else:
        flags = {"short": spec != configured(spec), "ordered": spec.ordered, "packed": spec.packed}
    return "-".join([spec.family, spec.arch, spec.op, dims, features, *(name for name, has in flags.items() if has)])


# Compiles what it gets, and prints remarks of ptxas with the resources.
_SHOW_REMARKS = """
import dataclasses, pickle, sys
from resources import inspect_kernel

while True:
    spec = pickle.load(sys.stdin.buffer)
    print("kernel", spec, flush=True)
    print("resources", [dataclasses.astuple(kernel) for kernel in inspect_kernel(spec)], flush=True)
    print("end", flush=True)
"""


class CompilerWithRemarks:
    """A process that runs `_SHOW_REMARKS`. It is shared, because it starts as long as a kernel or two compile."""

    process: subprocess.Popen[bytes] | None = None

    def printed(self, spec: KernelSpec) -> str:
        """Returns what the process prints, or printed in an earlier run of the tests."""
        import kept_kernels  # loads the compiler

        return kept_kernels.kernel("remarks", spec, None, lambda: self._print(spec)).decode()

    def _print(self, spec: KernelSpec) -> bytes:
        if self.process is None:
            path = os.pathsep.join([str(Path(__file__).parent / "emulator"), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, "CUTE_DSL_COMPILER_OPT": "remarks{ptx}", "PYTHONPATH": path}
            command, pipe = [sys.executable, "-c", _SHOW_REMARKS], subprocess.PIPE
            self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump(spec, self.process.stdin)
        self.process.stdin.flush()
        printed = b""
        while (line := self.process.stdout.readline()) not in (b"end\n", b""):
            printed += line
        assert line, printed[-3000:].decode()  # else the process has ended
        return printed


@pytest.fixture(scope="module")
def compiler_with_remarks() -> Iterator[CompilerWithRemarks]:
    compiler = CompilerWithRemarks()
    yield compiler
    if compiler.process is not None:
        with compiler.process as process:
            process.kill()


@pytest.mark.parametrize(
    ("features", "op"), [(x, op) for x in HOPPER for op in ("forward", "backward") if _hopper_specs(op, x)]
)
def test_hopper_rows_spill_little_and_do_not_serialise(
    features: str, op: str, compiler_with_remarks: CompilerWithRemarks
) -> None:
    """ptxas reports products that it had to serialise as C75xx; nothing else shows it but the speed."""
    assert {(dims, False) for dims in DIMS} < set(HOPPER_ROWS)
    local_bytes = HOPPER_LOCAL_BYTES.get((features, op), 0)
    _assert_neither_spills_nor_serialises(compiler_with_remarks, _hopper_specs(op, features), local_bytes)


@pytest.mark.parametrize("features", TANGENTS)
def test_hopper_rows_of_tangents_neither_spill_nor_serialise(
    features: str, compiler_with_remarks: CompilerWithRemarks
) -> None:
    specs = _tangent_specs("sm90", "sm_90a", features)
    _assert_neither_spills_nor_serialises(compiler_with_remarks, specs, 0)


@pytest.mark.parametrize("features", TANGENTS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_portable_rows_of_tangents_spill_nothing(arch: str, features: str) -> None:
    for spec in _tangent_specs("sm80", arch, features):
        _assert_fits(spec, kept_resources(spec), 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rows_of_tangents_in_float32_spill_little(arch: str) -> None:
    """At head dim 96 with 227 KB of shared memory, 8 bytes."""
    for spec in _tangent_specs("sm80", arch, "causal"):
        split = configured(dataclasses.replace(spec, products="bf16x3"))
        _assert_fits(split, kept_resources(split), 8 if arch == "sm_90a" else 0)


@pytest.mark.parametrize("features", BIASES)
def test_hopper_rows_with_a_bias_spill_little_and_do_not_serialise(
    features: str, compiler_with_remarks: CompilerWithRemarks
) -> None:
    specs, local_bytes = _hopper_specs("forward", features), BIAS_LOCAL_BYTES.get(features, 0)
    _assert_neither_spills_nor_serialises(compiler_with_remarks, specs, local_bytes)


@pytest.mark.parametrize("features", BIAS_GRADIENTS)
def test_hopper_rows_with_the_gradient_of_a_bias_spill_little_and_do_not_serialise(
    features: str, compiler_with_remarks: CompilerWithRemarks
) -> None:
    specs, local_bytes = _bias_gradient_specs(features), BIAS_GRADIENT_LOCAL_BYTES.get(features, 0)
    _assert_neither_spills_nor_serialises(compiler_with_remarks, specs, local_bytes)


def _assert_neither_spills_nor_serialises(
    compiler: CompilerWithRemarks, specs: Sequence[KernelSpec], local_bytes: int
) -> None:
    for spec in specs:
        printed = compiler.printed(spec)
        (kernels,) = re.findall(r"^resources (.*)$", printed, re.MULTILINE)
        _assert_fits(spec, [KernelResources(*kernel) for kernel in ast.literal_eval(kernels)], local_bytes)
        remarks = [line for line in printed.splitlines() if re.search(r"C75\d\d|^kernel", line)]
        assert "ptxas" in printed  # else the remarks have moved
        assert remarks == [f"kernel {spec}"], printed[-3000:]
