# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The executable specification against jax.nn, against finite differences, and at the edges of its contract."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.cases.cpu import CPU_CASES
from testing.cases.gpu import GPU_CASES
from testing.compare import (
    DIFFERENTIABLE,
    Attention,
    Results,
    assert_within_budget,
    evaluate,
    expected,
    same_dtype_attention,
)
from testing.poison import poison

from jax_fastattn.cases.case import Case
from jax_fastattn.reference import attention_reference, visible_pairs
from jax_fastattn.spec import AttentionSpec, Operands

pytestmark = pytest.mark.numbers

LENGTHS = Case(query_length=5, key_length=7, head_dim=4, query_seq_lengths=(3, 5), key_value_seq_lengths=(7, 0))


def jax_nn_has(case: Case) -> bool:
    beyond = case.logits_soft_cap, case.sinks, case.query_offset, case.segments, case.packed, case.dlse
    is_finite = case.bias_density == 1.0 and case.bias_spelled is None
    return not any(beyond) and is_finite and case.num_heads > 0


def jax_nn_attention(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """jax.nn's XLA path; a one-sided window as a mask. The log-sum-exp is not compared."""
    one_sided = spec.window[0] is None or spec.window[1] is None
    mask = visible_pairs(spec, operands) if one_sided and spec.window != (None, None) else operands.mask
    # JAX 0.8.0 ignores a window that comes with no other mask.
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None and not one_sided else mask
    out = jax.nn.dot_product_attention(
        *operands[:4],
        mask,
        scale=spec.scale if operands.scale is None else operands.scale[0, 0],
        is_causal=spec.is_causal,
        query_seq_lengths=operands.query_seq_lengths,
        key_value_seq_lengths=operands.key_value_seq_lengths,
        local_window_size=None if one_sided else spec.window,
        implementation="xla",
    )
    return out, jnp.zeros(out.shape[:3], jnp.float32)


def drop_empty_rows(spec: AttentionSpec, operands: Operands, x: jax.Array) -> jax.Array:
    """x with 0 in rows that see nothing, where jax.nn means something else."""
    sees = jnp.moveaxis(jnp.any(visible_pairs(spec, operands), axis=3), 1, 2)
    return jnp.where(sees[..., None], x, jnp.zeros((), x.dtype))


@functools.partial(jax.jit, static_argnums=0)
def both(spec: AttentionSpec, operands: Operands, dout: jax.Array) -> tuple[Results, Results]:
    """Results of jax.nn, and of the reference or, below float32, of the baseline."""
    ours = attention_reference if operands.query.dtype == jnp.float32 else same_dtype_attention
    theirs = evaluate(jax_nn_attention, spec, operands, dout)
    return theirs._replace(out=drop_empty_rows(spec, operands, theirs.out)), evaluate(ours, spec, operands, dout)


def test_shapes_of_a_case_are_those_of_its_operands(key: jax.Array) -> None:
    """The cases write their shapes down; they are not traced."""
    for case in CPU_CASES:
        written, traced = (
            jax.tree.map(lambda x: (x.shape, x.dtype), operands)
            for operands in (case._avals(), jax.eval_shape(case.operands, key))
        )
        assert written == traced, case


@pytest.mark.parametrize("case", [case for case in CPU_CASES if jax_nn_has(case)], ids=str)
def test_reference_is_jax_nn(case: Case, key: jax.Array) -> None:
    case = dataclasses.replace(case, v_head_dim=None)
    spec, operands = case.spec(), case.operands(key)
    dout = drop_empty_rows(spec, operands, case.cotangents(key)[0])
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        theirs, ours = both(spec, operands, dout)
    for name, x, y in zip(Results._fields, theirs, ours, strict=True):
        if name != "lse" and x is not None:
            np.testing.assert_allclose(y, x, atol=3e-6, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("key_length", [1, 2])
def test_the_gradient_of_a_key_may_come_from_a_stored_output(key_length: int) -> None:
    """Many queries see few keys: rounding the weights and the output is most of the error then."""
    case = Case("bfloat16", 1, query_length=400, key_length=key_length, num_kv_heads=1, head_dim=128, sinks="n")
    spec, operands, (dout, _) = case.spec(), case.operands(jax.random.key(1)), case.cotangents(jax.random.key(1))
    exact = operands._replace(
        **{name: getattr(operands, name).astype(jnp.float32) for name in ("query", "key", "value")}
    )
    out, lse = attention_reference(spec, exact)
    stored = same_dtype_attention(spec, operands)[0].astype(jnp.float32)
    # Of rows whose errors add up in the first element.
    error = jnp.sum((stored - out) * dout.astype(jnp.float32), axis=3, keepdims=True)
    dout = dout * jnp.sign(error * exact.query[..., :1]).astype(dout.dtype)
    oracle, baseline = expected(spec, operands, dout)

    def dkey(out: jax.Array) -> jax.Array:
        weights = jnp.exp(spec.scale * jnp.einsum("btnh,bsnh->btns", exact.query, exact.key) - lse[..., None])
        difference = exact.value[:, None] - out[:, :, None, 0, None]
        dweights = jnp.einsum("btsnd,btnd->btns", difference, dout.astype(jnp.float32))
        dkey = jnp.einsum("btns,btnh->bsnh", weights * dweights, exact.query)
        return (spec.scale * dkey).astype(jnp.bfloat16)

    def of_delta(errors: jax.Array) -> Results:
        """Returns the baseline, given the errors of the outputs that delta takes."""
        dlse = -jnp.sum(errors * dout.astype(jnp.float32), axis=3)
        return baseline._replace(dkey=evaluate(same_dtype_attention, spec, operands, dout, dlse).dkey)

    found = baseline._replace(dkey=dkey(stored))
    as_in_jax_nn = of_delta(jnp.zeros_like(out))
    assert_within_budget(found, oracle, baseline)
    assert_within_budget(baseline._replace(dkey=dkey(out)), oracle, as_in_jax_nn)
    for less in (as_in_jax_nn, of_delta(out.astype(jnp.bfloat16).astype(jnp.float32) - out))[:key_length]:
        with pytest.raises(AssertionError, match="dkey"):
            assert_within_budget(found, oracle, less)
    with pytest.raises(AssertionError, match="dkey"):
        assert_within_budget(found._replace(dkey=1.1 * found.dkey), oracle, baseline)


def test_baseline_rounds_as_jax_nn_does(key: jax.Array) -> None:
    """In bfloat16: jax.nn's float16 path asks for a precision that CPUs lack.

    The factor is larger for ours, since jax.nn's BF16_BF16_F32 rounds the cotangent of the logits on GPUs only.
    """
    case = Case(dtype="bfloat16", num_kv_heads=2, group=3, is_causal=True)
    spec, operands = case.spec(), case.operands(key)
    dout, _ = case.cotangents(key)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        theirs, ours = both(spec, operands, dout)
    oracle, _ = expected(spec, operands, dout)
    theirs = theirs._replace(lse=ours.lse)
    assert_within_budget(ours, oracle, theirs, factor=2.0)
    assert_within_budget(theirs, oracle, ours, factor=1.25)


@pytest.mark.parametrize(
    "case",
    [
        Case(is_causal=True, bias="nt", sinks="n", scale=-0.8, scale_is_array=True, logits_soft_cap=1.3, dlse=True),
        Case(window=(2, 1), sinks="bn", query_seq_lengths=(5, 3), key_value_seq_lengths=(0, 6), dlse=True),
        Case(mask="bts", bias="bnts", segments=3),
    ],
    ids=str,
)
def test_gradients_are_finite_differences(case: Case, key: jax.Array) -> None:
    case = dataclasses.replace(case, dtype="float64", query_length=5, key_length=7, group=2, head_dim=4, v_head_dim=3)
    step = 1e-6
    with jax.enable_x64(True):
        spec, operands = case.spec(), case.operands(key)
        dout, dlse = case.cotangents(key)
        wide = {"bias", "sinks"} & set(spec.present)
        operands = operands._replace(**{name: getattr(operands, name).astype(jnp.float64) for name in wide})
        found = evaluate(attention_reference, spec, operands, dout, dlse)

        @jax.jit
        def total(operands: Operands) -> jax.Array:
            out, lse = attention_reference(spec, operands)
            return jnp.sum(out * dout) + (
                0.0 if dlse is None else jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse)
            )

        for name, gradient in zip(DIFFERENTIABLE, found[2:], strict=True):
            if gradient is None:
                continue
            x = getattr(operands, name)
            direction = jax.random.normal(key, x.shape, x.dtype)
            up, down = (total(operands._replace(**{name: x + sign * step * direction})) for sign in (1, -1))
            np.testing.assert_allclose((up - down) / (2 * step), jnp.sum(gradient * direction), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("attention", [attention_reference, same_dtype_attention])
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(LENGTHS, sinks="n", dlse=True),
        Case(is_causal=True, query_length=5, key_length=11, query_offset=(-3, 2), sinks="bn", dlse=True),
        Case(window=(1, None), query_length=11, key_length=5, mask="bnts", bias="nts", logits_soft_cap=2.0, dlse=True),
    ],
    ids=str,
)
def test_what_is_invisible_is_not_read(case: Case, attention: Attention, key: jax.Array) -> None:
    case = dataclasses.replace(case, num_kv_heads=2, group=2, head_dim=4)
    spec, operands = case.spec(), case.operands(key)
    dout, dlse = case.cotangents(key)
    clean = evaluate(attention, spec, operands, dout, dlse)
    found = evaluate(attention, spec, *poison(spec, operands, dout, dlse))
    for name, x, y in zip(Results._fields, clean, found, strict=True):
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=name)


def test_empty_rows() -> None:
    case = dataclasses.replace(LENGTHS, sinks="n", dlse=True)
    key = jax.random.key(1)
    spec, operands = case.spec(), case.operands(key)
    found = evaluate(attention_reference, spec, operands, *case.cotangents(key))
    # Batch entry 0 has two rows of padding; entry 1 has no key.
    np.testing.assert_array_equal(found.lse[0, 3:], -jnp.inf)
    np.testing.assert_array_equal(found.lse[1], jnp.broadcast_to(operands.sinks, found.lse[1].shape))
    for x in (found.out[0, 3:], found.out[1], found.dquery[0, 3:], found.dquery[1], found.dkey[1], found.dvalue[1]):
        np.testing.assert_array_equal(x, 0.0)


def test_bias_of_minus_infinity_hides(key: jax.Array) -> None:
    """A bias of -inf is a mask, also for all of a row."""
    case = Case(query_length=5, key_length=7, head_dim=4, mask="bts")
    operands = case.operands(key)
    assert operands.mask is not None
    mask = operands.mask.at[:, :, 2].set(False)
    masked = operands._replace(mask=mask)
    biased = operands._replace(mask=None, bias=jnp.where(mask, 0.0, -jnp.inf))
    dout, _ = case.cotangents(key)
    first, second = (
        evaluate(attention_reference, AttentionSpec(scale=0.5, present=x.present()), x, dout) for x in (masked, biased)
    )
    for name, x, y in zip(Results._fields, first, second, strict=True):
        if name != "dbias" and x is not None:
            np.testing.assert_array_equal(x, y, err_msg=name)
    assert np.isfinite(second.dbias).all()


def test_names_of_cases_are_unique() -> None:
    for cases in (CPU_CASES, GPU_CASES):
        names = [str(case) for case in cases]
        assert len(set(names)) == len(names)


def test_budget_catches_what_a_maximum_hides(key: jax.Array) -> None:
    """Late causal rows are small: a wrong tile there is below the rounding of the first rows."""
    case = Case(dtype="bfloat16", is_causal=True, query_length=1000, key_length=1000)
    spec, operands = case.spec(), case.operands(key)
    dout, _ = case.cotangents(key)
    oracle, baseline = expected(spec, operands, dout)
    assert_within_budget(baseline, oracle, baseline)
    wrong = baseline._replace(out=baseline.out.at[0, 900:964].mul(0.9))
    with pytest.raises(AssertionError, match=r"out: rms error .* worst at \("):
        assert_within_budget(wrong, oracle, baseline)


def test_budget_names_what_is_not_finite(key: jax.Array) -> None:
    spec, operands = LENGTHS.spec(), LENGTHS.operands(key)
    oracle, baseline = expected(spec, operands, LENGTHS.cotangents(key)[0])
    wrong = baseline._replace(lse=jnp.zeros_like(baseline.lse), dkey=baseline.dkey.at[0, 1, 2, 3].set(jnp.nan))
    with pytest.raises(AssertionError, match=r"lse: 0.0 at \(0, 3, 0\), expected -inf") as error:
        assert_within_budget(wrong, oracle, baseline)
    assert "dkey: nan at (0, 1, 2, 3)" in str(error.value)


def test_the_gradient_of_a_sink_may_come_from_a_stored_output() -> None:
    """Rows that see one key, with cotangents that sum up to little: rounding the output is most of the error then."""
    case = Case("bfloat16", 1, query_length=1, key_length=1, num_kv_heads=8, head_dim=96, v_head_dim=96, sinks="n")
    operands, (dout, _) = case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    dout, value = (x.astype(jnp.float32) for x in (dout, operands.value))
    along = jnp.sum(dout * value, axis=3, keepdims=True) / jnp.sum(value * value, axis=3, keepdims=True)
    dout = (dout - along * value).astype(jnp.bfloat16)
    oracle, baseline = expected(case.spec(), operands, dout)
    stored = oracle.out.astype(jnp.bfloat16).astype(jnp.float32)
    weight = jnp.exp(operands.sinks - oracle.lse[:, 0])
    dsinks = -weight * jnp.sum(stored * dout.astype(jnp.float32), axis=3)[:, 0]
    assert_within_budget(baseline._replace(dsinks=dsinks), oracle, baseline)
    with pytest.raises(AssertionError, match="dsinks"):
        assert_within_budget(baseline._replace(dsinks=10 * dsinks), oracle, baseline)
