# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents of calls on a GPU by both families of kernels, against the XLA path in float32 and in the call's dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import combinations
from testing.borrow import portable_kernel
from testing.cases.gpu import GPU_CASES
from testing.cases.hidden_rows import HIDDEN_ROWS
from testing.cases.masked import MASKED
from testing.cases.packed import PACKED
from testing.poison import poison

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.support import tangent_reasons, unsupported_reasons
from jax_fastattn.ops import vjp
from jax_fastattn.ops.cuda import tangents as cuda
from jax_fastattn.spec import DIFFERENTIABLE, QKV, AttentionSpec, Operands
from jax_fastattn.xla import passes as xla
from jax_fastattn.xla import tangents as xla_tangents

pytestmark = pytest.mark.gpu

Tangents = tuple[jax.Array, jax.Array]

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
    moved = _draw(operands)
    hidden, hidden_moved = (_hide(spec, x) for x in (operands, operands._replace(**moved)))
    tangents = {name: getattr(hidden_moved, name) for name in moved}
    call = dataclasses.replace(spec, implementation="cuda")
    first, second = (_by_kernels(call, hidden, tangents) for _ in range(2))
    expected, baseline = (jax.jit(_by_xla, static_argnums=(0, 3))(spec, operands, moved, x) for x in (True, False))
    for name, x, y, wanted, based in zip(("dout", "dlse"), first, second, expected, baseline, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
        error, allowed = (np.abs(np.asarray(z, np.float32) - np.asarray(wanted)) for z in (x, based))
        ulp = 2.0 ** (-12 if case.dtype == "float32" else -8)
        rounding = ulp * (1.0 + float(jnp.abs(wanted).max())) if name == "dout" else 1e-3
        assert error.max() <= 2.0 * allowed.max() + rounding, (name, error.max(), allowed.max())
        typical, most, size = (np.sqrt(np.mean(x**2)) for x in (error, allowed, np.asarray(wanted)))
        assert typical <= 2.0 * most + 1e-4 * (1.0 + size), (name, typical, most)


def _draw(operands: Operands) -> dict[str, jax.Array]:
    """Draws tangents of everything that has one."""
    random = np.random.default_rng(1)
    arrays = {name: getattr(operands, name) for name in DIFFERENTIABLE}
    return {name: jnp.asarray(random.standard_normal(x.shape), x.dtype) for name, x in arrays.items() if x is not None}


def _hide(spec: AttentionSpec, operands: Operands) -> Operands:
    return poison(spec, operands, jnp.zeros_like(operands.query))[0]


def _by_kernels(spec: AttentionSpec, operands: Operands, moved: dict[str, jax.Array]) -> Any:
    """Returns the tangents of a program that is compiled anew, since a test replaces what chooses its kernel."""

    def call(given: dict[str, jax.Array]) -> Tangents:
        return vjp.attend(spec, operands._replace(**given), True)

    given = {name: getattr(operands, name) for name in moved}
    return jax.tree.map(np.asarray, jax.jit(lambda x, u: jax.jvp(call, (x,), (u,))[1])(given, moved))


def _by_xla(spec: AttentionSpec, operands: Operands, moved: dict[str, jax.Array], exact: bool) -> Tangents:
    """Returns the tangents on the XLA path, in float32 if they are to be exact."""
    with jax.default_matmul_precision("highest"):
        if exact:
            operands = operands._replace(**{name: getattr(operands, name).astype(jnp.float32) for name in QKV})
            moved = {name: x.astype(jnp.float32) for name, x in moved.items()}
        return xla_tangents.tangent(spec, operands, *xla.forward(spec, operands), moved)
