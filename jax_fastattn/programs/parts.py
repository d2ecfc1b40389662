# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Programs and planes of a part of a call: of some rows, of which the first ones are numbers at run time.

Rows of a part count from 0, and functions count rows of the whole call. So a program that computes with row numbers
gets three more planes, which hold the first query and the first key of the part, and their distance. It adds them, or
compares with them: kernels decide a comparison of positions with a number of a head for many pairs at once. All other
planes of a part are ranges of the planes of the call.

What stays out: which rows are a part (`ops/ring/`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.programs.code import Builder, Code, Instruction, Plane, operands_of, places
from jax_fastattn.programs.facts import COMPARISONS
from jax_fastattn.programs.function import Function, Program
from jax_fastattn.programs.planes import concatenated

_FIRST_ROWS = (Plane("head", "i", False, False),) * 3
_HEAD_INTEGERS = "head_integers"

# Factors of query and key in a number that one of the planes has, by the place of that plane.
_FACTORS = ((1, 0), (0, 1), (-1, 1))
# Comparisons of positions with numbers up to this are moved: no sum of both leaves int32.
_MOST = 1 << 28


@dataclass(frozen=True)
class Part:
    """Some rows of a call.

    Attributes:
        first_query, first_key: their rows in the whole call.
        queries, keys: how many rows.
        whole_queries: T of the whole call.
    """

    first_query: Any
    first_key: Any
    queries: int
    keys: int
    whole_queries: int

    def _range(self, name: str) -> tuple[Any, int] | None:
        """Returns first index and length of the part's range of an operand with planes; None for all of it."""
        kind = name.partition("_")[0]
        distance = self.first_key - self.first_query + (self.whole_queries - self.queries)
        ranges = {
            "query": (self.first_query, self.queries),
            "key": (self.first_key, self.keys),
            "distance": (distance, self.queries + self.keys),
        }
        return ranges.get(kind)

    def take(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the part's range of an operand with planes."""
        found = self._range(name)
        return x if found is None else lax.dynamic_slice_in_dim(x, *found, axis=3)

    def add(self, name: str, total: jax.Array, x: jax.Array) -> jax.Array:
        """Adds the gradient of what `take` returns to the gradient of an operand."""
        found = self._range(name)
        x = x.astype(total.dtype)
        if found is None:
            return total + x
        start, size = found
        x = lax.dynamic_slice_in_dim(total, start, size, axis=3) + x
        return lax.dynamic_update_slice_in_dim(total, x, start, axis=3)


def of_part(
    programs: Sequence[Program | None], stacks: Mapping[str, jax.Array], part: Part
) -> tuple[list[Program | None], dict[str, jax.Array]]:
    """Returns the programs of a part, and its operands with planes by name.

    Args:
        programs: those of the call.
        stacks: the operands of the call that have their planes, by name.
        part: the rows.
    """
    found = [None if program is None else _counting_from(program) for program in programs]
    taken = {name: part.take(name, x) for name, x in stacks.items()}
    first = part.first_query, part.first_key, part.first_key - part.first_query
    first = jnp.stack([jnp.asarray(x, jnp.int32) for x in first]).reshape(1, 1, -1)
    integers: list[jax.Array] = []
    for old, new, own in zip(programs, found, places(programs), strict=True):
        integers += [
            lax.slice_in_dim(stacks[_HEAD_INTEGERS], x.start, x.start + 1, axis=2)
            for x in own
            if x.operand == _HEAD_INTEGERS
        ]
        integers += [first] * (new is not old)
    return found, taken | ({_HEAD_INTEGERS: concatenated(integers)} if integers else {})


def _counting_from(program: Program) -> Program:
    """Returns a program whose last planes are `_FIRST_ROWS`; the program itself if it asks for no row."""
    if isinstance(program, Function):
        return replace(program, planes=(*program.planes, *_FIRST_ROWS), has_first_rows=True)
    return _code_counting_from(program) if any(op == "affine" for op, *_ in program.instructions) else program


@functools.lru_cache(maxsize=1024)
def _code_counting_from(program: Code) -> Code:
    planes = (*program.planes, *_FIRST_ROWS)
    builder, values = Builder(), list[int]()
    for dtype, instruction in zip(program.dtypes, program.instructions, strict=True):
        op, *operands = instruction
        compared = _compared(builder, program, instruction, len(program.planes))
        if compared is not None:
            values.append(compared)
            continue
        count = len(operands) - len(operands_of(instruction))
        values.append(builder.put(dtype, op, *operands[:count], *(values[x] for x in operands[count:])))
        if op == "affine":
            values[-1] = _moved(builder, values[-1], operands[0], operands[1], len(program.planes))
    results = [x if x < 0 else values[x] for x in program.results]
    is_mask = len(results) == 1
    return builder.code(results if is_mask else [*results, *(-1 for _ in _FIRST_ROWS)], planes)


def _moved(builder: Builder, x: int, a: int, b: int, plane: int) -> int:
    """Returns a value plus a times the first query and b times the first key. `plane` is the first of `_FIRST_ROWS`."""
    apply, const = builder.apply, builder.const
    query, key, distance = (builder.put("i", "plane", plane + i) for i in range(3))
    terms = ((b, distance),) if a == -b else ((a, query), (b, key))
    for factor, first in terms:
        x = apply("i", "add", x, apply("i", "mul", const("i", factor), first)) if factor else x
    return x


def _compared(builder: Builder, program: Code, instruction: Instruction, plane: int) -> int | None:
    """Returns a comparison of positions with one of `_FIRST_ROWS`; None if an instruction is none that can be one."""
    op, *operands = instruction
    if op not in COMPARISONS:
        return None
    lines = [_line(program, x) for x in operands]
    if None in lines:
        return None
    a, b, c = (x - y for x, y in zip(*lines, strict=True))  # pyright: ignore[reportArgumentType] (None is not in it)
    for i, factors in enumerate(_FACTORS):
        first = builder.put("i", "plane", plane + i)
        if (a, b) == factors:  # first >= -(a q + b k + c)
            return builder.apply("b", op, first, builder.put("i", "affine", -a, -b, -c))
        if (-a, -b) == factors:
            return builder.apply("b", op, builder.put("i", "affine", a, b, c), first)
    return None


def _line(program: Code, i: int) -> tuple[int, int, int] | None:
    """Returns the factors of query and key of a value, and what is added to both; None for a value that has others."""
    op, *operands = program.instructions[i]
    if op == "const" and program.dtypes[i] == "i":
        found = 0, 0, int(operands[0])
    elif op == "affine":
        found = operands[0], operands[1], operands[2]
    else:
        return None
    return found if abs(found[2]) <= _MOST else None
