# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts `score_mod` and `mask_mod` to programs, which a spec holds, and to planes, which are operands."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_fastattn.canonical.validation import Axes
from jax_fastattn.ops.block_mask import BlockMask
from jax_fastattn.programs import analysis, planes
from jax_fastattn.programs.code import Code
from jax_fastattn.programs.facts import short_read
from jax_fastattn.programs.function import Function, Program
from jax_fastattn.programs.lower import Cut, NoCodeError, lower_mask, lower_score
from jax_fastattn.programs.planes import PackedRows
from jax_fastattn.programs.trace import MASK_ARGUMENTS, SCORE_ARGUMENTS, Graph, trace_call


def programs(
    axes: Axes,
    dtype: Any,
    score_mod: Any,
    mask_mod: Any,
    rows: PackedRows | None = None,
    share: tuple[int, int] | None = None,
    *,
    in_order: bool = False,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Returns the programs by the names that a spec has for them, and operands by name.

    Args:
        axes: the sizes of the call.
        dtype: the dtype of the query.
        score_mod, mask_mod: functions, or a `BlockMask` in the place of the latter.
        rows: of packed sequences. Codes then count inside the sequence. A function that has no code does not: it takes
            rows of the arrays.
        share: how many queries and keys a device has, if all devices have the sizes together.
        in_order: whether gradients of captured arrays must be summed in a fixed order.

    Raises:
        ValueError: a row of the whole sequence is an index into a captured array of a device's share.
    """
    if score_mod is None and mask_mod is None:
        return {}, {}
    wide, sizes = np.promote_types(dtype, np.float32), (axes["B"], axes["N"], axes["T"], axes["S"])
    score, of_score = _program("score_mod", score_mod, sizes, wide, rows, share, in_order=in_order)
    if isinstance(mask_mod, BlockMask):
        mask, of_mask = mask_mod.program, [lax.stop_gradient(x) for x in mask_mod.planes]
    else:
        mask, of_mask = mask_planes(axes, dtype, mask_mod, share, rows)
    return {"score_mod": score, "mask_mod": mask}, planes.stack((score, mask), (of_score, of_mask))


def mask_planes(
    axes: Axes, dtype: Any, mask_mod: Any, share: tuple[int, int] | None = None, rows: PackedRows | None = None
) -> tuple[Program | None, list[jax.Array]]:
    """Returns the program of a mask function, and the planes `[b, n, L]` that it reads; see `programs`."""
    wide, sizes = np.promote_types(dtype, np.float32), (axes["B"], axes["N"], axes["T"], axes["S"])
    if rows is None:
        program, found = _program("mask_mod", mask_mod, sizes, wide, share=share)
    else:
        program, found = _packed_mask(mask_mod, sizes, wide, rows)
    return program, [lax.stop_gradient(x) for x in found]


def _packed_mask(
    function: Any, sizes: tuple[int, int, int, int], wide: Any, rows: PackedRows
) -> tuple[Program | None, list[jax.Array]]:
    """Returns the program of a mask function of packed sequences, and its planes.

    A code that reads planes of queries and of keys alone is the same by rows as inside of sequences. It comes first,
    since kernels may decide its comparisons of integers in edge tiles. A function of distances needs the other one.
    """
    found = _program("mask_mod", of_rows(function, rows), sizes, wide)
    if function is None or (isinstance(found[0], Code) and not analysis.is_inexact(found[0])):
        return found
    inside = _program("mask_mod", function, sizes, wide, rows)
    return inside if isinstance(inside[0], Code) and not analysis.is_inexact(inside[0]) else found


def _program(
    name: str,
    function: Any,
    sizes: tuple[int, int, int, int],
    wide: Any,
    rows: PackedRows | None = None,
    share: tuple[int, int] | None = None,
    *,
    in_order: bool = False,
) -> tuple[Program | None, list[jax.Array]]:
    if function is None:
        return None, []
    names = SCORE_ARGUMENTS if name == "score_mod" else MASK_ARGUMENTS
    arguments = {x: wide if x == "score" else np.int32 for x in names}
    graph, found = trace_call(name, function, arguments)
    if share is not None:
        _check_whole(name, graph, share, sizes[2:])
    captured = [_unsplit(x) for x in found]
    # A graph that no other one equals would leave an entry for each call.
    lower = _lowered if graph.is_stable else _lowered.__wrapped__
    code, cuts, reason = lower(graph, np.dtype(wide), name == "mask_mod", rows is not None)
    if code is not None:
        return code, planes.arrays(graph, cuts, captured, sizes, wide, rows, in_order=in_order)
    if rows is not None:
        graph, found = trace_call(name, of_rows(function, rows), arguments)
        captured = [_unsplit(x) for x in found]
    whole = Function.of(graph, reason)
    return whole, whole.arrays(captured, *sizes[:2], wide)


def _check_whole(name: str, graph: Graph, share: tuple[int, int], whole: tuple[int, int]) -> None:
    """Raises ValueError if a function reads an array of a device's share by a row of the whole sequence."""
    if found := short_read(graph, share, whole):
        shape, index, axis = found
        rows = whole["qk".index(index)]
        raise ValueError(
            f"`{name}` reads axis {axis} of an array of shape {shape} by `{index}`, one of {rows} rows of the whole "
            f"sequence, expected {rows} numbers along that axis; pass the array to the `shard_map` with a spec that "
            "does not split it along the sequence"
        )


def of_rows(mod: Any, rows: PackedRows) -> Any:
    """Returns a function of rows that gives one of the user's the number of a sequence, and the places in it."""
    if not callable(mod) or isinstance(mod, type):
        return mod

    @functools.wraps(mod)
    def function(*args: jax.Array) -> Any:
        *score, _, h, q, k = args
        return mod(*score, rows.query.sequence[q], h, rows.query.place[q], rows.key.place[k])

    return function


def _unsplit(x: Any) -> Any:
    """Returns a captured array that no Explicit mesh axis splits, so that any index reads it."""
    if not any(jax.typeof(x).sharding.spec):
        return x
    return jax.reshard(x, PartitionSpec(*(None for _ in x.shape)))


@functools.lru_cache(maxsize=1024)
def _lowered(graph: Graph, wide: Any, is_mask: bool, of_sequences: bool) -> tuple[Code | None, tuple[Cut, ...], str]:
    """Returns code and planes of a graph; None and why there is no code. An eager call comes here each time."""
    try:
        if is_mask:
            code, cuts = lower_mask(graph, of_sequences=of_sequences)
        else:
            code, cuts = lower_score(graph, wide, of_sequences=of_sequences)
    except NoCodeError as error:
        return None, (), str(error)
    return code, tuple(cuts), ""
