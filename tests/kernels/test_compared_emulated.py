# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels whose edge tiles compare ids instead of bits, which would take too much memory; emulated from call to result.

NaN is in whatever is hidden from everybody.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import numpy as np
from test_masks_ops import B, K, N, S, T, draw

from jax_fastattn import ffi
from jax_fastattn.kernels.choose import kernel_spec, list_sizes, prepass_configs
from jax_fastattn.kernels.tiles import lists as tile_lists
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import Problem

pytestmark = pytest.mark.slow

# See `test_masks_ops.CASES`. Masks broadcast over queries or over keys.
CASES: dict[str, dict[str, Any]] = {
    "ids-causal": {"ids": 3, "is_causal": True},
    "unsorted-ids-window": {"ids": 2, "sort": False, "local_window_size": (50, 20), "query_offset": (40, -20)},
    "ids-lengths-cap": {
        "ids": 2,
        "query_seq_lengths": (70, 40),
        "key_value_seq_lengths": (100, 141),
        "logits_soft_cap": 2.0,
    },
    "b11s": {"mask": (B, 1, 1, S)},
    "111s-offset": {"mask": (1, 1, 1, S), "is_causal": True, "query_offset": (50, -3)},
    "b1t1-sinks": {"mask": (B, 1, T, 1), "sinks": True, "is_causal": True},
    "bn1s-lengths": {"mask": (B, N, 1, S), "query_seq_lengths": (70, 40), "key_value_seq_lengths": (100, 141)},
    "1k1s-ids": {"mask": (1, K, 1, S), "ids": 2, "density": 0.7},
    "bnt1-ids": {"mask": (B, N, T, 1), "ids": 2, "density": 0.7, "is_causal": True},
    "nothing": {"mask": (1, 1, 1, S), "density": 0.0},
}

# Case, architecture, and head dims of keys and values.
CALLS = [
    ("ids-causal", "sm_90a", (64, 64)),
    ("unsorted-ids-window", "sm_90a", (128, 128)),
    ("ids-lengths-cap", "sm_90a", (64, 64)),
    ("b11s", "sm_90a", (64, 64)),
    ("111s-offset", "sm_90a", (96, 96)),
    ("b1t1-sinks", "sm_90a", (64, 64)),
    ("bn1s-lengths", "sm_90a", (128, 128)),
    ("1k1s-ids", "sm_90a", (64, 64)),
    ("bnt1-ids", "sm_90a", (64, 64)),
    ("nothing", "sm_90a", (64, 64)),
    ("unsorted-ids-window", "sm_90a", (192, 128)),
    ("b11s", "sm_90a", (256, 256)),
    ("bnt1-ids", "sm_90a", (192, 128)),
    ("ids-causal", "sm_80", (64, 64)),
    ("unsorted-ids-window", "sm_86", (128, 128)),
    ("b11s", "sm_80", (128, 128)),
    ("bn1s-lengths", "sm_80", (64, 64)),
    ("1k1s-ids", "sm_86", (192, 128)),
    ("bnt1-ids", "sm_80", (64, 64)),
]


class Launches(list[Any]):
    """Compile keys of the calls that were emulated."""

    def bind(self, *operands: jax.Array, **parameters: Any) -> list[jax.Array]:
        """Takes the place of `launch_p.bind`."""
        self.append(parameters["kernel"])
        return emulated_ops.bind(*operands, **parameters)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, arch: str) -> Launches:
    """Emulates custom calls of an architecture, in none of which bits may take memory."""
    found = Launches()
    monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", 0)
    emulated_ops.emulate(monkeypatch, arch, found.bind)
    return found


@pytest.mark.parametrize(
    ("name", "arch", "dims"), CALLS, ids=[f"{arch}-{name}-d{dims[0]}" for name, arch, dims in CALLS]
)
def test_calls_that_compare_rows_match_the_reference(name: str, dims: tuple[int, int], launches: Launches) -> None:
    emulated_ops.compare_with_reference(*draw(CASES[name] | {"head_dim": dims[0], "v_head_dim": dims[1]}))
    assert all(not kernel.config.bits if kernel.op == "prepass" else kernel.compared for kernel in launches)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_both_sides_of_the_limit_give_the_same_bits(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, operands = draw(CASES["unsorted-ids-window"])
    problem = Problem.of(spec, operands)
    (config,) = prepass_configs(dataclasses.replace(kernel_spec(problem, "forward", ffi.arch()), compared=False))
    nbytes = 4 * math.prod(tile_lists.shapes(config, list_sizes(problem, config))["bits"])
    results = []
    for limit in (nbytes, nbytes - 1):
        monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", limit)
        results.append(cuda.forward(spec, operands))
    assert [kernel.compared for kernel in launches if kernel.op == "forward"] == [False, True]
    for bits, compared in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(bits), np.asarray(compared))
