# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""float32 by products of float16: which rows count, and the powers of two, in the model of `half_model.py`.

`test_half_errors.py` has its errors. `tests/kernels/test_half_products.py` runs the kernels themselves, in the
emulators.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_model import model
from testing.poison import visible_rows

from jax_fastattn.layouts import packed
from jax_fastattn.ops.cuda import live_rows as live
from jax_fastattn.ops.cuda.half import forward_half
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec, Operands

B, T, S, N, K = 2, 21, 34, 4, 2
I32 = functools.partial(jnp.asarray, dtype=jnp.int32)


def _operands(seed: int = 0, **more: Any) -> Operands:
    random = np.random.default_rng(seed)
    shapes = ((B, T, N, 8), (B, S, K, 8), (B, S, K, 16))
    return Operands(*(jnp.asarray(random.standard_normal(x), jnp.float32) for x in shapes), **more)


def _sequences(offset: bool) -> jax.Array:
    found = [
        packed.sequences(I32(x), I32(y), (T, S)) for x, y in (((2, 9, 9, 20), (0, 12, 15, 31)), ((0, 21), (5, 34)))
    ]
    found[1] = jnp.concatenate([found[1][:1], jnp.zeros((2, 4), jnp.int32), found[1][1:]])
    stacked = jnp.stack(found)
    return jnp.pad(stacked, [(0, 0), (0, 0), (0, 1)], constant_values=-3) if offset else stacked


LENGTHS = {"query_seq_lengths": I32([15, 21]), "key_value_seq_lengths": I32([34, 9])}
OFFSET = {"query_offset": I32([-6, 20])}
IDS = {
    "query_segment_ids": I32(np.arange(B * T).reshape(B, T) // 6),
    "key_value_segment_ids": I32(np.arange(B * S).reshape(B, S) // 7 % 5),
}
MASK = np.random.default_rng(1).random((B, N, T, S)) < 0.05
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "window": ({"window": (3, 1)}, {}),
    "lengths": ({}, LENGTHS),
    "offset-lengths": ({"window": (7, 2)}, LENGTHS | OFFSET),
    "causal-offset": ({"is_causal": True}, OFFSET),
    "ids": ({"is_causal": True}, IDS),
    "mask": ({}, {"mask": jnp.asarray(MASK)}),
    "mask-of-keys": ({}, {"mask": jnp.asarray(MASK[:1, :1, :1])}),
    "mask-per-kv-head": ({"window": (5, 5)}, {"mask": jnp.asarray(MASK[:, :K])} | LENGTHS),
    "packed": ({"is_causal": True}, {"sequences": _sequences(offset=False)}),
    "packed-window": ({"window": (2, 4)}, {"sequences": _sequences(offset=True)}),
}


def _call(name: str) -> tuple[AttentionSpec, Operands]:
    facts, arrays = CALLS[name]
    operands = _operands(**arrays)
    return AttentionSpec(0.3, present=operands.present(), **facts), operands


@pytest.mark.parametrize("name", CALLS)
def test_rows_take_part_where_they_see_or_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_PAIRS", B * N * S * 8)  # chunks of queries, of which the last two overlap
    spec, operands = _call(name)
    found = live.live_rows(spec, operands)
    sees, seen, _ = visible_rows(spec, operands)
    for x, wanted in ((found.queries, sees), (found.keys, seen)):
        np.testing.assert_array_equal(np.broadcast_to(True if x is None else x, wanted.shape), wanted)
    # No array is made where all rows take part.
    assert (found.queries is None) == (name in ("all", "causal", "window") and bool(sees.all()))


# Calls whose hidden rows are found in different ways run at every commit, with the poison that hides best.
_HIDDEN = [
    pytest.param(value, name, marks=() if value == 1e38 and name in ("lengths", "ids", "packed") else pytest.mark.slow)
    for value in (1e38, np.nan, np.inf)
    for name in CALLS
    if name not in ("all", "causal")
]


@pytest.mark.parametrize(("value", "name"), _HIDDEN)
def test_what_is_hidden_changes_no_bit(value: float, name: str) -> None:
    spec, operands = _call(name)
    random = np.random.default_rng(5)
    dout, dlse = (jnp.asarray(random.standard_normal(x), jnp.float32) for x in ((B, T, N, 16), (B, T, N)))
    sees, seen, _ = visible_rows(spec, operands)

    def hidden(x: jax.Array, rows: jax.Array) -> jax.Array:
        heads = rows if rows.shape[2] in (1, x.shape[2]) else rows[:, :, :: rows.shape[2] // x.shape[2]]
        return jnp.where(heads.reshape(*heads.shape, *[1] * (x.ndim - 3)), x, jnp.asarray(value, x.dtype))

    poisoned = operands._replace(
        query=hidden(operands.query, sees), key=hidden(operands.key, seen), value=hidden(operands.value, seen)
    )
    first = model(spec, operands, dout, dlse)
    second = model(spec, poisoned, hidden(dout, sees), hidden(dlse, sees))
    for x, y, rows in zip(first, second, (sees, sees, sees, seen, seen), strict=True):
        shown = np.broadcast_to(rows.reshape(*rows.shape, *[1] * (x.ndim - 3)), x.shape)
        np.testing.assert_array_equal(np.asarray(x)[shown], np.asarray(y)[shown])


def test_a_visible_infinity_changes_no_power_of_two() -> None:
    """They come from finite elements."""
    operands = _operands()
    operands = operands._replace(query=operands.query.at[1, 5, 2, 3].set(jnp.inf))
    spec = AttentionSpec(0.3, present=operands.present())
    forward = forward_half(spec, operands)
    assert jnp.isinf(forward.operands.query).sum() == 1
    changed = forward.operands.query == forward_half(spec, _operands()).operands.query
    assert int(jnp.logical_not(changed).sum()) == 1


def test_packed_sequences_have_powers_of_their_own() -> None:
    """As if each were a call: a large value of a neighbor changes no bit."""
    spec, operands = _call("packed")
    dout = jnp.ones((B, T, N, 16), jnp.float32)
    first = model(spec, operands, dout)
    larger = operands._replace(value=operands.value.at[0, 12:].multiply(1e6))
    second = model(spec, larger, dout)
    for x, y, rows in zip(first, second, (9, 9, 9, 12, 12), strict=True):
        np.testing.assert_array_equal(x[0, :rows], y[0, :rows])
    assert (first.out[0, 9:20] != second.out[0, 9:20]).any()


def test_large_log_sum_exp_cotangents_leave_dv_right() -> None:
    operands = _operands()
    spec = AttentionSpec(0.3, present=operands.present())
    dout, dlse = jnp.ones((B, T, N, 16), jnp.float32), jnp.full((B, T, N), 1e9, jnp.float32)
    found, plain = model(spec, operands, dout, dlse), model(spec, operands, dout)
    np.testing.assert_allclose(found.dv, plain.dv, rtol=2e-3, atol=2e-3)

    def loss(query: jax.Array) -> jax.Array:
        out, lse = attention_reference(spec, operands._replace(query=query))
        return (out * dout).sum() + (lse * dlse).sum()

    wanted = jax.grad(loss)(operands.query)
    np.testing.assert_allclose(found.dq, wanted, atol=2e-3 * float(jnp.abs(wanted).max()))
