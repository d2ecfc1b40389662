# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`score_mod` and `mask_mod` in a block of logits: their planes where the block reads them, values and derivatives.

What stays out: which function has a code, and how planes are computed (`programs/`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.layouts.heads import product_or_zero, split_heads
from jax_fastattn.programs.code import Code, Place, places
from jax_fastattn.programs.evaluation import evaluate_code
from jax_fastattn.programs.function import Program
from jax_fastattn.spec import AttentionSpec, Operands, is_known
from jax_fastattn.xla.chunks import Index, Span

Lengths = tuple[int, int]
Starts = tuple[jax.Array, jax.Array]
Stacks = Mapping[str, Any]


def counts(
    spec: AttentionSpec, operands: Operands, queries: Span, keys: Span, lengths: Lengths, starts: Starts | None = None
) -> jax.Array:
    """Returns which pairs count by `mask_mod`, in a shape that broadcasts to `[B, K, G, t, s]`."""
    program = spec.mask_mod
    assert program is not None
    block = Block(operands, queries, keys, lengths, starts if isinstance(program, Code) else None)
    planes = block.read(program, places((spec.score_mod, program))[1], operands._asdict())
    if isinstance(program, Code):
        found = evaluate_code(program, block.leaves, planes)[0]
        return jnp.reshape(found, (1,) * 5) if jnp.ndim(found) == 0 else found
    return program.evaluate(block.shape, block.leaves, planes)


@dataclass(frozen=True)
class Block:
    """The places of a block in the operands of a call, and the axes of its pairs.

    Attributes:
        starts: the first rows of the sequences of all queries `[B, 1, 1, T]` and of all keys `[B, 1, 1, S]`, if a code
            counts inside of packed sequences; else None.
    """

    operands: Operands
    queries: Span
    keys: Span
    lengths: Lengths
    starts: Starts | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns B, K, G, t, s."""
        batch, _, heads, _ = self.operands.query.shape
        kv_heads = self.operands.key.shape[2]
        return batch, kv_heads, heads // max(kv_heads, 1), self.queries.size, self.keys.size

    @property
    def leaves(self) -> dict[str, jax.Array]:
        queries, keys = (span.positions()[None, None, None] for span in (self.queries, self.keys))
        if self.starts is not None:
            queries = queries - self.queries.take(self.starts[0], 3, self.lengths[0])
            keys = keys - self.keys.take(self.starts[1], 3, self.lengths[1])
        return {"query": queries[..., :, None], "key": keys[..., None, :]}

    def read(self, program: Program, found: Sequence[Place], stacks: Stacks) -> list[Any]:
        """Returns the planes of a program in shapes that broadcast to `shape`; tables as programs take them."""
        is_code = isinstance(program, Code)
        return [self._read(place, stacks[place.operand], is_code=is_code) for place in found]

    def _read(self, place: Place, x: jax.Array, *, is_code: bool) -> Any:
        kv_heads = self.operands.key.shape[2]
        if place.plane.kind == "table":
            table = lax.slice_in_dim(x, place.start, place.start + place.plane.length, axis=2)
            return functools.partial(_look_up, split_heads(table, kv_heads, 1)) if is_code else table
        x = split_heads(lax.index_in_dim(x, place.start, axis=2, keepdims=False), kv_heads, 1)
        if place.plane.kind == "head":
            return x[..., None, None]
        if place.plane.kind == "query":
            return self.queries.take(x, 3, self.lengths[0])[..., :, None]
        if place.plane.kind == "key":
            return self.keys.take(x, 3, self.lengths[1])[..., None, :]
        return self._distances(x)

    def _distances(self, x: jax.Array) -> jax.Array:
        """Returns `[b, k, g, t, s]` of a plane of distances `[b, k, g, T + S]`."""
        rows, columns, whole = self.queries.size, self.keys.size, self.lengths[0]
        if self.starts is not None:
            return _look_up(x, self.leaves["key"] - self.leaves["query"] + whole)
        if not is_known(rows + columns) or rows == 0:
            index = self.leaves["key"] - self.leaves["query"] + whole
            return jnp.take(x, index[0, 0, 0], axis=3, mode="clip")
        start: Index = self.keys.start - self.queries.start + whole - rows
        x = Span(start, rows + columns).take(x, 3, x.shape[3])
        # Row i begins i elements earlier than row 0. One element less in each row of a repeated sequence does that, and
        # the transpose is a sum, not a scatter.
        ring = jnp.concatenate([x[..., rows:], x[..., :rows]], axis=-1)[..., None, :]
        ring = jnp.broadcast_to(ring, (*ring.shape[:3], rows, rows + columns)).reshape(*ring.shape[:3], -1)
        ring = ring[..., : rows * (rows + columns - 1)]
        return ring.reshape(*ring.shape[:3], rows, rows + columns - 1)[..., :columns]


def _look_up(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns numbers of a table `[b, k, g, C]` at an index that broadcasts with `[b, k, g, t, s]`."""
    shape = jnp.broadcast_shapes(index.shape, (*table.shape[:3], 1, 1))
    if index.shape[:3] == (1, 1, 1):
        found = jnp.take(table, index.reshape(-1), axis=3, mode="clip")
        return found.reshape(*table.shape[:3], *index.shape[3:])
    rows, flat = jnp.broadcast_to(table, (*shape[:3], table.shape[3])), jnp.broadcast_to(index, shape)
    return jnp.take_along_axis(rows, flat.reshape(*shape[:3], -1), axis=3, mode="clip").reshape(shape)


@dataclass(frozen=True)
class ScoreMod:
    """The `score_mod` of a block.

    Attributes:
        score: `[B, K, G, t, s]`, scaled and biased.
        visible: which pairs are visible, broadcastable; None is all.
    """

    program: Program
    block: Block
    score: jax.Array
    visible: jax.Array | None

    def _planes(self, stacks: Stacks) -> list[Any]:
        return self.block.read(self.program, places((self.program,))[0], stacks)

    def _floats(self) -> list[tuple[int, str]]:
        """Returns number and operand of each plane that has derivatives."""
        found = enumerate(places((self.program,))[0])
        return [(i, place.operand) for i, place in found if place.plane.dtype == "f"]

    def _evaluate(self, count: int | None) -> list[Any]:
        assert isinstance(self.program, Code)
        leaves = self.block.leaves | {"score": self.score}
        found = evaluate_code(self.program, leaves, self._planes(self.block.operands._asdict()), count)
        return [None if x is None else jnp.broadcast_to(x, self.score.shape) for x in found]

    def value(self) -> jax.Array:
        """Returns the new scores."""
        if isinstance(self.program, Code):
            return self._evaluate(1)[0]
        leaves = self.block.leaves | {"score": self.score}
        return self.program.evaluate(self.score.shape, leaves, self._planes(self.block.operands._asdict()))

    def _of_visible(self) -> Callable[[jax.Array, Stacks], jax.Array]:
        """Returns a function without code of scores and stacks, of which pairs that do not count have no derivative."""
        program = self.program
        assert not isinstance(program, Code)
        finite = jnp.isfinite(lax.stop_gradient(self.value()))
        seen = finite if self.visible is None else jnp.broadcast_to(self.visible, finite.shape) & finite

        def function(score: jax.Array, moved: Stacks) -> jax.Array:
            planes = self._planes({**self.block.operands._asdict(), **moved})
            return program.evaluate(score.shape, self.block.leaves | {"score": score}, planes, seen)

        return function

    def pull(self, dvalue: jax.Array, names: Collection[str]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the gradients of the scores, and of stacks by name, from the gradients of new scores.

        A pair of which the gradient is 0 adds nothing to any of them, whatever its derivatives are.
        """
        stacks = {name: getattr(self.block.operands, name) for name in names}
        if not isinstance(self.program, Code):
            dscore, dstacks = jax.vjp(self._of_visible(), self.score, stacks)[1](dvalue)
            return dscore, dict(dstacks)
        _, slope, *partials = self._evaluate(None)
        wanted = [i for i, operand in self._floats() if operand in stacks]

        def read(stacks: Stacks) -> list[jax.Array]:
            planes = self._planes({**self.block.operands._asdict(), **stacks})
            return [jnp.broadcast_to(planes[i], dvalue.shape) for i in wanted]

        products = [product_or_zero(dvalue, partials[i]) for i in wanted]
        dstacks = jax.vjp(read, stacks)[1](products)[0] if wanted else {}
        return product_or_zero(dvalue, slope), dict(dstacks)

    def push(self, dscore: jax.Array, moved: Stacks) -> jax.Array:
        """Returns the tangents of the new scores, which are any numbers where a pair does not count."""
        if not isinstance(self.program, Code):
            stacks = {name: getattr(self.block.operands, name) for name in moved}
            return jax.jvp(self._of_visible(), (self.score, stacks), (dscore, dict(moved)))[1]
        _, slope, *partials = self._evaluate(None)
        still = {name: jnp.zeros_like(x) for name, x in self.block.operands._asdict().items() if x is not None}
        planes = self._planes(still | dict(moved))
        terms = [planes[i] * partials[i] for i, operand in self._floats() if operand in moved]
        return functools.reduce(jnp.add, terms, dscore * slope)
