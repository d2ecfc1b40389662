# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What is computed in JAX around the backward kernels. No GPU needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.compare import evaluate
from testing.poison import visible_rows

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.launch_plan import LaunchPlan
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV

CASE = Case(
    num_kv_heads=2,
    group=2,
    query_length=13,
    key_length=11,
    head_dim=64,
    is_causal=True,
    query_offset=(-5, 2),
    query_seq_lengths=(11, 13),
    sinks="n",
    dlse=True,
)


@pytest.fixture(params=["n", "bn"])
def call(request: pytest.FixtureRequest, key: jax.Array) -> tuple[Any, ...]:
    """A call, with its results in the reference: specification, operands, cotangents, results, and which rows see."""
    case = dataclasses.replace(CASE, sinks=request.param)
    spec, operands, cotangents = case.spec(), case.operands(key), case.cotangents(key)
    found = evaluate(attention_reference, spec, operands, *cotangents)
    half = [x.astype(jnp.bfloat16) for x in operands[:3]]
    return spec, operands._replace(query=half[0], key=half[1], value=half[2]), cotangents, found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_terms_of_rows_are_added_up_to_the_gradient_of_sinks(
    arch: str, call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of rows that see nothing count as well: their log-sum-exp is the sink."""
    spec, operands, (dout, dlse), found = call
    sees, _, _ = visible_rows(spec, operands)

    def launch(plan: LaunchPlan) -> dict[str, jax.Array]:
        shapes, sinks = plan.shapes, plan.operands["sinks"]
        assert plan.kernel.dsinks and sinks is not None
        assert plan.problem.sinks_per_batch == (len(operands.sinks) > 1)
        delta = jnp.where(sees, (found.out * dout).sum(-1), 0.0) - dlse
        weight = jnp.exp(sinks[:, None] - jnp.where(found.lse == -jnp.inf, jnp.inf, found.lse))
        terms = -(weight * delta).swapaxes(1, 2)
        assert terms.shape == shapes["dsinks_terms"]
        return {name: jnp.zeros(shapes[name]) for name in ("dq", "dk", "dv")} | {"dsinks_terms": terms}

    monkeypatch.setattr(ffi, "arch", lambda: arch)
    monkeypatch.setattr(ffi, "multiprocessors", lambda: 132)
    monkeypatch.setattr(LaunchPlan, "bind", launch)
    gradients = cuda.backward(spec, operands, found.out, found.lse, dout, dlse)
    np.testing.assert_allclose(gradients.sinks, found.dsinks, rtol=1e-5, atol=1e-5)


def test_no_gradient_of_sinks_is_computed_unless_it_is_wanted(
    call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is that of a call whose sinks are constant, and takes no sinks."""
    spec, operands, (dout, dlse), found = call

    def launch(plan: LaunchPlan) -> dict[str, jax.Array]:
        assert not plan.kernel.dsinks and plan.operands["sinks"] is None and "dsinks_terms" not in plan.shapes
        return {name: jnp.zeros(shape) for name, shape in plan.shapes.items()}

    monkeypatch.setattr(ffi, "arch", lambda: "sm_90a")
    monkeypatch.setattr(ffi, "multiprocessors", lambda: 132)
    monkeypatch.setattr(LaunchPlan, "bind", launch)
    assert cuda.backward(spec, operands, found.out, found.lse, dout, dlse, QKV).sinks is None
