# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a ring.

A block computes its gradients with output, log-sum-exp and cotangents of its whole rows, so the gradients of blocks add
up. Gradients of keys and values go straight to the device of the keys, rounded to their dtype, and are added there in
float32. This takes half of the bytes that sums in float32 would take, and has the same roundings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.layouts.heads import reduce_to
from jax_fastattn.ops.abstract import statistics_dtype
from jax_fastattn.ops.backward import gradient_op
from jax_fastattn.ops.cuda.bias_gradient import XlaRowBias
from jax_fastattn.ops.linear import Names
from jax_fastattn.ops.ring import helped, plan
from jax_fastattn.ops.ring.blocks import block_call, part_of
from jax_fastattn.ops.ring.helping import balances
from jax_fastattn.ops.ring.merge import add_columns, add_rows, put
from jax_fastattn.ops.ring.padding import cut_planes, hide
from jax_fastattn.ops.ring.passes import Call
from jax_fastattn.ops.ring.permute import permute
from jax_fastattn.ops.ring.plan import Block, Step, View
from jax_fastattn.spec import PLANES, QKV, AttentionSpec, Operands

Sums = dict[str, jax.Array]


def gradient(spec: AttentionSpec, operands: Operands, rows: Sequence[jax.Array], wanted: Names) -> dict[str, jax.Array]:
    """Returns a device's share of the gradients named in `wanted`.

    Gradients of query, key and value are whole. The shares of all others, which devices add up, are float32 or wider.

    Args:
        rows: output, log-sum-exp, cotangent of the output and, if it is not zero, cotangent of the log-sum-exp.
        wanted: as for `ops.backward.gradient`.
    """
    given = operands
    spec, operands = hide(spec, operands)
    rows, found, others = list(rows), {}, tuple(name for name in wanted if name != "sinks")
    if "bias" in wanted and spec.logits_soft_cap is None and operands.bias is not None and operands.bias.shape[3] == 1:
        found["bias"], others = _row_bias(operands, rows), tuple(name for name in others if name != "bias")
    if operands.sinks is not None:
        found["sinks"], rows[1] = _sinks(operands.sinks, rows)
    if balances(spec, operands):
        found |= helped.gradient(spec, operands, rows, others)
    else:
        found |= _Backward(Call.of(spec, operands), rows, others).run()
    found = cut_planes(spec, given, found)
    return {name: found[name] for name in wanted}


def _row_bias(operands: Operands, rows: Sequence[jax.Array]) -> jax.Array:
    """Returns the gradient of a bias of size 1 along the keys, which no block knows: it sums dS over all keys."""
    out, lse, dout, *dlse = rows
    bias, given = XlaRowBias(operands, out, lse), dlse[0] if dlse else None
    return bias.gradient(given, bias.sink_terms(out, dout, given))


def _sinks(sinks: jax.Array, rows: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of sinks, and the log-sum-exp with -inf for rows that see no key, as without sinks.

    A row whose log-sum-exp is its sink has seen nothing that counts. Its cotangent may be NaN.
    """
    out, lse, dout, *dlse = rows
    out, dout = out.astype(lse.dtype), dout.astype(lse.dtype)
    delta = jnp.sum(jnp.where(out == 0.0, 0.0, out * dout), axis=-1)
    delta = delta - dlse[0] if dlse else delta
    is_padding = lse == -jnp.inf
    weights = jnp.where(is_padding, 0.0, jnp.exp(sinks[:, None, :] - jnp.where(is_padding, 0.0, lse)))
    terms = jnp.where(is_padding, 0.0, weights * delta)
    sees_none = (lse == sinks[:, None, :]) & jnp.all(out == 0.0, axis=-1)
    return reduce_to(sinks.shape, -jnp.sum(terms, axis=1)), jnp.where(sees_none, -jnp.inf, lse)


class _Backward:
    """The sums of one backward pass."""

    def __init__(self, call: Call, rows: Sequence[jax.Array], wanted: Names) -> None:
        """Takes a call, its output, log-sum-exp and cotangents, and the operands whose gradients are summed."""
        self.call, self.rows, self.wanted, self.is_swapped = call, list(rows), wanted, False
        self.dtype = statistics_dtype(call.operands.query.dtype)
        self.first, self.stop = plan.touched(call.steps, call.operands.query.shape[1])
        # It holds the gradients that were sent home in the step before, and the first key of each.
        self.pending: tuple[dict[str, jax.Array], int] | None = None

    def run(self) -> Sums:
        first, *later = self.call.steps
        home = self.call.home()
        arrived = self.call.fetch(later[0], home) if later else {}
        whole, sums = self._first(first)
        self._swap(later)
        for at, step in enumerate(later):
            keys = arrived
            if at + 1 < len(later):
                # The barrier has the queries and their rows, too: otherwise XLA may prepare all steps' queries at once.
                taken = {name: x for name, x in self._of_queries().items() if x is not None}
                sums, home, keys, taken, self.rows = jax.lax.optimization_barrier(
                    (sums, home, arrived, taken, self.rows)
                )
                self._take(taken)
                arrived = self.call.fetch(later[at + 1], home)
            sums = self._step(step, keys, sums)
        sums = self._receive(sums)
        sums["query"] = put(whole, sums["query"].astype(whole.dtype), self.first)
        return {name: x.astype(whole.dtype) if name in QKV else x for name, x in sums.items()}

    def _swap(self, later: Sequence[Step]) -> None:
        """Swaps the halves of queries and their rows once, if the blocks of later steps take them so."""
        swaps = {block.queries for step in later for block in step.blocks if block.is_half}
        for view in swaps:  # there is one at most
            self.is_swapped = True
            self.rows = [view.take(x) for x in self.rows]
            self._take({name: view.take(x) for name, x in self._of_queries().items() if x is not None})

    def _of_queries(self) -> dict[str, jax.Array | None]:
        operands = self.call.operands
        return {"query": operands.query, "query_segment_ids": operands.query_segment_ids}

    def _take(self, arrays: Mapping[str, jax.Array]) -> None:
        self.call = self.call._replace(operands=self.call.operands._replace(**arrays))

    def _first(self, step: Step) -> tuple[jax.Array, Sums]:
        """Returns the gradient of all queries from step 0, and the sums that later steps add to."""
        diagonal = [(block, self._block(step, block, {})) for block in step.blocks if block.is_diagonal]
        parts = [found["query"] for _, found in diagonal]
        whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        sums = {name: jnp.zeros(getattr(self.call.operands, name).shape, self.dtype) for name in self.wanted}
        sums["query"] = whole[:, self.first : self.stop].astype(self.dtype)
        for block, found in diagonal:
            rest = {name: x for name, x in found.items() if name != "query"}
            sums = self._add(sums, step, block, rest)
        for block in step.blocks:
            if not block.is_diagonal:
                sums = self._add(sums, step, block, self._block(step, block, {}))
        return whole, sums

    def _step(self, step: Step, keys: Mapping[str, jax.Array], sums: Sums) -> Sums:
        """Adds the gradients of a step. It sends those for its keys home, and adds what the step before has sent."""
        away = {name: jnp.zeros(x.shape, self.dtype) for name, x in keys.items() if name in QKV}
        is_single = len(step.blocks) == 1
        for block in step.blocks:
            found = self._block(step, block, keys)
            of_keys = {name: found.pop(name) for name in away}
            away = of_keys if is_single else self._add(away, step, block, of_keys)
            sums = self._add(sums, step, block, found)
        dtype = self.call.operands.query.dtype
        back = [(target, source) for source, target in step.pairs]
        assert self.call.spec.ring is not None
        sent = permute(self.call.spec.ring, [x.astype(dtype) for x in away.values()], back)
        sums = self._receive(sums)
        self.pending = dict(zip(away, sent, strict=True)), step.fetched[0]
        return sums

    def _receive(self, sums: Sums) -> Sums:
        if self.pending is None:
            return sums
        found, first = self.pending
        self.pending = None
        return sums | {name: add_rows(sums[name], x, first) for name, x in found.items()}

    def _block(self, step: Step, block: Block, keys: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        operands, restore = self.call.operands._replace(**keys), block.queries.restore
        if self.is_swapped:
            block = dataclasses.replace(block, queries=View(block.queries.start, block.queries.stop))
        spec, operands = block_call(self.call.spec, operands, block, self.call.place(step))
        rows = [block.queries.take(x) for x in self.rows]
        ring = self.call.spec.ring
        # Sinks are no operand of a block, so a block of all keys has a part of each row then, too.
        # Kernels with dropout ask whether a block may begin anywhere.
        is_whole = ring is not None and ring.whole_keys and not {"sinks", "dropout"} & {*self.call.operands.present()}
        spec = dataclasses.replace(spec, is_part=not is_whole)
        found = gradient_op.share.bind(
            *operands.arrays(), *rows, spec=spec, with_dlse=len(rows) > 3, wanted=self.wanted
        )
        found = dict(zip(self.wanted, found, strict=True))
        found["query"] = restore(found["query"])
        return found | {name: block.keys.restore(found[name]) for name in ("key", "value")}

    def _add(self, sums: Sums, step: Step, block: Block, found: Mapping[str, jax.Array]) -> Sums:
        """Adds gradients of a block: of queries to the range from `self.first` on, of keys to the fetched ones."""
        added: dict[str, Any] = {}
        ring = self.call.spec.ring
        assert ring is not None
        for name, x in found.items():
            if name == "query":
                added[name] = add_rows(sums[name], x, block.queries.start - self.first)
            elif name in QKV:
                added[name] = add_rows(sums[name], x, block.keys.start)
            elif name == "bias":
                added[name] = add_columns(sums[name], x, block.queries.start, self.call.first_column(step, block))
            elif name in PLANES:
                added[name] = part_of(ring, block, self.call.place(step)).add(name, sums[name], x)
            else:
                added[name] = sums[name] + reduce_to(sums[name].shape, x)
        return sums | added
