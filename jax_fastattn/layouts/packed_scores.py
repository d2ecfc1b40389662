# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of a score function of packed sequences, which counts inside of them, as a code that takes rows of arrays.

Kernels of packed sequences take the code as it is. Kernels that take sequences as segment ids know rows of the arrays
alone: two more planes, of queries and of keys, have the place of each row in its sequence. A plane of distances has no
such code, since rows do not say how far a pair is apart.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.layouts import packed
from jax_fastattn.programs.code import Builder, Code, Plane, is_near, operands_of, places
from jax_fastattn.programs.function import Program
from jax_fastattn.spec import Operands

_PLACES = {side: Plane(side, "i", per_batch=True, per_head=False) for side in ("query", "key")}


def has_rows_code(program: Program | None) -> bool:
    """Returns whether a score function takes rows, or has a code that does. A function without a code takes them."""
    return not isinstance(program, Code) or all(plane.kind != "distance" for plane in program.planes)


def code_by_rows(code: Code) -> Code:
    """Returns a code that takes rows. Its last planes have the places that `added` names."""
    builder, planes = Builder(), [*code.planes, *(_PLACES[side] for side in added(code))]
    number = {side: len(code.planes) + i for i, side in enumerate(added(code))}

    def affine(dtype: str, query: int, key: int, constant: int) -> int:
        found = builder.const(dtype, 0)
        for side, factor in (("query", query), ("key", key)):
            if factor:
                place = builder.put("i", "plane", number[side])
                place = place if dtype == "i" else builder.apply("f", "to_float", place)
                place = builder.apply(dtype, "mul", place, builder.const(dtype, factor))
                found = builder.apply(dtype, "add", found, place)
        return builder.apply(dtype, "add", found, builder.const(dtype, constant))

    values: list[int] = []
    for dtype, instruction in zip(code.dtypes, code.instructions, strict=True):
        op, *operands = instruction
        source = code.instructions[operands[0]] if op == "to_float" else ()
        if op == "affine":
            values.append(affine("i", *operands))
        elif source and source[0] == "affine" and is_near(*source[1:]):
            values.append(affine("f", *source[1:]))  # converted once for a row or a column, not for each score
        else:
            taken = operands_of(instruction)
            fixed = operands[: len(operands) - len(taken)]
            values.append(builder.put(dtype, op, *fixed, *(values[i] for i in taken)))
    results = [values[i] if i >= 0 else -1 for i in code.results]
    return builder.code([*results, *(-1 for _ in added(code))], planes)


def added(code: Code) -> tuple[str, ...]:
    """Returns the sides whose places become planes: "query", "key"."""
    factors = [operands for op, *operands in code.instructions if op == "affine"]
    return tuple(side for i, side in enumerate(_PLACES) if any(x[i] for x in factors))


def operands_by_rows(code: Code, operands: Operands, by_token: Operands) -> Operands:
    """Returns operands by token with the places that the code by rows reads, after its other planes."""
    assert operands.sequences is not None
    ids = by_token.query_segment_ids, by_token.key_value_segment_ids
    assert ids[0] is not None and ids[1] is not None
    starts = dict(zip(_PLACES, packed.token_starts(operands.sequences, ids[0], ids[1]), strict=True))
    found: dict[str, Any] = {}
    for side in added(code):
        name = f"{side}_integers"
        rows = jnp.arange(starts[side].shape[1], dtype=jnp.int32)[None] - starts[side]
        first = sum(place.operand == name for place in places((code,))[0])
        found[name] = inserted(getattr(by_token, name), rows[:, None, None], first)
    return by_token._replace(**found)


def inserted(stack: jax.Array | None, planes: jax.Array, first: int | None = None) -> jax.Array:
    """Returns a stack `[b, n, P, L]` of planes with further ones before number `first`, by default at its end."""
    if stack is None:
        return planes
    shape = jnp.broadcast_shapes(stack.shape[:2], planes.shape[:2])
    first = stack.shape[2] if first is None else first
    parts = stack[:, :, :first], planes, stack[:, :, first:]
    return jnp.concatenate([jnp.broadcast_to(x, (*shape, *x.shape[2:])) for x in parts], axis=2)


def shapes_by_rows(
    code: Code, shapes: tuple[tuple[str, int, int], ...], batch: int
) -> tuple[tuple[str, int, int], ...]:
    """Returns `Problem.planes` of the code by rows, from those of the code."""
    found = {name: (entries, heads) for name, entries, heads in shapes}
    for side in added(code):
        entries, heads = found.get(f"{side}_integers", (1, 1))
        found[f"{side}_integers"] = max(entries, batch), heads
    return tuple((name, *found[name]) for name in sorted(found))
