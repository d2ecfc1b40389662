# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of shared memory and named barriers, on any machine; docs/kernels/memory.md is made from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
from generators.memory_map import memory_map

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.architectures import ARCHITECTURES
from jax_fastattn.kernels.device.regions import Barriers, NamedBarrier, Region, SharedTable, disjoint
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import RoleBarrier, dkdv_dq_config
from jax_fastattn.kernels.sm80.forward import config as portable
from jax_fastattn.kernels.sm90.backward.config import (
    DKDV_DQ_HEAD_DIM,
    BackwardMemory,
    DkdvBarrier,
    DkdvDqBarrier,
    backward_config,
    backward_configs,
)
from jax_fastattn.kernels.sm90.backward.dbias.config import DbiasMemory
from jax_fastattn.kernels.sm90.backward.dq_config import DqBarrier, DqMemory, dq_config
from jax_fastattn.kernels.sm90.forward.config import ForwardBarrier, SharedMemory, forward_config
from jax_fastattn.kernels.sm90.geometry import padded_head_dim

PAGE = Path(__file__).parents[2] / "docs" / "kernels" / "memory.md"
DIMS = list(itertools.product((8, 40, 64, 96, 128, 160, 192, 256), repeat=2))

TABLE = SharedTable(
    (
        Region("tile", 1000, 2, align=512),
        Region("small", 20, align=4),
        Barriers("full", 3, arrive_count=1),
        Barriers("empty", 3, arrive_count=8),
        Region("index", 4, align=4),
    )
)


def test_rows_follow_each_other_at_their_alignment() -> None:
    offsets = {row.name: TABLE.offset(row.name) for row in TABLE.rows}
    assert offsets == {"tile": 0, "small": 2048, "full": 2072, "empty": 2096, "index": 2120}
    assert TABLE.nbytes == 2124
    assert TABLE["tile"].pitch == 1024
    assert SharedTable(()).nbytes == 0


def test_every_barrier_is_initialized_with_its_arrivals() -> None:
    table = TABLE.with_rows(Barriers("done", 1, arrive_count=4))
    stages = [row for i in range(3) for row in (("full", i, 1), ("empty", i, 8))]
    assert list(table.arrive_counts()) == [*stages, ("done", 0, 4)]


@pytest.mark.parametrize("out", [100, 3000])
def test_a_region_uses_others_again(out: int) -> None:
    table = SharedTable((Region("a", 16), Region("b", 2000), Region("out", out, over="b"), Region("c", 16)))
    assert table.offset("out") == table.offset("b") == 16
    assert table.offset("c") >= 16 + max(out, 2000)
    assert table.nbytes == table.offset("c") + 16


def test_a_feature_adds_rows() -> None:
    table = TABLE.with_rows(Region("bias", 512, 2, align=512), Barriers("bias_full", 2, arrive_count=1))
    assert [row.name for row in table.rows] == ["tile", "small", "bias", "full", "empty", "bias_full", "index"]
    assert list(table.arrive_counts())[-2:] == [("bias_full", 0, 1), ("bias_full", 1, 1)]
    assert table.offset("bias") == 2560
    assert table.offset("tile") == 0
    assert "bias" in table
    assert "bias" not in TABLE
    assert TABLE.with_rows() == TABLE
    assert SharedTable(()).with_rows(Barriers("x", 1, arrive_count=1), Region("y", 4)).offset("x") == 16


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="more than one is called full"):
        TABLE.with_rows(Region("full", 16))
    with pytest.raises(KeyError, match="no row 'bias' in a table of tile, small, full"):
        TABLE.offset("bias")


def _biased_specs() -> Iterator[KernelSpec]:
    """Yields Hopper's backward passes with a bias of pairs and its gradient."""
    for dims, dtype, listed in itertools.product(DIMS, ("bfloat16", "float32"), (False, True)):
        spec = KernelSpec("backward", "sm_90a", "bfloat16", *dims, family="sm90", listed=listed)
        spec = replace(spec, bias="matrix", bias_dtype=dtype, dbias=True)
        yield replace(spec, config=backward_configs(spec))


def test_kernels_with_a_bias_fit() -> None:
    """Of the ring of dbias a warpgroup holds all columns of an operand at a time."""
    for spec in _biased_specs():
        memory = DbiasMemory.of(spec)
        assert memory.fits and BackwardMemory.of(spec, spec.config.main).fits, spec
        columns = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim))
        assert columns <= memory.config.stages * memory.head_dim, spec


def _tables() -> Iterator[tuple[object, SharedTable]]:
    for dims, cap in itertools.product(DIMS, (False, True)):
        backward = KernelSpec(
            "backward", "sm_90a", "bfloat16", *dims, family="sm90", features=(codes.SOFT_CAP,) if cap else ()
        )
        yield backward, BackwardMemory.of(backward, backward_config(backward)).table
        yield backward, DqMemory.of(backward, dq_config(backward)).table
        for short, packed in ((False, False), (True, False), (False, True)):
            forward = replace(backward, op="forward", packed=packed)
            yield forward, SharedMemory.of(forward, forward_config(forward, short=short)).table
    for spec in _biased_specs():
        yield spec, BackwardMemory.of(spec, backward_config(spec)).table
        yield spec, DbiasMemory.of(spec).table
    for dims, arch in itertools.product(DIMS, ARCHITECTURES):
        forward, backward = (KernelSpec(op, arch, "bfloat16", *dims) for op in ("forward", "backward"))
        yield forward, portable.forward_config(forward).table(*dims)
        yield backward, dkdv_dq_config(backward).memory(*dims).table


def test_rows_of_every_kernel_are_apart_and_aligned() -> None:
    for spec, table in _tables():
        end = 0
        for row in table.rows:
            start = table.offset(row.name)
            assert start % row.align == 0, (spec, row)
            assert row.count > 0 and row.pitch > 0, (spec, row)
            if not isinstance(row, Region) or row.over is None:
                assert end <= start < end + row.align, (spec, row)
                end = start + row.count * row.pitch
        assert table.nbytes >= end, spec


def test_rows_of_features_join_those_of_every_hopper_kernel() -> None:
    rows = (Region("bias", 8192, 2, align=1024), Barriers("bias_full", 2, arrive_count=1))
    forward, backward, wide = (
        KernelSpec(op, "sm_90a", "bfloat16", dim, dim, family="sm90")
        for op, dim in (("forward", 64), ("backward", 64), ("backward", 192))
    )
    memories = [
        SharedMemory.of(forward, forward_config(forward, short=False)),
        BackwardMemory.of(backward, backward_config(backward)),
        BackwardMemory.of(wide, backward_config(wide)),
        DqMemory.of(wide, dq_config(wide)),
    ]
    for memory in memories:
        more = replace(memory, feature_rows=rows)
        # Statistics of dkdv end between two multiples of the alignment.
        assert 0 <= more.nbytes - (memory.nbytes + 2 * 8192 + 2 * 8) < 1024
        assert more.table.offset("bias") % 1024 == 0


def test_named_barriers_of_a_kernel_are_apart() -> None:
    kernels = NamedBarrier.__subclasses__()
    assert {DkdvBarrier, DkdvDqBarrier, DqBarrier, ForwardBarrier, RoleBarrier} <= set(kernels)
    for kernel in kernels:
        numbers = [number for barrier in kernel.__members__.values() for number in barrier.numbers]
        assert len(set(numbers)) == len(numbers), kernel
        assert 1 <= min(numbers) <= max(numbers) <= 15, kernel


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"A": (1, 2), "B": (2, 1)}, r"Wrong.B and .A both use named barrier 2"),
        ({"A": (3, 1), "B": (3, 1)}, r"Wrong.B and .A both use named barrier 3"),
        ({"A": (12, 5)}, r"Wrong.A uses named barrier 16"),
        ({"A": (0, 1)}, r"Wrong.A uses named barrier 0"),
    ],
)
def test_wrong_named_barriers_are_refused(members: dict[str, tuple[int, int]], message: str) -> None:
    # Not a subclass of `NamedBarrier`, whose subclasses are those of kernels.
    class Base(Enum):
        __init__ = NamedBarrier.__init__
        numbers = NamedBarrier.numbers

    with pytest.raises(ValueError, match=message):
        disjoint(Base("Wrong", members))


def test_there_are_enough_named_barriers() -> None:
    for dims in DIMS:
        backward = KernelSpec("backward", "sm_90a", "bfloat16", *dims, family="sm90")
        for short in (False, True):
            warpgroups = forward_config(replace(backward, op="forward"), short=short).warpgroups
            assert warpgroups <= min(ForwardBarrier.WARPGROUP.count, ForwardBarrier.PING_PONG.count)
        if max(dims) > DKDV_DQ_HEAD_DIM:
            assert backward_config(backward).stages <= DkdvBarrier.WEIGHTS.count
        for arch in ARCHITECTURES:
            config = dkdv_dq_config(replace(backward, family="sm80", arch=arch))
            if config.roles == 2:
                assert config.role_warps <= RoleBarrier.PAIR.count
            if config.exchanges:
                assert config.key_warps <= min(RoleBarrier.EXCHANGE_P.count, RoleBarrier.EXCHANGE_DS.count)


def test_the_memory_map_is_up_to_date() -> None:
    assert PAGE.read_text() == memory_map(), "run: python tests/generators/memory_map.py > docs/kernels/memory.md"
