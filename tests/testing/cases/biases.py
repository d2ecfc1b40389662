# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Biases: kinds, dtypes and head dims that have a variant, large matrices, and elements that count as -inf."""

from __future__ import annotations

from testing.cases.base import GQA, MHA, on

# With these lengths, a matrix of 16 bits takes more than half of an H100's L2.
_LARGE_BIAS = {"query_length": 1500, "key_length": 1601}
BIASES = {
    "pairs": on(MHA, bias="nts", bias_dtype="bfloat16", dlse=True),
    "pairs of key/value heads": on(GQA, bias="bkts", bias_dtype="bfloat16", is_causal=True, deterministic=True),
    "pairs, d128": on(GQA, head_dim=128, bias="bts", bias_dtype="bfloat16", window=(150, 60), query_offset=(300, -40)),
    "pairs, d96, float16": on(MHA, head_dim=96, dtype="float16", bias="bnts", bias_dtype="float16", sinks="n"),
    "pairs, d192v128": on(MHA, head_dim=192, v_head_dim=128, bias="nts", bias_dtype="bfloat16", is_causal=True),
    "pairs, d256": on(GQA, head_dim=256, bias="ts", bias_dtype="bfloat16", logits_soft_cap=5.0),
    "two terms": on(MHA, bias="nts", key_value_seq_lengths=(257, 64)),
    "two terms, d128": on(GQA, head_dim=128, bias="bnts", query_seq_lengths=(193, 65)),
    "two terms, d256": on(MHA, head_dim=256, bias="bts", is_causal=True),
    "float16 next to bfloat16": on(GQA, bias="ts", bias_dtype="float16", logits_soft_cap=2.0, sinks="n", dlse=True),
    "pairs and a mask": on(GQA, bias="nts", bias_dtype="bfloat16", mask="bts", mask_density=0.05),
    "pairs and ids, d128": on(MHA, head_dim=128, bias="ts", bias_dtype="bfloat16", segments=4, is_causal=True),
    "pairs and padding": on(MHA, bias="nts", bias_dtype="bfloat16", mask="bs", mask_density=0.02, dlse=True),
    "pairs and padding, d32": on(
        GQA, head_dim=32, batch=40, bias="nts", bias_dtype="bfloat16", mask="bks", mask_density=0.3
    ),
    "two terms and padding, d128": on(
        GQA, head_dim=128, bias="bnts", mask="ks", key_value_seq_lengths=(257, 100), logits_soft_cap=5.0, sinks="n"
    ),
    "keys and padding, d96": on(MHA, head_dim=96, bias="bs", bias_dtype="bfloat16", mask="ns", mask_density=0.1),
    "pairs and a mask, d160": on(MHA, head_dim=160, bias="nts", mask="bs"),
    "few finite pairs": on(MHA, bias="nts", bias_dtype="bfloat16", bias_density=0.02),
    "few finite pairs, d128": on(MHA, head_dim=128, bias="bnts", bias_density=0.02, dlse=True),
    "large": on(MHA, batch=3, num_kv_heads=4, **_LARGE_BIAS, bias="nts", bias_dtype="bfloat16", is_causal=True),
    "large, d128": on(GQA, batch=3, num_kv_heads=2, head_dim=128, **_LARGE_BIAS, bias="nts", bias_dtype="bfloat16"),
    "in parts": on(MHA, batch=40, query_length=130, key_length=140, head_dim=32, bias="ts", bias_dtype="bfloat16"),
    "keys": on(MHA, bias="bs", bias_dtype="bfloat16", is_causal=True),
    "keys, d128": on(GQA, head_dim=128, bias="ns", deterministic=True, logits_soft_cap=5.0),
    "keys of key/value heads, d192": on(GQA, head_dim=192, bias="ks", bias_density=0.2, mask="bts"),
    "keys of one query": on(GQA, query_length=1, key_length=1000, head_dim=128, bias="bns", scale=-0.2),
    "rows": on(MHA, bias="bt", bias_density=0.7, sinks="n", dlse=True),
    "rows under a cap": on(GQA, head_dim=128, bias="nt", logits_soft_cap=2.0, is_causal=True, sinks="n"),
    # The gradient is smaller than the rounding of the output.
    "rows far below a cap": on(GQA, bias="bt", logits_soft_cap=50.0, dlse=True),
    "one row, d40": on(MHA, head_dim=40, v_head_dim=72, bias="n", scale=-0.2, sinks="n"),
    "one number": on(MHA, bias="", sinks="n", dlse=True),
}
