# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The instructions of a program (`programs/code.py`) on numbers of a lane, which are registers or known numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32

from jax_fastattn.kernels.device import ptx

_TYPES = {"f": Float32, "i": Int32, "b": Boolean}

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
COMPARISONS = frozenset(_COMPARE)


def register(dtype: str, x: Any) -> Any:
    """Returns a number of a dtype ("f", "i" or "b") as a device value."""
    if dtype == "i" and isinstance(x, int):
        return Int32((x + (1 << 31)) % (1 << 32) - (1 << 31))
    return _TYPES[dtype](x)


def apply(op: str, dtypes: Sequence[str], values: Sequence[Any]) -> Any:
    """Returns the result of an instruction of numbers; see `codes.MASK_OPS`.

    Args:
        op: the instruction.
        dtypes: the dtypes of its operands.
        values: the operands. The divisor of integers is a known number.
    """
    x, *others = (register(dtype, value) for dtype, value in zip(dtypes, values, strict=True))
    if op == "select":
        return ptx.where(x, others[1], others[0])
    if op in _COMPARE:
        return Boolean(_COMPARE[op](x, others[0]))
    if op in ("div", "rem") and dtypes[0] == "i":
        return _divided(op, x, values[1])
    return {"f": _of_floats, "i": _of_integers, "b": _of_booleans}[dtypes[0]](op, x, *others)


def _divided(op: str, x: Int32, divisor: int) -> Int32:
    """Returns the quotient of an integer and a positive number, rounded to 0, or the remainder, with the sign of x."""
    size = ptx.where(x < 0, -x, x)
    quotient = Int32(cutlass.Uint32(size) // cutlass.Uint32(divisor))
    quotient = ptx.where(x < 0, -quotient, quotient)
    return quotient if op == "div" else x - quotient * divisor


def _of_integers(op: str, x: Int32, y: Any = None) -> Any:
    if op == "sign":
        return ptx.where(x > 0, Int32(1), ptx.where(x < 0, Int32(-1), Int32(0)))
    return {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul": lambda: x * y,
        "neg": lambda: -x,
        "abs": lambda: ptx.where(x < 0, -x, x),
        "max": lambda: Int32(cutlass.max(x, y)),
        "min": lambda: Int32(cutlass.min(x, y)),
        "and": lambda: x & y,
        "or": lambda: x | y,
        "xor": lambda: x ^ y,
        "not": lambda: ~x,
        "to_float": lambda: Float32(x),
        "to_int": lambda: x,
        "stop_gradient": lambda: x,
    }[op]()


def _of_floats(op: str, x: Float32, y: Any = None) -> Any:
    if op == "sign":
        signed = ptx.where(x < 0.0, Float32(-1.0), x)  # 0, -0 and NaN stay
        return ptx.where(x > 0.0, Float32(1.0), signed)
    return {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul": lambda: x * y,
        "div": lambda: x / y,
        "neg": lambda: -x,
        "abs": lambda: ptx.from_bits(ptx.bits(x) & 0x7FFFFFFF),
        "max": lambda: ptx.maximum(x, y, keep_nan=True),
        "min": lambda: -ptx.maximum(-x, -y, keep_nan=True),
        "to_int": lambda: Int32(x),
        "stop_gradient": lambda: x,
    }[op]()


def _of_booleans(op: str, x: Boolean, y: Any = None) -> Boolean:
    return Boolean(
        {
            "and": lambda: x & y,
            "or": lambda: x | y,
            "xor": lambda: x != y,
            "max": lambda: x | y,
            "min": lambda: x & y,
            "not": lambda: x == Boolean(False),
            "stop_gradient": lambda: x,
        }[op]()
    )


def on_words(op: str, *words: Int32) -> Int32:
    """Returns the result of an instruction of booleans for 32 of them at once, a bit each."""
    x, *others = words
    y = others[0] if others else x
    return {
        "and": lambda: x & y,
        "or": lambda: x | y,
        "xor": lambda: x ^ y,
        "max": lambda: x | y,
        "min": lambda: x & y,
        "not": lambda: ~x,
        "eq": lambda: ~(x ^ y),
        "ne": lambda: x ^ y,
        "lt": lambda: ~x & y,
        "le": lambda: ~x | y,
        "gt": lambda: x & ~y,
        "ge": lambda: x | ~y,
        "select": lambda: (y & ~x) | (others[-1] & x),
        "stop_gradient": lambda: x,
    }[op]()


def shifted(x: Int32, count: Int32 | int) -> Int32:
    """Returns x shifted to the right, with zeros from the left."""
    return Int32(cutlass.Uint32(x) >> cutlass.Uint32(count))
