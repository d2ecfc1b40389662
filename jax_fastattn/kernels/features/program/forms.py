# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Values of a score function before they are numbers in registers, and their arithmetic.

A float is a Python float, a register, a `Line` or a `Scaled`; an integer a Python int, a register or an `Index`. The
scores of a lane differ in known steps, so that a linear term is one FFMA with an immediate. A product waits until it is
added to something, which is one FFMA too, or meets another factor: if both together are the same for all scores of a
row or of a column, their product is one number of it.
"""

from typing import Any, NamedTuple

from cutlass import Float32, Int32

from jax_fastattn.kernels.device import instructions, ptx


class Line(NamedTuple):
    """A float `base + slope * step`; base and slope are the same for many scores, and the step is known."""

    base: Any
    slope: Any
    step: float


class Scaled(NamedTuple):
    """A float `value * factor`.

    Attributes:
        depends: what the factor depends on, see `analysis.depends`; nothing if it is the same for all scores of a head.
    """

    value: Any
    factor: Any
    depends: frozenset[str] = frozenset()

    def joins(self, depends: frozenset[str]) -> bool:
        """Returns whether a product with another factor is a factor of all scores of a row, or of a column."""
        both = self.depends | depends
        return "score" not in both and len(both) < 2


class Index(NamedTuple):
    """An integer `base + step`, of which the step is known.

    Attributes:
        is_near: whether sums of two such bases and steps stay in int32.
    """

    base: Int32
    step: int
    is_near: bool = False


def number(x: Any) -> Any:
    """Returns a float as a register or a Python float."""
    if isinstance(x, Line):
        if x.step == 0.0:
            return x.base
        if isinstance(x.slope, float):
            return x.base + Float32(x.slope * x.step)
        return ptx.fma(Float32(x.step), x.slope, x.base)
    if isinstance(x, Scaled):
        return x.value * x.factor
    return x


def register(dtype: str, x: Any) -> Any:
    """Returns a value of any form in a register."""
    if isinstance(x, Index):
        return x.base if x.step == 0 else x.base + instructions.register("i", x.step)
    return instructions.register(dtype, number(x))


def multiply(x: Any, y: Any, depends: frozenset[str] = frozenset()) -> Any:
    """Returns x y.

    Args:
        depends: what y depends on, as for `Scaled`; nothing if it is a Python float.
    """
    if isinstance(x, float):
        x, y, depends = y, x, frozenset()
    y = number(y)
    if isinstance(x, float):
        return x * y
    if isinstance(y, float) and y == 1.0:
        return x
    if isinstance(x, Line) and not depends:
        return Line(x.base * y, x.slope * y, x.step)
    if isinstance(x, Scaled) and x.joins(depends):
        return Scaled(x.value, x.factor * y, x.depends | depends)
    return Scaled(number(x), y, depends)


def add(x: Any, y: Any) -> Any:
    """Returns x + y."""
    if isinstance(x, float) and isinstance(y, float):
        return x + y
    if isinstance(y, Scaled) and not isinstance(x, Scaled):
        x, y = y, x
    if isinstance(x, Scaled):
        return ptx.fma(register("f", x.value), register("f", x.factor), register("f", y))
    if isinstance(y, Line):
        x, y = y, x
    if isinstance(x, Line):
        return Line(x.base + number(y), x.slope, x.step)
    return register("f", x) + register("f", y)


def negative(x: Any) -> Any:
    """Returns -x."""
    return multiply(x, -1.0)
