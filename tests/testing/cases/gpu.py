# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Every case of the GPU suite."""

from __future__ import annotations

import dataclasses

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.choose import kernel_spec
from testing.cases.base import FEW, GQA, LONG, MHA, lengths, on, vary
from testing.cases.few_queries import FEW_QUERIES
from testing.cases.hidden_rows import HIDDEN_ROWS
from testing.cases.masked import MASKED
from testing.cases.packed import PACKED

# These lengths are around the tile sizes of kernels (64, 128), both ways round, and far from them.
_ODD = lengths((1, 63), (64, 65), (127, 193), (129, 128), (257, 127), (1000, 257))
_MANY = _ODD + lengths((193, 1), (63, 64), (65, 129), (128, 1000), (1, 1), (128, 128))
_LONG_EDGES = lengths((2111, 2112), (2112, 2113), (2113, 2111))
_WINDOWS = [{"window": window} for window in ((0, 0), (1, 0), (0, 3), (64, 63), (100, 7), (5, 150), (2000, 2000))]
_OFFSETS = [
    {"query_offset": offset}
    for offset in ((64, 64), (0, 0), (100, -100), (-1, 1), (-500, 500), (1 << 30, 40), (-(1 << 30), 7))
]
_BOTH_LENGTHS = [
    {"query_seq_lengths": query, "key_value_seq_lengths": key}
    for query, key in (((193, 100), (257, 129)), ((0, 64), (65, 128)), ((65, 1), (0, 256)), ((128, 190), (1, 0)))
]
# A line is one kernel forward and one backward (dtype, dims, group, what is present), two with and without `dlse`;
# its variations compile nothing.
_SHORTER = [
    # Lengths.
    *vary(MHA, {}, *_MANY, {"scale": -0.2}, {"scale": 0.0}, {"batch": 5}, *LONG, *_LONG_EDGES),
    *vary(on(MHA, dtype="float16", is_causal=True), {}, *_MANY, {"scale": -0.2}, *LONG),
    *vary(on(MHA, head_dim=128), {}, *_ODD, {"scale": 0.3}, {"scale": 0.1, "scale_is_array": True}),
    *vary(on(MHA, head_dim=128, num_kv_heads=4, group=5, is_causal=True), {}, *_MANY, {"num_kv_heads": 1}),
    # Head dims. Some lines have a feature that has no line of its own.
    *vary(on(GQA, head_dim=8, is_causal=True), {}, *_ODD),
    *vary(on(MHA, dtype="float16", head_dim=32), {}, *FEW),
    *vary(on(GQA, head_dim=256, v_head_dim=32), {}, *FEW),
    *vary(on(GQA, head_dim=112, v_head_dim=16, is_causal=True), {}, *FEW),
    *vary(on(GQA, head_dim=160, v_head_dim=16, logits_soft_cap=5.0, dlse=True, deterministic=True), {}, *FEW),
    *vary(on(GQA, head_dim=16), {}, *_ODD),
    *vary(on(GQA, head_dim=24, dtype="float16", is_causal=True), {}, *_ODD),
    *vary(on(GQA, head_dim=40, is_causal=True), {}, *_ODD),
    *vary(on(GQA, head_dim=72, sinks="n"), {}, {"sinks": "bn"}, *_ODD),
    *vary(on(GQA, head_dim=80, dtype="float16", logits_soft_cap=1.0), {}, *_ODD),
    *vary(on(GQA, head_dim=96, is_causal=True), {}, *_ODD, *LONG, *_LONG_EDGES),
    *vary(on(GQA, head_dim=104), *({"query_seq_lengths": lengths} for lengths in ((193, 65), (0, 128), (64, 1)))),
    *vary(on(GQA, head_dim=160), *({"window": (left, None)} for left in (0, 1, 64, 150, 1000))),
    *vary(on(GQA, head_dim=192, dtype="float16"), {}, *_ODD),
    *vary(on(GQA, head_dim=256, is_causal=True), {}, *_ODD),
    # The value has a head dim of its own.
    *vary(
        on(MHA, head_dim=192, v_head_dim=128, is_causal=True),
        {},
        *_ODD,
        *lengths((127, 79), (128, 80), (129, 81), (65, 161)),  # tiles of 80 keys
    ),
    *vary(on(MHA, head_dim=64, v_head_dim=256), {}, *FEW),
    *vary(on(GQA, head_dim=128, v_head_dim=64, is_causal=True), {}, *FEW),
    *vary(on(MHA, head_dim=16, v_head_dim=48, dtype="float16"), {}, *FEW),
    # Groups; 3 and 7 do not divide a tile.
    *vary(on(MHA, num_kv_heads=5, group=3, is_causal=True), {}, *_ODD),
    *vary(on(MHA, batch=3, num_kv_heads=2, group=7), {}, *_ODD, {"num_kv_heads": 1}),
    *vary(on(MHA, batch=3, num_kv_heads=2, group=8, is_causal=True), {}, *FEW, {"num_kv_heads": 1}),
    # Windows and offsets. Causal is a right bound of 0, so it shares the kernel of a right bound.
    *vary(MHA, *_WINDOWS, {"window": (70, None), "is_causal": True}, {"window": (0, 9), "is_causal": True}),
    *vary(on(MHA, window=(70, 30)), *lengths((65, 1000), (1000, 129), (257, 128)), *LONG),
    *vary(on(GQA, window=(500, 0), query_offset=(-7, 90)), *LONG),
    # There are more query tiles than multiprocessors, in more than one head group.
    *vary(on(MHA, batch=1, num_kv_heads=20, head_dim=128, window=(300, 0)), *lengths((1100, 1100))),
    *vary(on(GQA, head_dim=128), *({"window": (None, right)} for right in (0, 1, 64, 150, 1000))),
    *vary(on(GQA, is_causal=True), *_OFFSETS, *lengths((1, 257), (129, 65), query_offset=(-3, 128))),
    *vary(on(MHA, head_dim=128, query_offset=(64, -70)), *_WINDOWS, {"window": (150, None), "is_causal": True}),
    *vary(on(GQA, head_dim=128, query_offset=(60, -60)), {"window": (20, None)}, {"window": (300, None)}),
    # Lengths of sequences.
    *vary(GQA, *({"key_value_seq_lengths": lengths} for lengths in ((257, 64), (128, 0), (1, 129), (300, 256)))),
    *vary(on(GQA, key_value_seq_lengths=(1000, 193)), *lengths((1, 1000), (257, 1000), (64, 1000))),
    *vary(on(GQA, is_causal=True), *_BOTH_LENGTHS),
    *vary(
        on(GQA, is_causal=True, query_length=2240, key_length=2177),
        {"query_seq_lengths": (2113, 1), "key_value_seq_lengths": (2000, 2177)},
        {"query_seq_lengths": (0, 2240), "key_value_seq_lengths": (2177, 193), "query_offset": (3, -70)},
    ),
    # Soft cap.
    *vary(on(MHA, is_causal=True, logits_soft_cap=2.0), {}, *FEW, {"logits_soft_cap": 50.0}, {"scale": 1.5}, *LONG),
    *vary(
        on(MHA, is_causal=True, logits_soft_cap=2.0, deterministic=True),
        *lengths((65, 577), (257, 1000)),
        {"logits_soft_cap": 50.0, "key_length": 577},
        *LONG[:2],
    ),
    *vary(on(GQA, head_dim=96, dtype="float16", logits_soft_cap=30.0), {}, *_ODD),
    *vary(on(GQA, head_dim=96, dtype="float16", logits_soft_cap=30.0, deterministic=True), {}, *FEW),
    *vary(
        on(GQA, head_dim=128, is_causal=True, logits_soft_cap=50.0),
        *lengths((257, 1000), (1000, 577)),
        {"scale": -1.5, "key_length": 577},
        {"scale": -0.2, "key_length": 577, "scale_is_array": True},
        {"scale": 0.0, "key_length": 577},
        {"scale": 0.0, "key_length": 577, "scale_is_array": True},
        *LONG[:2],
    ),
    *vary(on(GQA, head_dim=256, logits_soft_cap=30.0), *_WINDOWS[2:5], {"window": (100, None), "is_causal": True}),
    # Sinks.
    *vary(on(MHA, batch=3, num_kv_heads=2, group=8, sinks="n"), *_WINDOWS[3:5], {"window": (127, 0)}),
    *vary(on(GQA, head_dim=128, is_causal=True, sinks="bn"), {}, {"sinks": "n"}, *FEW),
    # A cotangent of the log-sum-exp.
    *vary(on(MHA, dlse=True), {}, *_ODD),
    *vary(on(GQA, head_dim=128, is_causal=True, sinks="bn", dlse=True), {}, {"scale": -0.1}, *FEW),
    *vary(on(GQA, is_causal=True, dlse=True), *_BOTH_LENGTHS, {**_BOTH_LENGTHS[1], "scale_is_array": True}),
    # There are enough heads that the preprocess of the last ones runs concurrently with the first ones.
    *vary(
        on(MHA, batch=3, num_kv_heads=40, query_length=193, key_length=577),
        {},
        {"head_dim": 128, "is_causal": True, "query_offset": (-100, 3, 300)},
        {"head_dim": 96, "dtype": "float16", "dlse": True, "query_seq_lengths": (193, 0, 65)},
        {"num_kv_heads": 30, "group": 2, "head_dim": 128, "v_head_dim": 40},
        {"head_dim": 128, "deterministic": True},
        {"num_kv_heads": 30, "group": 3, "deterministic": True, "key_value_seq_lengths": (577, 1, 0)},
        {
            "num_kv_heads": 55,
            "head_dim": 96,
            "is_causal": True,
            "query_length": 800,
            "query_offset": (500, -100, 3),
            "dlse": True,
            "deterministic": True,
        },
    ),
    # The CTAs of many short heads add to dq in one order.
    *vary(
        on(MHA, batch=32, num_kv_heads=4, is_causal=True),
        *lengths((512, 512), (257, 127), (129, 193), (1, 300), (300, 1)),
        {"batch": 60, "query_length": 193, "scale": -0.2},
    ),
    *vary(on(MHA, batch=66, num_kv_heads=4, dtype="float16"), *lengths((384, 257), (65, 384), (128, 128), (1, 1))),
    *vary(on(MHA, batch=66, num_kv_heads=2, head_dim=128, is_causal=True), *lengths((256, 256), (129, 65))),
    *vary(on(MHA, batch=66, num_kv_heads=2, head_dim=128), *lengths((128, 65), (65, 128))),
    *vary(on(MHA, batch=66, num_kv_heads=2, head_dim=40, v_head_dim=72), *lengths((193, 256), (256, 129))),
    *vary(
        on(MHA, batch=44, num_kv_heads=3, group=3, head_dim=96, query_length=193, key_length=500, window=(300, 7)),
        {},
        {"deterministic": True, "query_length": 500, "key_length": 193},
    ),
    *vary(
        on(MHA, batch=4, num_kv_heads=33, group=2, head_dim=96, logits_soft_cap=5.0, sinks="n", dlse=True),
        *(
            {
                "query_length": 257,
                "key_length": 512,
                "window": window,
                "query_offset": (200, -30, 0, 64),
                "query_seq_lengths": (257, 193, 0, 65),
                "key_value_seq_lengths": (512, 129, 300, 0),
            }
            for window in ((200, 0), (0, 64))
        ),
    ),
    *vary(
        on(MHA, batch=32, num_kv_heads=4, logits_soft_cap=50.0, is_causal=True),
        *lengths((512, 512), (193, 500), (640, 577)),
        {"head_dim": 96, "query_length": 577, "key_length": 640, "dlse": True},
        {"logits_soft_cap": None, "query_length": 577, "key_length": 640},
    ),
    # Every run gives equal bits, short and long, with few heads and with enough that CTAs of several heads overlap.
    *vary(
        on(MHA, deterministic=True),
        *FEW,
        {"scale": -0.2},
        {"scale": 0.0},
        {"batch": 20, "query_length": 64},
        *LONG[:2],
    ),
    *vary(
        on(MHA, head_dim=40, v_head_dim=72, dtype="float16", deterministic=True),
        *FEW,
        *lengths((193, 577), (65, 600)),
    ),
    *vary(
        on(GQA, head_dim=96, is_causal=True, sinks="bn", dlse=True, deterministic=True),
        {},
        {"batch": 16, "query_length": 129, "key_length": 1089},
        *lengths((257, 1089), (1100, 65)),
        # Each query sees one key, so that an error is a few roundings: it takes many to compare.
        {"batch": 16, "query_length": 1, "key_length": 1100},
        *LONG[:2],
    ),
    *vary(
        on(GQA, is_causal=True, deterministic=True, key_length=665),
        *_BOTH_LENGTHS,
        *lengths((65, 665), (193, 257)),
        {
            "batch": 4,
            "num_kv_heads": 50,
            "query_seq_lengths": (193, 100, 64, 1),
            "key_value_seq_lengths": (257, 665, 0, 64),
        },
    ),
    *vary(on(MHA, batch=1, num_kv_heads=20, window=(300, 0), deterministic=True), *lengths((1100, 1100))),
    *vary(
        on(GQA, head_dim=128, is_causal=True, deterministic=True),
        *FEW,
        *lengths((1, 1100), (129, 1089), (1100, 65)),
        {"batch": 16, "query_length": 129, "key_length": 1089},
        *LONG[:2],
    ),
    *vary(on(MHA, batch=1, num_kv_heads=20, head_dim=128, window=(300, 0), deterministic=True), *lengths((1100, 1100))),
    *vary(
        on(GQA, head_dim=128, v_head_dim=64, dtype="float16", dlse=True, deterministic=True, query_length=1100),
        {"query_seq_lengths": (1100, 65), "key_value_seq_lengths": (0, 129)},
        {"query_seq_lengths": (193, 1089), "key_value_seq_lengths": (257, 64)},
    ),
    # All features are combined.
    *vary(
        on(MHA, num_kv_heads=4, group=5, head_dim=128, logits_soft_cap=5.0, sinks="n", dlse=True),
        *(
            {**lengths, "query_offset": offset, "window": window}
            for lengths in _BOTH_LENGTHS
            for offset in ((64, -30), (-200, 10))
            for window in ((40, 0), (0, 64))
        ),
        *(
            {
                "query_seq_lengths": (193, 65),
                "key_value_seq_lengths": (600, 1089),
                "key_length": 1089,
                "query_offset": (500, -30),
                "window": window,
                "deterministic": deterministic,
            }
            for window in ((400, 0), (0, 640))
            for deterministic in (False, True)
        ),
    ),
    # A few new queries attend to a long cache.
    *vary(
        on(MHA, batch=3, num_kv_heads=2, group=4, head_dim=128, is_causal=True, key_length=1000),
        *(
            {"query_length": length, "query_offset": offset, "key_value_seq_lengths": lengths}
            for length in (1, 5, 65)
            for offset, lengths in (((999, 0, 500), (1000, 1, 501)), ((935, 128, -5), (1000, 193, 60)))
        ),
    ),
    # Capped logits are so large that an error of tanh shows, with sinks and without.
    *vary(
        on(GQA, head_dim=128, is_causal=True, logits_soft_cap=50.0, scale=1.0, query_length=257, key_length=1000),
        {},
        {"sinks": "n"},
        {"sinks": "n", "deterministic": True},
    ),
]


def _in_order(case: Case) -> bool:
    """Returns whether CTAs add to dq in one order on Hopper."""
    return kernel_spec(case.problem(), "backward", "sm_90a").ordered


GPU_CASES = [
    *_SHORTER,
    *PACKED,
    *MASKED,
    # With more queries, CTAs add in any order, unless the case is deterministic.
    *(
        dataclasses.replace(case, query_length=case.query_length + 1024, deterministic=i % 3 == 2)
        for i, case in enumerate(filter(_in_order, _SHORTER))
        if i % 2 == 0 and case.batch * case.num_kv_heads <= 16
    ),
    *HIDDEN_ROWS.values(),
    *FEW_QUERIES.values(),
]
