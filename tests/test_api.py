# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of `attention` and `attention_varlen`: what arguments mean, and what is said about wrong ones."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import typing
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import compare

from jax_fastattn import attention, attention_varlen
from jax_fastattn.canonical import packed as canonical_packed
from jax_fastattn.canonical.arguments import fold_wide_window
from jax_fastattn.cases.case import Case
from jax_fastattn.ops import vjp
from jax_fastattn.reference import attention_reference

SMALL = Case(query_length=5, key_length=7, num_kv_heads=3, group=2, head_dim=8, v_head_dim=4)

# One argument each, and the pairs that share a meaning; cases.CPU_CASES has more of these for the layers below.
MEANINGS = {
    "plain": {},
    "scale": {"scale": -0.3},
    "causal": {"is_causal": True},
    "causal-more-queries": {"is_causal": True, "query_length": 11},
    "window-two-sided": {"window": (2, 1)},
    "window-left": {"window": (2, None)},
    "window-right": {"window": (None, 1)},
    "window-zero": {"window": (0, 0)},
    "window-causal": {"window": (2, 3), "is_causal": True},
    "lengths": {"query_seq_lengths": (3, 5), "key_value_seq_lengths": (7, 2)},
    "lengths-zero": {"query_seq_lengths": (0, 4), "key_value_seq_lengths": (5, 0)},
    "soft-cap": {"logits_soft_cap": 0.7},
    "soft-cap-bias": {"logits_soft_cap": 0.7, "bias": "bnts"},
    "segments": {"segments": 3},
    "sinks": {"sinks": "n"},
    "sinks-empty-rows": {"sinks": "n", "key_value_seq_lengths": (0, 4), "query_seq_lengths": (4, 5)},
    "offset": {"is_causal": True, "query_offset": (2, -3)},
    "offset-window": {"window": (1, 1), "query_offset": (4, -2)},
    "same-head-dims": {"v_head_dim": None},
    "wider-values": {"v_head_dim": 12},
    "mha": {"group": 1},
    "mqa": {"num_kv_heads": 1, "group": 5},
    "gqa-7": {"group": 7},
    "bias-and-mask": {"bias": "nts", "mask": "bts"},
    "no-queries": {"query_length": 0},
    "no-keys": {"key_length": 0},
    "no-keys-sinks": {"key_length": 0, "sinks": "n"},
    "bfloat16": {"dtype": "bfloat16", "bias": "bnts", "sinks": "n"},
    "float16": {"dtype": "float16", "is_causal": True, "mask": "nts"},
    "everything": {
        field: getattr(calls.EVERYTHING, field) for field in ("bias", "mask", "segments", "sinks", "window")
    },
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", MEANINGS)
def test_argument_means_what_the_reference_means(name: str) -> None:
    results = calls.check(dataclasses.replace(SMALL, dlse=True, **MEANINGS[name]))
    assert results.lse.dtype == jnp.float32


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        query, key, value = (rng.normal(size=shape) for shape in (Q.shape, K.shape, V.shape))
        out, lse = attention(query, key, value, return_residual=True)
        weights = np.exp(np.einsum("btnh,bsnh->bnts", query, np.repeat(key, 2, axis=2)) / np.sqrt(8))
        total = weights.sum(axis=3)
        exact = np.einsum("bnts,bsnd->btnd", weights / total[..., None], np.repeat(value, 2, axis=2))
        assert (out.dtype, lse.dtype) == (np.float64, np.float64)
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-14)
        np.testing.assert_allclose(lse, np.log(total).transpose(0, 2, 1), rtol=0, atol=1e-14)


BROADCASTS = ["".join(axes) for n in range(5) for axes in itertools.combinations("bnts", n)]


@pytest.mark.numbers
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda axes: axes or "1")
def test_mask_and_bias_broadcast_along(axes: str) -> None:
    case = dataclasses.replace(SMALL, bias=axes, mask=axes)
    calls.check(case, seed=len(axes))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_mask_and_bias_of_lower_rank(rank: int) -> None:
    case = dataclasses.replace(SMALL, bias="nts"[3 - rank :], mask="nts"[3 - rank :])
    operands = case.operands(jax.random.key(2))
    arrays = calls.arrays_of(operands)
    lower = arrays | {name: arrays[name].reshape(arrays[name].shape[4 - rank :]) for name in ("bias", "mask")}
    calls.assert_same(jax.jit(lambda x: attention(**x))(lower), jax.jit(lambda x: attention(**x))(arrays))


@pytest.mark.parametrize(
    "features",
    [(), ("bias", "mask"), tuple(calls.arrays_of(calls.EVERYTHING.operands(jax.random.key(0))))[3:]],
    ids=["qkv", "planes", "everything"],
)
def test_unbatched_is_a_batch_of_one(features: tuple[str, ...]) -> None:
    one = dataclasses.replace(
        calls.EVERYTHING, batch=1, query_seq_lengths=(4,), key_value_seq_lengths=(6,), query_offset=(2,)
    )
    arrays = calls.arrays_of(one.operands(jax.random.key(0)))
    arrays = {name: x for name, x in arrays.items() if name in ("query", "key", "value", *features)}
    kept = ("sinks", "scale", "query_seq_lengths", "key_value_seq_lengths", "query_offset")
    unbatched = {name: x if name in kept else jax.tree.map(lambda x: x[0], x) for name, x in arrays.items()}
    run = jax.jit(lambda x: attention(**x, is_causal=True, return_residual=True))
    calls.assert_same(run(unbatched), jax.tree.map(lambda x: x[0], run(arrays)))


def _qkv(case: Case = SMALL, seed: int = 0) -> list[jax.Array]:
    return list(case.operands(jax.random.key(seed))[:3])


SAME = {
    "window-int": ({"local_window_size": 2}, {"local_window_size": (2, 2)}),
    "window-list": ({"local_window_size": [2, None]}, {"local_window_size": (2, None)}),
    "window-numpy": ({"local_window_size": (np.int64(2), np.int32(1))}, {"local_window_size": (2, 1)}),
    "window-array": ({"local_window_size": np.array([3, 0])}, {"local_window_size": (3, 0)}),
    "window-jax": ({"local_window_size": jnp.array([3, 0])}, {"local_window_size": (3, 0)}),
    "window-jax-sides": ({"local_window_size": (jnp.int32(2), None)}, {"local_window_size": (2, None)}),
    "window-huge": ({"local_window_size": (2**40, 2**40)}, {}),
    "scale-default": ({"scale": 8**-0.5}, {}),
    "scale-numpy": ({"scale": np.float32(0.25)}, {"scale": 0.25}),
    "scale-array": ({"scale": jnp.float32(0.25)}, {"scale": 0.25}),
    "scale-integer-array": ({"scale": jnp.int32(2)}, {"scale": 2}),
    "offset-int": ({"query_offset": 2, "is_causal": True}, {"query_offset": jnp.array([2, 2]), "is_causal": True}),
    "offset-scalar": ({"query_offset": jnp.array(2), "is_causal": True}, {"query_offset": 2, "is_causal": True}),
    "offset-numpy": ({"query_offset": np.int32(2), "is_causal": True}, {"query_offset": 2, "is_causal": True}),
    "lengths-int64": (
        {"key_value_seq_lengths": np.array([3, 6], np.int64)},
        {"key_value_seq_lengths": jnp.array([3, 6])},
    ),
    "lengths-uint8-list": (
        {"query_seq_lengths": jnp.array([3, 6], jnp.uint8), "key_value_seq_lengths": [3, 6]},
        {"query_seq_lengths": jnp.array([3, 6]), "key_value_seq_lengths": jnp.array([3, 6])},
    ),
    "segments-uint32": (
        {
            "segment_ids": (
                jnp.array([[2**31 + 1] * 5, [2] * 5], jnp.uint32),
                jnp.array([[2**31 + 1] * 7] * 2, jnp.uint32),
            )
        },
        {"segment_ids": (jnp.array([[1] * 5, [2] * 5]), jnp.array([[1] * 7] * 2))},
    ),
    "segments-two-dtypes": (
        {"segment_ids": (jnp.array([[1] * 5, [2] * 5], jnp.int8), jnp.array([[1] * 7] * 2, jnp.uint16))},
        {"segment_ids": (jnp.array([[1] * 5, [2] * 5]), jnp.array([[1] * 7] * 2))},
    ),
    "causal-is-a-window": ({"is_causal": True}, {"local_window_size": (None, 0)}),
    "causal-int": ({"is_causal": 1}, {"is_causal": True}),
    "causal-jax": ({"is_causal": jnp.bool_(True)}, {"is_causal": True}),
    "deterministic": ({"deterministic": True}, {}),
    "deterministic-numpy": ({"deterministic": np.int8(1)}, {}),
    "xla": ({"implementation": "xla"}, {}),
    "sinks-float16": ({"sinks": jnp.arange(6, dtype=jnp.float16)}, {"sinks": jnp.arange(6, dtype=jnp.float32)}),
}


@pytest.mark.parametrize("name", SAME)
def test_two_ways_to_say_the_same(name: str) -> None:
    one, other = SAME[name]
    qkv = _qkv()
    calls.assert_same(attention(*qkv, **one), attention(*qkv, **other), tolerance=1e-6)


def test_one_array_of_segment_ids_serves_queries_and_keys() -> None:
    case = dataclasses.replace(SMALL, key_length=5)
    ids = jnp.array([[0, 0, 1, 1, 1], [4, 4, 4, 2, 2]])
    calls.assert_same(attention(*_qkv(case), segment_ids=ids), attention(*_qkv(case), segment_ids=(ids, ids)), 1e-7)


def test_bottom_right_alignment_is_an_offset() -> None:
    query, key, value = _qkv()
    out = attention(query, key, value, is_causal=True, query_offset=7 - 5)
    last = attention(query[:, -1:], key, value)
    calls.assert_same(out[:, -1:], last)


def test_numpy_arrays_and_lists() -> None:
    qkv = _qkv()
    out = attention(*(np.asarray(x) for x in qkv), key_value_seq_lengths=np.array([3, 6], np.int32))
    expected = attention(*qkv, key_value_seq_lengths=jnp.array([3, 6]))
    calls.assert_same(out, expected, tolerance=0)
    out = attention(*(x.tolist() for x in qkv), key_value_seq_lengths=[3, 6])
    calls.assert_same(out, expected, tolerance=1e-6)
    out = jax.jit(lambda *x: attention(*map(list, x), key_value_seq_lengths=[3, 6]))(*qkv)  # lists of traced arrays
    calls.assert_same(out, expected, tolerance=1e-6)


def test_results() -> None:
    out = attention(*_qkv())
    assert (out.shape, out.dtype) == ((2, 5, 6, 4), jnp.float32)
    out, lse = attention(*(x.astype(jnp.bfloat16) for x in _qkv()), return_residual=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 5, 6, 4), jnp.bfloat16, (2, 5, 6), jnp.float32)
    out, lse = attention(*(x[0] for x in _qkv()), return_residual=True)
    assert (out.shape, lse.shape) == ((5, 6, 4), (5, 6))


@pytest.mark.parametrize(
    "why",
    {
        "mask": {"mask": jnp.zeros((1, 1, 5, 1), bool)},
        "lengths": {"key_value_seq_lengths": jnp.zeros(2, jnp.int32)},
        "segments": {"segment_ids": (jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 7), jnp.int32))},
        "offset": {"query_offset": -100, "is_causal": True},
        "window": {"query_offset": 100, "local_window_size": (3, 3)},
        "padding": {"query_seq_lengths": jnp.zeros(2, jnp.int32)},
    }.items(),
    ids=lambda why: why[0],
)
def test_rows_without_a_visible_key(why: tuple[str, dict[str, Any]]) -> None:
    qkv = [jnp.full_like(x, jnp.nan) for x in _qkv()]

    def run(qkv: list[jax.Array]) -> Any:
        return attention(*qkv, **why[1], return_residual=True)

    (out, lse), vjp = jax.vjp(run, qkv)
    assert not np.any(out)
    assert np.all(np.isneginf(lse))
    (gradients,) = vjp((jnp.ones_like(out), jnp.ones_like(lse)))
    assert not any(np.any(x) for x in gradients)


def _packed(lengths: tuple[int, ...], heads: int, dim: int, seed: int, padding: int = 0) -> tuple[jax.Array, jax.Array]:
    """A packed array, and its boundaries."""
    array = jax.random.normal(jax.random.key(seed), (sum(lengths) + padding, heads, dim))
    return array, jnp.array([0, *itertools.accumulate(lengths)], jnp.int32)


PACKED = {
    "same-lengths": ((3, 5, 2), (3, 5, 2), {}),
    "other-lengths": ((3, 5, 2), (4, 1, 6), {}),
    "empty-sequences": ((0, 5, 0, 2), (3, 0, 0, 6), {}),
    "one-sequence": ((5,), (7,), {}),
    "causal": ((3, 5, 2), (4, 2, 6), {"is_causal": True}),
    "window-cap": ((3, 5, 2), (4, 2, 6), {"local_window_size": (1, 1), "logits_soft_cap": 0.5, "scale": 0.9}),
    "offset": ((3, 5, 2), (4, 2, 6), {"is_causal": True, "query_offset": (1, -3, 4)}),
    "offset-int": ((3, 5, 2), (4, 2, 6), {"is_causal": True, "query_offset": 2}),
    "sinks": ((3, 5, 2), (4, 0, 6), {"sinks": (0.5, -1.0, 2.0, 0.0, 1.0, -0.5)}),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", PACKED)
def test_packed_is_one_call_for_each_sequence(name: str) -> None:
    lengths_q, lengths_k, options = PACKED[name]
    options = {k: jnp.array(v) if isinstance(v, tuple) and k != "local_window_size" else v for k, v in options.items()}
    query, starts_q = _packed(lengths_q, 6, 8, 0, padding=3)
    key, starts_k = _packed(lengths_k, 3, 8, 1, padding=2)
    value, _ = _packed(lengths_k, 3, 4, 2, padding=2)
    first_q, first_k = starts_q.tolist(), starts_k.tolist()

    def packed(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return attention_varlen(query, key, value, starts_q, starts_k, **options, return_residual=True)

    def one_by_one(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        outs, lses = [], []
        for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            q = query[first_q[b] : first_q[b] + rows]
            k, v = (x[first_k[b] : first_k[b] + keys] for x in (key, value))
            own = dict(options)
            if "query_offset" in own and not isinstance(own["query_offset"], int):
                own["query_offset"] = own["query_offset"][b]
            out, lse = attention(q, k, v, **own, return_residual=True)
            outs.append(out)
            lses.append(lse)
        outs.append(jnp.zeros((3, 6, 4)))
        return jnp.concatenate(outs), jnp.concatenate([*lses, jnp.full((3, 6), -jnp.inf)])

    def everything(function: Any) -> Any:
        def loss(*qkv: jax.Array) -> Any:
            out, lse = function(*qkv)
            weights = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape) % 7
            inside = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return jnp.sum(out * weights) + jnp.sum(inside * weights[..., 1]), (out, lse)

        grads, results = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)
        return {"grads": grads, "out": results[0], "lse": results[1]}

    calls.assert_same(everything(packed), everything(one_by_one))


def test_packed_results_are_unbatched() -> None:
    query, starts_q = _packed((3, 4), 6, 8, 0)
    key, starts_k = _packed((5, 6), 3, 8, 1)
    out = attention_varlen(query, key, key, starts_q, starts_k)
    assert out.shape == (7, 6, 8)


# Arguments that replace those of a good call, and the text of the error that they cause.
Q, K, V = (jnp.zeros(shape) for shape in ((2, 5, 6, 8), (2, 7, 3, 8), (2, 7, 3, 4)))
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query-rank": ({"query": Q[0, 0]}, ValueError, r"`query` has shape \(6, 8\), expected 4 .* \(BTNH\), or 3 \(TNH\)"),
    "query-rank-5": (
        {"query": Q[None]},
        ValueError,
        r"`query` has shape \(1, 2, 5, 6, 8\), expected 4 .* or 3 \(TNH\)",
    ),
    "key-rank": ({"key": K[0]}, ValueError, r"`key` has shape \(7, 3, 8\), expected 4 dimensions \(BSKH\)"),
    "key-batch": ({"key": K[:1]}, ValueError, r"`key` has shape \(1, 7, 3, 8\) .* B = 1, expected B = 2 as in `query`"),
    "key-head-dim": ({"key": K[..., :5]}, ValueError, r"`key` .* with H = 5, expected H = 8 as in `query`"),
    "value-length": ({"value": V[:, :4]}, ValueError, r"`value` .* with S = 4, expected S = 7 as in `key`"),
    "value-heads": ({"value": V[:, :, :2]}, ValueError, r"`value` .* with K = 2, expected K = 3 as in `key`"),
    "heads": (
        {"query": Q[:, :, :5]},
        ValueError,
        r"`key` has 3 heads, which does not divide the 5 heads of `query`; .*mult",
    ),
    "no-kv-heads": (
        {"key": K[:, :, :0], "value": V[:, :, :0]},
        ValueError,
        r"`key` has 0 heads, which does not divide the 6 heads of `query`",
    ),
    "query-int": (
        {"query": Q.astype(int)},
        TypeError,
        r"`query` has dtype int32, expected one of bfloat16, .*; cast it",
    ),
    "key-dtype": (
        {"key": K.astype(jnp.bfloat16)},
        TypeError,
        r"`key` has dtype bfloat16, expected float32 as in `query`",
    ),
    "value-dtype": ({"value": V.astype(jnp.float16)}, TypeError, r"`value` has dtype float16, expected float32 as in"),
    "query-string": ({"query": "text"}, TypeError, r"`query` is str, expected an array"),
    "query-big-endian": (
        {"query": np.zeros(Q.shape, ">f4")},
        TypeError,
        r"`query` has dtype >f4, which is big-endian; .* pass `query.astype\(\"float32\"\)`",
    ),
    "query-none": ({"query": None}, TypeError, r"`query` is NoneType, expected an array"),
    "bias-axis": (
        {"bias": jnp.zeros((2, 6, 4, 7))},
        ValueError,
        r"`bias` has shape \(2, 6, 4, 7\) with T = 4, expected 1 or T = 5 as in `query`; it must broadcast to BNTS",
    ),
    "bias-kv-heads": ({"bias": jnp.zeros((3, 1, 1))}, ValueError, r"`bias` .* with N = 3, expected 1 or N = 6"),
    "bias-rank": (
        {"bias": jnp.zeros((1,) * 5)},
        ValueError,
        r"`bias` has shape .* expected at most 4 dimensions \(BNTS\)",
    ),
    "bias-dtype": (
        {"bias": jnp.zeros((5, 7), int)},
        TypeError,
        r"`bias` has dtype int32, expected float; cast it first",
    ),
    "mask-axis": (
        {"mask": jnp.ones((5, 6), bool)},
        ValueError,
        r"`mask` .* with S = 6, expected 1 or S = 7 as in `key`",
    ),
    "mask-dtype": (
        {"mask": jnp.zeros((5, 7))},
        TypeError,
        r"`mask` has dtype float32, expected bool; if it is of zeros and ones, pass `mask.astype\(bool\)`; pass an "
        r"additive mask as `bias`",
    ),
    "mask-of-integers": (
        {"mask": jnp.zeros((5, 7), int)},
        TypeError,
        r"`mask` has dtype int32, expected bool; if it is of zeros and ones, pass `mask.astype\(bool\)`$",
    ),
    "mask-of-keys": (
        {"mask": jnp.ones((2, 7), bool)},
        ValueError,
        r"`mask` .* with T = 2, .* so pass `mask\[:, None, None, :\]` if it is \[B, S\]",
    ),
    "mask-of-pairs": (
        {"mask": jnp.ones((2, 5, 7), bool)},
        ValueError,
        r"`mask` .* with N = 2, .* so pass `mask\[:, None, :, :\]` if it is \[B, T, S\]",
    ),
    "bias-of-bools": (
        {"bias": jnp.ones((5, 7), bool)},
        TypeError,
        r"`bias` has dtype bool, expected float; pass it as `mask`",
    ),
    "lengths-shape": (
        {"key_value_seq_lengths": jnp.zeros(3, jnp.int32)},
        ValueError,
        r"`key_value_seq_lengths` has shape \(3,\) \(B\) with B = 3, expected B = 2 as in `query`",
    ),
    "lengths-scalar": (
        {"key_value_seq_lengths": 7},
        ValueError,
        r"`key_value_seq_lengths` has shape \(\), expected 1 dimension \(B\)",
    ),
    "lengths-dtype": (
        {"query_seq_lengths": jnp.zeros(2)},
        TypeError,
        r"`query_seq_lengths` has dtype float32, expected integer; cast it first",
    ),
    "segments-one-array": (
        {"segment_ids": jnp.zeros((2, 5), jnp.int32)},
        ValueError,
        r"`segment_ids` is one array, expected a pair .* T = 5 as in `query` and S = 7 as in `key`; pass `segm",
    ),
    "segments-of-keys": (
        {"segment_ids": (jnp.zeros((2, 5), jnp.int32),) * 2},
        ValueError,
        r"`segment_ids` .* with S = 5, expected S = 7 as in `key`",
    ),
    "segments-dtype": (
        {"segment_ids": (jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 7)))},
        TypeError,
        r"`segment_ids` has dtype float32, expected integer",
    ),
    "lengths-range": (
        {"key_value_seq_lengths": np.array([5, 2**32 + 3])},
        ValueError,
        r"`key_value_seq_lengths` is 4294967299, expected a value that int32 holds",
    ),
    "lengths-range-below": (
        {"key_value_seq_lengths": np.array([5, -(2**33)])},
        ValueError,
        r"`key_value_seq_lengths` is -8589934592, expected a value that int32 holds",
    ),
    "lengths-range-list": (
        {"query_seq_lengths": [5, 2**32 + 3]},
        ValueError,
        r"`query_seq_lengths` is \[5, 4294967299\], expected values that int32 holds",
    ),
    "lengths-big-endian": (
        {"key_value_seq_lengths": np.array([5, 3], ">i4")},
        TypeError,
        r"`key_value_seq_lengths` has dtype >i4, which is big-endian; .*astype\(\"int32\"\)`",
    ),
    "segments-big-endian": (
        {"segment_ids": (jnp.zeros((2, 5), jnp.int32), np.zeros((2, 7), ">i8"))},
        TypeError,
        r"`segment_ids` has dtype >i8, which is big-endian",
    ),
    "segments-range": (
        {"segment_ids": (np.zeros((2, 5), int), np.full((2, 7), -(2**32)))},
        ValueError,
        r"`segment_ids` is -4294967296, expected a value that int32 holds",
    ),
    "sinks-shape": ({"sinks": jnp.zeros(3)}, ValueError, r"`sinks` has shape \(3,\) \(N\) with N = 3, expected N = 6"),
    "sinks-dtype": ({"sinks": jnp.zeros(6, int)}, TypeError, r"`sinks` has dtype int32, expected float"),
    "offset-shape": (
        {"query_offset": jnp.zeros(3, jnp.int32)},
        ValueError,
        r"`query_offset` has shape \(3,\), expected an int, or integers of shape \(2,\)",
    ),
    "offset-float": ({"query_offset": 1.5}, TypeError, r"`query_offset` has dtype float32, expected integer"),
    "offset-none": ({"query_offset": None}, TypeError, r"`query_offset` is None, expected an int .*; pass the key pos"),
    "offset-word": (
        {"query_offset": "bottom_right"},
        TypeError,
        r"`query_offset` is 'bottom_right', expected an int or integers; pass .* S - T for bottom-right alignment",
    ),
    "offset-bool": ({"query_offset": True}, TypeError, r"`query_offset` has dtype bool, expected integer"),
    "offset-range": (
        {"query_offset": 2**40},
        ValueError,
        r"`query_offset` is 1099511627776, expected a value that int32 holds",
    ),
    "offset-range-numpy": (
        {"query_offset": np.uint32(2**31)},
        ValueError,
        r"`query_offset` is 2147483648, expected a value that int32 holds",
    ),
    "scale-range": ({"scale": -1e300}, ValueError, r"`scale` is -1e\+300, expected a number that float32 holds"),
    "scale-range-int": ({"scale": 10**400}, ValueError, r"`scale` is inf, expected a finite number"),
    "cap-range": (
        {"logits_soft_cap": 1e39},
        ValueError,
        r"`logits_soft_cap` is 1e\+39, expected a positive number that float32 holds",
    ),
    "cap-range-0": (
        {"logits_soft_cap": 1e-300},
        ValueError,
        r"`logits_soft_cap` is 1e-300, expected a positive number that float32 holds",
    ),
    "scale-object": ({"scale": np.array(None, object)}, TypeError, r"`scale` is ndarray, expected a float"),
    "scale-date": ({"scale": np.datetime64("2026-01-01")}, TypeError, r"`scale` is datetime64, expected a float"),
    "scale-bytes": ({"scale": b"1"}, TypeError, r"`scale` is bytes, expected a float"),
    "scale-bool": ({"scale": np.bool_(True)}, TypeError, r"`scale` is bool_?, expected a float"),
    "cap-key": ({"logits_soft_cap": jax.random.key(0)}, TypeError, r"`logits_soft_cap` is PRNGKeyArray, expected a"),
    "scale-array": (
        {"scale": np.ones(2)},
        TypeError,
        r"`scale` is ndarray, .*; pass a number, or a `jax.Array` of",
    ),
    "cap-string": ({"logits_soft_cap": "1"}, TypeError, r"`logits_soft_cap` is str, expected a float; pass a number$"),
    "scale-string": ({"scale": "1"}, TypeError, r"`scale` is str, expected a float"),
    "scale-shape": ({"scale": jnp.ones(2)}, ValueError, r"`scale` has shape \(2,\), expected .* of shape \(\); vmap"),
    "scale-complex": ({"scale": 1j}, TypeError, r"`scale` is complex, expected a float"),
    "scale-complex-scalar": ({"scale": np.complex64(1)}, TypeError, r"`scale` is complex64, expected a float"),
    "scale-dtype": ({"scale": jnp.array(True)}, TypeError, r"`scale` has dtype bool, expected a floating or integer"),
    "scale-nan": ({"scale": float("nan")}, ValueError, r"`scale` is nan, expected a finite number"),
    "cap-zero": ({"logits_soft_cap": 0.0}, ValueError, r"`logits_soft_cap` is 0.0, expected a finite positive number"),
    "cap-negative": ({"logits_soft_cap": -2}, ValueError, r"`logits_soft_cap` is -2.0, expected a finite positive"),
    "causal-two": ({"is_causal": 2}, ValueError, r"`is_causal` is 2, expected a bool; pass True or False"),
    "causal-array": ({"is_causal": jnp.ones(1, bool)}, TypeError, r"`is_causal` is ArrayImpl, expected a bool"),
    "deterministic-string": ({"deterministic": "yes"}, TypeError, r"`deterministic` is str, expected a bool"),
    "residual-none": ({"return_residual": None}, TypeError, r"`return_residual` is NoneType, expected a bool"),
    "window-negative": (
        {"local_window_size": (-1, 2)},
        ValueError,
        r"`local_window_size` is \(-1, 2\), expected sides >= 0; pass None for an unlimited side",
    ),
    "window-three": (
        {"local_window_size": (1, 2, 3)},
        TypeError,
        r"`local_window_size` is \(1, 2, 3\), expected an int or a",
    ),
    "window-float": ({"local_window_size": 2.0}, TypeError, r"`local_window_size` is 2.0, expected an int or a pair"),
    "window-float-side": ({"local_window_size": (1, 2.0)}, TypeError, r"expected ints or None in \(left, right\)"),
    "window-float-array": ({"local_window_size": np.array([3.0, 0.0])}, TypeError, r"expected an int or a pair"),
    "window-bool": ({"local_window_size": True}, TypeError, r"`local_window_size` is True, expected ints? or"),
    "implementation": (
        {"implementation": "triton"},
        ValueError,
        r'`implementation` is \'triton\', expected None, "cuda" or "xla"$',
    ),
    "implementation-list": (
        {"implementation": ["cuda"]},
        TypeError,
        r"`implementation` is list, expected None, \"cuda\"",
    ),
    "implementation-array": ({"implementation": np.ones(2)}, TypeError, r"`implementation` is ndarray, expected None"),
    "implementation-cudnn": (
        {"implementation": "cudnn"},
        ValueError,
        r"; cuDNN is reached through jax.nn.dot_product_att",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_says_so(name: str) -> None:
    arguments, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        attention(**{"query": Q, "key": K, "value": V} | arguments)


STARTS = jnp.array([0, 2, 5], jnp.int32)
WRONG_PACKED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batched": ({"query": Q}, ValueError, r"`query` has shape \(2, 5, 6, 8\), expected 3 dimensions \(TNH\)"),
    "starts-differ": (
        {"cu_seqlens_k": STARTS[:2]},
        ValueError,
        r"`cu_seqlens_k` has shape \(2,\) .*, expected C = 3 as in `cu_seqlens_q`",
    ),
    "no-boundary": (
        {"cu_seqlens_q": STARTS[:0], "cu_seqlens_k": STARTS[:0]},
        ValueError,
        r"`cu_seqlens_q` has C = 0 entries, expected one more than there are sequences; pass \[0\] for none",
    ),
    "starts-dtype": (
        {"cu_seqlens_q": STARTS.astype(float)},
        TypeError,
        r"`cu_seqlens_q` has dtype float32, expected integer",
    ),
    "starts-range": (
        {"cu_seqlens_k": np.array([0, 2, 2**32 + 3])},
        ValueError,
        r"`cu_seqlens_k` is 4294967299, expected a value that int32 holds",
    ),
    "starts-rank": ({"cu_seqlens_q": STARTS[None]}, ValueError, r"`cu_seqlens_q` has shape \(1, 3\), expected 1 dim"),
    "offset-shape": (
        {"query_offset": jnp.zeros(3, jnp.int32)},
        ValueError,
        r"`query_offset` has shape \(3,\), expected an int, or integers of shape \(2,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_PACKED)
def test_wrong_argument_of_a_packed_call_says_so(name: str) -> None:
    arguments, kind, text = WRONG_PACKED[name]
    good = {"query": Q[0], "key": K[0], "value": V[0], "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    with pytest.raises(kind, match=text):
        attention_varlen(**good | arguments)


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x, 0), lambda x: [None, x]], ids=["int", "left", "right"])
def test_window_that_is_traced_says_to_mark_it_static(pack: Any) -> None:
    message = "`local_window_size` is a traced value, expected Python integers; mark it static"
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda x: attention(Q, K, V, local_window_size=pack(x)))(1)


def test_soft_cap_that_is_traced_says_so() -> None:
    with pytest.raises(TypeError, match="`logits_soft_cap` is a traced value, expected a Python float; mark it static"):
        jax.jit(lambda x: attention(Q, K, V, logits_soft_cap=x))(1)


@pytest.mark.parametrize("name", ["is_causal", "deterministic", "return_residual"])
def test_flag_that_is_traced_says_so(name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` is a traced value, expected a Python bool; mark it static"):
        jax.jit(lambda x: attention(Q, K, V, **{name: x}))(True)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_insisting_on_cuda_elsewhere_names_every_reason(transform: Any) -> None:
    def call(query: jax.Array) -> jax.Array:
        return attention(query, K, V, implementation="cuda").sum()

    with pytest.raises(NotImplementedError) as caught:
        transform(call)(Q)
    listed = [line.strip(" -") for line in str(caught.value).split("\n")[1:-1]]
    assert listed == ["the platform is not CUDA"]
    assert "implementation=None falls back to the XLA path" in str(caught.value)


@pytest.mark.parametrize("function", [attention, attention_varlen])
def test_overloads_have_the_arguments_of_the_function(function: Any) -> None:
    arguments = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    returned = [inspect.signature(overload).parameters["return_residual"].annotation for overload in overloads]
    assert returned == ["Literal[False]", "Literal[True]", "bool"]
    for overload in overloads:
        own = dict(inspect.signature(overload).parameters)
        (options,) = typing.get_args(typing.get_type_hints(overload)[own.pop("options").name])
        assert own.keys() | options.__annotations__.keys() == arguments.keys()
        hints = typing.get_type_hints(function)
        assert typing.get_type_hints(options).items() <= hints.items()


def test_int64_arrays_do_not_wrap() -> None:
    qkv = _qkv()
    ids = jnp.array([[0] * 7, [0] * 3 + [1] * 4], jnp.int32)
    narrow = {
        "key_value_seq_lengths": jnp.array([7, 4]),
        "query_offset": jnp.array([2**31 - 1, 1]),
        "segment_ids": (ids[:, :5], ids),
    }
    with jax.enable_x64(True):
        wide_ids = ids.astype(jnp.int64) * 2**32
        wide = {
            "key_value_seq_lengths": jnp.array([2**32 + 3, 4]),
            "query_offset": jnp.array([2**32 + 3, 1]),
            "segment_ids": (wide_ids[:, :5], wide_ids),
        }
        run = calls.quick_jit(lambda arrays: attention(*qkv, is_causal=True, **arrays))
        found, expected = run(wide), run(narrow)
    np.testing.assert_array_equal(found, expected)


SIDES = [None, 0, 2, 2**29 - 4, 2**29 + 7, 2**30, 2**31 - 1, 2**31 + 6, 2**32 + 1, 2**40]


@pytest.mark.parametrize("left", SIDES)
def test_wide_windows_show_the_same_keys_at_any_offset(left: int | None) -> None:
    """As `reference.py` and all that run an offset see it, which is clamped to 2^29."""
    queries, keys = np.arange(5)[:, None, None], np.arange(7)[None, :, None]
    ends = [2**31 - 1, 2**29, 0, -(2**29), -(2**31)]
    for right in SIDES:
        near = [*ends, *(side for side in (left, -(right or 0)) if side and abs(side) < 2**31)]
        offsets = np.array([x + step for x in near for step in range(-9, 10) if -(2**31) <= x + step < 2**31])
        found, (low, high) = fold_wide_window(jnp.array(offsets, jnp.int32), (left, right), 5, 7)
        position = queries + np.clip(np.asarray(found).astype(np.int64), -(2**29), 2**29)
        same = _sees(position, keys, low, high) == _sees(queries + offsets, keys, left, right)
        assert same.all(), (right, offsets[~same.all((0, 1))])


def _sees(position: Any, keys: Any, left: int | None, right: int | None) -> Any:
    above = position - (2**60 if left is None else left) <= keys
    return above & (keys <= position + (2**60 if right is None else right))


WIDE = [
    ((2**30, 0), False, (2**30, 2**30 + 2)),
    ((2**29 + 5, None), False, (2**30, 2**29 + 8)),
    ((2**31 + 3, None), True, (2**31 - 1, -3)),
    ((2**40, 2**29 - 1), False, (-(2**29), -(2**29) + 4)),
    ((3, 2), False, (-(2**31), 2**31 - 1)),
    ((None, None), True, (-(2**31), 2**31 - 1)),
]


def test_wide_windows_and_far_offsets_mean_what_they_say() -> None:
    """In `attention` and, two sequences packed, in `attention_varlen`."""
    qkv = _qkv()
    queries, keys = np.arange(5)[:, None], np.arange(7)[None]
    masks = []
    for (left, right), is_causal, offsets in WIDE:
        one = [_sees(queries + x, keys, left, 0 if is_causal else right) for x in offsets]
        masks.append(jnp.array(np.stack(one))[:, None])

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        found, packed, expected = [], [], []
        tokens = [x.reshape(-1, *x.shape[2:]) for x in (query, key, value)]
        starts = jnp.array([0, 5, 10]), jnp.array([0, 7, 14])
        for (window, is_causal, offsets), mask in zip(WIDE, masks, strict=True):
            options = {"local_window_size": window, "is_causal": is_causal, "query_offset": jnp.array(offsets)}
            found.append(attention(query, key, value, **options))
            packed.append(attention_varlen(*tokens, *starts, **options).reshape(found[-1].shape))
            expected.append(attention(query, key, value, mask=mask))
        return found, packed, expected

    found, packed, expected = calls.quick_jit(run)(*qkv)
    calls.assert_same(found, expected)
    calls.assert_same(packed, expected)


@pytest.mark.parametrize("first", [0, 1], ids=["past-the-last-boundary", "before-the-first-boundary"])
@pytest.mark.parametrize("function", [vjp.attend, attention_reference, compare.same_dtype_attention])
def test_padding_rows_of_packed_input_see_no_sink(function: Any, first: int) -> None:
    query, key, value = (x[0] for x in _qkv())
    query, sinks, ends = query[:3], jnp.linspace(-1.0, 2.0, 6), jnp.array([0, 7])
    spec, operands = canonical_packed.canonicalize(
        query, key, value, jnp.array([first, first + 2]), ends, sinks=sinks, query_offset=0
    )
    attend = functools.partial(function, return_residual=True) if function is vjp.attend else function
    padding = (jnp.arange(3) < first) | (jnp.arange(3) >= first + 2)
    cotangents = [
        jnp.where(padding[None, :, None, None], jnp.nan, 1.0),
        jnp.where(padding[None, :, None], jnp.nan, 1.0),
    ]
    shapes = (1, 3, 6, 4), (1, 3, 6)
    cotangents = [jnp.broadcast_to(x, shape) for x, shape in zip(cotangents, shapes, strict=True)]
    found = compare.evaluate(attend, spec, operands, *cotangents)
    assert not np.any(found.out[0, padding])
    assert np.all(np.isneginf(found.lse[0, padding]))

    def rows(query: jax.Array, sinks: jax.Array) -> Any:
        return attention(query[first : first + 2], key, value, sinks=sinks, return_residual=True)

    expected, pullback = jax.vjp(rows, query, sinks)
    dquery, dsinks = pullback((jnp.ones((2, 6, 4)), jnp.ones((2, 6))))
    inside = jax.tree.map(lambda x: x[0, ~padding], (found.out, found.lse))
    calls.assert_same((*inside, found.dquery[0], found.dsinks[0]), (*expected, dquery, dsinks))


def test_an_offset_at_the_end_of_int32_does_not_wrap() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 8))
    offset = jnp.array([2**31 - 1, -(2**31) + 1], jnp.int32)
    everything, nothing = attention(x, x, x, is_causal=True, query_offset=offset)
    np.testing.assert_allclose(everything, attention(x, x, x)[0], atol=1e-6)
    np.testing.assert_array_equal(nothing, 0.0)
