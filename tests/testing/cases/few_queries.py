# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Few queries over long keys: decoding, pages aside."""

from __future__ import annotations

from jax_fastattn.cases.case import Case
from testing.cases.base import IDS, on

# The keys of few queries are split. The cases have lengths of 0 and near the sizes of tiles, rows that see nothing, and
# each number of blocks of rows.
_DECODING = Case(
    dtype="bfloat16", batch=9, query_length=1, key_length=1100, num_kv_heads=2, group=4, head_dim=128, v_head_dim=128
)
_ENDS = (0, 1, 63, 64, 65, 129, 700, 3, 1100)
FEW_QUERIES = {
    "one query": _DECODING,
    "lengths": on(_DECODING, key_value_seq_lengths=_ENDS, dlse=True),
    "a few tiles": on(_DECODING, batch=1, num_kv_heads=1, key_length=260, dtype="float16"),
    "ratio 7, causal": on(
        _DECODING,
        query_length=3,
        group=7,
        is_causal=True,
        key_value_seq_lengths=_ENDS,
        query_offset=tuple(end - 3 for end in _ENDS),
    ),
    "window, sinks": on(
        _DECODING,
        query_length=4,
        window=(300, 0),
        query_offset=(1096, 0, -2, -40, 64, 500, 1200, 1390, 1401),
        sinks="n",
        dlse=True,
    ),
    "64 rows, cap": on(
        _DECODING, query_length=16, is_causal=True, logits_soft_cap=5.0, query_offset=tuple(end - 16 for end in _ENDS)
    ),
    "query lengths": on(
        _DECODING,
        query_length=5,
        query_seq_lengths=(5, 0, 1, 2, 3, 4, 5, 5, 5),
        key_value_seq_lengths=_ENDS,
        sinks="bn",
    ),
    "d64": on(_DECODING, head_dim=64, v_head_dim=64, key_value_seq_lengths=_ENDS, scale=-0.2),
    "d192v128": on(_DECODING, head_dim=192, key_value_seq_lengths=_ENDS, query_length=8),
    "d256": on(_DECODING, head_dim=256, v_head_dim=256, key_value_seq_lengths=_ENDS),
    "128 rows": on(
        _DECODING, query_length=32, is_causal=True, sinks="n", query_offset=tuple(end - 32 for end in _ENDS)
    ),
    # Each unit has a CTA of its own, with or without keys.
    "whole units": on(_DECODING, key_length=300, key_value_seq_lengths=_ENDS, sinks="n"),
    # Up to three portions of 2048 keys.
    "portions": on(
        _DECODING,
        key_length=4300,
        key_value_seq_lengths=(0, 1, 2047, 2048, 2049, 4096, 700, 4097, 4300),
        sinks="n",
        deterministic=True,
    ),
    "mask of keys": on(_DECODING, mask="bs"),
    "mask of heads and pairs": on(_DECODING, query_length=4, mask="bnts", key_value_seq_lengths=_ENDS, dlse=True),
    "mask of short units": on(_DECODING, query_length=3, key_length=300, mask="bts", head_dim=64, v_head_dim=64),
    "ids, window": on(_DECODING, query_length=4, window=(600, None), **IDS),
}
