# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A scale that is an array: an operand of both passes, differentiable, and multiplied into the query for the kernels.

That it means what the reference means, under every transformation and next to every other operand, is tested where
`calls.EVERYTHING` is: it has such a scale.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import compare
from testing.poison import poison

from jax_fastattn import attention, attention_varlen, explain
from jax_fastattn.cases.case import Case
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.launch_plan import LaunchPlan
from jax_fastattn.ops.vjp import LSE_NAME, OUT_NAME
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla import passes as xla

QKV = Case(query_length=5, key_length=7, group=2, head_dim=8).operands(jax.random.key(0))[:3]
LOW = Case(dtype="bfloat16", query_length=11, key_length=13, num_kv_heads=2, group=3, head_dim=8, scale_is_array=True)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_traced_scale_raised(transform: Any) -> None:
    """Value and gradient are those of jax.nn, for a negative scale and for 0 too."""

    def loss(function: Any, scale: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(*QKV, scale=scale)))

    ours = transform(jax.value_and_grad(functools.partial(loss, attention)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = jax.jit(jax.value_and_grad(functools.partial(loss, jax.nn.dot_product_attention)))
        for scale in (0.7, -0.3, 0.0):
            calls.assert_same(ours(jnp.float32(scale)), theirs(jnp.float32(scale)))


def test_packed_input_takes_a_traced_scale() -> None:
    starts = jnp.array([0, 2, 5])
    query, key, value = (x[0, :5] for x in QKV)

    def packed(scale: Any) -> jax.Array:
        return jnp.sum(jnp.sin(attention_varlen(query, key, value, starts, starts, scale=scale)))

    def apart(scale: Any) -> jax.Array:
        parts = [attention(query[i:j], key[i:j], value[i:j], scale=scale) for i, j in ((0, 2), (2, 5))]
        return jnp.sum(jnp.sin(jnp.concatenate(parts)))

    found, expected = (jax.jit(jax.value_and_grad(f))(jnp.float32(-0.4)) for f in (packed, apart))
    calls.assert_same(found, expected)
    calls.assert_same(found[0], packed(-0.4))


def test_explain_takes_a_traced_scale() -> None:
    found = []
    jax.eval_shape(lambda scale: found.append(explain(*QKV, scale=scale)), jnp.float32(0.3))
    found += [explain(*QKV, scale=scale) for scale in (0.3, jnp.float32(0.3), jax.ShapeDtypeStruct((), jnp.float32))]
    assert len(set(found)) == 1


def test_a_new_scale_does_not_trace_again() -> None:
    traced = []

    @jax.jit
    def run(scale: jax.Array) -> jax.Array:
        traced.append(scale)
        return attention(*QKV, scale=scale)

    assert not np.allclose(run(jnp.float32(0.5)), run(jnp.float32(0.25)))
    assert len(traced) == 1


def test_checkpoint_with_a_traced_scale_launches_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    qkv = LOW.operands(jax.random.key(0))[:3]

    policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    for given, launches in (({"policy": policy}, 2), ({}, 3)):
        layer = jax.checkpoint(lambda scale, *qkv: attention(*qkv, scale=scale), **given)
        gradient = jax.grad(lambda *arrays, layer=layer: jnp.sin(layer(*arrays).astype(jnp.float32)).sum(), (0, 1))
        assert calls.count_launches(calls.cuda_text(gradient, jnp.float32(0.3), *qkv)) == launches


@pytest.fixture
def _launches_in_jax(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ops/cuda/passes.py launches is computed by the XLA path, from the launch's own arrays and scale."""
    calls.lower_for_cuda(monkeypatch, tmp_path)

    def launch(plan: LaunchPlan) -> dict[str, jax.Array]:
        problem, arrays = plan.problem, plan.operands
        assert plan.lists is None
        present = tuple(name for name in problem.spec.present if name != "scale")
        spec = dataclasses.replace(problem.spec, present=present)
        operands = Operands(**{name: arrays[name] for name in present})
        if plan.kernel.op == "forward":
            return dict(zip(("out", "lse"), xla.forward(spec, operands), strict=True))
        found = xla.backward(spec, operands, *(arrays[name] for name in ("out", "lse", "dout", "dlse")))
        scratch = {name: jnp.zeros(shape) for name, shape in plan.shapes.items()}
        return scratch | {"dq": found.query, "dk": found.key, "dv": found.value}

    monkeypatch.setattr(LaunchPlan, "bind", launch)


def by_launches(spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: Any = None) -> compare.Results:
    """All results of ops/cuda/passes.py."""

    @jax.jit
    def run(operands: Operands, dout: jax.Array, dlse: Any) -> compare.Results:
        out, lse = cuda.forward(spec, operands)
        return compare.Results.of(out, lse, cuda.backward(spec, operands, out, lse, dout, dlse))

    return run(operands, dout, dlse)


def jax_nn(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """jax.nn, given the query that the kernels get; its log-sum-exp is not compared."""
    query = (operands.query.astype(jnp.float32) * operands.scale[:, :, None, None]).astype(operands.query.dtype)
    out = jax.nn.dot_product_attention(query, *operands[1:3], scale=1.0, is_causal=spec.is_causal)
    return out, jnp.zeros(out.shape[:3])


@pytest.mark.usefixtures("_launches_in_jax")
@pytest.mark.parametrize("scale", [0.3, -1.7, 0.0])
def test_folded_scale_errs_as_jax_nn_of_the_folded_query(scale: float) -> None:
    case = dataclasses.replace(LOW, scale=scale, is_causal=True)
    spec, operands, (dout, _) = case.spec(), case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    found = by_launches(spec, operands, dout)
    oracle, ours = compare.expected(spec, operands, dout)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = compare.evaluate(jax_nn, spec, operands, dout)
    compare.assert_within_budget(found, oracle, theirs._replace(lse=ours.lse, dscale=ours.dscale))
    assert np.any(found.dscale)


@pytest.mark.usefixtures("_launches_in_jax")
@pytest.mark.parametrize("scale", [0.25, -2.0])
def test_folded_powers_of_two_lose_nothing(scale: float) -> None:
    case = dataclasses.replace(LOW, scale=scale, dlse=True)
    static = dataclasses.replace(case, scale_is_array=False)
    cotangents = case.cotangents(jax.random.key(1))
    found, expected = (by_launches(x.spec(), x.operands(jax.random.key(0)), *cotangents) for x in (case, static))
    for name, x, y in zip(compare.Results._fields, found._replace(dscale=None), expected, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.usefixtures("_launches_in_jax")
def test_nan_of_padding_queries_does_not_reach_the_gradient_of_scale() -> None:
    case = dataclasses.replace(LOW, scale=0.5, query_seq_lengths=(4, 0), key_value_seq_lengths=(9, 13))
    spec, operands, (dout, _) = case.spec(), case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    poisoned_operands, poisoned_dout, _ = poison(spec, operands, dout)
    clean, poisoned = by_launches(spec, operands, dout), by_launches(spec, poisoned_operands, poisoned_dout)
    calls.assert_same(poisoned, clean, tolerance=0)
    assert np.isfinite(clean.dscale).all()
