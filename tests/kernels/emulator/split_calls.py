# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls in float32 by three products that tests of both passes of Hopper's kernels share."""

from __future__ import annotations

from typing import Any

from emulated_backward import Sizes

from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

EVERYTHING = {
    "group": 2,
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
}
LENGTHS = Sizes(2, 150, 170, offsets=(-10, 25), query_lengths=(150, 130), key_lengths=(170, 150))


def spec(op: Any, head_dim: int, v_head_dim: int, **features: Any) -> KernelSpec:
    """Returns the compile key of a call."""
    key = KernelSpec(op, "sm_90a", "bfloat16", head_dim, v_head_dim, products="bf16x3", family="sm90")
    return configured(KernelSpec(**{**vars(key), **features}))
