# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences in an order of rows in which each sequence begins at the same row for queries and for keys.

A distance inside a sequence is a distance of rows then, so that kernels which know rows alone read planes of distances,
and sum their gradients. A sequence takes as many rows as its longer side has, which are T + S rows at most for all.
Rows without a query or a key belong to sequences of their own, of which one side is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.layouts.heads import reduce_to
from jax_fastattn.layouts.packed import token_ids
from jax_fastattn.programs.code import Code
from jax_fastattn.spec import PLANES, AttentionSpec, Gradients, Operands

_SIDES = ("query", "key")


def has_distances(spec: AttentionSpec) -> bool:
    """Returns whether a code reads a plane of distances."""
    found = (program for program in (spec.score_mod, spec.mask_mod) if isinstance(program, Code))
    return any(plane.kind == "distance" for program in found for plane in program.planes)


@dataclass(frozen=True)
class Order:
    """The new order of the rows of a call.

    Attributes:
        given: the operands of the call.
        sequences: its sequences in the new order, `[B, 2 M - 2, 4 or 5]`.
        sources: the row before of each new row, int32 `[B, T + S]` each for queries and keys; -1 without one.
        targets: the new row of each row, int32 `[B, T]` and `[B, S]`; -1 for rows of no sequence.
    """

    given: Operands
    sequences: jax.Array
    sources: tuple[jax.Array, jax.Array]
    targets: tuple[jax.Array, jax.Array]

    @classmethod
    def of(cls, operands: Operands) -> Order:
        """Returns the order for the sequences of a call."""
        assert operands.sequences is not None
        lengths = operands.query.shape[1], operands.key.shape[1]
        found = _aligned(operands.sequences, sum(lengths))
        sources = (_sources(operands.sequences, found, sum(lengths), side) for side in range(2))
        targets = (_targets(operands.sequences, found, lengths[side], side) for side in range(2))
        return cls(operands, found, (next(sources), next(sources)), (next(targets), next(targets)))

    def operands(self) -> Operands:
        """Returns the operands in the new order."""
        found: dict[str, Any] = {"sequences": self.sequences}
        for side, names in enumerate((("query",), ("key", "value"))):
            found |= {name: _taken(getattr(self.given, name), self.sources[side], 1) for name in names}
        if self.given.out_rests is not None:
            found["out_rests"] = self.rows(self.given.out_rests, 0)
        for name, x in self._planes(self.given):
            kind = name.partition("_")[0]
            if kind == "distance":
                rows, keys = self.given.query.shape[1], self.given.key.shape[1]
                found[name] = jnp.pad(x, ((0, 0),) * 3 + ((keys, rows),))
            elif kind in _SIDES:
                found[name] = _taken(x, self.sources[_SIDES.index(kind)], 3)
        return self.given._replace(**found)

    def rows(self, x: jax.Array, padding: jax.Array | float = 0.0) -> jax.Array:
        """Returns an array of queries `[B, T, ...]` in the new order, with `padding` where there is no query."""
        return _taken(x, self.sources[0], 1, padding)

    def results(self, x: jax.Array) -> jax.Array:
        """Inverts `rows`. Rows of no sequence get zeros."""
        return _taken(x, self.targets[0], 1)

    def gradients(self, found: Gradients) -> Gradients:
        """Returns gradients of the operands of the call, given the gradients of `operands`."""
        moved: dict[str, Any] = {"query": self.results(found.query)}
        moved |= {name: _taken(getattr(found, name), self.targets[1], 1) for name in ("key", "value")}
        for name, x in self._planes(found):
            kind, shape = name.partition("_")[0], getattr(self.given, name).shape
            if kind == "distance":
                keys = self.given.key.shape[1]
                moved[name] = x[..., keys : keys + shape[3]]
            elif kind in _SIDES:
                moved[name] = reduce_to(shape, _taken(x, self.targets[_SIDES.index(kind)], 3))
        return found._replace(**moved)

    @staticmethod
    def _planes(found: Operands) -> list[tuple[str, jax.Array]]:
        return [(name, x) for name in PLANES if (x := getattr(found, name)) is not None]


def _aligned(sequences: jax.Array, length: int) -> jax.Array:
    """Returns the sequences in the new order: each is followed by the rows that its shorter side lacks."""
    inner = sequences[:, 1:-1]
    queries, keys = inner[:, :, 1], inner[:, :, 3]
    sizes = jnp.maximum(queries, keys)
    ends = jnp.cumsum(sizes, axis=1, dtype=jnp.int32)
    starts = ends - sizes
    own = jnp.stack([starts, queries, starts, keys], axis=2)
    lacking = jnp.stack([starts + queries, sizes - queries, starts + keys, sizes - keys], axis=2)
    if sequences.shape[2] == 5:
        own = jnp.concatenate([own, inner[:, :, 4:]], axis=2)
        lacking = jnp.pad(lacking, ((0, 0), (0, 0), (0, 1)))
    found = jnp.stack([own, lacking], axis=2).reshape(sequences.shape[0], -1, sequences.shape[2])
    end = jnp.sum(sizes, axis=1, dtype=jnp.int32)
    last = jnp.stack([end, length - end, end, length - end], axis=1)[:, None]
    first = jnp.zeros_like(last)
    first, last = (jnp.pad(x, ((0, 0), (0, 0), (0, sequences.shape[2] - 4))) for x in (first, last))
    return jnp.concatenate([first, found, last], axis=1)


def _sources(sequences: jax.Array, aligned: jax.Array, length: int, side: int) -> jax.Array:
    """Returns the row before of each new row of a side."""
    ids = token_ids(aligned, length, of_keys=side == 1)
    is_own = (ids > 0) & (ids % 2 == 1)
    number = jnp.where(is_own, (ids + 1) // 2, 0)
    places = jnp.arange(length, dtype=jnp.int32)[None] - _first(aligned, side, jnp.maximum(ids, 0))
    return jnp.where(is_own, _first(sequences, side, number) + places, -1)


def _targets(sequences: jax.Array, aligned: jax.Array, length: int, side: int) -> jax.Array:
    """Returns the new row of each row of a side."""
    ids = token_ids(sequences, length, of_keys=side == 1)
    number = jnp.maximum(ids, 0)
    places = jnp.arange(length, dtype=jnp.int32)[None] - _first(sequences, side, number)
    return jnp.where(ids > 0, _first(aligned, side, jnp.maximum(2 * number - 1, 0)) + places, -1)


def _first(sequences: jax.Array, side: int, number: jax.Array) -> jax.Array:
    """Returns the first rows of sequences that have a number, int32 `[B, L]`."""
    return jnp.take_along_axis(sequences[:, :, 2 * side], number, axis=1)


def _taken(x: jax.Array, rows: jax.Array, axis: int, padding: jax.Array | float = 0.0) -> jax.Array:
    """Returns the rows of x along an axis, with `padding` for row -1. x has B batch entries, or one for all of them."""
    x = jnp.broadcast_to(x, (rows.shape[0], *x.shape[1:]))
    found = jax.vmap(lambda x, rows: jnp.take(x, rows, axis=axis - 1, mode="clip"))(x, rows)
    shape = [1] * x.ndim
    shape[0], shape[axis] = rows.shape
    return jnp.where(rows.reshape(shape) >= 0, found, jnp.asarray(padding, x.dtype))
