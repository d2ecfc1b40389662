# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels with lists in the emulator, on what the prepass writes there; NaN in whatever is hidden from everybody."""

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_masks
from emulated_prepass import Predicate

pytestmark = [pytest.mark.slow, pytest.mark.whole]

# Blocks of 64 make full and empty tiles, low densities keys that nobody sees.
CASES = {
    "d64-random": (Predicate(mask=(2, 1, 133, 201), group=2), 64),
    "d64-full-tiles": (
        Predicate(mask=(2, 1, 200, 333), group=2, queries=200, keys=333, blocks=64, density=0.6),
        64,
    ),
    "d64-dead-keys": (Predicate(mask=(2, 1, 200, 333), group=2, queries=200, keys=333, blocks=17, density=0.1), 64),
    "d96-one-full-tile": (
        Predicate(
            mask=(1, 1, 200, 333), group=2, queries=200, keys=333,
            shown=((0, 1, 0, 20), (0, 200, 100, 300), (150, 151, 320, 333)),
        ),
        96,
    ),
    "d96-per-head": (
        Predicate(mask=(1, 4, 200, 333), queries=200, keys=333, query_heads=4, group=2, blocks=33, density=0.2),
        96,
    ),
    "d128-per-kv-head": (
        Predicate(mask=(2, 2, 200, 333), queries=200, keys=333, query_heads=4, group=2, blocks=33, density=0.2),
        128,
    ),
    "d128-ids-causal": (Predicate(segments=4, queries=300, keys=320, right=0), 128),
    "d192-dead-keys": (Predicate(mask=(1, 1, 200, 333), queries=200, keys=333, blocks=33, density=0.2), 192),
    "d256-dead-keys": (Predicate(mask=(1, 1, 200, 333), queries=200, keys=333, blocks=33, density=0.2), 256),
    "d64-lengths": (
        Predicate(
            mask=(1, 1, 133, 201), query_lengths=(70, 0), key_lengths=(201, 100), density=0.9, blocks=20
        ),
        64,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("predicate", "head_dim"), CASES.values(), ids=CASES)
def test_hopper_forward(predicate: Predicate, head_dim: int) -> None:
    emulated_masks.check_forward(predicate, head_dim)


@pytest.mark.parametrize("head_dim", [64, 96])
def test_hopper_forward_for_long_calls(head_dim: int) -> None:
    predicate = Predicate(mask=(2, 1, 300, 290), queries=300, keys=290, blocks=33, density=0.3)
    emulated_masks.check_forward(predicate, head_dim, short=False)


def test_tiles_of_queries_share_a_list() -> None:
    emulated_masks.check_forward(Predicate(mask=(2, 1, 1, 201), blocks=50), 64, one_row=True)
