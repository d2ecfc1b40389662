# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates the code of a score function for one score after the other.

Each value is computed where it changes: once for a query head, once for an accumulator row or column of the lane in a
pass over its scores, or for each score.
"""

from collections.abc import Callable
from typing import Any

from cutlass import Float32

from jax_fastattn.kernels.codes import ScoreParts
from jax_fastattn.kernels.device import instructions, ptx
from jax_fastattn.kernels.device.softmax import LN_2, LOG2_E
from jax_fastattn.kernels.features.places import Element
from jax_fastattn.kernels.features.program import functions
from jax_fastattn.kernels.features.program.forms import Index, Line, Scaled, add, multiply, negative, number, register
from jax_fastattn.kernels.features.program.planes import PlaneReader
from jax_fastattn.programs.code import MAX_CONSTANT, is_near, parsed


class Values:
    """The values of one pass over the scores of a tile, or those of a head.

    Args:
        parts: what is compiled in.
        planes: loads numbers of the head.
        of_head: the values that the head alone decides, by number.
    """

    def __init__(self, parts: ScoreParts, planes: PlaneReader, of_head: dict[int, Any]):
        self._parts, self._planes, self._of_head = parts, planes, of_head
        self._memo: dict[Any, Any] = {}

    @classmethod
    def head(cls, parts: ScoreParts, planes: PlaneReader) -> dict[int, Any]:
        """Returns the values that the head alone decides, by number."""
        found: dict[int, Any] = {}
        values = cls(parts, planes, found)
        for i in parts.head_values:
            x = values._new(i, None, None)
            found[i] = x if isinstance(x, bool | int | float) else register(parts.code.dtypes[i], x)
        return found

    def value(self, i: int, at: Element, score: Any) -> Any:
        """Returns a value in any form, see `forms.py`.

        Args:
            i: its number.
            at: where the score lies.
            score: the score, a float in any form.
        """
        depends = self._parts.depends[i]
        if not depends:
            return self._of_head[i]
        row, column = ("key", "query") if at.tile.transposed else ("query", "key")
        has_row, has_column = ("score" in depends or name in depends for name in (row, column))
        key = (i, at.i if has_row else None, at.column if has_column else None)
        if key not in self._memo:
            self._memo[key] = self._new(i, at, score)
        return self._memo[key]

    def times(self, i: int, factor: float, at: Element, score: Any) -> Any:
        """Returns a float times a known number, which is multiplied where that takes no instruction, if it can be."""
        op, *args = self._parts.code.instructions[i]
        if op in ("add", "sub"):
            x, y = (self.times(x, factor, at, score) for x in args)
            return add(x, y if op == "add" else negative(y))
        if op == "neg":
            return self.times(args[0], -factor, at, score)
        return multiply(self.value(i, at, score), factor)

    def less(self, i: int, at: Element, score: Any, less: Float32) -> Any:
        """Returns a float in base 2, less a number, which joins a term without the score, or a last product."""
        op, *args = self._parts.code.instructions[i]
        if op in ("add", "sub"):
            of_score = ["score" in self._parts.depends[x] for x in args]
            factors = LOG2_E, LOG2_E if op == "add" else -LOG2_E
            x, y = (self.times(x, factor, at, score) for x, factor in zip(args, factors, strict=True))
            if not all(of_score):
                x, y = (x, y) if of_score[0] else (y, x)
                return add(x, add(y, -less))
            return add(add(x, y), -less)
        return add(self.times(i, LOG2_E, at, score), -less)

    def _new(self, i: int, at: Any, score: Any) -> Any:
        code = self._parts.code
        op, *args = code.instructions[i]
        if op == "const":
            return parsed(code.dtypes[i], args[0])
        if op == "score":
            return score
        if op == "affine":
            return self._position(*args, at)
        if op == "plane":
            return self._plane(args[0], at)
        if op == "stop_gradient":
            return self._get(args[0], at, score)
        if op == "to_float":
            return self._to_float(args[0], at, score)
        if op == "select":
            which, no, yes = (self._get(x, at, score) for x in args)
            if isinstance(which, bool):
                return yes if which else no
            return ptx.where(which, *(register(code.dtypes[i], x) for x in (yes, no)))
        dtypes = [code.dtypes[x] for x in args]
        values = [self._get(x, at, score) for x in args]
        if dtypes[0] == "i":
            return self._of_integers(op, values)
        if dtypes[0] == "b":
            return instructions.apply(op, dtypes, values)
        return self._of_floats(op, args, values)

    def _get(self, i: int, at: Any, score: Any) -> Any:
        return self._of_head[i] if at is None else self.value(i, at, score)

    # Positions and planes.

    def _position(self, query: int, key: int, constant: int, at: Element) -> Index:
        """Returns `query * q + key * k + constant`."""
        tile = at.tile
        row, column = (key, query) if tile.transposed else (query, key)
        name = ("base", row, column)
        if name not in self._memo:
            found = None
            for factor, first in ((row, lambda: tile.row), (column, lambda: tile.column)):
                if factor:
                    term = first() if factor == 1 else first() * factor
                    found = term if found is None else found + term
            self._memo[name] = found
        step = constant + row * 8 * at.i + column * at.column
        return Index(self._memo[name], step, is_near(query, key, constant))

    def _plane(self, plane: int, at: Any) -> Any:
        kind = self._parts.places[plane].plane.kind
        factors = {"query": (1, 0, 0), "key": (0, 1, 0), "distance": (-1, 1, 0)}.get(kind)
        index = None if factors is None else self._position(*factors, at)
        return self._planes.load(plane, index, self._memo)

    # Integers.

    def _of_integers(self, op: str, values: list[Any]) -> Any:
        if op in instructions.COMPARISONS:
            return self._compare(op, *values)
        x, y = values if len(values) == 2 else (values[0], None)
        if op == "neg" and isinstance(x, Index):
            return Index(-x.base, -x.step)
        if op == "mul" and isinstance(x, int):
            x, y = y, x
        if op == "mul" and isinstance(x, Index) and isinstance(y, int):
            return Index(x.base * instructions.register("i", y), x.step * y)
        if op in ("add", "sub") and any(isinstance(z, Index) for z in (x, y)):
            return _sum(x, y, 1 if op == "add" else -1)
        known = [z if isinstance(z, int) else register("i", z) for z in values]
        return instructions.apply(op, "i" * len(known), known)

    @staticmethod
    def _compare(op: str, x: Any, y: Any) -> Any:
        """Returns a comparison, whose steps are on the side of the known number if nothing overflows."""
        if all(map(_is_near, (x, y))) and any(isinstance(z, Index) for z in (x, y)):
            difference = _sum(x, y, -1)
            return instructions.apply(op, "ii", [difference.base, -difference.step])
        return instructions.apply(op, "ii", [z if isinstance(z, int) else register("i", z) for z in (x, y)])

    def _to_float(self, i: int, at: Any, score: Any) -> Any:
        """Returns an integer as a float. One conversion serves all scores that differ in known steps."""
        op, *args = self._parts.code.instructions[i]
        if at is not None and self._parts.depends[i]:
            if op == "abs":
                return ptx.magnitude(register("f", self._to_float(args[0], at, score)))
            if op in ("max", "min"):
                x, y = (register("f", self._to_float(z, at, score)) for z in args)
                return ptx.maximum(x, y) if op == "max" else -ptx.maximum(-x, -y)
            if op == "select" and not isinstance(which := self.value(args[0], at, score), bool):
                yes, no = (register("f", self._to_float(z, at, score)) for z in (args[2], args[1]))
                return ptx.where(which, yes, no)
        x = self._get(i, at, score)
        if isinstance(x, int):
            return float(x)
        if not isinstance(x, Index):
            return Float32(x)
        name = ("float", id(x.base))
        if name not in self._memo:
            self._memo[name] = Float32(x.base), x.base  # which keeps the id
        return Line(self._memo[name][0], 1.0, float(x.step))

    # Floats.

    def _of_floats(self, op: str, args: list[int], values: list[Any]) -> Any:
        depends = self._parts.depends
        x, y = values if len(values) == 2 else (values[0], None)
        if op in _ALGEBRA:
            return _ALGEBRA[op](x, y)
        if op == "mul":
            if not depends[args[0]] and depends[args[1]]:
                args, x, y = args[::-1], y, x
            return multiply(x, y, depends[args[1]])
        if op == "div":
            over = 1.0 / y if isinstance(y, float) and y != 0.0 else ptx.reciprocal(register("f", y))
            return multiply(x, over, depends[args[1]])
        if op == "exp":
            return ptx.exp2(register("f", multiply(x, LOG2_E)))
        if op == "log":
            return Scaled(ptx.log2(register("f", x)), LN_2)
        if op == "tanh":
            rough = not self._parts.exact and "score" in depends[args[0]]
            return ptx.tanh(register("f", x)) if rough else functions.tanh(register("f", x))
        if op in functions.OF_ONE:
            return functions.OF_ONE[op](register("f", x))
        return instructions.apply(op, "f" * len(values), [number(z) for z in values])


_ALGEBRA: dict[str, Callable[[Any, Any], Any]] = {
    "add": add,
    "sub": lambda x, y: add(x, negative(y)),
    "neg": lambda x, y: negative(x),
}


def _sum(x: Any, y: Any, sign: int) -> Index:
    """Returns x + sign y, of which one is an `Index`."""
    bases = [z.base if isinstance(z, Index) else None if isinstance(z, int) else z for z in (x, y)]
    steps = [z.step if isinstance(z, Index) else z if isinstance(z, int) else 0 for z in (x, y)]
    first, second = bases
    if second is None:
        base = first
    elif first is None:
        base = second if sign == 1 else -second
    else:
        base = first + second if sign == 1 else first - second
    return Index(base, steps[0] + sign * steps[1])


def _is_near(x: Any) -> bool:
    """Returns whether sums with an integer stay in int32, see `Index`."""
    return abs(x) <= MAX_CONSTANT if isinstance(x, int) else isinstance(x, Index) and x.is_near
