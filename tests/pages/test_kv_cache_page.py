# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/kv_cache.md run as they stand, and give what attention over the whole text gives."""

import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "kv_cache.md").read_text()
PLAIN, FLAX, PAGES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOLERANCE = 1e-5


def _run(code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns what a recipe defines, the names that it is given, and how many programs each function compiled to.

    Caches are cleared between tests now and then, so programs are counted here.
    """
    found = dict(names or {})
    with warnings.catch_warnings():
        # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates.
        warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
        import flax.nnx  # noqa: F401 (a recipe imports it again, without a warning)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code, found)
    compiled = {name: x._cache_size() for name, x in found.items() if hasattr(x, "_cache_size")}
    return found | {"programs": compiled}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return _run(PLAIN)


@pytest.fixture(scope="module")
def flax_nnx() -> dict[str, Any]:
    return _run(FLAX)


@pytest.fixture(scope="module")
def in_pages(plain: dict[str, Any]) -> dict[str, Any]:
    """What the plain recipe defines, and what the one with pages adds."""
    return _run(PAGES, plain)


def _logits(names: dict[str, Any], text: np.ndarray) -> jax.Array:
    """The logits [T, VOCABULARY] of a text [T], by attention of jax.nn over all of it."""
    params = names["params"]
    x = params["embedding"][text] + params["position"][: len(text)]
    for i in range(names["LAYERS"]):
        q, k, v = (jnp.einsum("tc,cnh->tnh", x, params[name][i]) for name in ("query", "key", "value"))
        x += jnp.einsum("tnh,nhc->tc", jax.nn.dot_product_attention(q, k, v, is_causal=True), params["out"][i])
    return x @ params["head"]


def _texts(names: dict[str, Any]) -> list[np.ndarray]:
    """Each prompt with the tokens that follow it."""
    new = np.stack(names["tokens"], axis=1)
    pairs = zip(names["prompts"], names["counts"], new, strict=True)
    return [np.concatenate([prompt[:count], tokens]) for prompt, count, tokens in pairs]


@pytest.mark.parametrize("code", [PLAIN, FLAX, PAGES], ids=["plain", "nnx", "pages"])
def test_recipes_have_forty_lines(code: str) -> None:
    assert 20 < len([line for line in code.splitlines() if line]) <= 40


def test_plain_recipe_gives_the_tokens_of_whole_texts(plain: dict[str, Any]) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for b, (text, count) in enumerate(zip(_texts(plain), plain["counts"], strict=True)):
            logits = _logits(plain, text[:-1])
            np.testing.assert_array_equal(logits[count - 1 :].argmax(axis=-1), text[count:])
            np.testing.assert_allclose(plain["logits"][b], logits[-1], atol=TOLERANCE, rtol=TOLERANCE)
    assert plain["cache"]["lengths"].tolist() == [16, 13]
    assert plain["programs"]["extend"] == 2  # the prompts, and every step of one token


def test_chunks_and_withdrawn_tokens_give_the_same(plain: dict[str, Any]) -> None:
    """A text in chunks over a cache of NaN; the second sequence gets one as a proposal, withdraws it, waits a step."""
    text, extend = _texts(plain)[0][:9], plain["extend"]
    cache = jax.tree.map(lambda x: x * jnp.nan if x.ndim > 1 else x, plain["make_cache"](2))
    first, second, last = text[:3], text[3:6], text[6:]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        cache, _ = extend(plain["params"], cache, jnp.stack([first, first]), jnp.array([3, 3]))
        cache, _ = extend(plain["params"], cache, jnp.stack([second, second[::-1]]), jnp.array([3, 3]))
        cache = cache | {"lengths": cache["lengths"] - jnp.array([0, 3])}
        cache, _ = extend(plain["params"], cache, jnp.stack([last, last]), jnp.array([2, 0]))
        cache, logits = extend(plain["params"], cache, jnp.stack([last[::-1], second]), jnp.array([1, 3]))
        for found, whole in zip(logits, (text, text[:6]), strict=True):
            np.testing.assert_allclose(found, _logits(plain, whole)[-1], atol=TOLERANCE, rtol=TOLERANCE)


def test_tokens_past_the_capacity_are_dropped(plain: dict[str, Any]) -> None:
    cache = plain["make_cache"](2) | {"lengths": jnp.full(2, plain["CAPACITY"])}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        cache, _ = plain["extend"](plain["params"], cache, jnp.array([[1], [2]]), jnp.array([1, 1]))
    assert not any(x.any() for x in cache["keys"] + cache["values"])


def test_lengths_alone_serve_one_query(plain: dict[str, Any]) -> None:
    cache, attention = plain["cache"], plain["attention"]
    q, lengths = jnp.ones((2, 1, plain["HEADS"], plain["HEAD_DIM"])), cache["lengths"] - 1
    arrays = (q, cache["keys"][0], cache["values"][0])
    expected = attention(*arrays, is_causal=True, query_offset=lengths, key_value_seq_lengths=lengths + 1)
    np.testing.assert_allclose(attention(*arrays, key_value_seq_lengths=lengths + 1), expected, atol=TOLERANCE)


def test_a_step_writes_into_the_cache_that_it_is_given(plain: dict[str, Any], flax_nnx: dict[str, Any]) -> None:
    one = jnp.array([1, 1])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for names, held, token in ((plain, "params", jnp.array([[1], [2]])), (flax_nnx, "rest", flax_nnx["x"][:, :1])):
            old = jax.tree.map(jnp.copy, names["cache"])
            before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(old)]
            new, _ = names["extend"](names[held], old, token, one)
            assert all(x.is_deleted() for x in jax.tree.leaves(old))
            assert sorted(x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)) == sorted(before)


def test_flax_recipe_gives_attention_over_the_whole_sequence(flax_nnx: dict[str, Any]) -> None:
    layer, x = flax_nnx["layer"], flax_nnx["x"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        attended = jax.nn.dot_product_attention(layer.query(x), layer.key(x), layer.value(x), is_causal=True)
        expected = layer.out(attended)
    np.testing.assert_allclose(np.concatenate(flax_nnx["outs"], axis=1), expected, atol=TOLERANCE)
    assert flax_nnx["programs"]["extend"] == 2


def test_pages_give_the_tokens_and_logits_of_the_plain_recipe(in_pages: dict[str, Any], plain: dict[str, Any]) -> None:
    np.testing.assert_array_equal(np.stack(in_pages["paged"]), np.stack(plain["tokens"]))
    np.testing.assert_allclose(in_pages["logits"], plain["logits"], atol=TOLERANCE, rtol=TOLERANCE)
    assert in_pages["cache"]["lengths"].tolist() == [16, 13]
    assert in_pages["programs"]["extend_pages"] == 2


def test_sequences_take_pages_as_they_grow_and_leave_others_alone(in_pages: dict[str, Any]) -> None:
    """The first sequence needs a second page for its 17th token. Padding past a page that a sequence has is dropped."""
    table, free, cache = in_pages["table"].copy(), list(in_pages["free"]), in_pages["cache"]
    taken, none = {*range(in_pages["PAGES"])} - {*free}, in_pages["PAGES"]
    assert len(taken) == 2 and (table == none).sum() == 2 and {*table[table != none].tolist()} == taken
    in_pages["reserve"](table, free, np.array([17, 13]))
    assert len(free) == 2 and table[0, 1] not in taken and table[1, 1] == none
    tokens = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        given = jax.tree.map(jnp.copy, cache)
        after, _ = in_pages["extend_pages"](in_pages["params"], given, table, tokens, jnp.array([1, 1]))
    written = np.argwhere(np.any(np.asarray(after["keys"][0] != cache["keys"][0]), axis=(2, 3)))
    rows = [(table[0, 1], i) for i in range(4)] + [(table[1, 0], i) for i in range(13, 16)]
    assert sorted(map(tuple, written.tolist())) == sorted((int(page), i) for page, i in rows)
