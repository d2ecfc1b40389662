# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Fast cases in float32 with every feature: the semantics of every implementation that runs on a CPU."""

from __future__ import annotations

import dataclasses

from jax_fastattn.cases.case import Case
from testing.cases.base import lengths, vary

# The cases have small sizes, so that they are fast.
_SMALL = Case(query_length=37, key_length=53, num_kv_heads=3, group=2, head_dim=8, v_head_dim=12)
CPU_CASES = [
    *vary(
        _SMALL,
        {},
        {"group": 1},
        {"num_kv_heads": 1, "group": 5},
        {"v_head_dim": None, "batch": 4},
        {"v_head_dim": 4, "dlse": True},
        {"scale": -0.7},
        {"scale": 0.0, "dlse": True},
        {"scale": -0.7, "scale_is_array": True, "query_seq_lengths": (0, 23), "logits_soft_cap": 1.5, "dlse": True},
        {"scale": 0.0, "scale_is_array": True, "bias": "nt"},
        {"is_causal": True},
        {"is_causal": True, "query_length": 53, "key_length": 37},
        {"is_causal": True, "query_offset": (16, -9)},
        {"is_causal": True, "query_offset": (-40, 60), "dlse": True},
        {"window": (7, 4)},
        {"window": (0, 0), "query_offset": (3, -5)},
        {"window": (11, None), "query_offset": (20, -20)},
        {"window": (None, 5)},
        {"window": (9, 30), "is_causal": True},
        {"key_value_seq_lengths": (19, 53)},
        {"key_value_seq_lengths": (0, 31), "dlse": True},
        {"query_seq_lengths": (0, 23), "key_value_seq_lengths": (41, 17), "is_causal": True},
        {"query_seq_lengths": (30, 37), "key_value_seq_lengths": (0, 1), "sinks": "n", "dlse": True},
        {"logits_soft_cap": 1.5},
        {"logits_soft_cap": 0.5, "bias": "bnts", "is_causal": True, "dlse": True},
        {"sinks": "n"},
        {"sinks": "bn", "window": (6, 0), "query_offset": (-8, 4), "dlse": True},
        {"bias": "bnts"},
        {"bias": "ns", "is_causal": True},
        {"bias": "bt"},
        {"bias": "ts", "mask": "b", "sinks": "n"},
        {"bias": "", "logits_soft_cap": 2.0},
        {"mask": "bnts"},
        {"mask": "bts", "bias": "n", "dlse": True},
        {"mask": "nt", "is_causal": True},
        {"mask": "bkts", "dlse": True},
        {"mask": "ks", "is_causal": True, "sinks": "n"},
        {"segments": 4},
        {"segments": 3, "is_causal": True, "query_offset": (5, 12), "sinks": "bn"},
    ),
    # Biases are as in AlphaFold, Swin, a graph transformer, ALiBi by keys and by rows, and padding that a bias spells.
    *vary(
        _SMALL,
        {"bias": "nts", "mask": "bs"},
        {"bias": "nts", "mask": "bts", "bias_density": 0.5, "dlse": True},
        {"bias": "bnts", "bias_density": 0.2, "key_value_seq_lengths": (19, 53)},
        {"bias": "ns", "is_causal": True, "scale": 0.3},
        {"bias": "nt", "bias_density": 0.8, "sinks": "n", "dlse": True},
        {"bias": "bs", "bias_spelled": Case(query_length=37, key_length=53, key_value_seq_lengths=(0, 31))},
    ),
    *vary(
        dataclasses.replace(_SMALL, batch=1, query_length=41),
        {"packed": ((11, 0, 17, 9), (13, 8, 0, 27))},
        {"packed": ((11, 0, 17, 9), (13, 8, 12, 20)), "is_causal": True, "sinks": "n", "dlse": True},
        {"packed": ((5, 33), (29, 24)), "window": (6, 2), "logits_soft_cap": 3.0},
    ),
    *vary(
        _SMALL,
        *lengths((0, 53), (37, 0), (1, 53), (37, 1), sinks="n", dlse=True),
        {"batch": 0, "is_causal": True, "bias": "nts"},
        {"num_kv_heads": 0, "mask": "ts"},
    ),
]
