# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of one float of a score function. Relative errors are some 2^-20, of exponentials 2^-24 of the argument."""

from collections.abc import Callable

from cutlass import Float32, cute

from jax_fastattn.kernels.device import instructions, ptx
from jax_fastattn.kernels.device.softmax import LN_2, LOG2_E

# Below it the first terms of a series are more accurate than a difference to 1.
_SMALL = 2.0**-6


def _unless_small(x: Float32, series: Float32, other: Float32) -> Float32:
    return ptx.where(ptx.magnitude(x) < Float32(_SMALL), series, other)


def tanh(x: Float32) -> Float32:
    """Returns the tanh by two MUFU."""
    grown = ptx.exp2(x * (2 * LOG2_E))
    other = ptx.fma(Float32(-2.0), ptx.reciprocal(grown + Float32(1.0)), Float32(1.0))
    return _unless_small(x, x * ptx.fma(x * x, Float32(-1 / 3), Float32(1.0)), other)


def _logistic(x: Float32) -> Float32:
    return ptx.reciprocal(ptx.exp2(x * -LOG2_E) + Float32(1.0))


def _expm1(x: Float32) -> Float32:
    series = x * ptx.fma(x, ptx.fma(x, Float32(1 / 6), Float32(0.5)), Float32(1.0))
    return _unless_small(x, series, ptx.exp2(x * LOG2_E) - Float32(1.0))


def _log1p(x: Float32) -> Float32:
    series = x * ptx.fma(x, ptx.fma(x, Float32(1 / 3), Float32(-0.5)), Float32(1.0))
    return _unless_small(x, series, ptx.log2(x + Float32(1.0)) * LN_2)


OF_ONE: dict[str, Callable[[Float32], Float32]] = {
    "exp2": ptx.exp2,
    "expm1": _expm1,
    "log1p": _log1p,
    "logistic": _logistic,
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),  # pyright: ignore[reportAttributeAccessIssue] (its stub lacks it)
    "rsqrt": lambda x: cute.math.rsqrt(x, fastmath=True),  # pyright: ignore[reportAttributeAccessIssue] (the same)
    "abs": ptx.magnitude,
    "sign": lambda x: instructions.apply("sign", "f", [x]),
}
