# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of a function of one score: what is left of it once planes have been cut out, in single numbers.

A code has no array in it, is equal for equal functions, and is part of what a call fixes. It knows neither batch entry
nor head, which are indices of planes: `vmap` and meshes renumber both.

What stays out: how a function becomes a code (`lower.py`), how it is evaluated in JAX (`evaluation.py`), and how planes
are computed (`planes.py`). A process that compiles kernels reads codes, and imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["head", "query", "key", "distance", "table"]
Instruction = tuple[Any, ...]


@dataclass(frozen=True)
class Plane:
    """An array of numbers `[b, n, L]` that a code reads.

    Attributes:
        kind: which index its last axis has: none ("head", L is 1), query, key, their "distance" key - query + T, or one
            that the code computes ("table").
        dtype: "f", floats in the dtype of logits, or "i", int32.
        per_batch, per_head: whether batch entries or query heads have their own numbers; else the axis is of size 1.
        length: L of a table; else 0.
    """

    kind: Kind
    dtype: str
    per_batch: bool
    per_head: bool
    length: int = 0


@dataclass(frozen=True)
class Code:
    """Instructions in single assignment form: value i is the result of instruction i.

    Attributes:
        instructions: `(op, *operands)`. Operands are values, except for a text of "const", a plane of "plane", a plane
            and a value of "table", and three numbers of "affine": `a * query + b * key + c`.
        dtypes: "f", "i" or "b" of each value.
        results: of a mask function, whether the pair counts. Of a score function, the new score, and its derivatives by
            the score and by each plane; -1 for planes of integers.
        planes: what it reads.
    """

    instructions: tuple[Instruction, ...]
    dtypes: str
    results: tuple[int, ...]
    planes: tuple[Plane, ...] = ()

    def __str__(self) -> str:
        found = enumerate(zip(self.dtypes, self.instructions, strict=True))
        lines = [f"{i}:{dtype} = {' '.join(map(str, x))}" for i, (dtype, x) in found]
        return "; ".join([*lines, f"return {' '.join(map(str, self.results))}"])

    def needed(self, results: Sequence[int]) -> set[int]:
        """Returns the values that some results need."""
        needed, ahead = set[int](), [x for x in results if x >= 0]
        while ahead:
            i = ahead.pop()
            if i not in needed:
                needed.add(i)
                ahead += operands_of(self.instructions[i])
        return needed


@dataclass(frozen=True)
class Place:
    """Where an operand has a plane.

    Attributes:
        operand: name of the operand, see `spec.Operands`.
        start: number of the plane in the stack, or of the first element of a table.
    """

    operand: str
    start: int
    plane: Plane


class HasPlanes(Protocol):
    """A code, or another program."""

    @property
    def planes(self) -> Sequence[Plane]:
        """What it reads."""
        ...


def places(programs: Sequence[HasPlanes | None]) -> list[list[Place]]:
    """Returns where the planes of each program are, in the order in which `stack` puts them."""
    taken: dict[str, int] = {}
    found: list[list[Place]] = []
    for program in programs:
        found.append([])
        for plane in program.planes if program is not None else ():
            name = f"{plane.kind}_{'numbers' if plane.dtype == 'f' else 'integers'}"
            found[-1].append(Place(name, taken.get(name, 0), plane))
            taken[name] = taken.get(name, 0) + (plane.length if plane.kind == "table" else 1)
    return found


def operands_of(instruction: Instruction) -> tuple[int, ...]:
    """Returns the values that an instruction takes."""
    op, *operands = instruction
    return () if op in _LEAVES else tuple(operands[1:] if op == "table" else operands)


def parsed(dtype: str, text: str) -> Any:
    """Returns the number of a constant."""
    return {"f": float, "i": int, "b": lambda x: x == "True"}[dtype](text)


class Builder:
    """Makes a code without two equal instructions, and without what is known already."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.dtypes: list[str] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def put(self, dtype: str, op: str, *operands: Any) -> int:
        key = dtype, op, *operands
        if key not in self._known:
            self._known[key] = len(self.instructions)
            self.instructions.append((op, *operands))
            self.dtypes.append(dtype)
        return self._known[key]

    def const(self, dtype: str, value: Any) -> int:
        return self.put(dtype, "const", str({"f": float, "i": int, "b": bool}[dtype](value)))

    def apply(self, dtype: str, op: str, *args: int) -> int:
        """Adds an instruction, or returns a value that is known to equal its result."""
        numbers = [self.number(x) for x in args]
        if op in _FOLD and None not in numbers:
            try:
                found = _FOLD[op](*numbers)
            except (ValueError, OverflowError):  # such as the logarithm of a negative number
                return self.put(dtype, op, *args)
            if dtype != "i" or -(2**31) <= found < 2**31:
                return self.const(dtype, found)
        neutral = _NEUTRAL.get(op)
        if neutral is not None and numbers[1] == neutral:
            return args[0]
        if neutral is not None and op in ("add", "mul", "and") and numbers[0] == neutral:
            return args[1]
        if op == "select" and (numbers[0] is not None or args[1] == args[2]):
            return args[2] if numbers[0] else args[1]
        return self.put(dtype, op, *args)

    def number(self, i: int) -> Any:
        """Returns the number of a constant; None of other values."""
        op, *operands = self.instructions[i]
        return parsed(self.dtypes[i], operands[0]) if op == "const" else None

    def code(self, results: Sequence[int], planes: Sequence[Plane]) -> Code:
        """Returns the code with these results, without what none of them needs."""
        whole = Code(tuple(self.instructions), "".join(self.dtypes), tuple(results), tuple(planes))
        order = sorted(whole.needed(results))
        number = {old: new for new, old in enumerate(order)} | {-1: -1}

        def renamed(instruction: Instruction) -> Instruction:
            op, *operands = instruction
            first = operands[: len(operands) - len(operands_of(instruction))]
            return op, *first, *(number[x] for x in operands_of(instruction))

        instructions = tuple(renamed(self.instructions[i]) for i in order)
        dtypes = "".join(self.dtypes[i] for i in order)
        return Code(instructions, dtypes, tuple(number[x] for x in results), tuple(planes))


_LEAVES = ("score", "const", "plane", "affine")

# What leaves its first operand as it is, in the place of the second; the first three take their operands in any order.
_NEUTRAL: dict[str, Any] = {"add": 0, "mul": 1, "and": True, "sub": 0, "div": 1}

_FOLD: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "to_float": float,
    "log": math.log,
    "exp": math.exp,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}


# Positions are below 2^21, so that sums of positions with these factors and numbers are exact as float32.
_MAX_FACTORS, MAX_CONSTANT = 4, 1 << 22


def is_near(query: int, key: int, constant: int) -> bool:
    """Returns whether `query * q + key * k + constant` is exact as float32 for all positions."""
    return abs(query) + abs(key) <= _MAX_FACTORS and abs(constant) <= MAX_CONSTANT
