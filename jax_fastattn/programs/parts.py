# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Programs and planes of a part of a call: of some rows, of which the first ones are numbers at run time.

Rows of a part count from 0, and functions count rows of the whole call. So a program that computes with row numbers
gets two more planes, which hold the first query and the first key of the part, and adds them. All other planes of a
part are ranges of the planes of the call.

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

from jax_fastattn.programs.code import Builder, Code, Plane, operands_of, places
from jax_fastattn.programs.function import Function, Program
from jax_fastattn.programs.planes import concatenated

_FIRST_ROWS = Plane("head", "i", False, False), Plane("head", "i", False, False)
_HEAD_INTEGERS = "head_integers"


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
    first = jnp.stack([jnp.asarray(x, jnp.int32) for x in (part.first_query, part.first_key)]).reshape(1, 1, 2)
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
    """Returns a program whose last two planes hold the first rows; the program itself if it asks for no row."""
    if isinstance(program, Function):
        return replace(program, planes=(*program.planes, *_FIRST_ROWS), has_first_rows=True)
    return _code_counting_from(program) if any(op == "affine" for op, *_ in program.instructions) else program


@functools.lru_cache(maxsize=1024)
def _code_counting_from(program: Code) -> Code:
    planes = (*program.planes, *_FIRST_ROWS)
    builder, values = Builder(), list[int]()
    for dtype, (op, *operands) in zip(program.dtypes, program.instructions, strict=True):
        count = len(operands) - len(operands_of((op, *operands)))
        values.append(builder.put(dtype, op, *operands[:count], *(values[x] for x in operands[count:])))
        if op == "affine":
            values[-1] = _moved(builder, values[-1], operands[0], operands[1], len(program.planes))
    results = [x if x < 0 else values[x] for x in program.results]
    is_mask = len(results) == 1
    return builder.code(results if is_mask else [*results, -1, -1], planes)


def _moved(builder: Builder, x: int, a: int, b: int, plane: int) -> int:
    """Adds a times the number of one plane and b times the number of the next one to a value."""
    apply, const = builder.apply, builder.const
    query, key = (builder.put("i", "plane", plane + i) for i in range(2))
    if a == -b:
        return apply("i", "add", x, apply("i", "mul", const("i", a), apply("i", "sub", query, key)))
    for factor, first in ((a, query), (b, key)):
        x = apply("i", "add", x, apply("i", "mul", const("i", factor), first)) if factor else x
    return x
