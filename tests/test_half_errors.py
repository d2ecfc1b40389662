# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of float32 calls by products of float16, in the model of `half_model.py`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_model import exact, model, row_errors, size, tf32

from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec, Operands

RESULTS = ("out", "dq", "dk", "dv")


class Draw(NamedTuple):
    """Normal operands of a call, some of which have large rows; and the limits of errors of rows.

    Attributes:
        spread: of logits.
        large: operands, rows, and factors on one element of a row, or on all of it if it is not the last one.
        median, most, rms: limits of the median, of the 99th percentile and of the root mean square of all elements,
            over those of `jax.nn`. A large last row may have any root mean square.
        gradients: limit of the 99th percentile in gradients, over the size of the row; None for `most`.
        length, head_dim, is_causal: sizes and the mask.
        falling: rows of the cotangent fall from 1 to 2 to the power of minus this.
        outliers: channel 7 of the queries is the first number, that of the keys uniform between the others.
        num_keys: keys from this one on are hidden, and are 1e38.
    """

    spread: float = 1.0
    large: tuple[tuple[str, int, float], ...] = ()
    median: float = 1.3
    most: float = 2.0
    rms: float = 1.15
    gradients: float | None = None
    length: int = 512
    head_dim: int = 64
    is_causal: bool = True
    falling: int = 0
    outliers: tuple[float, float, float] | None = None
    num_keys: int | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        random, shape = np.random.default_rng(1), (1, self.length, 1, self.head_dim)
        found = {x: random.standard_normal(shape).astype(np.float32) for x in ("query", "key", "value", "dout")}
        found["query"] *= self.spread
        found["dout"] *= np.exp2(-np.linspace(0, self.falling, self.length, dtype=np.float32))[:, None, None]
        if self.outliers:
            found["query"][..., 7], found["key"][..., 7] = (
                self.outliers[0],
                random.uniform(*self.outliers[1:], shape[:3]),
            )
        for which, row, factor in self.large:
            found[which][:, row, :, slice(3, 4) if row == -1 else slice(None)] *= np.float32(factor)
        return found


DRAWS = {
    "plain": Draw(),
    "full": Draw(is_causal=False),
    "spread-3": Draw(3.0),
    "spread-5": Draw(5.0),
    "spread-5-full": Draw(5.0, is_causal=False),
    "spread-11": Draw(11.0, most=3.5, length=2048),
    "spread-11-full": Draw(11.0, is_causal=False),
    "head-dim-128": Draw(head_dim=128),
    "head-dim-256": Draw(head_dim=256),
    "cotangent-row": Draw(large=(("dout", 100, 1e3),)),
    "first-cotangent": Draw(large=(("dout", 0, 1e3),)),
    "cotangents-fall": Draw(falling=10),
    # Errors of rows far below the largest ones grow: docs/numerics.md.
    "cotangents-fall-far": Draw(falling=16, most=4.0),
    "ranges": Draw(large=(("key", 200, 30.0), ("value", 300, 1e3)), falling=24, median=np.inf, most=np.inf, rms=2.0),
    "outliers": Draw(outliers=(44.8, 16.92, 18.8)),
    # As in a served model; errors of `jax.nn` are as large as its results.
    "served-outliers": Draw(outliers=(448.0, 1692.0, 1880.0), is_causal=False, length=1024, head_dim=128),
    "hidden-keys": Draw(num_keys=400),
    "late-value-1e3": Draw(large=(("value", -1, 1e3),)),
    "late-value-1e5": Draw(large=(("value", -1, 1e5),), gradients=2e-2),
    "late-value-1e8": Draw(large=(("value", -1, 1e8),), gradients=np.inf),
    "late-key-1e5": Draw(large=(("key", -1, 1e5),)),
    "late-key-1e8": Draw(large=(("key", -1, 1e8),), median=2.0, gradients=np.inf),
    "late-query-1e8": Draw(large=(("query", -1, 1e8),), median=2.0, gradients=np.inf),
    "late-cotangent-1e3": Draw(large=(("dout", -1, 1e3),)),
    "late-cotangent-1e5": Draw(large=(("dout", -1, 1e5),), gradients=2e-2),
    "value-and-cotangent": Draw(large=(("value", 300, 1e3), ("dout", 400, 1e3)), gradients=1e-1),
    "late-value-and-cotangent": Draw(large=(("value", -1, 1e3), ("dout", -1, 1e3)), gradients=1e-1),
}


# These have programs of their own, which take a second or more to compile.
_SLOW = ("full", "spread-5-full", "spread-11", "spread-11-full", "head-dim-128", "head-dim-256", "served-outliers")
_MARKED = [pytest.param(x, marks=pytest.mark.slow if x in (*_SLOW, "hidden-keys") else ()) for x in DRAWS]


@pytest.mark.parametrize("name", _MARKED)
def test_rows_have_the_errors_of_jax_nn(name: str) -> None:
    """A large element of a later row hardly touches the rows before it, with which it shares powers of two."""
    draw = DRAWS[name]
    *operands, dout = (jnp.asarray(x) for x in draw.arrays().values())
    lengths = None if draw.num_keys is None else jnp.asarray([draw.num_keys], jnp.int32)
    call = Operands(*operands, key_value_seq_lengths=lengths)
    spec = AttentionSpec(draw.head_dim**-0.5, is_causal=draw.is_causal, present=call.present())
    given = call
    if draw.num_keys is not None:
        given = call._replace(**{x: getattr(call, x).at[:, draw.num_keys :].set(1e38) for x in ("key", "value")})
    found = model(spec, given, dout)
    wanted, baseline = (exact(spec, call, dout, x) for x in (functools.partial(np.einsum, optimize=True), tf32))
    for result, x, y, z in zip(RESULTS, found[:1] + found[2:], baseline, wanted, strict=True):
        errors, others = row_errors(x, z), row_errors(y, z)
        if all(row >= 0 for _, row, _ in draw.large):
            assert size(x - z) <= draw.rms * size(y - z), result
        if result != "out" and draw.gradients is not None:
            assert np.percentile(errors, 99) <= draw.gradients, result
            continue
        assert np.median(errors) <= draw.median * np.median(others), result
        assert np.percentile(errors, 99) <= draw.most * np.percentile(others, 99), result


# Factors on query, key, value and cotangent.
SIZES = {
    "ordinary": (1.0, 1.0, 1.0, 1.0),
    "no-queries": (0.0, 1.0, 1.0, 1.0),
    "no-values": (1.0, 1.0, 0.0, 1.0),
    "nothing": (0.0, 0.0, 0.0, 0.0),
    "tiny-queries": (1e-30, 1.0, 1.0, 1.0),
    "tiny-logits": (1e-6, 1e-6, 1.0, 1.0),
    "far-apart": (1e-25, 1e25, 1e20, 1e-30),
    "small-values": (1.0, 1.0, 1e-35, 1.0),
    "large-values": (1.0, 1.0, 1e36, 1e-10),
    "small-cotangents": (1.0, 1.0, 1.0, 1e-30),
    "almost-subnormal": (1e-37, 1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("name", SIZES)
def test_any_size_of_operands_has_the_same_errors(name: str) -> None:
    operands, dout = _small_call(SIZES[name])
    spec = AttentionSpec(0.3, present=operands.present())
    found = model(spec, operands, dout)
    for result, x, wanted in zip(RESULTS, found[:1] + found[2:], exact(spec, operands, dout), strict=True):
        if size(wanted) < 1e-36:  # subnormal, which a CPU takes for 0
            assert np.abs(np.asarray(x)).max() <= 4 * size(wanted) + 1e-37, result
        else:
            assert size(x - wanted) < 1e-3 * size(wanted), result


def _small_call(factors: tuple[float, ...] = (1.0,) * 4) -> tuple[Operands, jax.Array]:
    random, rows, columns = np.random.default_rng(3), (2, 21, 4), (2, 34, 4)
    shapes = (*rows, 8), (*columns, 8), (*columns, 16), (*rows, 16)
    arrays = (random.standard_normal(x).astype(np.float32) for x in shapes)
    *found, dout = (jnp.asarray(x * np.float32(y)) for x, y in zip(arrays, factors, strict=True))
    return Operands(*found), dout


# Calls whose largest element is 0, subnormal or infinite: an operand, and an element, or a factor on all of them.
ODD = {
    f"{name}-{which}": (place, value)
    for place, which in enumerate(("query", "key", "value", "dout"))
    for name, value in (("zero", 0.0), ("subnormal", 1e-39), ("infinite", np.inf), ("minus-infinite", -np.inf))
}


@pytest.mark.parametrize("name", ODD)
def test_odd_largest_elements_have_the_results_of_the_xla_path(name: str) -> None:
    """Numbers are in the same places, with errors of float16 products; of infinities, signs are the same, or NaN."""
    place, value = ODD[name]
    operands, dout = _small_call()
    arrays = [*operands[:3], dout]
    arrays[place] = arrays[place] * jnp.float32(value) if abs(value) < 1 else arrays[place].at[1, 5, 2, 3].set(value)
    *operands, dout = arrays
    operands = Operands(*operands)
    spec = AttentionSpec(0.3, present=operands.present())
    found = model(spec, operands, dout)
    with jax.default_matmul_precision("highest"):
        out, pullback = jax.vjp(lambda *x: attention_reference(spec, Operands(*x))[0], *operands[:3])
        wanted = out, *pullback(dout)
    for result, x, y in zip(RESULTS, found[:1] + found[2:], wanted, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), result)
        both = np.isinf(x) & np.isinf(y)
        np.testing.assert_array_equal(x[both], y[both], result)
        numbers = np.isfinite(y)
        assert size(x[numbers] - y[numbers]) <= 2e-3 * size(y[numbers]), result
