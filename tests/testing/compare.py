# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The differential rule: how wrong a result may be is measured, not guessed.

The oracle is `attention_reference` on operands widened to float32. The baseline is `same_dtype_attention`, which rounds
where the XLA path of `jax.nn.dot_product_attention` rounds (tests/test_reference.py holds the two together) and has
the features that jax.nn lacks. A result passes when its error is at most twice the baseline's, plus float32 rounding:
its largest error and its root mean square both, since the largest elements of a tensor hide what is wrong with others.

In one thing the baseline of gradients is FlashAttention's (Dao et al. 2022, algorithm 4), not jax.nn's: `delta`, the
product of dout with the output, takes the output as the forward pass stores it: of rounded weights, and rounded to the
dtype of the operands. Both roundings may be most of the error of a gradient, such as dk for a key which many queries
see and few other keys with it. jax.nn takes the weights before it rounds them.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.reference import attention_reference, by_query_head, of_pairs, padding_rows, survival, visible_pairs
from jax_fastattn.spec import DIFFERENTIABLE, HIDDEN_BIAS, AttentionSpec, Gradients, Operands

Attention = Callable[[AttentionSpec, Operands], tuple[jax.Array, jax.Array]]

FACTOR = 2.0
# The gradients of sinks, of scale and of a bias that all queries share are long sums, and the baseline's error is small
# by chance now and then. The root mean square of `_typical_errors` over `SIGNS` draws of signs takes its place. The
# largest of a thousand sums may be off by `SUM_FACTORS` such deviations, which are known to a fifth. The gradient of
# scale is a single number.
SIGNS = 16
SUM_FACTORS = {"dsinks": 4.5, "dscale": 5.0, "dbias": 4.5}
# It is relative to `1 + the largest element`, for sums of a thousand float32 terms of order 1 in another order.
ROUNDING = 2.0**-15

_GRADIENTS = tuple(f"d{name}" for name in DIFFERENTIABLE)
_Results = namedtuple("_Results", ("out", "lse", *_GRADIENTS), defaults=[None] * len(_GRADIENTS))  # pyright: ignore[reportUntypedNamedTuple] (each is Any)


class Results(_Results):
    """All results of a call: output, log-sum-exp and the gradients. A gradient is None if its operand is absent."""

    @classmethod
    def of(cls, out: Any, lse: Any, gradients: Gradients) -> Results:
        """Returns the results of a call from the results of the two passes."""
        return cls(out, lse, *(getattr(gradients, name) for name in DIFFERENTIABLE))


@functools.partial(jax.jit, static_argnums=(0, 1))
def evaluate(
    attention: Attention, spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: jax.Array | None = None
) -> Results:
    """Returns the results of `attention` and its gradients by `jax.vjp` for cotangents dout and dlse (None: zero)."""
    names = [name for name in DIFFERENTIABLE if name in spec.present]

    def function(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attention(spec, operands._replace(**dict(zip(names, arrays, strict=True))))

    (out, lse), vjp = jax.vjp(function, *(getattr(operands, name) for name in names))
    gradients = vjp((dout.astype(out.dtype), jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)))
    return Results(out, lse, **{f"d{name}": x for name, x in zip(names, gradients, strict=True)})


@functools.partial(jax.jit, static_argnums=0)
def expected(
    spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: jax.Array | None = None
) -> tuple[Results, Results]:
    """Returns the results of the oracle and of the baseline."""
    dtype = np.promote_types(operands.query.dtype, np.float32)
    wide = {name: getattr(operands, name) for name in DIFFERENTIABLE if name in spec.present}
    wide = operands._replace(**{name: x.astype(dtype) for name, x in wide.items()})
    with jax.default_matmul_precision("highest"):
        oracle = evaluate(attention_reference, spec, wide, dout, dlse)
    # An error of delta acts as one of -dlse. The roundings of a row may cancel by chance, and ours need not.
    errors_of_products = _errors_of_products(spec, operands, oracle.out, dout)
    delta_errors, typical = jnp.sum(errors_of_products, axis=3), jnp.sqrt(jnp.sum(errors_of_products**2, axis=3))
    delta_errors = jnp.copysign(jnp.maximum(jnp.abs(delta_errors), typical), delta_errors)
    given = jnp.zeros_like(delta_errors) if dlse is None else dlse
    baseline = evaluate(same_dtype_attention, spec, operands, dout, given - delta_errors.astype(given.dtype))
    sums = [name for name in SUM_FACTORS if _sum_factor(name, getattr(oracle, name))]
    if sums:
        errors = _typical_errors(sums, spec, operands, wide, errors_of_products, dout, dlse)
        baseline = baseline._replace(
            **{name: _off_by(getattr(oracle, name), x, getattr(baseline, name).dtype) for name, x in errors.items()}
        )
    return oracle, baseline


def _sum_factor(name: str, x: Any) -> float:
    """Returns how many typical errors each element of a result may be off; 0 if it is no sum over all queries."""
    is_sum = x is not None and (name != "dbias" or x.shape[2] == 1)
    return SUM_FACTORS.get(name, 0.0) if is_sum else 0.0


def _typical_errors(
    names: list[str],
    spec: AttentionSpec,
    operands: Operands,
    wide: Operands,
    errors_of_products: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> dict[str, jax.Array]:
    """Returns typical errors of each element of some results: of the baseline, and of `delta` by a stored output.

    The errors of rows are independent, so each draw changes the signs of rows of the cotangents. A row that sees few
    keys may have most of such a sum, where the rounding of the output is ten times the baseline's other errors.
    """
    given = jnp.zeros(dout.shape[:3], errors_of_products.dtype) if dlse is None else dlse

    def errors(key: jax.Array) -> dict[str, jax.Array]:
        row_key, rounding_key = jax.random.split(key)
        signs = jax.random.rademacher(row_key, dout.shape[:3], jnp.float32)
        errors = errors_of_products * jax.random.rademacher(rounding_key, dout.shape, errors_of_products.dtype)
        dlse = given * signs.astype(given.dtype)
        dout_signed = dout * signs[..., None].astype(dout.dtype)
        with jax.default_matmul_precision("highest"):
            exact = evaluate(attention_reference, spec, wide, dout_signed, dlse + jnp.sum(errors, axis=3))
        found = evaluate(same_dtype_attention, spec, operands, dout_signed, dlse)
        return {name: getattr(found, name).astype(getattr(exact, name).dtype) - getattr(exact, name) for name in names}

    found = jax.lax.map(errors, jax.random.split(jax.random.key(0), SIGNS))
    return {name: jnp.sqrt(jnp.mean(x**2, axis=0)) for name, x in found.items()}


def _off_by(x: jax.Array, error: jax.Array, dtype: Any) -> jax.Array:
    """Returns x in a dtype; it is off by at least a positive error once it is rounded."""
    return (x + error + float(jnp.finfo(dtype).eps) / 2 * (jnp.abs(x) + error)).astype(dtype)


def _errors_of_products(spec: AttentionSpec, operands: Operands, out: jax.Array, dout: jax.Array) -> jax.Array:
    """Returns the error of each product that `delta` sums, if its output is the one that the baseline stores."""
    stored = _rounded(same_dtype_attention(spec, operands)[0].astype(out.dtype), operands.query.dtype)
    return (stored.astype(out.dtype) - out) * dout.astype(out.dtype)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds x to another dtype. XLA for GPUs would drop a plain conversion if the result is converted back."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant).astype(dtype)


def same_dtype_attention(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes what `attention_reference` does, with the roundings of jax.nn's XLA path.

    Logits are accumulated and the softmax is taken in float32; probabilities, output and the cotangent of the logits
    are rounded to the dtype of the operands. The log-sum-exp stays float32, unlike jax.nn's. A scale that is an operand
    is multiplied into the query, which is rounded once more.
    """
    if operands.scale is not None:
        query = operands.query.astype(operands.scale.dtype) * operands.scale[:, :, None, None]
        operands = operands._replace(query=_rounded(query, operands.query.dtype))
    dtype = operands.query.dtype
    wide = np.promote_types(dtype, np.float32)
    visible = visible_pairs(spec, operands)
    batch, num_heads, query_length, key_length = visible.shape
    num_kv_heads = operands.key.shape[2]
    # Heads are apart, so that gradients of keys and values are summed over the group before they are rounded.
    heads = num_kv_heads, num_heads // max(num_kv_heads, 1)
    grouped = visible.reshape(batch, *heads, query_length, key_length)
    sees = jnp.moveaxis(jnp.any(grouped, axis=4), 3, 1)[..., None]
    seen = jnp.moveaxis(jnp.any(grouped, axis=(2, 3)), 1, 2)[..., None]
    zero = jnp.zeros((), dtype)
    query = jnp.where(sees, operands.query.reshape(batch, query_length, *heads, operands.query.shape[3]), zero)
    key, value = (jnp.where(seen, x, zero) for x in (operands.key, operands.value))

    # jax.nn asks for the preset BF16_BF16_F32 or F16_F16_F32, and no CPU has the latter; this is what they mean.
    precision = None if dtype == wide else jax.lax.Precision.HIGHEST
    logits = jnp.einsum("btkgh,bskh->bkgts", query.astype(wide), key.astype(wide), precision=precision)
    logits = jnp.reshape(_round_cotangent(logits, dtype), visible.shape) * spec.scale
    if operands.bias is not None:
        bias = by_query_head(operands.bias, num_heads).astype(wide)
        logits = logits + jnp.where(bias <= HIDDEN_BIAS, -jnp.inf, bias)
    logits = jnp.where(visible, logits, 0.0)
    if spec.score_mod is not None:
        logits = of_pairs(spec, operands, visible, logits)
    if spec.logits_soft_cap is not None:
        logits = jnp.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
    logits = jnp.where(visible, logits, -jnp.inf)
    # The sink is one more key, without a value.
    rows = logits.shape[:3]
    sinks = jnp.full(rows, -jnp.inf, wide)
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks[:, :, None].astype(wide), rows)
    sinks = jnp.where(padding_rows(operands)[:, None, :], -jnp.inf, sinks)
    extended = jnp.concatenate([logits, sinks[..., None]], axis=3)
    is_empty = jnp.all(jnp.isneginf(extended), axis=3)
    extended = jnp.where(is_empty[..., None], 0.0, extended)

    weights = jax.nn.softmax(extended, axis=3)[..., :-1]
    if operands.dropout is not None:
        weights = weights * survival(operands, wide)
    weights = weights.astype(dtype)
    weights = jnp.where(is_empty[..., None], zero, weights).reshape(grouped.shape)
    out = jnp.where(sees, jnp.einsum("bkgts,bskd->btkgd", weights, value), zero)
    out = out.reshape(batch, query_length, num_heads, value.shape[3])
    lse = jnp.where(is_empty, -jnp.inf, jax.nn.logsumexp(extended, axis=3))
    return out, jnp.moveaxis(lse, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_cotangent(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns x, and rounds its cotangent to dtype."""
    del dtype
    return x


_round_cotangent.defvjp(lambda x, dtype: (x, None), lambda dtype, _, g: (g.astype(dtype).astype(g.dtype),))


def assert_within_budget(
    actual: Results, oracle: Results, baseline: Results, *, factor: float = FACTOR, rounding: float = ROUNDING
) -> None:
    """Raises AssertionError naming every result whose error is over `factor` times the baseline's, plus rounding.

    Args:
        actual: the results under test. If one is None and the baseline's is not, that is an error.
        oracle, baseline: as from `expected`.
        factor: the allowed ratio to the baseline's error.
        rounding: an additional allowance, times `1 + the largest element of the oracle`. The largest error may also
            have half a unit in the last place of that element, since a value has a neighbor on either side.
    """
    fields = zip(Results._fields, actual, oracle, baseline, strict=True)
    found = [
        _failure(name, x, exact, base, max(factor, _sum_factor(name, base)), rounding)
        for name, x, exact, base in fields
    ]
    failures = [failure for failure in found if failure]
    if failures:
        raise AssertionError("\n".join(failures))


def _failure(name: str, actual: Any, oracle: Any, baseline: Any, factor: float, rounding: float) -> str | None:
    if actual is None and baseline is None:
        return None
    if actual is None or baseline is None:
        return f"{name}: is {'absent' if actual is None else 'present'}, unlike the baseline's"
    if (actual.shape, actual.dtype) != (baseline.shape, baseline.dtype):
        return f"{name}: {actual.shape} {actual.dtype}, expected {baseline.shape} {baseline.dtype}"
    precision = float(jnp.finfo(actual.dtype).eps)
    actual, oracle, baseline = (np.asarray(x).astype(np.float64) for x in (actual, oracle, baseline))
    finite = np.isfinite(oracle)
    same = np.where(finite, np.isfinite(actual), (actual == oracle) | (np.isnan(actual) & np.isnan(oracle)))
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        return f"{name}: {actual[at]} at {at}, expected {oracle[at]}; {np.sum(~same)} of {same.size} differ like this"
    error, allowed = (
        np.abs(np.subtract(x, oracle, where=finite, out=np.zeros_like(oracle))) for x in (actual, baseline)
    )
    largest = np.abs(oracle).max(initial=0.0, where=finite)
    for measure, reduce, slack in (
        ("largest", lambda x: x.max(initial=0.0), rounding * (1 + largest) + precision / 2 * largest),
        ("rms", lambda x: ((x**2).sum() / max(x.size, 1)) ** 0.5, rounding * (1 + largest)),
    ):
        found, budget = reduce(error), reduce(allowed)
        if found > factor * budget + slack:
            at = tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))
            return (
                f"{name}: {measure} error {found:.3e}, allowed {factor:g} x {budget:.3e} + {slack:.1e}; "
                f"worst at {at}: {actual[at]:.6g}, expected {oracle[at]:.6g}, the baseline has {baseline[at]:.6g}"
            )
    return None


def assert_same_bits(first: Results, second: Results, leaving_out: Collection[str] = ()) -> None:
    """Raises AssertionError if two runs of a call differ in a bit.

    Args:
        first, second: the results of the runs.
        leaving_out: names of results that may differ.
    """
    for name, x, y in zip(Results._fields, first, second, strict=True):
        if x is not None and name not in leaving_out:
            x, y = (np.asarray(z).view(np.uint8) for z in (x, y))
            np.testing.assert_array_equal(x, y, err_msg=name)


def check(attention: Attention, spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: Any = None) -> Results:
    """Asserts that the results of `attention`, gradients included, are within the budget, and returns them."""
    actual = evaluate(attention, spec, operands, dout, dlse)
    assert_within_budget(actual, *expected(spec, operands, dout, dlse))
    return actual
