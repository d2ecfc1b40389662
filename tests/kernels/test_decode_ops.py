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
from emulated_launch import MULTIPROCESSORS

from jax_fastattn import ffi
from jax_fastattn.canonical import canonicalize
from jax_fastattn.ops import cuda
from jax_fastattn.ops.launch import launch_p
from jax_fastattn.reference import attention_reference

pytestmark = pytest.mark.slow

# Queries, query heads, key/value heads and head dims; other arguments are those of `attention`.
CASES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    # 3 CTAs read 3 heads side by side. Head dims are padded.
    "decoding": ((1, 6, 3, 60, 36), {"is_causal": True, "query_offset": (256, 12), "key_value_seq_lengths": (257, 13)}),
    "speculative": ((5, 3, 1, 64, 64), {"is_causal": True, "query_offset": (255, 0), "sinks": True}),
    "scale-operand": ((2, 2, 2, 64, 64), {"scale": True, "local_window_size": (100, 3), "query_offset": 200}),
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", CASES)
def test_attention_of_few_queries(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops: list[str] = []

    def bind(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        ops.append(params["kernel"].op)
        return emulated_ops.bind(*operands, **params)

    monkeypatch.setattr(ffi, "arch", lambda: arch)
    monkeypatch.setattr(ffi, "multiprocessors", lambda: MULTIPROCESSORS)
    monkeypatch.setattr(launch_p, "bind", bind)
    (queries, heads, kv_heads, head_dim, v_head_dim), arguments = CASES[name]
    arguments = {name: jnp.asarray(x, jnp.int32) if name.endswith("lengths") else x for name, x in arguments.items()}
    random = np.random.default_rng(0)
    if "sinks" in arguments:
        arguments["sinks"] = jnp.asarray(random.standard_normal(heads), jnp.float32)
    if "scale" in arguments:
        arguments["scale"] = jnp.float32(0.125)
    if isinstance(offset := arguments.get("query_offset"), tuple):
        arguments["query_offset"] = jnp.asarray(offset, jnp.int32)
    shapes = ((2, queries, heads, head_dim), (2, 260, kv_heads, head_dim), (2, 260, kv_heads, v_head_dim))
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    spec, operands = canonicalize(*arrays, **arguments)
    out, lse = cuda.forward(spec, operands)
    wanted, wanted_lse = attention_reference(spec, operands)
    assert ops == ["decode"]
    np.testing.assert_allclose(np.asarray(out, np.float64), np.asarray(wanted, np.float64), atol=2e-2)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-3, rtol=1e-4)
