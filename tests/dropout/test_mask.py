# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What dropout keeps: the definition and its words. `test_quality.py` has their statistics."""

from __future__ import annotations

import itertools
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import dropout, dropout_mask

SHAPE = 2, 3, 37, 53


def test_words_do_not_change() -> None:
    """A mask that a paper or a checkpoint depends on stays what it was."""
    found = np.asarray(dropout_mask(jax.random.key(7), 0.5, (1, 2, 8, 32)))[0].reshape(16, 32)
    assert [int("".join("01"[int(x)] for x in row), 2) for row in found] == GOLDEN


# fmt: off
GOLDEN = [
    2801246057, 2926084816, 2832619533, 4183712811, 1661267554, 1075449896,
    2335653070, 2075145644, 3816088363, 1574207484, 2069697175, 3737958118,
    1078618452, 996237200, 2518032795, 3454072858,
]
# fmt: on


@pytest.mark.parametrize("rate", [0.0, 2.0**-15, 0.1, 0.5, 1.0])
def test_masks_are_as_defined(rate: float) -> None:
    key = jax.random.key(123)
    expected = drawn.mask(np.asarray(jax.random.key_data(key)), rate, SHAPE)
    found = np.asarray(dropout_mask(key, rate, SHAPE))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.asarray(dropout_mask(key, jnp.float32(rate), SHAPE)), expected)
    assert found.all() if rate == 0 else not found.any() if rate == 1 else 0 < found.sum() <= found.size


def test_each_value_of_the_bits_counts() -> None:
    """About 8 pairs have each of the 2^15 values of the bits: a rate that is off by one of them shows."""
    shape = 1, 1, 512, 512
    for rate in (0.0, 0.1, 0.9999):
        found = np.asarray(dropout_mask(jax.random.key(0), rate, shape))
        np.testing.assert_array_equal(found, drawn.mask((0, 0), rate, shape))


def test_masks_of_keys_of_each_kind() -> None:
    seed = 5
    typed, legacy = jax.random.key(seed), jax.random.PRNGKey(seed)
    assert legacy.dtype == np.uint32
    keys: list[Any] = [typed, legacy, np.asarray(legacy)]
    found = [np.asarray(dropout_mask(key, 0.3, SHAPE)) for key in keys]
    for x in found:
        np.testing.assert_array_equal(x, drawn.mask(np.asarray(legacy), 0.3, SHAPE))
    for name in ("rbg", "unsafe_rbg"):
        key = jax.random.key(seed, impl=name)
        words = np.asarray(jax.random.key_data(key))
        assert words.shape == (4,)
        np.testing.assert_array_equal(np.asarray(dropout_mask(key, 0.3, SHAPE)), drawn.mask(words, 0.3, SHAPE))
        moved = np.asarray(
            dropout_mask(jax.random.wrap_key_data(words + np.uint32([0, 0, 1, 0]), impl=name), 0.3, SHAPE)
        )
        assert (moved != drawn.mask(words, 0.3, SHAPE)).mean() > 0.3


def test_a_mask_depends_on_places_alone() -> None:
    """A smaller mask is a corner of a larger one, rates share their draws, and `broadcast` has the first head."""
    key = jax.random.key(1)
    whole = np.asarray(dropout_mask(key, 0.25, SHAPE))
    np.testing.assert_array_equal(np.asarray(dropout_mask(key, 0.25, (1, 2, 20, 31))), whole[:1, :2, :20, :31])
    more = np.asarray(dropout_mask(key, 0.6, SHAPE))
    assert not (more & ~whole).any() and (whole & ~more).any()
    np.testing.assert_array_equal(np.asarray(dropout_mask(key, 0.25, SHAPE, broadcast=True)), whole[:1, :1])


def test_parts_of_a_call_have_the_masks_of_the_whole() -> None:
    """As blocks of a ring have, from any first row on."""
    operand = dropout.numbers(jnp.array([3, 4], jnp.uint32), 0.4, 1, 2)
    rows = [jnp.arange(size, dtype=jnp.int32) for size in (70, 90)]
    whole = np.asarray(dropout.kept(operand, *rows))
    for first in itertools.product((0, 5, 16, 24), (0, 9, 32)):
        part = dropout.kept(dropout.moved(operand, *first), rows[0][:40], rows[1][:50])
        np.testing.assert_array_equal(np.asarray(part), whole[..., first[0] : first[0] + 40, first[1] : first[1] + 50])


def test_masks_of_packed_rows() -> None:
    """Rows count from where their sequence begins, which is part of the counter."""
    key, starts_q, starts_k = jax.random.key(9), [2, 20, 20, 41], [0, 11, 30, 50]
    found = np.asarray(
        dropout_mask(key, 0.3, (1, 2, 45, 53), cu_seqlens_q=jnp.array(starts_q), cu_seqlens_k=jnp.array(starts_k))
    )
    words, expected = np.asarray(jax.random.key_data(key)), np.zeros((1, 2, 45, 53), bool)
    for (q, q_end), (k, k_end) in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True):
        for n in range(2):
            bits = drawn.bits(drawn.numbers(words, 0, n), q_end - q, k_end - k, (q, k))
            expected[0, n, q:q_end, k:k_end] = bits >= drawn.threshold(0.3)
    np.testing.assert_array_equal(found, expected)


def test_wrong_masks_raise() -> None:
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"`shape` is \(1, 2, 3\), expected four sizes"):
        dropout_mask(key, 0.1, (1, 2, 3))  # pyright: ignore
    with pytest.raises(ValueError, match=r"`rate` is 1.5, expected a number from 0 to 1"):
        dropout_mask(key, 1.5, SHAPE)
    with pytest.raises(TypeError, match=r"`key` has dtype int32, expected a key of `jax.random`"):
        dropout_mask(3, 0.1, SHAPE)  # pyright: ignore
    with pytest.raises(ValueError, match=r"`key` has shape \(2,\), expected one key"):
        dropout_mask(jax.random.split(key), 0.1, SHAPE)
    with pytest.raises(ValueError, match="`cu_seqlens_k` is None, expected boundaries of queries and of keys"):
        dropout_mask(key, 0.1, (1, 1, 4, 4), cu_seqlens_q=jnp.array([0, 4]))
    with pytest.raises(ValueError, match="with B = 2, expected B = 1 for packed rows"):
        dropout_mask(key, 0.1, (2, 1, 4, 4), cu_seqlens_q=jnp.array([0, 4]), cu_seqlens_k=jnp.array([0, 4]))
