# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a ring, and its tangent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn.ops.abstract import statistics_dtype
from jax_fastattn.ops.ring import helped, plan
from jax_fastattn.ops.ring.blocks import BlockPlace, block_call, first_column
from jax_fastattn.ops.ring.helping import balances
from jax_fastattn.ops.ring.merge import RowResults, attend, put
from jax_fastattn.ops.ring.padding import hide
from jax_fastattn.ops.ring.permute import permute
from jax_fastattn.ops.ring.plan import Block, Step
from jax_fastattn.spec import AttentionSpec, Operands

# These operands travel: they have an axis of keys.
TRAVELERS = ("key", "value", "key_value_segment_ids")


class Call(NamedTuple):
    """A call whose devices compute all of their own queries."""

    spec: AttentionSpec
    operands: Operands
    steps: list[Step]

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands) -> Call:
        """Returns a call whose padding is hidden."""
        return cls(spec, operands, plan.steps(spec, operands))

    def place(self, step: Step) -> BlockPlace:
        """Returns where a step takes place."""
        ring = self.spec.ring
        assert ring is not None
        device = jax.lax.axis_index(ring.axes).astype(jnp.int32)
        source = jnp.zeros_like(device) if ring.whole_keys else (device - step.shift) % ring.size
        return BlockPlace(device, source, self.operands.query.shape[1], self.operands.key.shape[1], step.fetched[0])

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
    spec, operands = hide(spec, operands)
    return helped.forward(spec, operands) if balances(spec, operands) else list(_forward(Call.of(spec, operands)))


def _forward(call: Call) -> RowResults:
    first, *later = call.steps
    home = call.home()
    arrived = call.fetch(later[0], home) if later else {}
    diagonal = [_block(call, first, block, {}) for block in first.blocks if block.is_diagonal]
    whole = RowResults(
        *(parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1) for parts in zip(*diagonal, strict=True))
    )
    start, stop = plan.touched(call.steps, whole.lse.shape[1])
    if start == stop:
        return whole
    state = RowResults(whole.out[:, start:stop].astype(whole.lse.dtype), whole.lse[:, start:stop])
    for block in first.blocks:
        if not block.is_diagonal:
            state = state.merge(_block(call, first, block, {}), block.queries.start - start)
    for at, step in enumerate(later):
        keys = arrived
        if at + 1 < len(later):
            # Keys come one step ahead and no more: else XLA may fetch all at once, and keep all outputs for one merge.
            state, home, keys = jax.lax.optimization_barrier((state, home, arrived))
            arrived = call.fetch(later[at + 1], home)
        for block in step.blocks:
            state = state.merge(_block(call, step, block, keys), block.queries.start - start)
    return RowResults(*(put(x, y.astype(x.dtype), start) for x, y in zip(whole, state, strict=True)))


def _block(call: Call, step: Step, block: Block, keys: Mapping[str, jax.Array]) -> RowResults:
    operands = call.operands._replace(**keys)
    is_first = step.shift == 0 and block.is_diagonal
    spec, operands = block_call(call.spec, operands, block, call.place(step), with_sinks=is_first)
    return RowResults(*(block.queries.restore(x) for x in attend(spec, *operands.arrays())))


def tangent(spec: AttentionSpec, operands: Operands, moved: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Returns the tangents of `forward` along tangents of operands. It runs the forward pass again."""

    def along(given: Mapping[str, jax.Array]) -> list[jax.Array]:
        return forward(spec, operands._replace(**given))

    given = {name: getattr(operands, name) for name in moved}
    tangents = {name: x.astype(given[name].dtype) for name, x in moved.items()}
    out, lse = jax.jvp(along, (given,), (tangents,))[1]
    return [out, lse.astype(statistics_dtype(out.dtype))]
