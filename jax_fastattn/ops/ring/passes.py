# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a ring, and its tangent.

The results of blocks are merged in float32: with the log-sum-exp of both, `lse`, a block's output counts
`exp(lse_block - lse)`. Each block's output was rounded by its kernel, and the sum is rounded once more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn.ops.abstract import statistics_dtype
from jax_fastattn.ops.forward import forward_p
from jax_fastattn.ops.ring import plan
from jax_fastattn.ops.ring.blocks import Place, block_call, first_column
from jax_fastattn.ops.ring.layout import from_zigzag, to_zigzag
from jax_fastattn.ops.ring.padding import hide
from jax_fastattn.ops.ring.permute import permute
from jax_fastattn.ops.ring.plan import Block, Step
from jax_fastattn.ops.tangents import tangent_op
from jax_fastattn.spec import AttentionSpec, Operands, Ring

# Operands with an axis of rows or of keys.
TRAVELERS = ("key", "value", "key_value_segment_ids")
EXCHANGED = ("query", "key", "value", "query_segment_ids", "key_value_segment_ids")


class Rows(NamedTuple):
    """Output and log-sum-exp of a range of queries."""

    out: jax.Array
    lse: jax.Array

    def merge(self, block: Rows, first: int) -> Rows:
        """Merges the results of a block, whose queries start at `first` of these."""
        stop = first + block.lse.shape[1]
        merged = _merged(Rows(*(x[:, first:stop] for x in self)), block)
        return Rows(*(put(x, y, first) for x, y in zip(self, merged, strict=True)))


def put(x: jax.Array, part: jax.Array, start: int) -> jax.Array:
    """Returns x with a range of its rows, on axis 1, replaced."""
    return part if part.shape == x.shape else jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def _merged(x: Rows, y: Rows) -> Rows:
    # A row of which neither has seen a key: -inf minus -inf, which is in the tangent of `logaddexp`, too.
    is_empty = jnp.maximum(x.lse, y.lse) == -jnp.inf
    shift = jnp.logaddexp(jnp.where(is_empty, 0.0, x.lse), y.lse)
    lse = jnp.where(is_empty, -jnp.inf, shift)
    weights = (jnp.exp(part.lse - shift)[..., None] for part in (x, y))
    terms = (part.out.astype(lse.dtype) * weight for part, weight in zip((x, y), weights, strict=True))
    return Rows(next(terms) + next(terms), lse)


class Call(NamedTuple):
    """A call of which the rows of all devices are in the order in which its steps take them."""

    spec: AttentionSpec
    operands: Operands
    steps: list[Step]

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands) -> Call:
        """Returns the call, with its padding hidden, and its rows exchanged into zigzag order if it balances."""
        spec, operands = hide(spec, operands)
        assert spec.ring is not None
        if plan.balances(spec, operands):
            names = [name for name in EXCHANGED if getattr(operands, name) is not None]
            exchanged = to_zigzag(spec.ring, [getattr(operands, name) for name in names])
            operands = operands._replace(**dict(zip(names, exchanged, strict=True)))
            spec = dataclasses.replace(spec, ring=dataclasses.replace(spec.ring, layout="zigzag", balance=False))
        return cls(spec, operands, plan.steps(spec, operands))

    def is_exchanged(self, ring: Ring) -> bool:
        """Returns whether the rows of a call with that ring were exchanged."""
        return self.spec.ring != ring

    def place(self, step: Step) -> Place:
        """Returns where a step takes place."""
        ring = self.spec.ring
        assert ring is not None
        device = jax.lax.axis_index(ring.axes).astype(jnp.int32)
        source = jnp.zeros_like(device) if ring.whole_keys else (device - step.shift) % ring.size
        return Place(device, source, self.operands.query.shape[1], self.operands.key.shape[1], step.fetched[0])

    def first_column(self, step: Step, block: Block) -> jax.Array:
        """Returns where the keys of a block start in the whole sequence."""
        assert self.spec.ring is not None
        return first_column(self.spec.ring, block, self.place(step))

    def home(self) -> dict[str, jax.Array]:
        """Returns what travels."""
        found = {name: getattr(self.operands, name) for name in TRAVELERS}
        return {name: x for name, x in found.items() if x is not None}

    def fetch(self, step: Step, home: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns keys, values and ids of the device of a step, straight from there and no more than is needed."""
        assert self.spec.ring is not None
        start, stop = step.fetched
        parts = [x if stop - start == x.shape[1] else x[:, start:stop] for x in home.values()]
        return dict(zip(home, permute(self.spec.ring, parts, step.pairs), strict=True))


def forward(spec: AttentionSpec, operands: Operands) -> list[jax.Array]:
    """Returns output `[B, T, N, D]` and log-sum-exp `[B, T, N]` of a device's queries."""
    assert spec.ring is not None
    call = Call.of(spec, operands)
    results = list(_forward(call))
    return from_zigzag(spec.ring, results) if call.is_exchanged(spec.ring) else results


def _forward(call: Call) -> Rows:
    first, *later = call.steps
    home = call.home()
    arrived = call.fetch(later[0], home) if later else {}
    diagonal = [_block(call, first, block, {}) for block in first.blocks if block.is_diagonal]
    whole = Rows(*(parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1) for parts in zip(*diagonal, strict=True)))
    start, stop = plan.touched(call.steps, whole.lse.shape[1])
    if start == stop:
        return whole
    state = Rows(whole.out[:, start:stop].astype(whole.lse.dtype), whole.lse[:, start:stop])
    for block in first.blocks:
        if not block.is_diagonal:
            state = state.merge(_block(call, first, block, {}), block.queries.start - start)
    for at, step in enumerate(later):
        keys = arrived
        if at + 1 < len(later):
            # One step ahead and no more: otherwise XLA may fetch all keys at once, and keep all outputs for one merge.
            state, home, keys = jax.lax.optimization_barrier((state, home, arrived))
            arrived = call.fetch(later[at + 1], home)
        for block in step.blocks:
            state = state.merge(_block(call, step, block, keys), block.queries.start - start)
    return Rows(*(put(x, y.astype(x.dtype), start) for x, y in zip(whole, state, strict=True)))


def _block(call: Call, step: Step, block: Block, keys: Mapping[str, jax.Array]) -> Rows:
    operands = call.operands._replace(**keys)
    is_first = step.shift == 0 and block.is_diagonal
    spec, operands = block_call(call.spec, operands, block, call.place(step), with_sinks=is_first)
    return Rows(*(block.queries.restore(x) for x in _attend(spec, *operands.arrays())))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(spec: AttentionSpec, *arrays: jax.Array) -> list[jax.Array]:
    return forward_p.bind(*arrays, spec=spec, mapped=(False,) * len(arrays))


@_attend.defjvp
def _attend_jvp(spec: AttentionSpec, arrays: Sequence[Any], tangents: Sequence[Any]) -> Any:
    results = _attend(spec, *arrays)
    moved = {name: x for name, x in zip(spec.present, tangents, strict=True) if x.dtype != jax.dtypes.float0}
    return results, tangent_op.share.bind(*arrays, *results, *moved.values(), spec=spec, moved=tuple(moved))


def tangent(spec: AttentionSpec, operands: Operands, moved: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Returns the tangents of `forward` along tangents of operands. It runs the forward pass again."""

    def along(given: Mapping[str, jax.Array]) -> list[jax.Array]:
        return forward(spec, operands._replace(**given))

    given = {name: getattr(operands, name) for name in moved}
    tangents = {name: x.astype(given[name].dtype) for name, x in moved.items()}
    out, lse = jax.jvp(along, (given,), (tangents,))[1]
    return [out, lse.astype(statistics_dtype(out.dtype))]
