# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Masks and segment ids."""

from __future__ import annotations

from testing.cases.base import FEW, GQA, IDS, LONG, MHA, on, vary

# Masks and segment ids. A line is one attention kernel forward and one backward, which all masks, ids, windows, offsets
# and lengths of keys share; a predicate of its own has a prepass of its own.
_SPARSE = {"mask": "bnts", "mask_density": 0.05}
MASKED = [
    *vary(
        on(GQA, mask="bts"),
        {},
        *FEW,
        *LONG[1:2],
        _SPARSE,
        {"mask_density": 0.0},
        {"mask": "ks"},
        {"mask": "bs", "key_value_seq_lengths": (257, 64)},
        {"mask": "bt"},
        {"mask": "kts", "window": (70, 30), "query_offset": (64, -70)},
        {"is_causal": True},
        IDS,
        IDS | {"ids": "unsorted", "window": (100, 7)},
    ),
    *vary(
        on(GQA, head_dim=128, mask="ts"),
        {},
        *LONG[1:2],
        _SPARSE,
        _SPARSE | {"logits_soft_cap": 5.0, "sinks": "n", "dlse": True},
        IDS | {"is_causal": True},
        IDS | {"ids": "negative", "query_seq_lengths": (193, 65), "dlse": True},
        IDS | {"is_causal": True, "query_length": 2113, "key_length": 2113},
        {"mask": "ks", "logits_soft_cap": 5.0, "sinks": "n", "dlse": True},
        {"mask": "bs", "mask_density": 0.01, "query_length": 2113, "key_length": 2113},
    ),
    *vary(on(MHA, head_dim=64, deterministic=True, **_SPARSE), {}, *LONG[1:2]),
    *vary(on(MHA, head_dim=192, v_head_dim=128, mask="bts"), {}, _SPARSE, IDS | {"is_causal": True}),
    *vary(on(GQA, head_dim=96, dtype="float16", mask="ns"), {}, IDS),
    *vary(on(GQA, head_dim=160, **_SPARSE), {}, IDS | {"is_causal": True}),
    *vary(on(GQA, head_dim=256, mask="bnts"), {}, {"mask": "bs"}),
]
