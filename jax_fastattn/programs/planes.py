# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The planes of programs: XLA computes them before a call, and a call takes them as operands, stacked by kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fastattn.programs import reads
from jax_fastattn.programs.code import places
from jax_fastattn.programs.function import HARMLESS, Program
from jax_fastattn.programs.lower import Cut
from jax_fastattn.programs.trace import Graph, evaluate


def own_sizes(programs: Sequence[Program | None], number: int, operands: Any) -> tuple[int, int]:
    """Returns how many batch entries and query heads have numbers of their own in a program, 1 if they share them.

    Args:
        programs: of a call.
        number: which of them.
        operands: the operands of the call, by attribute.
    """
    names = {place.operand for place in places(programs)[number]}
    shapes = [getattr(operands, name).shape for name in names]
    return max((x[0] for x in shapes), default=1), max((x[1] for x in shapes), default=1)


def shapes_of(program: Program | None, operands: Any) -> tuple[tuple[str, int, int], ...]:
    """Returns name, b and n of each operand that has planes of a program, whose planes come first in each."""
    names = sorted({place.operand for place in places((program,))[0]})
    return tuple((name, *getattr(operands, name).shape[:2]) for name in names)


def stack(programs: Sequence[Program | None], arrays: Sequence[Sequence[jax.Array]]) -> dict[str, jax.Array]:
    """Returns operands by name from the planes `[b, n, L]` of each program."""
    found: dict[str, list[jax.Array]] = {}
    for program_places, planes in zip(places(programs), arrays, strict=True):
        for place, x in zip(program_places, planes, strict=True):
            is_stacked = place.plane.kind in ("query", "key", "distance")
            found.setdefault(place.operand, []).append(x[:, :, None] if is_stacked else x)
    return {name: concatenated(x) for name, x in found.items()}


def concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
    """Joins `[b, n, ...]` along the next axis; b and n broadcast."""
    if len(arrays) == 1:
        return arrays[0]
    batch, heads = jnp.broadcast_shapes(*(x.shape[:2] for x in arrays))
    return jnp.concatenate([jnp.broadcast_to(x, (batch, heads, *x.shape[2:])) for x in arrays], axis=2)


class Rows(NamedTuple):
    """The rows of one side of packed sequences, int32 `[T]` or `[S]` each; any numbers for rows of no sequence.

    Attributes:
        sequence: the number of the sequence.
        place: counted from the first row of the sequence.
    """

    sequence: jax.Array
    place: jax.Array


class PackedRows(NamedTuple):
    """The rows of packed sequences on both sides."""

    query: Rows
    key: Rows


def arrays(
    graph: Graph,
    cuts: Sequence[Cut],
    captured: Sequence[Any],
    sizes: tuple[int, int, int, int],
    wide: Any,
    rows: PackedRows | None = None,
    *,
    in_order: bool = False,
) -> list[jax.Array]:
    """Returns the planes `[b, n, L]` of a graph.

    Args:
        captured: the arrays that the graph captures.
        sizes: B, N, T and S.
        wide: the dtype of floats.
        rows: of packed sequences, inside of which the graph counts; see `Facts.of_sequences`.
        in_order: whether gradients of captured arrays must be summed in a fixed order.
    """
    if not cuts:
        return []
    # A graph that no other one equals would leave a program in the cache for each call.
    compute = _jitted if graph.is_stable else _arrays
    return compute(graph, tuple(cuts), sizes, np.dtype(wide), in_order, list(captured), rows)


def _arrays(
    graph: Graph,
    cuts: tuple[Cut, ...],
    sizes: tuple[int, int, int, int],
    wide: Any,
    in_order: bool,
    captured: list[Any],
    rows: PackedRows | None,
) -> list[jax.Array]:
    return [_plane(graph, cut, captured, sizes, wide, rows, in_order=in_order) for cut in cuts]


_jitted = functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), inline=True)(_arrays)


def _plane(
    graph: Graph,
    cut: Cut,
    captured: list[Any],
    sizes: tuple[int, int, int, int],
    wide: Any,
    packed: PackedRows | None,
    *,
    in_order: bool,
) -> jax.Array:
    batch, heads, queries, keys = sizes
    plane = cut.plane
    lengths = {"query": queries, "key": keys, "distance": queries + keys}
    first = -queries if plane.kind == "distance" else 0
    rows = None if packed is None else {"query": packed.query, "key": packed.key}.get(plane.kind)

    def leaves(b: jax.Array, h: jax.Array, i: jax.Array) -> dict[str, jax.Array]:
        if rows is not None:
            b, i = rows.sequence[i], rows.place[i]
        zero = jnp.zeros_like(i)
        query, key = (i, zero) if plane.kind == "query" else (zero, i)
        return {"batch": b, "head": h, "query": query, "key": key}

    def at(b: jax.Array, h: jax.Array, i: jax.Array, given: Mapping[int, Any]) -> jax.Array:
        compute = functools.partial(evaluate, graph, leaves=leaves(b, h, i), captured=captured, wide=wide, given=given)
        if plane.kind == "table":
            return _table(cut, compute).astype(jnp.int32)
        if plane.dtype == "i":
            return compute([cut.value])[0].astype(jnp.int32)
        return _number(functools.partial(compute, [cut.value]))

    axes = [jnp.arange(n, dtype=jnp.int32) for n in (batch if plane.per_batch else 1, heads if plane.per_head else 1)]

    def everywhere(function: Callable[..., Any], *more: Any) -> Any:
        """Returns a function of batch entry, head and index, and of arrays with these axes, at all of them."""
        axis = [0 for _ in more]
        over_heads: Callable[..., Any] = jax.vmap(jax.vmap(function, (None, 0, None, *axis)), (0, None, None, *axis))
        if plane.kind not in lengths:
            return over_heads(*axes, jnp.int32(0), *more)
        indices = jnp.arange(lengths[plane.kind], dtype=jnp.int32) + first
        return jax.vmap(over_heads, (None, None, 0, *(2 for _ in more)), 2)(*axes, indices, *more)

    def known(i: int) -> jax.Array:
        """Returns what a read finds, for all numbers of the plane."""
        array, *starts = graph.values[i].args

        def place(b: jax.Array, h: jax.Array, index: jax.Array) -> jax.Array:
            return reads.places(graph, i, evaluate(graph, starts, leaves(b, h, index), captured, wide))

        return reads.read(graph, i, evaluate(graph, [array], {}, captured, wide)[0], everywhere(place))

    given: dict[int, jax.Array] = {}
    if in_order and plane.dtype == "f":
        numbers = {"batch": batch * plane.per_batch, "head": heads * plane.per_head, "query": queries, "key": keys}
        own = {x: n for x, n in numbers.items() if n and x in ("batch", "head", plane.kind)}
        is_once = rows is None and plane.kind != "distance"
        given = {i: known(i) for i in reads.reads(graph, cut.value, own if is_once else {})}
    found = everywhere(at, given)
    return found if plane.kind in ("table", *lengths) else found[..., None]


def _table(cut: Cut, compute: Any) -> jax.Array:
    """Returns the array of a table without the axes of which batch entry and head are the indices."""
    array, *starts = compute([cut.value, *(x for x in cut.starts if x is not None)])
    given = iter(starts)
    starts = [jnp.int32(0) if x is None else next(given).astype(jnp.int32) for x in cut.starts]
    sizes = [n if x is None else 1 for x, n in zip(cut.starts, array.shape, strict=True)]
    return lax.dynamic_slice(array, starts, sizes).reshape(-1)


def _number(compute: Any) -> jax.Array:
    """Returns a number of a plane, of which the gradient is 0 if no pair reads it, whatever it is.

    0 times the derivative at NaN would be NaN, and reach arrays that others read too. A number that is not finite has
    no derivative; a pair that reads one makes the results NaN, or sees nothing.
    """
    (x,) = compute()
    is_finite = jnp.isfinite(lax.stop_gradient(x))
    (y,) = compute(read=lambda x: jnp.where(is_finite, x, jnp.asarray(HARMLESS, x.dtype)))
    return jnp.where(is_finite, y, lax.stop_gradient(x))
