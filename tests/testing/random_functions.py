# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random functions of scores in random calls: the same ones in every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jax_fastattn.canonical.packed import packed_rows
from jax_fastattn.canonical.programs import programs
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.mask_functions import mask_function
from jax_fastattn.kernels.support import gradient_reasons, summed_plane
from jax_fastattn.programs.analysis import is_wild
from jax_fastattn.spec import DIFFERENTIABLE, PLANES, AttentionSpec, Operands, Problem
from testing.combinations import keys_of, number
from testing.compare import Results
from testing.score_functions import random_score


def has_random_score(case: Case) -> bool:
    """Returns whether `with_random_score` adds a `score_mod`: to half of the calls."""
    return number(case) // 2 % 2 == 1


def with_random_score(case: Case, spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns spec and operands of a case with a random `score_mod`, beside its `mask_mod`; see `has_random_score`."""
    if not has_random_score(case):
        return spec, operands
    sizes: Any = {name: case.shape[name] for name in "BNTS"}
    entries = case.shape | ({} if case.packed is None else {"B": len(case.packed[0])})
    score, mask = random_score(np.random.default_rng(number(case)), entries), None
    rows = None if operands.sequences is None else packed_rows(operands.sequences[0], (sizes["T"], sizes["S"]))
    if case.mask_mod is not None:
        captured = case.captured(keys_of(case)[0])
        mask = mask_function(case.mask_mod, case.query_length, captured, is_packed=rows is not None)
    with jax.numpy_dtype_promotion("standard"):  # as in the functions of users
        found, arrays = programs(sizes, case.dtype, score, mask, rows)
    code = found["score_mod"]
    is_refused = is_wild(code) and (rows is not None or case.query_length % 128 > 0)
    if is_refused:
        return spec, operands
    operands = operands._replace(**arrays)
    return dataclasses.replace(spec, **found, present=operands.present()), operands


def with_a_plane(problem: Problem, names: Collection[str], turn: int) -> tuple[str, ...]:
    """Returns names of operands, and one of a plane of a `score_mod`, if kernels compute these gradients together.

    Args:
        problem: a call.
        names: of operands whose gradients are wanted.
        turn: which plane comes first, of those that have a gradient.
    """
    planes = [x for x in problem.spec.present if x in PLANES and x in DIFFERENTIABLE]
    # A `mask_mod` has no gradients for what it reads.
    planes = [x for x in planes if summed_plane(problem, (x,)) is not None]
    found = [x for x in planes if not gradient_reasons(problem, (*names, x))]
    return (*names, found[turn % len(found)]) if found else tuple(names)


def assert_planes_are_close(found: Results, exact: Results, baseline: Results) -> tuple[Results, Results, Results]:
    """Compares gradients of planes, and returns the results without them.

    They are sums over all pairs, of which the baseline's error may be small by chance: the largest error may be a
    hundredth of the largest gradient, and twice the baseline's.
    """
    fields = {f"d{x}": None for x in PLANES if x in DIFFERENTIABLE}
    for name in fields:
        got, wanted, other = (getattr(x, name) for x in (found, exact, baseline))
        if got is None:
            continue
        got, wanted, other = (np.asarray(x, np.float64) for x in (got, wanted, other))
        limit = 0.01 * np.abs(wanted).max() + 2 * np.abs(other - wanted).max() + 2**-15
        np.testing.assert_allclose(got, wanted, rtol=0, atol=limit, err_msg=name)
    found, exact, baseline = (x._replace(**fields) for x in (found, exact, baseline))
    return found, exact, baseline
