# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Hopper's backward kernels with lists in the emulator, on what the prepass writes; NaN in whatever is hidden."""

import dataclasses

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_masks_backward
from emulated_masks_backward import Case
from emulated_prepass import Predicate

from jax_fastattn.compilation.compiler import _open_runtime

pytestmark = pytest.mark.slow

RANDOM = Predicate(mask=(2, 1, 133, 201), group=2)
# Blocks make full and empty tiles, low densities keys and queries that see nothing.
BLOCKS = Predicate(mask=(2, 1, 300, 400), queries=300, keys=400, blocks=64, density=0.6)
SPARSE = Predicate(mask=(2, 1, 300, 333), queries=300, keys=333, group=2, blocks=17, density=0.1)
PER_HEAD = Predicate(mask=(2, 4, 200, 333), queries=200, keys=333, query_heads=4, group=2, blocks=33, density=0.2)
PER_KV_HEAD = Predicate(mask=(2, 2, 200, 333), queries=200, keys=333, query_heads=4, group=2, blocks=33, density=0.2)
PADDING = Predicate(mask=(2, 1, 1, 333), queries=200, keys=333, blocks=90, density=0.7)
PADDING_OF_HEADS = Predicate(
    mask=(2, 2, 1, 333), queries=200, keys=333, query_heads=4, group=2, key_lengths=(333, 150), blocks=40, density=0.5
)
IDS = Predicate(segments=4, queries=300, keys=320, right=0)
DOCUMENTS = Predicate(
    batch=1, query_heads=6, group=3, queries=340, keys=340, segments=1, document=150, right=0, left=200
)
UNSORTED_IDS = Predicate(segments=3, queries=150, keys=270, sorted_ids=False, left=70)
LENGTHS = Predicate(
    mask=(1, 1, 133, 333), keys=333, query_lengths=(70, 0), key_lengths=(333, 200), density=0.9, blocks=20, group=2
)
WINDOW = Predicate(mask=(1, 1, 300, 333), queries=300, keys=333, left=90, right=30, offsets=(60, -140), density=0.8)
CAUSAL = Predicate(queries=300, keys=300, right=0)
ONE_FULL_TILE = Predicate(
    mask=(1, 1, 200, 333),
    queries=200,
    keys=333,
    group=2,
    shown=((0, 1, 0, 20), (64, 128, 100, 300), (150, 151, 90, 333)),
)
NOTHING = Predicate(mask=(2, 1, 133, 201), density=0.0)
EVERYTHING = Predicate(mask=(2, 1, 256, 256), queries=256, keys=256, density=1.0)

# Head dims up to 128.
FUSED = {
    "d64-random": Case(RANDOM, 64),
    "d64-blocks": Case(BLOCKS, 64),
    "d64-sparse-sinks": Case(SPARSE, 64, sinks=True),
    "d64-cap-lengths": Case(LENGTHS, 64, cap=True),
    "d64-nothing": Case(NOTHING, 64),
    "d64-everything": Case(EVERYTHING, 64),
    "d96-per-head": Case(PER_HEAD, 96, dtype="float16"),
    "d64-one-full-tile": Case(ONE_FULL_TILE, 64),
    "d64v128-padding": Case(PADDING, 64, 128, alike=True),
    "d128-padding-of-heads-sinks-cap": Case(PADDING_OF_HEADS, 128, sinks=True, cap=True, alike=True),
    "d64-nothing-alike": Case(dataclasses.replace(NOTHING, mask=(2, 1, 1, 201)), 64, alike=True),
    "d128-sparse": Case(SPARSE, 128),
    "d128-ids-causal": Case(IDS, 128),
    "d128-documents-groups": Case(DOCUMENTS, 128),
    "d64-documents-groups-sinks": Case(DOCUMENTS, 64, sinks=True),
    "d128-lengths-sinks-cap": Case(LENGTHS, 128, sinks=True, cap=True),
    "d128-per-kv-head": Case(PER_KV_HEAD, 128),
    "d64-window": Case(WINDOW, 64),
    "d64-unsorted-ids": Case(UNSORTED_IDS, 64),
    "d64-causal": Case(CAUSAL, 64),
}
ORDERED = (
    "d64-random",
    "d64-blocks",
    "d96-per-head",
    "d128-ids-causal",
    "d128-sparse",
    "d64-window",
    "d64-nothing",
    "d64v128-padding",
    "d128-documents-groups",
    "d64-documents-groups-sinks",
)
# Head dims over 128, at which dq has a kernel of its own.
SPLIT = {
    "d192v128-random": Case(RANDOM, 192, 128),
    "d192v128-blocks": Case(BLOCKS, 192, 128),
    "d192-sparse-sinks": Case(SPARSE, 192, sinks=True),
    "d256-per-head": Case(PER_HEAD, 256),
    "d160-ids-cap": Case(IDS, 160, dtype="float16", cap=True),
    "d256-lengths": Case(LENGTHS, 256),
    "d192-lengths-sinks": Case(LENGTHS, 192, sinks=True),
    "d192-padding-in-one-row": Case(PADDING, 192, one_row=True),
    "d256-window": Case(WINDOW, 256),
    "d192-nothing": Case(NOTHING, 192),
    "d192-one-full-tile": Case(ONE_FULL_TILE, 192),
    "d192-everything": Case(EVERYTHING, 192),
}


@pytest.fixture(autouse=True)
def _runtime() -> None:
    _open_runtime()


@pytest.mark.parametrize("case", FUSED.values(), ids=FUSED)
def test_one_kernel(case: Case) -> None:
    emulated_masks_backward.check(case)


@pytest.mark.parametrize("name", ORDERED)
def test_one_kernel_in_semaphore_order(name: str) -> None:
    """CTAs add to a tile of dq by the ranks of entries."""
    emulated_masks_backward.check(dataclasses.replace(FUSED[name], ordered=True))


@pytest.mark.parametrize("case", SPLIT.values(), ids=SPLIT)
def test_kernels_of_dk_dv_and_of_dq(case: Case) -> None:
    emulated_masks_backward.check(case)
