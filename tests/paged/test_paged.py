# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`paged_attention`: its contract, against the reference and a loop, and its arguments; see `test_paged_ops.py`."""

from __future__ import annotations

import inspect
import re
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_explain

from jax_fastattn import attention, explain, paged_attention
from jax_fastattn.canonical.paged import canonicalize
from jax_fastattn.layouts import paged
from jax_fastattn.reference import paged_reference

NAMES = ("query", "key_pages", "value_pages", "page_table", "lengths")
LENGTHS = (0, 1, 40, 32, 48)  # of tables with 3 pages of 16: none, one, a part of a page, whole pages, all


def draw(page: int = 16, queries: int = 2, dtype: Any = jnp.float32, **other: Any) -> dict[str, Any]:
    """Arguments of a call. Each page belongs to one batch entry, in a random order; some are free."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "query": jax.random.normal(keys[0], (len(LENGTHS), queries, 6, 8)).astype(dtype),
        "key_pages": jax.random.normal(keys[1], (19, page, 3, 8)).astype(dtype),
        "value_pages": jax.random.normal(keys[2], (19, page, 3, 4)).astype(dtype),
        "page_table": jax.random.permutation(keys[3], 19)[:15].reshape(5, 3).astype(jnp.int32),
        "lengths": jnp.array(LENGTHS, jnp.int32),
    } | other


def expected(arguments: dict[str, Any], **options: Any) -> Any:
    """The reference's output and log-sum-exp."""
    return paged_reference(*canonicalize(**arguments, **options))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 0)},
    "left of a window": {"local_window_size": (9, None), "is_causal": True},
    "wide window": {"local_window_size": (1 << 40, 3)},
    "offset": {"is_causal": True, "query_offset": 5},
    "offsets": {"local_window_size": 4, "query_offset": np.array([0, -1, 30, 70, 11])},
    "cap, sinks, scale": {"logits_soft_cap": 2.0, "sinks": jnp.arange(6.0) - 2, "scale": 0.7, "is_causal": True},
    "an array as scale": {"scale": jnp.float32(-0.3), "sinks": jnp.ones(6)},
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", OPTIONS)
def test_is_the_reference(name: str) -> None:
    found = paged_attention(**draw(), **OPTIONS[name], return_residual=True)
    calls.assert_same(found, expected(draw(), **OPTIONS[name]))
    calls.assert_same(paged_attention(**draw(), **OPTIONS[name]), found[0])


@pytest.mark.numbers
@pytest.mark.parametrize(("page", "queries"), [(16, 1), (48, 5), (64, 1), (256, 2)])
def test_pages_of_other_sizes(page: int, queries: int) -> None:
    arguments = draw(page, queries, lengths=jnp.array([0, 3 * page, 2 * page + 1, page, 1]))
    found = paged_attention(**arguments, is_causal=True, return_residual=True)
    calls.assert_same(found, expected(arguments, is_causal=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype: str) -> None:
    found = paged_attention(**draw(dtype=dtype), is_causal=True)
    wide = {name: x.astype(jnp.float32) if x.dtype == dtype else x for name, x in draw(dtype=dtype).items()}
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(jnp.float32), expected(wide, is_causal=True)[0], atol=0.02)


def test_is_attention_of_the_keys_that_the_table_names_one_entry_at_a_time() -> None:
    """The last query stands at the last key; queries before the first key see nothing."""
    arguments = draw()
    query, keys, values, table, _ = (np.asarray(arguments[name]) for name in NAMES)
    found, lse = paged_attention(**arguments, is_causal=True, return_residual=True)
    for b, length in enumerate(LENGTHS):
        rows = [(table[b, j // 16], j % 16) for j in range(length)]
        dense = [np.stack([x[row] for row in rows]) if rows else np.zeros((0, *x.shape[2:])) for x in (keys, values)]
        dense = [x.astype(np.float32) for x in dense]
        one = attention(query[b], *dense, is_causal=True, query_offset=length - 2, return_residual=True)
        calls.assert_same((found[b], lse[b]), one)


def test_lengths_are_clamped() -> None:
    """The default offset is made from clamped lengths."""
    arguments = draw(lengths=jnp.array([-7, 1, 1000, 2**31 - 1, -(2**31)]))
    inside = draw(lengths=jnp.array([0, 1, 48, 48, 0]))
    run = lambda x: paged_attention(**x, is_causal=True, local_window_size=(20, None), return_residual=True)
    calls.assert_same(run(arguments), run(inside))
    wide = arguments | {"lengths": np.array([-7, 1, 1000, 2**31 - 1, -(2**31)], np.int64)}
    calls.assert_same(run(wide), run(inside))


def test_ids_are_clamped() -> None:
    table = draw()["page_table"].at[2].set(jnp.array([-1, 19, 2**31 - 1]))
    inside = table.at[2].set(jnp.array([0, 18, 18]))
    calls.assert_same(*(paged_attention(**draw(page_table=x)) for x in (table, inside)))
    _, operands = canonicalize(**draw(page_table=table))
    assert (paged.page_ids(operands)[2] == inside[2]).all()  # whatever XLA makes of an id outside


def test_entries_past_the_end_are_not_read() -> None:
    """No page that they name is gathered."""
    _, operands = canonicalize(**draw())
    found = paged.page_ids(operands)
    for b, length in enumerate(LENGTHS):
        used = -(-length // 16)
        assert (found[b, :used] == operands.page_table[b, :used]).all() and not found[b, used:].any()


@pytest.mark.parametrize("entry", [-(2**31), -1, 0, 18, 19, 2**31 - 1])
def test_entries_past_the_end_may_be_anything(entry: int) -> None:
    """Also if they name a page of NaN."""
    arguments, table = draw(), np.array(draw()["page_table"])
    for b, length in enumerate(LENGTHS):
        table[b, -(-length // 16) :] = entry
    free = sorted(set(range(19)) - {int(table[b, i]) for b, n in enumerate(LENGTHS) for i in range(-(-n // 16))})
    broken = {name: arguments[name].at[np.array(free)].set(jnp.nan) for name in NAMES[1:3]}
    found = paged_attention(**arguments | broken | {"page_table": jnp.asarray(table)}, return_residual=True)
    calls.assert_same(found, paged_attention(**arguments, return_residual=True))


@pytest.mark.parametrize("broken", ["key_pages", "value_pages"])
def test_nan_in_free_pages_and_in_rows_past_a_length_reaches_nothing(broken: str) -> None:
    arguments = draw()
    is_used = np.zeros((19, 16), bool)
    for b, length in enumerate(LENGTHS):
        for j in range(length):
            is_used[arguments["page_table"][b, j // 16], j % 16] = True
    poisoned = jnp.where(is_used[:, :, None, None], arguments[broken], jnp.nan)
    for options in ({}, {"is_causal": True}, {"sinks": jnp.ones(6)}):
        found = paged_attention(**arguments | {broken: poisoned}, **options, return_residual=True)
        calls.assert_same(found, paged_attention(**arguments, **options, return_residual=True))


def test_batch_entries_may_share_pages() -> None:
    """As those of a common prompt, and one entry may have a page twice."""
    table = jnp.array([[4, 7, 1], [4, 7, 2], [4, 4, 4], [7, 4, 3], [4, 7, 1]])
    arguments = draw(page_table=table, lengths=jnp.array([40, 48, 33, 20, 40]))
    calls.assert_same(paged_attention(**arguments, return_residual=True), expected(arguments))


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"M": 0}, {"N": 0, "K": 0}], ids=str)
def test_sizes_of_0(sizes: dict[str, int]) -> None:
    size = {"B": 2, "T": 3, "M": 2, "N": 4, "K": 2} | sizes
    query = jnp.ones((size["B"], size["T"], size["N"], 8))
    pages = jnp.ones((5, 16, size["K"], 8))
    table, lengths = jnp.zeros((size["B"], size["M"]), jnp.int32), jnp.full(size["B"], 20)
    out, lse = paged_attention(query, pages, pages, table, lengths, is_causal=True, return_residual=True)
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    if "M" in sizes:
        assert not out.any() and np.isneginf(lse).all()


FLOATS = "one of bfloat16, float16, float32, float64"
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "pages of 8": ({"page": 8}, ValueError, "`key_pages` has pages of R = 8 rows, expected a multiple of 16, such as"),
    "pages of 24": ({"page": 24}, ValueError, "`key_pages` has pages of R = 24 rows, expected a multiple of 16"),
    "pages of 0": ({"page": 0}, ValueError, "`key_pages` has pages of R = 0 rows, expected a multiple of 16"),
    "no pages": (
        {"key_pages": jnp.ones((0, 16, 3, 8)), "value_pages": jnp.ones((0, 16, 3, 4))},
        ValueError,
        "`key_pages` has P = 0 pages, expected at least one; pass lengths of 0",
    ),
    "query without batch": ({"query": jnp.ones((2, 6, 8))}, ValueError, "`query` has shape (2, 6, 8), expected 4 dim"),
    "keys without pages": (
        {"key_pages": jnp.ones((16, 3, 8))},
        ValueError,
        "`key_pages` has shape (16, 3, 8), expected 4 dimensions (PRKH)",
    ),
    "head dims": ({"key_pages": jnp.ones((19, 16, 3, 9))}, ValueError, "with H = 9, expected H = 8 as in `query`"),
    "heads": ({"query": jnp.ones((5, 2, 5, 8))}, ValueError, "`key_pages` has 3 heads, which does not divide the 5"),
    "pages of values": (
        {"value_pages": jnp.ones((18, 16, 3, 4))},
        ValueError,
        "`value_pages` has shape (18, 16, 3, 4) (PRKD) with P = 18, expected P = 19 as in `key_pages`",
    ),
    "rows of values": ({"value_pages": jnp.ones((19, 32, 3, 4))}, ValueError, "with R = 32, expected R = 16 as in"),
    "rows of the table": (
        {"page_table": jnp.zeros((4, 3), int)},
        ValueError,
        "`page_table` has shape (4, 3) (BM) with B = 4, expected B = 5 as in `query`",
    ),
    "one table": ({"page_table": jnp.zeros(3, int)}, ValueError, "`page_table` has shape (3,), expected 2 dimensions"),
    "lengths": ({"lengths": jnp.zeros(3, int)}, ValueError, "`lengths` has shape (3,) (B) with B = 3, expected B = 5"),
    "one length": ({"lengths": 7}, ValueError, "`lengths` has shape (), expected 1 dimension (B)"),
    "a long length": ({"lengths": [2**40] * 5}, ValueError, f"`lengths` is {[2**40] * 5}, expected values that int32"),
    "offsets": ({"query_offset": jnp.zeros(3, int)}, ValueError, "`query_offset` has shape (3,), expected an int"),
    "sinks": ({"sinks": jnp.ones(3)}, ValueError, "`sinks` has shape (3,) (N) with N = 3, expected N = 6 as in"),
    "dtype of the query": (
        {"query": jnp.ones((5, 2, 6, 8), int)},
        TypeError,
        f"`query` has dtype int32, expected {FLOATS}",
    ),
    "dtype of keys": (
        {"key_pages": jnp.ones((19, 16, 3, 8), jnp.bfloat16)},
        TypeError,
        "`key_pages` has dtype bfloat16, expected float32 as in `query`; cast one of them",
    ),
    "dtype of the table": (
        {"page_table": jnp.zeros((5, 3))},
        TypeError,
        "`page_table` has dtype float32, expected int",
    ),
    "dtype of lengths": ({"lengths": jnp.zeros(5)}, TypeError, "`lengths` has dtype float32, expected integer"),
    "dtype of offsets": ({"query_offset": 1.0}, TypeError, "`query_offset` has dtype float32, expected integer"),
    "flag": ({"is_causal": 1.0}, TypeError, "`is_causal` is float, expected a bool"),
    "window": ({"local_window_size": (1, -2)}, ValueError, "`local_window_size` is (1, -2), expected sides >= 0"),
    "residual": ({"return_residual": None}, TypeError, "`return_residual` is NoneType, expected a bool"),
    "implementation": ({"implementation": "cudnn"}, ValueError, "`implementation` is 'cudnn', expected None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise(name: str) -> None:
    given, error, message = WRONG[name]
    with pytest.raises(error, match=re.escape(message)):
        paged_attention(**draw(**given))


@pytest.mark.parametrize("name", inspect.signature(paged_attention).parameters)
def test_explain_says_what_the_call_says_and_names_the_argument(name: str) -> None:
    renamed = {"key_pages": "key", "value_pages": "value"}
    bad = [x for x in test_explain.BAD if x is not None or name != "page_table"]  # None is a call of `attention` there
    found = [test_explain.said_by(paged_attention, draw() | {name: x}) for x in bad]
    for x, text in zip(bad, found, strict=True):
        arguments = {renamed.get(key, key): value for key, value in (draw() | {name: x}).items()}
        assert test_explain.said_by(explain, arguments) == text
        assert f"`{name}`" in text or not text
    assert sum(text != "" for text in found) >= len(bad) // 2


def test_explain_says_that_pages_are_gathered() -> None:
    arguments = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in draw(dtype=jnp.bfloat16).items()}
    query, *pages = (arguments.pop(name) for name in NAMES[:3])
    found = explain(query, *pages, **arguments)
    assert found.reasons == ("the platform is cpu",)
    assert str(found).endswith(
        "; the pages are first gathered into dense keys and values, which takes a copy; there is no gradient"
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'; `attention` has it"):
        explain(query, *pages, mask=jnp.ones(1, bool), **arguments)
    with pytest.raises(TypeError, match=r"'lengths'; .*, and so has `explain` with `page_table`"):
        explain(query, *pages, lengths=arguments["lengths"])
    with pytest.raises(TypeError, match="`lengths` is NoneType, expected an array"):
        explain(query, *pages, page_table=arguments["page_table"])
