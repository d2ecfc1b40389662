# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable kernel for dk, dv and dq without a GPU: tilings, gradients, and what each barrier is for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_dkdv_dq
import numpy as np
import warp_emulator
from emulated_backward import BOUNDED, Sizes
from emulated_dkdv_dq import Run
from ptx_emulator import Memory
from warp_emulator import SCHEDULES, Race

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.architectures import ARCHITECTURES, BORROWED, shared_memory_limit
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig, RoleBarrier, backward_scratch


def _spec(
    head_dim: int, v_head_dim: int, dtype: str = "bfloat16", arch: str = "sm_80", **features: object
) -> KernelSpec:
    return configured(KernelSpec("backward", arch, dtype, head_dim, v_head_dim, **features))


@pytest.mark.parametrize("arch", ARCHITECTURES + BORROWED)
def test_every_head_dim_has_a_tiling(arch: str) -> None:
    limit = shared_memory_limit(arch)
    for head_dim in range(8, 257, 8):
        for v_head_dim in range(8, 257, 8):
            config = _spec(head_dim, v_head_dim, arch=arch).config
            memory = config.memory(head_dim, v_head_dim)
            assert memory.nbytes <= limit
            assert config.roles == 1 or config.role_warps <= 4, "named barriers are for four warps of a role"
            assert config.part % (16 * config.column_warps) == 0
            assert config.queries % (16 * config.dq_row_warps) == 0
            for tile, warps in (
                (memory.query, config.column_warps),
                (memory.dout, config.column_warps),
                (memory.key, config.dq_column_warps),
                (memory.dq, config.dq_column_warps),
            ):
                assert tile.padded_columns % (16 * warps) == 0
            # The tiles of K and V take dK and dV in the end.
            assert memory.query.padded_columns <= memory.key.padded_columns
            assert memory.dout.padded_columns == memory.value.padded_columns
            # A warp has 255 registers: its sums, and S^T or dP^T of a stage.
            share = config.keys_per_warp // config.column_warps
            sums = [share * x.padded_columns // 32 for x in (memory.query, memory.dout)]
            scores = share * config.part // 32
            assert (sum(sums) if config.roles == 1 else max(sums)) + scores <= 224


def test_scratch_has_a_count_for_each_warp_and_tile() -> None:
    spec = _spec(128, 128, ordered=True)
    config = spec.config
    shapes = backward_scratch(spec, 3, 130, 5)
    tiles = -(-130 // config.queries)
    assert shapes["stats"] == (3, 5, 130, 2)
    assert shapes["dq_accum"] == (3, 5, tiles * config.queries, 128)
    assert shapes["dq_semaphore"] == (3, 5, tiles, config.dq_warps)
    assert shapes["tile_counter"] == (1,)


_ALL = {**BOUNDED, "group": 2, "dlse": True}
_CAUSAL = Sizes(batch=1, right=0, queries=201, keys=133)
_SMALL = Sizes(batch=1, queries=70, keys=101)
# Each tiling, every feature, widths that end inside an mma step or a warp's share of the columns.
_CASES = {
    "causal-d64": (_spec(64, 64, window_right=True), _CAUSAL),
    "ordered-d64-f16": (_spec(64, 64, "float16", ordered=True, **_ALL), Sizes()),
    "all-d64-two-roles": (_spec(64, 64, arch="sm_86", **_ALL), Sizes()),
    "all-d128-ordered": (_spec(128, 128, ordered=True, **_ALL), Sizes()),
    "cap-d128-negative-scale": (_spec(128, 128, arch="sm_86", features=(codes.SOFT_CAP,), **_ALL), Sizes(scale=-0.3)),
    "cap-d64-small": (_spec(64, 64, arch="sm_86", features=(codes.SOFT_CAP,), window_right=True), _SMALL),
    "sinks-d40-72": (
        _spec(40, 72, dsinks=True, **_ALL),
        Sizes(2, 70, 40, 2, offsets=(-30, 5), query_lengths=(70, 50), key_lengths=(40, 40)),
    ),
    "sinks-without-dlse": (
        _spec(8, 8, dsinks=True, window_right=True, query_offset=True),
        Sizes(1, 70, 40, 3, right=0, offsets=(-30,)),
    ),
    "all-d96-f16": (_spec(96, 96, "float16", **_ALL), Sizes()),
    "d96-small": (_spec(96, 96, arch="sm_86", window_right=True), _CAUSAL),
    "causal-d256": (_spec(256, 256, window_right=True, query_offset=True), Sizes(queries=70, keys=101, right=0)),
    "d256-two-stages": (
        _spec(256, 256, arch="sm_90", window_right=True),
        Sizes(batch=1, right=0, queries=150, keys=70),
    ),
    "d256-small": (_spec(256, 256, arch="sm_86"), _SMALL),
    "all-d256-small-ordered": (_spec(256, 256, arch="sm_86", ordered=True, **_ALL), _SMALL),
    "d256-32-small": (_spec(256, 32, arch="sm_86"), _SMALL),
    "d192-128": (_spec(192, 128, window_left=True), _SMALL),
    "d192-128-small": (_spec(192, 128, arch="sm_86", window_right=True), _SMALL),
    "all-d160-ordered": (_spec(160, 160, ordered=True, **_ALL), Sizes()),
    "d160-16-small": (_spec(160, 16, arch="sm_86", window_right=True), _SMALL),
    "all-d192-small": (_spec(192, 192, arch="sm_86", **_ALL), _SMALL),
    "d256-128-small": (_spec(256, 128, arch="sm_86", window_right=True), _SMALL),
    "d64-256": (_spec(64, 256, group=3), Sizes(batch=1, queries=33, keys=47)),
    "d8-248": (_spec(8, 248), Sizes(batch=1, queries=33, keys=47)),
    "d72-40": (_spec(72, 40, group=3, dlse=True), Sizes(batch=1, queries=33, keys=47)),
    "one-query": (_spec(64, 64, query_offset=True, window_right=True), Sizes(queries=1, right=0)),
    "one-key": (_spec(64, 64, query_seq_lengths=True), Sizes(keys=1)),
    "zero-scale": (_spec(64, 64), Sizes(batch=1, queries=40, keys=33, scale=0.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "sizes"), _CASES.values(), ids=_CASES.keys())
def test_gradients_match_the_reference(spec: KernelSpec, sizes: Sizes) -> None:
    emulated_dkdv_dq.check(spec, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_infinite_probabilities_of_keys_past_the_end_do_not_reach_dq(arch: str) -> None:
    """Scores are about -130, so P of a zero-filled key, whose score is 0, overflows."""
    spec, sizes = _spec(64, 64, arch=arch), Sizes(batch=1, queries=40, keys=37, scale=0.4, shift=2.3)
    run = Run(spec, sizes)
    assert (run.wanted["lse"] < -89).all()
    for name in ("Preprocess", "DkdvDq", "Convert"):
        run.run(name)
    run.compare()


@functools.cache
def _ordered_run() -> Run:
    spec, sizes = _spec(128, 128, window_right=True, ordered=True), Sizes(batch=1, right=0, queries=130, keys=257)
    return Run(spec, sizes)


@pytest.mark.slow
def test_a_warp_counts_a_tile_after_all_its_lanes_have_added() -> None:
    """One lane counts. The emulator's lanes advance in step, so only the text shows what it waits for."""
    (ptx,) = (ptx for name, ptx in _ordered_run().texts.items() if "DkdvDq" in name)
    found = re.findall(r"bar\.warp\.sync|bar\.sync|barrier\.sync|(?:st|red)\S*global|atom\.\w+", ptx)
    counts = [before for before, x in itertools.pairwise(found) if x == "atom.release"]
    assert counts and set(counts) == {"bar.warp.sync"}


@pytest.mark.slow
def test_ordered_sums_have_the_same_bits_under_every_schedule() -> None:
    run = _ordered_run()
    run.run("Preprocess")
    before, found = run.memory.data.copy(), []
    for schedule in ("first", "random"):
        run.memory.data = before.copy()
        run.run("DkdvDq", schedule=schedule)
        run.run("Convert")
        found.append(run.read("dq"))
    np.testing.assert_array_equal(*(x.view(np.uint16) for x in found))
    counts = run.read("dq_semaphore").reshape(-1, run.kernel.config.dq_warps)
    assert (counts == counts[:, :1]).all()
    # Query tiles of 64, key tiles of 128, causal.
    assert counts[:, 0].tolist() == [1, 1, 2]


# Forms of the kernel, and the barriers that each of them has; "CTA" is that of all threads.
def _numbers(*names: str) -> dict[str, set[int]]:
    return {name: set(RoleBarrier[name].numbers) for name in names}


_LAGGED = {"CTA": {0}} | _numbers("FIRST", "SECOND", "READY", "PAIR")
_DONE, _EXCHANGES = _numbers("DONE"), _numbers("EXCHANGE_P", "EXCHANGE_DS")
_ONE_STAGE = {"CTA": {0}} | _numbers("SECOND", "PAIR") | _DONE
_BARRIERS = {
    "one-role": (DkdvDqConfig(4, 1, 64, roles=1, parts=2), {"CTA": {0}}),
    "two-roles": (DkdvDqConfig(4, 1, 64), _LAGGED | _DONE),
    "dq-by-second-role": (DkdvDqConfig(4, 1, 64, dq_row_warps=1, dq_roles=1), _LAGGED),
    "exchanges": (DkdvDqConfig(2, 2, 64), _LAGGED | _DONE | _EXCHANGES),
    "exchanges-one-stage": (DkdvDqConfig(2, 2, 64, stages=1), _ONE_STAGE | _EXCHANGES),
    "three-warps-one-stage": (DkdvDqConfig(3, 1, 32, keys_per_warp=16, stages=1, dq_row_warps=1), _ONE_STAGE),
}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "barriers"), _BARRIERS.values(), ids=_BARRIERS.keys())
def test_each_barrier_is_needed(config: DkdvDqConfig, barriers: dict[str, set[int]]) -> None:
    """Without one of them, a schedule exists that gives wrong gradients or hangs; with all of them, none."""
    spec = dataclasses.replace(_spec(64, 64, window_right=True), config=config)
    run = Run(spec, Sizes(batch=1, right=0, queries=201, keys=config.keys))
    run.run("Preprocess")
    before = run.memory.data.copy()

    def is_right(schedule: str, left_out: set[int]) -> bool:
        run.memory.data = before.copy()
        try:
            run.run("DkdvDq", schedule=schedule, left_out=left_out)
            run.run("Convert")
            run.compare()
        except (AssertionError, RuntimeError):
            return False
        return True

    assert all(is_right(schedule, set()) for schedule in SCHEDULES)
    unseen = [name for name, left_out in barriers.items() if all(is_right(x, left_out) for x in SCHEDULES)]
    assert not unseen


@pytest.mark.slow
@pytest.mark.parametrize(("config", "barriers"), _BARRIERS.values(), ids=_BARRIERS.keys())
def test_barriers_order_all_accesses_to_shared_memory(config: DkdvDqConfig, barriers: dict[str, set[int]]) -> None:
    """Not by the luck of a schedule: without one of the barriers, some accesses are not ordered."""
    spec = dataclasses.replace(_spec(64, 64, window_right=True, group=2, ordered=True), config=config)
    run = Run(spec, Sizes(batch=1, right=0, queries=201, keys=config.keys + 30))
    run.run("Preprocess")
    before = run.memory.data.copy()

    def races(schedule: str, left_out: set[int]) -> bool:
        run.memory.data = before.copy()
        try:
            run.run("DkdvDq", schedule=schedule, left_out=left_out, finds_races=True)
        except Race:
            return True
        except RuntimeError:  # warps wait forever
            assert left_out
        return False

    assert not any(races(schedule, set()) for schedule in SCHEDULES)
    unseen = [name for name, left_out in barriers.items() if not any(races(x, left_out) for x in SCHEDULES)]
    assert not unseen


@pytest.mark.parametrize(("opcode", "passes"), [("bar.sync", False), ("barrier.sync", True)])
def test_an_aligned_barrier_is_one_instruction(opcode: str, passes: bool) -> None:
    """Roles that wait for each other at two of them are undefined in PTX, and an error to synccheck."""
    ptx = f"""
.visible .entry kernel()
.reqntid 64, 1, 1
{{
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra $first;
    {opcode} 0;
    ret;
$first:
    {opcode} 0;
    ret;
}}
"""
    with contextlib.nullcontext() if passes else pytest.raises(RuntimeError, match="aligned barrier 0"):
        warp_emulator.launch(ptx, [], Memory(), 1, 16)
