# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Logits of which a float32 holds no fraction: a weight of 1 stays 1 on the XLA path, forward and backward.

XLA:CPU made `exp(product * scale - max)` one fused multiply-add, which subtracted a rounded maximum from a logit that
was not rounded. It does so in optimized programs alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_passes import SMALL_CHUNKS, run

from jax_fastattn import attention
from jax_fastattn.cases.case import Case
from jax_fastattn.reference import visible_pairs
from jax_fastattn.spec import Operands
from jax_fastattn.xla.blocks import Blocks
from jax_fastattn.xla.chunks import CPU, Tuning

MAGNITUDES = [1.6e5, 2.4e5, 1.6e7, 2e9, 1e12, 1e30]

# The default scale, 96 ** -0.5, rounds each product, and so does a cap that is no power of two.
CASE = Case(query_length=37, key_length=53, num_kv_heads=3, group=2, head_dim=96, v_head_dim=8)
CASES = {
    "plain": {},
    "scale-power-of-two": {"scale": 0.125},
    "scale-array": {"scale": -0.3, "scale_is_array": True},
    "cap": {"logits_soft_cap": 3e30, "scale": 0.125},
    "cap-power-of-two": {"logits_soft_cap": 2.0**101},
    "bias": {"bias": "nts"},
    "cap-bias": {"logits_soft_cap": 3e30, "bias": "bnts"},
    "causal": {"is_causal": True},
    "mask": {"mask": "bnts"},
    "one-key": {"key_value_seq_lengths": (53, 1)},
    "packed": {"batch": 1, "packed": ((11, 26), (13, 40))},
    "sinks": {"sinks": "n"},
}


@pytest.fixture(autouse=True)
def optimized() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def draw(case: Case, magnitude: float) -> tuple[Operands, jax.Array, np.ndarray]:
    """Returns operands whose largest logits are up to `magnitude`, the cotangent of the output, and the weights.

    One visible key of each query has the weight 1, and all others 0. Values and cotangents are small integers, so that
    sums of their products are exact in any order.
    """
    rng, operands = np.random.default_rng(0), case.operands(jax.random.key(0))
    (batch, length, heads, head_dim), group = operands.query.shape, case.group
    visible = np.asarray(visible_pairs(case.spec(), operands))
    winner = np.where(visible, rng.random(visible.shape), -1.0).argmax(axis=3)[..., None]
    key = rng.choice([-1.0, 1.0], size=operands.key.shape)
    keys = np.repeat(key.swapaxes(1, 2), group, axis=1)
    scale = float(case.spec().scale if operands.scale is None else operands.scale[0, 0])
    factor = magnitude / head_dim / scale * rng.uniform(0.5, 1.0, size=(batch, heads, length, 1))
    query = (factor * np.take_along_axis(keys, winner, axis=2)).swapaxes(1, 2)
    value, dout = (rng.integers(-2, 3, size=x.shape) for x in (operands.value, case.cotangents(jax.random.key(0))[0]))
    made = operands._replace(
        **{name: jnp.asarray(x, case.dtype) for name, x in (("query", query), ("key", key), ("value", value))}
    )
    if made.bias is not None:
        made = made._replace(bias=made.bias * (magnitude / 64))
    return made, jnp.asarray(dout, case.dtype), np.arange(case.key_length) == winner


# A plain call in all variants, cases without a mask in a program that XLA fused wrongly, and each other case once.
VARIANTS = [("float32", CPU), ("bfloat16", SMALL_CHUNKS), ("float32", SMALL_CHUNKS), ("bfloat16", CPU)]
CALLS = [("plain", *variant) for variant in VARIANTS]
CALLS += [(name, *VARIANTS[0]) for name in ("scale-power-of-two", "scale-array", "cap-power-of-two", "bias")]
CALLS += [(name, *VARIANTS[i % 4]) for i, name in enumerate(CASES) if name not in {name for name, *_ in CALLS}]


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("name", "dtype", "tuning"), CALLS, ids=lambda x: x if isinstance(x, str) else "whole" if x is CPU else "chunks"
)
def test_large_logits_have_weights_of_one(name: str, dtype: str, tuning: Tuning) -> None:
    """Gradients of values were off by half an ulp of the logit, and from 2e9 on outputs were NaN."""
    case = dataclasses.replace(CASE, dtype=dtype, **CASES[name])
    call = jax.jit(functools.partial(run, case.spec(), tuning=tuning))
    for magnitude in MAGNITUDES:
        operands, dout, weights = draw(case, magnitude)
        found = call(operands, dout)
        grouped = weights.reshape(case.shape["B"], case.num_kv_heads, case.group, *weights.shape[2:])
        value, dout = (np.asarray(x, np.float64) for x in (operands.value, dout))
        out = np.einsum("bkgts,bskd->btkgd", grouped, value).reshape(dout.shape)
        dvalue = np.einsum("bkgts,btkgd->bskd", grouped, dout.reshape(*dout.shape[:2], -1, case.group, 8))
        np.testing.assert_array_equal(np.asarray(found.out, np.float64), out, err_msg=f"{magnitude}")
        np.testing.assert_array_equal(np.asarray(found.dvalue, np.float64), dvalue, err_msg=f"{magnitude}")
        for x in (found.dquery, found.dkey, found.dbias, found.dsinks, found.dscale):
            assert x is None or not np.asarray(x).any(), magnitude
        assert (np.asarray(found.lse) > 0.3 * magnitude).all()


def test_gradients_of_values_at_large_logits_are_those_of_jax_nn() -> None:
    """The error was 186, of gradients of 4.4 at most, where queries and keys are 3000 times as large as normal ones."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, value, dout = (jax.random.normal(key, (1, 256, 1, 128), jnp.bfloat16) for key in keys)

    def gradient(function: Any) -> np.ndarray:
        loss = lambda value: jnp.sum((function(3000 * x, 3000 * x, value) * dout).astype(jnp.float32))
        return np.asarray(jax.jit(jax.grad(loss))(value), np.float64)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_array_equal(gradient(attention), gradient(jax.nn.dot_product_attention))


@pytest.mark.parametrize(("dtype", "tuning"), VARIANTS[:2], ids=["float32-whole", "bfloat16-chunks"])
def test_keys_that_tie_at_large_logits_share_the_output(dtype: str, tuning: Tuning) -> None:
    """The log-sum-exp cannot hold log(2) next to such logits, and gradients of values were up to twice as large."""
    half = dataclasses.replace(CASE, dtype=dtype)
    call = jax.jit(functools.partial(run, half.spec(), tuning=tuning))
    for magnitude in MAGNITUDES:
        operands, dout, _ = draw(half, magnitude)
        twice = operands._replace(
            key=jnp.concatenate([operands.key] * 2, axis=1), value=jnp.concatenate([operands.value, -operands.value], 1)
        )
        found, one = call(twice, dout), call(operands, dout)
        assert not np.asarray(found.out, np.float32).any(), magnitude
        dvalue, expected = (np.asarray(x.dvalue, np.float64) for x in (found, one))
        for part in np.split(dvalue, 2, axis=1):
            np.testing.assert_allclose(2 * part, expected, rtol=2**-8, err_msg=f"{magnitude}")


@pytest.mark.parametrize("change", [{}, {"logits_soft_cap": 50.0}, {"scale": 1.0}], ids=str)
def test_programs_of_a_gpu_are_not_changed_for_the_sake_of_a_cpu(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jax.ShapeDtypeStruct((1, 5, 2, 96), jnp.float32)
    platforms = ("cuda", "tpu", "cpu")

    def texts() -> dict[str, str]:
        loss = lambda x: attention(x, x, x, implementation="xla", **change).sum()
        return {
            name: jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=(name,)).as_text() for name in platforms
        }

    with_it = texts()
    monkeypatch.setattr(Blocks, "rounded", lambda self, logits: logits)
    without = texts()
    is_exact = change == {"scale": 1.0}
    assert [with_it[name] == without[name] for name in platforms] == [True, True, is_exact]
    assert ["optimization_barrier" in with_it[name] for name in platforms] == [False, False, not is_exact]
