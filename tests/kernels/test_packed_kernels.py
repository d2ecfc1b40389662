# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences in the kernels, without a GPU: records of tiles, and whole launches in an emulator."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal, cast

import jax.numpy as jnp
import numpy as np
import pytest
from testing.draws import packed_draws, wild_draws

from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.records import Record, slot_count
from jax_fastattn.layouts import packed
from jax_fastattn.ops.cuda.records import tile_records

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_packed
import test_gpu
from emulated_backward import Sizes
from emulated_packed import Pack


@pytest.mark.parametrize("of_keys", [False, True])
def test_records_name_each_row_of_each_sequence_once(of_keys: bool) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        rows, count = (int(random.choice([4, 8])), int(random.choice([4, 16]))), int(random.integers(1, 6))
        totals = int(random.integers(1, 60)), int(random.integers(1, 60))
        cu = [np.sort(random.integers(0, total + 1, count + 1)) for total in totals]
        sequences = np.asarray(packed.sequences(*map(jnp.asarray, cu), totals))[None]
        offsets = random.integers(-9, 9, (1, sequences.shape[1], 1))
        records = np.asarray(
            tile_records(jnp.asarray(np.concatenate([sequences, offsets], axis=2)), totals, rows, of_keys=of_keys)
        )
        assert records.shape == (slot_count(totals[of_keys], rows[of_keys], count + 2), 8)
        found = []
        for words in records:
            record = Record(*map(int, words))
            owned = range(record.rows)[record.tile * rows[of_keys] :][: rows[of_keys]]
            found += [record.first + row for row in owned]
            if record.rows:
                (m,) = (
                    m
                    for m, x in enumerate(sequences[0])
                    if x[2 * of_keys] <= record.first < x[2 * of_keys] + x[2 * of_keys + 1]
                )
                is_padding = m in (0, count + 1)
                assert record.entry == (-1 if is_padding else 0)
                assert record.others == (0 if is_padding else sequences[0, m, 3 - 2 * of_keys])
                assert record.offset == offsets[0, m, 0]
                assert record.first_slot == sequences[0, m, 0] // rows[0] + m
        assert found == list(range(totals[of_keys]))


def test_boundaries_that_decrease_or_leave_the_rows_are_moved() -> None:
    wild = jnp.array([-5, 3, 1, 2**31 - 1, -(2**31), 4], jnp.int32)
    found = np.asarray(packed.sequences(wild, wild, (10, 7)))
    assert found[:, 1].tolist() == [0, 3, 0, 7, 0, 0, 0] and found[:, 3].tolist() == [0, 3, 0, 4, 0, 0, 0]
    assert (found[:, 1::2].sum(axis=0) == (10, 7)).all()


ALL = {
    "window_left": True,
    "window_right": True,
    "query_offset": True,
    "group": 2,
    "features": (codes.SOFT_CAP,),
}
# Lengths about those of tiles, empty on one side or both. Every case of this file has two key/value heads: with one, no
# stride between heads counts.
CAUSAL = Pack((70, 0, 1, 129, 64), (70, 0, 1, 129, 64), sizes=Sizes(kv_heads=2, right=0))
OTHERS = Pack((40, 0, 133, 17), (77, 30, 65, 0), offsets=(-5, 3, 40, 0), sizes=Sizes(kv_heads=2, left=20, right=5))
CASES = {
    "causal-d64": (KernelSpec("forward", "sm_80", "bfloat16", 64, 64, window_right=True), CAUSAL),
    "all-d128": (KernelSpec("forward", "sm_80", "float16", 128, 128, **ALL), OTHERS),
    "full-d72-40": (KernelSpec("forward", "sm_86", "bfloat16", 72, 40), dataclasses.replace(OTHERS, offsets=())),
    "causal-d256": (KernelSpec("forward", "sm_86", "bfloat16", 256, 256, window_right=True, group=2), CAUSAL),
}


# In semaphore order one role and two are enough: the order of records does not depend on head dims.
PORTABLE = [*itertools.product(("forward", "backward"), CASES), ("ordered", "causal-d64"), ("ordered", "all-d128")]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), PORTABLE)
def test_portable_kernels(name: str, op: str) -> None:
    """Each sequence as if it were alone, NaN in padding and in what nothing sees; zeros are stored for padding."""
    spec, pack = CASES[name]
    everything = name.startswith("all")
    spec = dataclasses.replace(spec, packed=True)
    if op == "forward":
        sinks = (codes.SINKS,) if everything else ()
        emulated_packed.check_forward(configured(dataclasses.replace(spec, features=(*spec.features, *sinks))), pack)
    else:
        spec = dataclasses.replace(spec, op="backward", dlse=everything, dsinks=everything, ordered=op == "ordered")
        emulated_packed.check_backward(configured(spec), pack)


# Forward tiles of 192, 128, 64 and 128 query rows; a CTA for each, or persistent CTAs.
HOPPER_CASES = {
    "causal-d64": ((64, 64), {"window_right": True}, CAUSAL),
    "causal-d64-short": ((64, 64), {"window_right": True, "group": 2}, CAUSAL),
    "all-d128": ((128, 128), {**ALL, "features": (codes.SOFT_CAP, codes.SINKS)}, OTHERS),
    "full-d72-40": ((72, 40), {}, dataclasses.replace(OTHERS, offsets=())),
    "causal-d256": ((256, 256), {"window_right": True, "group": 2}, CAUSAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_hopper_forward(name: str) -> None:
    """The same of the Hopper kernel."""
    dims, features, pack = HOPPER_CASES[name]
    spec = KernelSpec("forward", "sm_90a", "bfloat16", *dims, family="sm90", packed=True, **features)
    emulated_packed.check_forward(configured(spec, short=name.endswith("short")), pack)


# Some of twelve kinds: with sinks, and with a cap and query heads that share keys. The last call has boundaries that
# decrease and leave the rows.
DRAWN = {"dtypes": ["bfloat16"], "head_dims": [(64, 64), (40, 72)], "rows": [220]}
SINKS, CAP = (packed_draws(35, 12, 12, **DRAWN)[i] for i in (5, 9))
WILD = wild_draws(35, 60, 12, **DRAWN)[57]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "op"), [(SINKS, "forward"), (CAP, "backward"), (WILD, "forward"), (WILD, "backward")], ids=str
)
def test_random_packed_calls(case: Case, op: Literal["forward", "backward"]) -> None:
    """A sample of what `test_gpu.py` draws."""
    (spec,) = (x for x in kernel_specs([case], "sm_90a") if x.op == op)
    check = emulated_packed.check_forward if op == "forward" else emulated_packed.check_backward
    check(spec, Pack.of(case))


# 34 is the default of `--seed`.
@pytest.mark.parametrize("seed", range(34, 40))
def test_a_run_of_random_calls_takes_few_kernels(seed: int) -> None:
    """On a GPU, where a kernel takes seconds to compile."""
    found = packed_draws(seed, test_gpu.DRAWS, test_gpu.KINDS, **test_gpu.CHOICES)
    found += wild_draws(seed, test_gpu.WILD_DRAWS, test_gpu.WILD_KINDS, **test_gpu.CHOICES)
    for arch in ("sm_80", "sm_90a"):
        assert len(kernel_specs(found, arch)) <= 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        *((kernel, 64) for kernel in ("sm80-forward", "sm80-backward", "sm90-forward", "sm90-backward")),
        ("sm90-backward", 192),
    ],
)
def test_nan_stays_in_its_sequence(kernel: str, head_dim: int) -> None:
    """Neighbors that lie in the same tiles of rows are as they would be by themselves."""
    family, op = kernel.split("-")
    arch = {"sm80": "sm_80", "sm90": "sm_90a"}[family]
    dims = (head_dim, min(head_dim, 128))
    spec = KernelSpec(cast(Any, op), arch, "bfloat16", *dims, family=cast(Any, family), packed=True, window_right=True)
    check = emulated_packed.check_forward if op == "forward" else emulated_packed.check_backward
    check(configured(spec), Pack((70, 33, 64), (70, 33, 64), sizes=Sizes(kv_heads=2, right=0), broken=1))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize(("family", "arch"), [("sm80", "sm_80"), ("sm90", "sm_90a")])
def test_boundaries_with_one_entry_leave_padding_alone(family: Any, arch: str, op: Any) -> None:
    """Zeros are stored for rows on both sides of the boundary, 3 and 7."""
    spec = KernelSpec(op, arch, "bfloat16", 64, 64, family=family, packed=True, window_right=True)
    check = emulated_packed.check_forward if op == "forward" else emulated_packed.check_backward
    boundaries = np.array([3], np.int32), np.array([7], np.int32)
    check(configured(spec), Pack((0,), (0,), sizes=Sizes(kv_heads=2, right=0), boundaries=boundaries))


# Lengths about those of tiles, empty on one side or both; on one side other ones than on the other.
STEPS, SQUARE = (1, 0, 63, 64, 65, 127, 129, 128), Sizes(kv_heads=2, right=0)
UNPADDED = Pack((3, 64, 0, 140, 65), (200, 0, 5, 63, 129), padding=((0, 0), (0, 0)), sizes=Sizes(kv_heads=2))
HOPPER_BACKWARD = {
    "causal-d64": ((64, 64), {"window_right": True, "group": 2}, Pack(STEPS, STEPS, sizes=SQUARE)),
    "causal-d128": ((128, 128), {"window_right": True}, Pack(STEPS, STEPS, sizes=SQUARE)),
    "full-d128": ((128, 128), {}, UNPADDED),
    "all-d128": ((128, 128), {**ALL, "dlse": True, "dsinks": True}, OTHERS),
    "left-d64": (
        (64, 64),
        {"window_left": True},
        Pack((300, 129), (100, 333), sizes=Sizes(kv_heads=2, left=90, scale=-0.3)),
    ),
    "full-d72-40": ((72, 40), {}, dataclasses.replace(OTHERS, offsets=())),
}
# dq in a kernel of its own. Sequences of one tile of queries and of several, full tiles before one that ends early.
WIDE_BACKWARD = {
    "causal-d192-128": ((192, 128), {"window_right": True, "group": 2}, Pack(STEPS, STEPS, sizes=SQUARE)),
    "full-d160": ((160, 160), {}, UNPADDED),
    "causal-d256": ((256, 256), {"window_right": True}, Pack((1, 0, 200), (1, 0, 200), sizes=SQUARE)),
    "all-d192-128": ((192, 128), {**ALL, "dlse": True, "dsinks": True}, OTHERS),
    "left-d192-128": (
        (192, 128),
        {"window_left": True},
        Pack((300, 33), (70, 200), sizes=Sizes(kv_heads=2, left=40, scale=-0.3)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE_BACKWARD)
def test_hopper_backward_over_head_dim_128(name: str) -> None:
    """The same of the kernels for dq, and for dk and dv."""
    dims, features, pack = WIDE_BACKWARD[name]
    dtype = "float16" if name.startswith("all") else "bfloat16"
    spec = KernelSpec("backward", "sm_90a", dtype, *dims, family="sm90", packed=True, **features)
    emulated_packed.check_backward(configured(spec), pack)


# In semaphore order `causal-d128` and `full-d72-40` reach the code of `causal-d64`, `full-d128` and `all-d128`.
ORDERS = [("atomic", name) for name in HOPPER_BACKWARD]
ORDERS += [("ordered", name) for name in ("causal-d64", "full-d128", "all-d128", "left-d64")]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "name"), ORDERS)
def test_hopper_backward(order: str, name: str) -> None:
    """As `test_portable_kernels`; in semaphore order `PreprocessKernel.background` prepares most slots."""
    dims, features, pack = HOPPER_BACKWARD[name]
    dtype = "float16" if name.startswith("all") else "bfloat16"
    features = features | {"packed": True, "ordered": order == "ordered"}
    spec = KernelSpec("backward", "sm_90a", dtype, *dims, family="sm90", **features)
    emulated_packed.check_backward(configured(spec), pack)
