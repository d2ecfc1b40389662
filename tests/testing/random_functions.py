# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random functions of scores in random calls: the same ones in every run."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np

from jax_fastattn.canonical.packed import packed_rows
from jax_fastattn.canonical.programs import programs
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.mask_functions import mask_function
from jax_fastattn.programs.analysis import is_wild
from jax_fastattn.spec import AttentionSpec, Operands
from testing.combinations import keys_of
from testing.score_functions import random_score


def has_random_score(case: Case) -> bool:
    """Returns whether `with_random_score` adds a `score_mod`: to half of the calls."""
    return zlib.crc32(str(case).encode()) // 2 % 2 == 1


def with_random_score(case: Case, spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns spec and operands of a case with a random `score_mod`, beside its `mask_mod`; see `has_random_score`."""
    if not has_random_score(case):
        return spec, operands
    sizes: Any = {name: case.shape[name] for name in "BNTS"}
    entries = case.shape | ({} if case.packed is None else {"B": len(case.packed[0])})
    score, mask = random_score(np.random.default_rng(zlib.crc32(str(case).encode())), entries), None
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
