# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents of calls on a GPU by both families of kernels, against the XLA path in float32 and in the call's dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from testing import combinations, tangents
from testing.borrow import portable_kernel
from testing.cases.gpu import GPU_CASES
from testing.cases.hidden_rows import HIDDEN_ROWS
from testing.cases.masked import MASKED
from testing.cases.packed import PACKED

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.support import tangent_reasons, unsupported_reasons
from jax_fastattn.ops import vjp
from jax_fastattn.ops.cuda import tangents as cuda
from jax_fastattn.spec import AttentionSpec, Operands

pytestmark = pytest.mark.gpu

_SINGLE = [dataclasses.replace(x, dtype="float32") for x in HIDDEN_ROWS.values()]
# Every twelfth of the others, which have few kernels.
DRAWN = (*HIDDEN_ROWS.values(), *_SINGLE, *MASKED, *PACKED, *GPU_CASES[::12])
CASES = [x for x in DRAWN if not (tangent_reasons(x.problem(), "sm_90a") or unsupported_reasons(x.problem(), "sm_90a"))]


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=str)
@pytest.mark.parametrize("family", ["own", "portable"])
def test_tangents(case: Case, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands and tangents have NaN and infinities in everything that is invisible; a second run has the same bits."""
    if family == "portable":
        monkeypatch.setattr(cuda, "kernel_spec", portable_kernel)
    spec, operands, *_ = combinations.inputs(case)
    if case.dtype == "float32" and (reasons := tangent_reasons(case.problem(), ffi.arch() or "")):
        pytest.skip(f"its tiles do not fit this GPU: {reasons}")
    moved = tangents.draw(operands)
    hidden = tangents.hidden(spec, operands, moved)
    call = dataclasses.replace(spec, implementation="cuda")
    first, second = (_by_kernels(call, *hidden) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
    tangents.assert_within_budget(first, spec, operands, moved, rough_cap=family == "own" and _has_rough_cap(case))


def _has_rough_cap(case: Case) -> bool:
    """Returns whether Hopper kernels take the approximate tanh of the GPU for a soft cap."""
    return case.logits_soft_cap is not None and case.sinks is None and case.dtype != "float32"


def _by_kernels(spec: AttentionSpec, operands: Operands, moved: tangents.Moved) -> Any:
    """Returns the tangents of a program that is compiled anew, since a test replaces what chooses its kernel."""

    def call(given: tangents.Moved) -> tangents.Tangents:
        return vjp.attend(spec, operands._replace(**given), True)

    given = {name: getattr(operands, name) for name in moved}
    return jax.tree.map(np.asarray, jax.jit(lambda x, u: jax.jvp(call, (x,), (u,))[1])(given, moved))
