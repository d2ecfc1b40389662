# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random dropout, which calls take in addition to their other arguments."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_fastattn import dropout
from jax_fastattn.cases.case import Case
from jax_fastattn.spec import AttentionSpec, Operands
from testing.combinations import number

_RATES = (0.1, 0.3, 0.6)


def has_random_dropout(case: Case) -> bool:
    """Returns whether `with_random_dropout` adds dropout: to a third of the calls."""
    return number(case, "dropout of ") % 3 == 0


def with_few_queries(case: Case) -> Case:
    """Returns a case with at most 16 queries and dropout: a quarter of the cases with dropout in which rows are free.

    Kernels for few queries have no dropout, so other kernels take these calls.
    """
    has_rows = case.packed or case.documents or case.segments or case.spelled or case.bias_spelled
    if not has_random_dropout(case) or has_rows or number(case, "dropout of ") // 12 % 4:
        return case
    lengths = case.query_seq_lengths
    for count in range(1 + number(case, "dropout of ") // 48 % 8, 17):
        clipped = None if lengths is None else tuple(min(x, count) for x in lengths)
        few = dataclasses.replace(case, query_length=count, query_seq_lengths=clipped)
        if has_random_dropout(few):
            return few
    return case


def with_random_dropout(case: Case, spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns spec and operands of a case with dropout, the same in every run; see `has_random_dropout`.

    Masks are those of each batch entry and head, or one for all. Kernels refuse dropout of packed sequences with a mask
    function.
    """
    if not has_random_dropout(case) or (operands.is_packed and spec.mask_mod is not None):
        return spec, operands
    found = number(case, "dropout of ") // 3
    heads = (operands.query.shape[0], operands.query.shape[2]) if found % 2 else (1, 1)
    words = jnp.array([found % 1000, 7], jnp.uint32)
    operands = operands._replace(dropout=dropout.numbers(words, _RATES[found % len(_RATES)], *heads))
    return dataclasses.replace(spec, present=operands.present()), operands
