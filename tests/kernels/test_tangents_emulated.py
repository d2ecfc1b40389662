# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of tangents without a GPU: tilings, and tangents of output and log-sum-exp."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_tangent
from emulated_backward import BOUNDED, Sizes

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

ALL = ("query", "key", "value")
SMALL = Sizes(batch=1, queries=150, keys=141)

CASES: dict[str, tuple[int, int, dict[str, Any], Sizes]] = {
    "bounds": (64, 64, {**BOUNDED, "group": 2}, Sizes()),
    "causal": (128, 128, {"window_right": True}, Sizes(batch=1, right=0, queries=201, keys=133)),
    "sinks": (40, 72, {"group": 2, "query_seq_lengths": True, "features": (codes.SINKS,)}, SMALL),
    "cap": (96, 64, {"window_left": True, "features": (codes.SOFT_CAP,)}, SMALL),
    "query": (64, 64, {"moved": ("query",)}, SMALL),
    "key": (64, 64, {"moved": ("key",)}, SMALL),
    "value": (64, 64, {"moved": ("value",)}, SMALL),
}
SPLIT = {
    "bounds": (64, 32, {**BOUNDED, "group": 2}, Sizes()),
    "causal": (128, 128, {"window_right": True}, Sizes(batch=1, right=0, queries=140, keys=133)),
    "sinks": (96, 96, {"group": 2, "features": (codes.SINKS,)}, SMALL),
}


def key(family: Literal["sm80", "sm90"], name: str, arch: str = "") -> tuple[KernelSpec, Sizes]:
    head_dim, v_head_dim, features, sizes = CASES[name]
    arch = arch or {"sm80": "sm_80", "sm90": "sm_90a"}[family]
    spec = KernelSpec("tangent", arch, "bfloat16", head_dim, v_head_dim, family=family, **{"moved": ALL, **features})
    return configured(spec), sizes


# A case of each silent fault, in both families.
ALWAYS = ("bounds", "causal", "key")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in ALWAYS else pytest.mark.slow) for x in CASES])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_tangents(family: Literal["sm80", "sm90"], name: str) -> None:
    emulated_tangent.check(*key(family, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_float32(arch: str, name: str) -> None:
    """By three products, whose results are float32."""
    head_dim, v_head_dim, features, sizes = SPLIT[name]
    spec = KernelSpec("tangent", arch, "bfloat16", head_dim, v_head_dim, products="bf16x3", moved=ALL, **features)
    emulated_tangent.check(configured(spec), sizes)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_logits_that_move_alike(family: Literal["sm80", "sm90"]) -> None:
    """A constant of a row moves its log-sum-exp alone, though the output is rounded."""
    emulated_tangent.check(*key(family, "causal"), alike=30.0)
