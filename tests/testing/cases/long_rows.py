# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of many keys in float16, where gradients of logits would underflow. Odd draws have small cotangents, too."""

from __future__ import annotations

import dataclasses

from jax_fastattn.cases.case import Case

_LONG = Case("float16", 1, 200, 16384, num_kv_heads=2, head_dim=64)
LONG_ROWS = [
    dataclasses.replace(_LONG, draw=i, **changes)
    for i, changes in enumerate(
        (
            {},
            {"key_length": 65536},
            {"sinks": "n", "head_dim": 128, "group": 2},
            {"key_length": 40000, "bias": "bs", "bias_dtype": "float16", "head_dim": 96},
        )
    )
]
