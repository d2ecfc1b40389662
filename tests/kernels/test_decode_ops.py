# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls with few queries, from canonical operands to results, with emulated custom calls."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from testing.poison import poison

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels import choose
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec, Operands

pytestmark = [pytest.mark.slow, pytest.mark.whole]

# Queries, query heads, key/value heads and head dims; other arguments are those of `attention`.
CASES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    # 3 CTAs read 3 heads side by side. Head dims are padded.
    "decoding": ((1, 6, 3, 60, 36), {"is_causal": True, "query_offset": (256, 12), "key_value_seq_lengths": (257, 13)}),
    "speculative": ((5, 3, 1, 64, 64), {"is_causal": True, "query_offset": (255, 0), "sinks": True}),
    "scale-operand": ((2, 2, 2, 64, 64), {"scale": True, "local_window_size": (100, 3), "query_offset": 200}),
    # Keys before the first visible one, which is no multiple of a word, and after the last one are not read.
    "mask-of-keys": ((1, 6, 3, 64, 64), {"mask": (2, 1, 1, 260), "keys": ((70, 250), (0, 40))}),
    "mask-of-pairs-and-heads": ((5, 4, 2, 64, 64), {"mask": (1, 4, 5, 260), "query_seq_lengths": (5, 2)}),
    "mask-of-kv-heads-causal": (
        (3, 6, 2, 128, 128),
        {"mask": (2, 2, 3, 260), "is_causal": True, "query_offset": (256, 100), "key_value_seq_lengths": (259, 90)},
    ),
    "mask-that-hides-all": ((2, 4, 2, 64, 64), {"mask": (2, 1, 1, 260), "keys": ((0, 0), (3, 4)), "sinks": True}),
    "64-rows-of-a-mask": ((16, 4, 1, 64, 64), {"mask": (1, 1, 16, 260), "logits_soft_cap": 2.0}),
    # Portions of 128 keys, which the test sets.
    "deterministic": (
        (2, 4, 2, 128, 128),
        {"is_causal": True, "query_offset": (257, 30), "key_value_seq_lengths": (259, 32), "deterministic": True},
    ),
    "deterministic-mask": (
        (1, 6, 3, 64, 64),
        {"mask": (2, 1, 1, 260), "keys": ((70, 250), (0, 40)), "deterministic": True},
    ),
    "segment-ids": ((4, 4, 2, 64, 64), {"ids": 3, "local_window_size": (150, 150)}),
    "segment-ids-and-a-mask": ((2, 2, 1, 256, 256), {"ids": 2, "mask": (2, 1, 1, 260), "keys": ((100, 190), (0, 64))}),
}


def _arguments(name: str) -> tuple[AttentionSpec, Operands]:
    """Returns a case's specification and canonical operands."""
    (queries, heads, kv_heads, head_dim, v_head_dim), arguments = CASES[name]
    arguments = {name: jnp.asarray(x, jnp.int32) if name.endswith("lengths") else x for name, x in arguments.items()}
    random = np.random.default_rng(0)
    if "sinks" in arguments:
        arguments["sinks"] = jnp.asarray(random.standard_normal(heads), jnp.float32)
    if "scale" in arguments:
        arguments["scale"] = jnp.float32(0.125)
    if isinstance(offset := arguments.get("query_offset"), tuple):
        arguments["query_offset"] = jnp.asarray(offset, jnp.int32)
    if documents := arguments.pop("ids", None):
        ids = [np.sort(random.integers(0, documents, (2, rows)), 1) for rows in (queries, 260)]
        arguments["segment_ids"] = tuple(jnp.asarray(x, jnp.int32) for x in ids)
    if "mask" in arguments:
        mask = random.random(arguments["mask"]) < 0.6
        for i, (begin, end) in enumerate(arguments.pop("keys", ())):
            mask[i, ..., :begin] = mask[i, ..., end:] = False
            mask[i, ..., begin : begin + 1] = mask[i, ..., end - 1 : end] = begin < end
        arguments["mask"] = jnp.asarray(mask)
    shapes = ((2, queries, heads, head_dim), (2, 260, kv_heads, head_dim), (2, 260, kv_heads, v_head_dim))
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    return canonicalize(*arrays, **arguments)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", CASES)
def test_attention_of_few_queries(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of Q, K and V that are invisible hold NaN."""
    ops: list[str] = []

    def bind(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        ops.append(params["kernel"].op)
        return emulated_ops.bind(*operands, **params)

    emulated_ops.emulate(monkeypatch, arch, bind)
    monkeypatch.setattr(choose, "_PORTION_KEYS", 128)
    spec, operands = _arguments(name)
    poisoned, *_ = poison(spec, operands, jnp.zeros((*operands.query.shape[:3], operands.value.shape[3]), jnp.bfloat16))
    out, lse = cuda.forward(spec, poisoned)
    wanted, wanted_lse = attention_reference(spec, operands)
    assert ops == ["decode"]
    np.testing.assert_allclose(np.asarray(out, np.float64), np.asarray(wanted, np.float64), atol=2e-2)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-3, rtol=1e-4)
