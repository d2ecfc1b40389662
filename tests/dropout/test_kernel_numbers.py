# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of dropout that kernels read, against the definition."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import dropout
from jax_fastattn.kernels.arguments.dropout import DropoutNumbers
from jax_fastattn.ops.cuda.dropout import dropout_numbers
from jax_fastattn.ops.cuda.gradient_units import gradient_units
from jax_fastattn.spec import Operands

WORDS = jnp.array([3, 4], jnp.uint32)


def make_operands(rate: float, dtype: str = "bfloat16") -> Operands:
    shape = (2, 5, 3, 8)
    q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal(shape), dtype) for i in range(3))
    return Operands(q, k, v, dropout=dropout.numbers(WORDS, rate, 2, 3))


def numbers_of(operands: Operands) -> DropoutNumbers:
    return DropoutNumbers(*np.moveaxis(np.asarray(dropout_numbers(operands)), -1, 0))


@pytest.mark.parametrize("rate", [0.0, 2.0**-15, 0.1, 0.5, 1.0])
def test_each_value_of_the_bits_counts(rate: float) -> None:
    """Bits of both halves, plus what they are compared with, have a sign if the definition keeps the weight."""
    compared = numbers_of(make_operands(rate)).compared.astype(np.uint32)
    bits = np.arange(dropout.STEPS, dtype=np.uint32)
    words = (bits * 0x10001)[:, None] + compared.reshape(-1)[None]
    kept = bits >= round(rate * dropout.STEPS)
    for half in (15, 31):
        np.testing.assert_array_equal((words >> half & 1).astype(bool), np.broadcast_to(kept[:, None], words.shape))


@pytest.mark.parametrize(("rate", "factor"), [(0.5, 2.0), (0.75, 4.0), (1.0, 1.0)])
def test_factors(rate: float, factor: float) -> None:
    """If nothing is kept, the factor on nothing is 1: it is divided by, and the gradient of log-sum-exps stays."""
    np.testing.assert_array_equal(numbers_of(make_operands(rate)).factor.view(np.float32), factor)


def test_a_mask_that_all_share_has_numbers_for_each_head() -> None:
    operands = make_operands(0.1)._replace(dropout=dropout.numbers(WORDS, 0.1, 1, 1))
    found = np.asarray(dropout_numbers(operands))
    assert found.shape == (2, 3, 4)
    assert (found == found[:1, :1]).all()


def test_packed_entries_count_from_their_own_rows() -> None:
    """Entries lie one after the other: the first rows of sequences that kernels add have those of entries before."""
    operands = make_operands(0.1)
    packed = operands._replace(sequences=jnp.zeros((2, 3, 4), jnp.int32))
    found, plain = numbers_of(packed), numbers_of(operands)
    np.testing.assert_array_equal(plain.query - found.query, np.array([[0] * 3, [5] * 3]))
    np.testing.assert_array_equal(plain.key - found.key, np.array([[0] * 3, [5] * 3]))


def test_units_of_float16_have_the_factor() -> None:
    operands = make_operands(0.875, "float16")
    shape = operands.query.shape
    out, dout = jnp.ones(shape, "float16"), jnp.full(shape, 30.0, "float16")
    lse = jnp.zeros(shape[:3], jnp.float32)
    dropped = gradient_units(operands, out, lse, dout, None)
    plain = gradient_units(operands._replace(dropout=None), out, lse, dout, None)
    # Both factors together are as much smaller as the gradients may be larger.
    np.testing.assert_array_equal(
        np.log2(plain[..., 0]) + plain[..., 2], np.log2(dropped[..., 0]) + dropped[..., 2] + 3
    )


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.875, 0.999])
def test_units_of_float16_leave_room_for_the_factor(rate: float) -> None:
    """P times its unit times the factor is at most 2^15: Hopper rounds that to float16."""
    operands = make_operands(rate, "float16")
    shape = operands.query.shape
    out, dout = jnp.ones(shape, "float16"), jnp.full(shape, 2.0**-12, "float16")
    units = gradient_units(operands, out, jnp.zeros(shape[:3], jnp.float32), dout, None)
    factor = numbers_of(operands).factor.view(np.float32).max()
    assert (units[..., 2] + np.log2(factor) <= 15).all()
    assert (units[..., 2] + np.log2(factor) > 12).all()
