# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that no query sees, and rows that see nothing. In most cases lengths do not hide them."""

from __future__ import annotations

from testing.cases.base import GQA, MHA, on

_NO_KEY = on(GQA, is_causal=True, query_length=193, query_offset=(-70, -150))
HIDDEN_ROWS = {
    "more keys than queries": on(MHA, batch=1, num_kv_heads=1, is_causal=True, query_length=33, key_length=127),
    "chunked prefill": on(GQA, is_causal=True, query_length=129, key_length=1000, query_offset=(512, 128)),
    "chunked prefill, deterministic": on(
        GQA, head_dim=128, is_causal=True, query_length=193, key_length=700, query_offset=(300, 64), deterministic=True
    ),
    "decoding": on(GQA, group=4, head_dim=128, is_causal=True, query_length=1, key_length=577, query_offset=(300, 64)),
    "keys left of a window": on(
        GQA, head_dim=128, window=(20, None), query_length=65, key_length=577, query_offset=(300, 70)
    ),
    "keys on both sides of a window": on(
        MHA, head_dim=96, window=(63, 7), query_length=129, key_length=700, query_offset=(200, 500), deterministic=True
    ),
    "keys on both sides of a window, d192v128": on(
        GQA, head_dim=192, v_head_dim=128, window=(99, 0), query_length=65, key_length=400, query_offset=(200, 100)
    ),
    "queries before the keys": _NO_KEY,
    "queries before the keys, sinks": on(_NO_KEY, sinks="bn", dlse=True),
    "queries before the keys, sinks, deterministic": on(_NO_KEY, sinks="n", dlse=True, deterministic=True),
    "queries before the keys, sinks, d256": on(
        _NO_KEY, head_dim=256, window=(40, 0), query_offset=(-70, 200), sinks="n", dlse=True
    ),
    "queries past a window": on(MHA, window=(30, None), query_length=257, key_length=100, dlse=True),
    "many queries in any order": on(
        GQA, group=3, head_dim=128, dtype="float16", is_causal=True, query_length=1300, query_offset=(-70, -1100)
    ),
    "lengths too": on(
        GQA,
        group=3,
        head_dim=128,
        window=(100, 0),
        logits_soft_cap=5.0,
        query_seq_lengths=(150, 193),
        key_value_seq_lengths=(257, 90),
        query_offset=(150, -40),
        sinks="bn",
        dlse=True,
    ),
}
