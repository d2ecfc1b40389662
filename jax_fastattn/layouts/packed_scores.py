# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A code of packed sequences, which counts inside of them, as a code that takes rows of arrays.

Kernels of packed sequences take the code of a score function as it is. Kernels that take sequences as segment ids know
rows of the arrays alone: two more planes, of queries and of keys, have the place of each row in its sequence. If rows
are aligned (`packed_aligned.py`), a distance of places is one of rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.layouts import packed
from jax_fastattn.programs.code import Builder, Code, Plane, is_near, operands_of, places
from jax_fastattn.spec import Operands

_PLACES = {side: Plane(side, "i", per_batch=True, per_head=False) for side in ("query", "key")}


def code_by_rows(code: Code, *, is_aligned: bool) -> Code:
    """Returns a code that takes rows. Its last planes have the places that `added` names.

    Args:
        is_aligned: whether rows are aligned. A code that reads a plane of distances needs that.
    """
    sides = added(code, is_aligned=is_aligned)
    builder, planes = Builder(), [*code.planes, *(_PLACES[side] for side in sides)]
    number = {side: len(code.planes) + i for i, side in enumerate(sides)}

    def affine(dtype: str, query: int, key: int, constant: int) -> int:
        if _is_of_rows((query, key), is_aligned=is_aligned):
            found = builder.put("i", "affine", query, key, constant)
            return found if dtype == "i" else builder.apply("f", "to_float", found)
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
    is_mask = len(results) == 1
    return builder.code(results if is_mask else [*results, *(-1 for _ in sides)], planes)


def added(code: Code, *, is_aligned: bool) -> tuple[str, ...]:
    """Returns the sides whose places become planes: "query", "key"."""
    found = [tuple(operands[:2]) for op, *operands in code.instructions if op == "affine"]
    factors = [x for x in found if not _is_of_rows(x, is_aligned=is_aligned)]
    return tuple(side for i, side in enumerate(_PLACES) if any(x[i] for x in factors))


def _is_of_rows(factors: tuple[Any, ...], *, is_aligned: bool) -> bool:
    """Returns whether factors of query and key make the same number of rows as of places."""
    return is_aligned and factors[0] == -factors[1]


def operands_by_rows(
    code: Code, operands: Operands, by_token: Operands, *, is_aligned: bool, is_last: bool
) -> Operands:
    """Returns operands by token with the places that the code by rows reads, after its other planes.

    Args:
        operands: the operands of the packed call.
        is_last: whether no code has planes after this one's.
    """
    assert operands.sequences is not None
    ids = by_token.query_segment_ids, by_token.key_value_segment_ids
    assert ids[0] is not None and ids[1] is not None
    starts = dict(zip(_PLACES, packed.token_starts(operands.sequences, ids[0], ids[1]), strict=True))
    found: dict[str, Any] = {}
    for side in added(code, is_aligned=is_aligned):
        name = f"{side}_integers"
        rows = jnp.arange(starts[side].shape[1], dtype=jnp.int32)[None] - starts[side]
        first = None if is_last else sum(place.operand == name for place in places((code,))[0])
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
