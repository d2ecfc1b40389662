# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The random calls of `testing/combinations.py`, with dropout next to their two or three features."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import combinations, compare
from testing.draw_sizes import SMALL
from testing.poison import poison

from jax_fastattn import dropout
from jax_fastattn.cases.case import Case

DRAWS, KINDS = 24, 12


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    drawn = combinations.combined_draws(metafunc.config.getoption("--seed") + 1, DRAWS, KINDS, SMALL)
    kinds = [drawn[i::KINDS] for i in range(KINDS)]
    metafunc.parametrize("cases", kinds, ids=[str(dataclasses.replace(kind[0], draw=None)) for kind in kinds])


@pytest.mark.numbers
def test_random_calls_with_dropout(cases: list[Case]) -> None:
    """One draw of a kind has masks for each batch entry and head, the next one a mask for all."""
    for case, rate in zip(cases, (0.3, 0.6), strict=True):
        spec, operands, *cotangents = combinations.inputs(case)
        heads = (operands.query.shape[0], case.num_heads) if rate == 0.3 else (1, 1)
        words = jnp.array([case.draw or 0, 5], jnp.uint32)
        operands = operands._replace(dropout=dropout.numbers(words, rate, *heads))
        spec = dataclasses.replace(spec, present=operands.present())
        poisoned = poison(spec, operands, *cotangents, turn=case.draw or 0)
        in_chunks = case.query_length > combinations.ROWS_AT_ONCE
        with combinations.in_chunks() if in_chunks else contextlib.nullcontext():
            found = [jax.tree.map(np.asarray, combinations.evaluate(case, spec, *poisoned)) for _ in range(2)]
        try:
            compare.assert_within_budget(found[0], *combinations.expected(case, spec, operands, *cotangents))
            compare.assert_same_bits(*found)
        except AssertionError as error:
            error.add_note(str(case))
            raise
