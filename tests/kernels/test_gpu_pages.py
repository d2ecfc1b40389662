# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` on a GPU, against the oracle of the dense call. Pages lie at random places, and calls share some.

Kernels read the pages of few queries in place; `128 rows` are gathered first. Free pages, and rows past a length, hold
NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from testing import combinations, compare
from testing.cases.few_queries import FEW_QUERIES
from testing.pages import can_be_paged, paged_arguments
from testing.poison import poison

from jax_fastattn import paged_attention
from jax_fastattn.cases.case import Case

pytestmark = pytest.mark.gpu

PAGES = (16, 64, 256)
PAGED = {name: case for name, case in FEW_QUERIES.items() if can_be_paged(case)}
CALLS = {
    **{f"{name}, pages of {PAGES[i % 3]}": (case, PAGES[i % 3]) for i, (name, case) in enumerate(PAGED.items())},
    **{f"lengths, pages of {page}": (PAGED["lengths"], page) for page in (*PAGES, 48)},
}


@pytest.mark.parametrize(("case", "page"), CALLS.values(), ids=CALLS.keys())
def test_pages(case: Case, page: int) -> None:
    spec, operands, *cotangents = combinations.inputs(case)
    # Every second entry has the keys of the last one, so that whole pages that both see are one page.
    shared = {name: getattr(operands, name).at[::2].set(getattr(operands, name)[-1]) for name in ("key", "value")}
    operands = operands._replace(**shared)
    arguments = paged_arguments(case, poison(spec, operands, *cotangents)[0], page)
    first, second = _results(arguments), _results(arguments)
    oracle, baseline = combinations.expected(case, spec, operands, *cotangents)
    compare.assert_within_budget(first, *(compare.Results(x.out, x.lse) for x in (oracle, baseline)))
    compare.assert_same_bits(first, second, set())


def _results(arguments: dict[str, Any]) -> compare.Results:
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "shape")}
    options = {name: x for name, x in arguments.items() if name not in arrays}

    @jax.jit
    def call(arrays: dict[str, Any]) -> Any:
        return paged_attention(**arrays, **options, return_residual=True)

    return compare.Results(*map(np.asarray, call(arrays)))
