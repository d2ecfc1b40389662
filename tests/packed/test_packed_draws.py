# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random packed calls on the XLA path, through the public function; `tests/kernels/test_gpu.py` has more on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import calls
import jax
import pytest
from testing import compare, draws
from testing.poison import poison

from jax_fastattn.cases.case import Case
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec
from jax_fastattn.xla import blocks, chunks

pytestmark = pytest.mark.numbers

MOST_ROWS, ROWS_AT_ONCE = 500, 250


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        found = draws.packed_draws(
            metafunc.config.getoption("--seed"),
            60,
            6,
            dtypes=["float32"],
            head_dims=[(8, 8), (16, 4)],
            rows=[MOST_ROWS, ROWS_AT_ONCE],
        )
        metafunc.parametrize("case", found, ids=str)


@pytest.fixture
def _chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long calls are computed in chunks of 128 queries and keys, as longer ones would be."""
    if case.query_length > ROWS_AT_ONCE:
        cut, tuning = blocks.Blocks.of, dataclasses.replace(chunks.CPU, whole=0, block=0, chunk=128)
        monkeypatch.setattr(blocks.Blocks, "of", lambda spec, operands, _: cut(spec, operands, tuning))


@functools.cache
def _reference(spec: AttentionSpec) -> Any:
    return jax.jit(functools.partial(compare.evaluate, attention_reference, spec))


@pytest.mark.usefixtures("_chunks")
def test_random_packed_calls(case: Case) -> None:
    spec = case.spec()
    operands, cotangents = case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    poisoned = poison(spec, operands, *cotangents)
    first, second = (draws.evaluate(case, spec, *poisoned) for _ in range(2))
    compare.assert_same_bits(first, second)
    calls.assert_same(first, _reference(spec)(operands, *cotangents))


def test_wild_boundaries_are_moved_into_the_rows(pytestconfig: pytest.Config) -> None:
    """Those that decrease, are negative or huge; see "Which key a query sees" in docs/semantics.md."""
    seed = pytestconfig.getoption("--seed")
    for case in draws.wild_draws(seed, 20, 1, dtypes=["float32"], head_dims=[(8, 8)], rows=[200]):
        spec = case.spec()
        arrays = case.operands(jax.random.key(0)), *case.cotangents(jax.random.key(1))
        arrays = poison(spec, *arrays)
        compare.assert_same_bits(*(draws.evaluate(x, spec, *arrays) for x in (case, draws.moved(case))))
