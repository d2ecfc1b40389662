# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a mask function says of all pairs of a tile at once, by arithmetic of intervals.

Each integer becomes an interval, and each boolean a pair: whether it may be True for some pair, and whether it must be
True for all. So a tile may turn out to be hidden or visible as a whole, without a look at its pairs. Intervals know
nothing of how two values depend on each other: they may leave a tile undecided, and never decide one wrongly.

It runs on Python integers as well as on device integers, by `Arithmetic`; tests compare it with all pairs of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from jax_fastattn.programs.code import Code, parsed

Int = Any  # a Python int or a device integer

# Positions are below this where there are lists.
_POSITIONS = 1 << 21
# Sums and products are computed up to this size, which no int32 operation leaves.
_MOST = 1 << 30
_ANY = 1 << 31


class Arithmetic(Protocol):
    """Operations that Python integers and device integers write differently."""

    def minimum(self, x: Int, y: Int) -> Int: ...

    def maximum(self, x: Int, y: Int) -> Int: ...

    def where(self, condition: Any, x: Int, y: Int) -> Int: ...

    def quotient(self, x: Int, divisor: int) -> Int:
        """Returns x / divisor, rounded to 0."""
        ...


@dataclass(frozen=True)
class Interval:
    """Integers from `low` to `high`, of which none is larger than `limit`, as known ahead of a launch, or below it."""

    low: Int
    high: Int
    limit: int = _ANY


@dataclass(frozen=True)
class Truth:
    """A boolean of all pairs: 1 or 0 for whether it may be, and whether it must be True."""

    may: Int
    must: Int


UNKNOWN = Truth(1, 0)


@dataclass(eq=False)
class Tile:
    """A tile of pairs, for which a code is evaluated.

    Attributes:
        code: of a mask function.
        queries, keys: the first and the last one of the tile.
        plane: returns the interval of a plane of integers; None if it is not known.
        ops: how numbers are computed.
    """

    code: Code
    queries: tuple[Int, Int]
    keys: tuple[Int, Int]
    plane: Callable[[int], Interval | None]
    ops: Arithmetic
    _truths: dict[int, Truth] = field(default_factory=dict[int, Truth])
    _intervals: dict[int, Interval | None] = field(default_factory=dict[int, "Interval | None"])

    def result(self) -> Truth:
        """Returns what the function says of the tile."""
        return self.truth(self.code.results[0])

    # Booleans.

    def truth(self, i: int) -> Truth:
        """Returns a boolean value."""
        if i not in self._truths:
            self._truths[i] = self._new_truth(*self.code.instructions[i])
        return self._truths[i]

    def _new_truth(self, op: str, *operands: Any) -> Truth:
        if op == "const":
            x = int(parsed("b", operands[0]))
            return Truth(x, x)
        dtypes = {self.code.dtypes[x] for x in operands}
        if dtypes == {"i"} and op in _COMPARISONS:
            x, y = (self.interval(i) for i in operands)
            return UNKNOWN if x is None or y is None else self._compared(op, x, y)
        if dtypes != {"b"} or op not in _TRUTHS:
            return UNKNOWN
        return _TRUTHS[op](*(self.truth(i) for i in operands))

    def _compared(self, op: str, x: Interval, y: Interval) -> Truth:
        if op in ("gt", "ge"):
            return self._compared({"gt": "lt", "ge": "le"}[op], y, x)
        if op == "lt":
            return Truth(self._flag(x.low < y.high), self._flag(x.high < y.low))
        if op == "le":
            return Truth(self._flag(x.low <= y.high), self._flag(x.high <= y.low))
        may = self._flag(x.low <= y.high) & self._flag(y.low <= x.high)
        must = self._flag(x.low == y.high) & self._flag(x.high == y.low)
        same = Truth(may, must)
        return same if op == "eq" else _not(same)

    def _flag(self, condition: Any) -> Int:
        return self.ops.where(condition, 1, 0)

    # Integers.

    def interval(self, i: int) -> Interval | None:
        """Returns an integer value; None if nothing is known of it."""
        if i not in self._intervals:
            self._intervals[i] = self._new_interval(*self.code.instructions[i])
        return self._intervals[i]

    def _new_interval(self, op: str, *operands: Any) -> Interval | None:
        if op == "const":
            x = parsed("i", operands[0])
            return Interval(x, x, abs(x)) if abs(x) <= _MOST else None
        if op == "affine":
            return self._affine(*operands)
        if op == "plane":
            return self.plane(operands[0])
        if op == "to_int" and self.code.dtypes[operands[0]] == "b":
            x = self.truth(operands[0])
            return Interval(x.must, x.may, 1)
        if op == "select":
            x, y = (self.interval(i) for i in operands[1:])
            return None if x is None or y is None else self._either(self.truth(operands[0]), x, y)
        if op not in _INTERVALS or {self.code.dtypes[x] for x in operands} != {"i"}:
            return None
        values = [self.interval(i) for i in operands]
        known = [x for x in values if x is not None]
        return getattr(self, _INTERVALS[op])(*known) if len(known) == len(values) else None

    def _affine(self, a: int, b: int, c: int) -> Interval | None:
        limit = (abs(a) + abs(b)) * _POSITIONS + abs(c)
        if limit > _MOST:
            return None
        low, high = (
            [ends[end ^ (n < 0)] * n for n, ends in ((a, self.queries), (b, self.keys)) if n] for end in (0, 1)
        )
        return Interval(sum(low, start=c), sum(high, start=c), limit)

    def _either(self, truth: Truth, x: Interval, y: Interval) -> Interval:
        """Returns y where a boolean is True, else x."""
        where, ops = self.ops.where, self.ops
        low, high = ops.minimum(x.low, y.low), ops.maximum(x.high, y.high)
        low = where(truth.must != 0, y.low, where(truth.may == 0, x.low, low))
        high = where(truth.must != 0, y.high, where(truth.may == 0, x.high, high))
        return Interval(low, high, max(x.limit, y.limit))

    def _sum(self, x: Interval, y: Interval) -> Interval | None:
        limit = x.limit + y.limit
        return Interval(x.low + y.low, x.high + y.high, limit) if limit <= _MOST else None

    def _difference(self, x: Interval, y: Interval) -> Interval | None:
        negative = self._negative(y)
        return None if negative is None else self._sum(x, negative)

    def _negative(self, x: Interval) -> Interval | None:
        return Interval(-x.high, -x.low, x.limit) if x.limit <= _MOST else None

    def _absolute(self, x: Interval) -> Interval | None:
        if x.limit > _MOST:
            return None
        low = self.ops.maximum(self.ops.maximum(x.low, -x.high), 0)
        return Interval(low, self.ops.maximum(-x.low, x.high), x.limit)

    def _product(self, x: Interval, y: Interval) -> Interval | None:
        """Returns a product with a known number."""
        if not isinstance(y.low, int) or y.low != y.high:
            x, y = y, x
        if not isinstance(y.low, int) or y.low != y.high or (limit := x.limit * y.limit) > _MOST:
            return None
        ends = (x.low, x.high) if y.low >= 0 else (x.high, x.low)
        return Interval(ends[0] * y.low, ends[1] * y.low, limit)

    def _quotient(self, x: Interval, y: Interval) -> Interval:
        return Interval(self.ops.quotient(x.low, y.low), self.ops.quotient(x.high, y.low), x.limit)

    def _remainder(self, x: Interval, y: Interval) -> Interval:
        first, last = (self.ops.quotient(end, y.low) for end in (x.low, x.high))
        is_same, most = first == last, y.low - 1
        low = self.ops.where(is_same, x.low - first * y.low, self.ops.where(x.low >= 0, 0, -most))
        high = self.ops.where(is_same, x.high - last * y.low, self.ops.where(x.high <= 0, 0, most))
        return Interval(low, high, y.low)

    def _larger(self, x: Interval, y: Interval) -> Interval:
        most = self.ops.maximum
        return Interval(most(x.low, y.low), most(x.high, y.high), max(x.limit, y.limit))

    def _smaller(self, x: Interval, y: Interval) -> Interval:
        least = self.ops.minimum
        return Interval(least(x.low, y.low), least(x.high, y.high), max(x.limit, y.limit))


_INTERVALS = {
    "add": "_sum",
    "sub": "_difference",
    "neg": "_negative",
    "abs": "_absolute",
    "mul": "_product",
    "div": "_quotient",
    "rem": "_remainder",
    "max": "_larger",
    "min": "_smaller",
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _not(x: Truth) -> Truth:
    return Truth(1 ^ x.must, 1 ^ x.may)


def _and(x: Truth, y: Truth) -> Truth:
    return Truth(x.may & y.may, x.must & y.must)


def _or(x: Truth, y: Truth) -> Truth:
    return Truth(x.may | y.may, x.must | y.must)


def _differ(x: Truth, y: Truth) -> Truth:
    return _or(_and(x, _not(y)), _and(_not(x), y))


_TRUTHS: dict[str, Callable[..., Truth]] = {
    "not": _not,
    "and": _and,
    "min": _and,
    "or": _or,
    "max": _or,
    "xor": _differ,
    "ne": _differ,
    "eq": lambda x, y: _not(_differ(x, y)),
    "lt": lambda x, y: _and(_not(x), y),
    "le": lambda x, y: _or(_not(x), y),
    "gt": lambda x, y: _and(x, _not(y)),
    "ge": lambda x, y: _or(x, _not(y)),
    "select": lambda x, y, z: _or(_and(x, z), _and(_not(x), y)),
    "stop_gradient": lambda x: x,
}
