# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences with rows of padding past them. Their lengths are near the sizes of tiles, or 0."""

from __future__ import annotations

from jax_fastattn.cases.case import Case
from testing.cases.base import vary

_LENGTHS = (1000, 0, 1, 63, 64, 65, 127, 128, 129)
_OTHER_LENGTHS = (300, 77, 1, 129, 0, 64, 200, 65, 513)
_FEW_LENGTHS = ((2100, 65), (1900, 300))
_LONGER = (1300, 129, 1000)
# The last case has boundaries that decrease and leave the rows.
PACKED = vary(
    Case(batch=1, query_length=1600, key_length=1600, num_kv_heads=2, packed=(_LENGTHS, _LENGTHS), dtype="bfloat16"),
    {"is_causal": True, "head_dim": 64, "v_head_dim": 64},
    {"is_causal": True, "head_dim": 64, "v_head_dim": 64, "deterministic": True, "scale": -0.2},
    {"is_causal": True, "head_dim": 128, "v_head_dim": 128, "group": 4},
    {"is_causal": True, "head_dim": 128, "v_head_dim": 128, "deterministic": True},
    # There are so few sequences that CTAs add to dq in any order on Hopper.
    *(
        {"head_dim": head_dim, "v_head_dim": head_dim, "packed": _FEW_LENGTHS, "query_length": 6200, "key_length": 6200}
        | {"is_causal": head_dim == 128, "group": 2}
        for head_dim in (64, 128)
    ),
    # There are enough heads that the preprocess of the last sequences runs concurrently with the first products.
    *(
        {"is_causal": True, "head_dim": head_dim, "v_head_dim": head_dim, "packed": (_LONGER, _LONGER)}
        | {"query_length": 2600, "key_length": 2600, "num_kv_heads": 33, "dlse": head_dim == 64}
        for head_dim in (64, 128)
    ),
    {"head_dim": 64, "v_head_dim": 64, "packed": (_LENGTHS, _OTHER_LENGTHS), "dtype": "float16"},
    {"head_dim": 192, "v_head_dim": 128, "is_causal": True, "packed": (_OTHER_LENGTHS, _LENGTHS)},
    {"head_dim": 192, "v_head_dim": 128, "is_causal": True, "group": 4, "dlse": True},
    {
        "head_dim": 192,
        "v_head_dim": 128,
        "packed": (_OTHER_LENGTHS, _LENGTHS),
        "window": (100, 7),
        "query_offset": "bottom_right",
        "dtype": "float16",
    },
    {"head_dim": 160, "v_head_dim": 160, "packed": (_LENGTHS, _OTHER_LENGTHS)},
    {"head_dim": 256, "v_head_dim": 256, "is_causal": True, "group": 2},
    {
        "head_dim": 256,
        "v_head_dim": 256,
        "group": 2,
        "packed": (_OTHER_LENGTHS, _LENGTHS),
        "window": (70, None),
        "query_offset": (-70, 3, 0, 64, 0, 150, -1, 500, 40),
        "logits_soft_cap": 5.0,
        "sinks": "n",
        "dlse": True,
    },
    {
        "head_dim": 96,
        "v_head_dim": 96,
        "group": 2,
        "packed": (_OTHER_LENGTHS, _LENGTHS),
        "window": (100, 7),
        "logits_soft_cap": 5.0,
        "sinks": "n",
        "dlse": True,
    },
    {
        "is_causal": True,
        "head_dim": 128,
        "v_head_dim": 128,
        "first": (-7, 3),
        "packed": ((1200, -900, 500, 10**9, -2 * 10**9, 10**9), (200, 1000, 0, -300, 1097, -400)),
    },
)
