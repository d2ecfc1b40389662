# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Paged calls, from canonical operands to results, with emulated custom calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical.paged import canonicalize
from jax_fastattn.layouts.paged import PagedOperands
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import paged_reference
from jax_fastattn.spec import AttentionSpec

pytestmark = [pytest.mark.slow, pytest.mark.whole]

# Queries, query heads, key/value heads and rows of a page; other arguments are those of `paged_attention`.
CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "decoding": ((1, 6, 3, 16), {"is_causal": True}),
    "speculative-sinks": ((5, 3, 1, 64), {"is_causal": True, "sinks": True}),
    "scale-operand-window": ((2, 2, 2, 32), {"scale": True, "local_window_size": (30, 3)}),
    "offset": ((3, 2, 1, 48), {"is_causal": True, "query_offset": 40}),
}


def _with_scaled_query(spec: AttentionSpec, operands: PagedOperands) -> tuple[AttentionSpec, PagedOperands]:
    """Returns the call that kernels run: an array `scale` is multiplied into the query, which is rounded."""
    if operands.scale is None:
        return spec, operands
    query = (operands.query.astype(jnp.float32) * operands.scale[0, 0]).astype(operands.query.dtype)
    operands = operands._replace(query=query, scale=None)
    return dataclasses.replace(spec, present=operands.present()), operands


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", CASES)
def test_paged_attention_of_few_queries(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of the table past a length are out of range, and rows that no table names are NaN."""
    keys: list[Any] = []

    def bind(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        keys.append(params["kernel"])
        return emulated_ops.bind(*operands, **params)

    emulated_ops.emulate(monkeypatch, arch, bind)
    (queries, heads, kv_heads, page), arguments = CASES[name]
    random = np.random.default_rng(0)
    if "sinks" in arguments:
        arguments = arguments | {"sinks": jnp.asarray(random.standard_normal(heads), jnp.float32)}
    if "scale" in arguments:
        arguments = arguments | {"scale": jnp.float32(0.2)}
    lengths, pages = np.array([0, 2 * page + 1, 3 * page], np.int32), 9
    table = random.permutation(pages)[:9].reshape(3, 3).astype(np.int32)
    shapes = ((3, queries, heads, 64), (pages, page, kv_heads, 64), (pages, page, kv_heads, 64))
    arrays = [random.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]
    is_used = np.zeros((pages, page), bool)
    for b, length in enumerate(lengths):
        for j in range(length):
            is_used[table[b, j // page], j % page] = True
        table[b, -(-length // page) :] = 1 << 30
    call = (*arrays, table, lengths)
    wanted, wanted_lse = paged_reference(*_with_scaled_query(*canonicalize(*call, **arguments)))
    broken = [np.where(is_used[..., None, None], x, np.nan).astype(x.dtype) for x in arrays[1:]]
    out, lse = cuda.paged_forward(*canonicalize(arrays[0], *broken, table, lengths, **arguments))
    assert [(key.op, key.page) for key in keys] == [("decode", page)]
    np.testing.assert_allclose(np.asarray(out, np.float64), np.asarray(wanted, np.float64), atol=2e-2)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-4, rtol=1e-4)
