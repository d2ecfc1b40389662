# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the code of a score function says of its values, without their numbers: how kernels evaluate it depends on that.

A process that compiles kernels reads this file, and imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_fastattn.programs.code import Code, Instruction, operands_of, parsed

# These give a finite number for finite numbers, apart from overflow.
_TAME = frozenset(
    (
        *("score", "to_float", "stop_gradient", "select"),
        *("add", "sub", "mul", "neg", "abs", "max", "min", "sign", "tanh", "logistic"),
    )
)

# The last digits of these depend on who computes them. In a mask function XLA does, unless they are of pairs.
INEXACT = ("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt")

_SHARED = (frozenset[str](), frozenset(["query"]), frozenset(["key"]))

_OF_PAIRS = {"query": {"query"}, "key": {"key"}, "distance": {"query", "key"}}


def depends(code: Code) -> list[frozenset[str]]:
    """Returns of each value which of "score", "query" and "key" it depends on; none for a number of a head."""
    found: list[frozenset[str]] = []
    for instruction in code.instructions:
        found.append(_own(code, instruction).union(*(found[x] for x in operands_of(instruction))))
    return found


def _own(code: Code, instruction: Instruction) -> frozenset[str]:
    op, *operands = instruction
    if op == "score":
        return frozenset(["score"])
    if op == "affine":
        return frozenset(name for name, factor in zip(("query", "key"), operands, strict=False) if factor)
    return frozenset(_OF_PAIRS.get(code.planes[operands[0]].kind, ())) if op == "plane" else frozenset()


def terms(code: Code) -> list[tuple[int, int]] | None:
    """Returns sign and value of each term, if the result is the score plus terms without it, else None."""
    of_score, found = [("score" in x) for x in depends(code)], list[tuple[int, int]]()
    i = code.results[0]
    while code.instructions[i] != ("score",):
        op, *operands = code.instructions[i]
        if op not in ("add", "sub") or all(of_score[x] for x in operands):
            return None
        x, y = operands
        if of_score[y]:
            if op == "sub":
                return None
            x, y = y, x
        if not of_score[x]:
            return None
        found.append((1 if op == "add" else -1, y))
        i = x
    return found or None


def reads_positions(code: Code) -> bool:
    """Returns whether a code reads where a pair lies, other than by planes of queries and of keys."""
    found = any(op == "affine" for op, *_ in code.instructions)
    return found or any(plane.kind == "distance" for plane in code.planes)


def needs_equal_numbers(code: Code) -> bool:
    """Returns whether a mask function holds only where a number of the query equals one of the key, such as an id."""
    of, ahead, sides = depends(code), [code.results[0]], ({"query"}, {"key"})
    while ahead:
        op, *operands = code.instructions[ahead.pop()]
        if op == "and":
            ahead += operands
        elif op == "eq" and all(side in map(set, (of[x] for x in operands)) for side in sides):
            return True
    return False


def is_inexact(code: Code) -> bool:
    """Returns whether a mask function has instructions whose last digits depend on who computes them."""
    return any(op in INEXACT for op, *_ in code.instructions)


def scale_factor(code: Code) -> str | None:
    """Returns which index decides a number that the score is multiplied by first: "head", "query" or "key".

    Kernels multiply it by the scale, once for all scores that share it. None if there is no such number, or one that is
    known.
    """
    found = depends(code)
    for op, *operands in code.instructions:
        for x, y in (operands, operands[::-1]) if op == "mul" else ():
            is_known = code.instructions[y][0] == "const"
            if code.instructions[x][0] == "score" and not is_known and found[y] in _SHARED:
                return next(iter(found[y]), "head")
    return None


def keeps_nan(code: Code) -> bool:
    """Returns whether the new score is NaN wherever it reads a NaN of a plane: no comparison loses it."""
    of_planes: list[bool] = []
    for instruction in code.instructions:
        is_plane = instruction[0] == "plane" and code.planes[instruction[1]].dtype == "f"
        of_planes.append(is_plane or any(of_planes[x] for x in operands_of(instruction)))
    needed = code.needed(code.results[:1])
    return not any(code.dtypes[i] != "f" and of_planes[i] for i in needed)


def is_tame(code: Code, results: Sequence[int], *, finite_planes: bool = False, finite_score: bool = True) -> bool:
    """Returns whether values are finite numbers wherever the score and the numbers of heads are.

    Args:
        results: which values.
        finite_score: whether the score is a finite number. With a bias it may be infinite.
        finite_planes: whether other planes count as finite numbers, too. Those of queries, keys and distances that
            nobody sees may be NaN.
    """
    found = [(code.dtypes[i], code.instructions[i]) for i in code.needed(results)]
    if not finite_score and any(op == "score" for _, (op, *_) in found):
        return False
    return all(_is_tame(code, x, dtype, finite_planes=finite_planes) for dtype, x in found)


def _is_tame(code: Code, instruction: Instruction, dtype: str, *, finite_planes: bool) -> bool:
    op, *operands = instruction
    if dtype != "f":
        return True
    if op == "const":
        return math.isfinite(float(operands[0]))
    if op == "plane":
        return finite_planes or code.planes[operands[0]].kind == "head"
    return is_number(code, operands[1]) if op == "div" else op in _TAME


def is_wild(code: Code) -> bool:
    """Returns whether the new score or its derivative may be no number at a score of 0 and zeros of planes."""
    found = [(code.dtypes[i], code.instructions[i]) for i in code.needed(code.results)]
    wild = any(not _is_tame(code, x, dtype, finite_planes=True) and x[0] != "const" for dtype, x in found)
    return wild or not keeps_nan(code)


def is_number(code: Code, i: int) -> bool:
    """Returns whether a value is a known float that numbers may be divided by."""
    op, *operands = code.instructions[i]
    return op == "const" and math.isfinite(x := parsed(code.dtypes[i], operands[0])) and x != 0


def key_slope(code: Code, i: int) -> float | None:
    """Returns by how much a value grows from key to key, if that is a known number, else None."""
    op, *operands = code.instructions[i]
    if {"key", "score"}.isdisjoint(depends(code)[i]):
        return 0.0
    if op == "affine":
        return float(operands[1])
    if op in ("to_float", "stop_gradient", "neg"):
        slope = key_slope(code, operands[0])
        return slope if slope is None or op != "neg" else -slope
    if op in ("add", "sub"):
        slopes = [x for x in (key_slope(code, y) for y in operands) if x is not None]
        return None if len(slopes) < 2 else slopes[0] + slopes[1] * (1 if op == "add" else -1)
    if op not in ("mul", "div") or code.dtypes[i] != "f":
        return None
    x, y = operands if op == "div" or is_number(code, operands[1]) else operands[::-1]
    slope = key_slope(code, x) if is_number(code, y) else None
    if slope is None:
        return None
    number = parsed("f", code.instructions[y][1])
    return slope * number if op == "mul" else slope / number


def may_hide(code: Code) -> bool:
    """Returns whether a new score may be -inf. A factor that is a number of a head counts as finite."""
    return not is_tame(code, code.results[:1]) or _adds_plane(code, code.results[0])


def _adds_plane(code: Code, i: int) -> bool:
    """Returns whether a value is a plane plus others, or the choice of one."""
    op, *operands = code.instructions[i]
    if op in ("plane", "score"):
        return op == "plane"
    chosen = operands[1:] if op == "select" else operands
    return op in ("add", "sub", "neg", "max", "min", "select", "stop_gradient") and any(
        _adds_plane(code, x) for x in chosen
    )
