# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable kernels with lists in the emulators, on what the prepass writes there; see `emulated_portable_masks`."""

import dataclasses

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_portable_masks
import numpy as np
from emulated_portable_masks import backward_spec, forward_spec
from emulated_prepass import Predicate
from warp_emulator import SCHEDULES

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig

pytestmark = pytest.mark.slow

# Blocks of some keys make full and empty tiles, low densities keys that no query of a tile sees.
_BLOCKS = Predicate(mask=(2, 1, 200, 333), group=2, queries=200, keys=333, blocks=64, density=0.6)
_DEAD = Predicate(mask=(2, 1, 200, 333), group=2, queries=200, keys=333, blocks=17, density=0.1)
_PER_HEAD = Predicate(
    mask=(1, 4, 200, 333), queries=200, keys=333, query_heads=4, group=2, blocks=33, density=0.2
)  # fmt: skip
_PER_KV_HEAD = Predicate(
    mask=(2, 2, 150, 260), queries=150, keys=260, query_heads=4, group=2, blocks=33, density=0.2
)  # fmt: skip
# Heads of a group share lists of tiles of keys, and have bits of their own.
_GROUP_PER_HEAD = Predicate(
    mask=(2, 4, 133, 201), query_heads=4, group=2, blocks=20, density=0.1
)  # fmt: skip
_IDS = Predicate(segments=4, queries=300, keys=320, right=0)
_UNSORTED = Predicate(segments=4, sorted_ids=False, queries=130, keys=201, offsets=(60, -140), left=100, right=5)
_CAUSAL = Predicate(batch=1, queries=201, keys=201, segments=1, document=1000, right=0)
_LENGTHS = Predicate(
    mask=(2, 1, 133, 201), query_lengths=(70, 0), key_lengths=(201, 100), density=0.9, blocks=20
)  # fmt: skip
_EMPTY = Predicate(mask=(2, 1, 133, 201), density=0.02, blocks=40)


def _forward(predicate: Predicate, *dims: int, **features: object) -> tuple[Predicate, KernelSpec]:
    return predicate, forward_spec(predicate, *dims, **features)


# Each tiling: 32 rows a warp with Q in registers or not, 16 rows a warp; 64, 48 and 32 keys.
FORWARD = {
    "d64-random": _forward(Predicate(mask=(2, 1, 133, 201), group=2), 64),
    "d64-full-tiles-f16": _forward(_BLOCKS, 64, operand_dtype="float16"),
    "d64-dead-keys": _forward(_DEAD, 64),
    "d64-lengths": _forward(_LENGTHS, 64),
    "d64-cap-sinks": _forward(_DEAD, 64, features=(codes.SOFT_CAP, codes.SINKS)),
    "d40-72-sinks": _forward(_EMPTY, 40, 72, features=(codes.SINKS,)),
    "d128-per-head": _forward(_PER_HEAD, 128),
    "d128-per-kv-head-small": _forward(_PER_KV_HEAD, 128, arch="sm_86"),
    "d128-ids-causal": _forward(_IDS, 128),
    "d96-unsorted-ids-window": _forward(_UNSORTED, 96, arch="sm_86"),
    "d192-48-keys": _forward(_DEAD, 192, arch="sm_86"),
    "d256-32-keys": _forward(_DEAD, 256, arch="sm_86"),
    "d256-resident": _forward(_DEAD, 256),
}
_, _SPEC = FORWARD["d64-dead-keys"]
FORWARD["d64-two-stages"] = _DEAD, dataclasses.replace(_SPEC, config=dataclasses.replace(_SPEC.config, stages=2))


@pytest.mark.whole
@pytest.mark.parametrize(("predicate", "spec"), FORWARD.values(), ids=FORWARD)
def test_outputs_match_the_reference(predicate: Predicate, spec: KernelSpec) -> None:
    emulated_portable_masks.check_forward(predicate, spec)


def test_tiles_of_queries_share_a_list() -> None:
    predicate = Predicate(mask=(2, 1, 1, 201), blocks=50)
    emulated_portable_masks.check_forward(predicate, forward_spec(predicate, 64), one_row=True)


def _backward(predicate: Predicate, *dims: int, **features: object) -> tuple[Predicate, KernelSpec]:
    return predicate, backward_spec(predicate, *dims, **features)


_SMALL = Predicate(mask=(2, 1, 70, 101), queries=70, keys=101, blocks=17, density=0.1)
_SOME = Predicate(mask=(2, 1, 133, 201), group=2, blocks=17, density=0.1)
# One role, two roles; one stage, warps that exchange scores, 32 queries, 16 keys a warp.
BACKWARD = {
    "d64-random": _backward(Predicate(mask=(2, 1, 133, 201), group=2), 64),
    "d64-full-tiles-f16-ordered": _backward(_BLOCKS, 64, operand_dtype="float16", ordered=True),
    "d64-dead-rows": _backward(_SOME, 64),
    "d64-cap-sinks-dlse": _backward(_SOME, 64, features=(codes.SOFT_CAP,), dsinks=True, dlse=True),
    "d64-lengths-sinks": _backward(_LENGTHS, 64, dsinks=True, dlse=True),
    "d64-two-roles": _backward(_SOME, 64, arch="sm_86"),
    "d64-two-roles-cap-dlse": _backward(_SMALL, 64, arch="sm_86", features=(codes.SOFT_CAP,), dlse=True),
    "d40-72-empty-sinks": _backward(_EMPTY, 40, 72, dsinks=True),
    "d128-per-head": _backward(_PER_HEAD, 128),
    "d128-per-kv-head-ordered": _backward(_PER_KV_HEAD, 128, ordered=True),
    "d128-group-per-head": _backward(_GROUP_PER_HEAD, 128, ordered=True),
    "d128-ids-causal": _backward(_IDS, 128, ordered=True),
    "d128-32-queries": _backward(_SMALL, 128, arch="sm_86"),
    "d96-unsorted-ids-window": _backward(_UNSORTED, 96),
    "d160-one-stage": _backward(_SMALL, 160),
    "d192-64-keys": _backward(_SMALL, 192, arch="sm_86"),
    "d256-exchanges": _backward(_SMALL, 256),
    "d256-exchanges-one-stage": _backward(_SMALL, 256, 128, arch="sm_86"),
    "d256-48-keys": _backward(_SMALL, 256, arch="sm_86", ordered=True),
}


@pytest.mark.parametrize(("predicate", "spec"), BACKWARD.values(), ids=BACKWARD)
def test_gradients_match_the_reference(predicate: Predicate, spec: KernelSpec) -> None:
    emulated_portable_masks.check_backward(predicate, spec)


def _with_config(predicate: Predicate, config: DkdvDqConfig) -> tuple[Predicate, KernelSpec]:
    return predicate, dataclasses.replace(backward_spec(predicate, 64), config=config)


ROLES = {
    "one-role": _with_config(_SMALL, DkdvDqConfig(4, 1, 64, roles=1, parts=2)),
    "two-roles": _with_config(_SMALL, DkdvDqConfig(4, 1, 64, dq_roles=1)),
    "one-stage": _with_config(_SMALL, DkdvDqConfig(2, 2, 64, stages=1)),
}


@pytest.mark.parametrize(("predicate", "spec"), ROLES.values(), ids=ROLES)
def test_barriers_order_the_zeros_of_dead_rows(predicate: Predicate, spec: KernelSpec) -> None:
    """A thread zeroes what it has copied itself, before the barrier after which others read it."""
    run = emulated_portable_masks.BackwardRun(predicate, spec)
    run.run("Preprocess")
    before = run.memory.data.copy()
    for schedule in SCHEDULES:
        run.memory.data = before.copy()
        run.run("DkdvDq", schedule=schedule, finds_races=True)
        run.run("Convert")
        run.compare()


def test_ordered_sums_have_the_same_bits_under_every_schedule() -> None:
    run = emulated_portable_masks.BackwardRun(_SMALL, backward_spec(_SMALL, 64, ordered=True))
    run.run("Preprocess")
    before, found = run.memory.data.copy(), []
    for schedule in ("first", "random"):
        run.memory.data = before.copy()
        run.run("DkdvDq", schedule=schedule)
        run.run("Convert")
        found.append(run.read("dq").view(np.uint16))
    np.testing.assert_array_equal(*found)
