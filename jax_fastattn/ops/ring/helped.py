# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The passes of a ring whose devices help each other, and the order of their kernels and permutes.

While a kernel runs, the operands of the next step arrive, and the results of the step before go home. With n = 4:

    kernel         opening              step 1               step 2             closing
    permutes       operands of step 1   operands of step 2   results of step 1  results of step 2

XLA overlaps one permute with a kernel. From six devices on, a kernel in the middle has two, and one of them is exposed.
"""

from __future__ import annotations

import abc
from typing import Any, final

import jax
import jax.numpy as jnp

from jax_fastattn.layouts.heads import reduce_to
from jax_fastattn.ops.abstract import statistics_dtype
from jax_fastattn.ops.backward import gradient_op
from jax_fastattn.ops.linear import Names
from jax_fastattn.ops.ring.blocks import BlockPlace, block_call, first_column, part_of
from jax_fastattn.ops.ring.helping import Arrays, HelpStep, Travelers, own_blocks, steps
from jax_fastattn.ops.ring.merge import RowResults, add_columns, attend, merge
from jax_fastattn.ops.ring.permute import permute_during
from jax_fastattn.ops.ring.plan import Block
from jax_fastattn.spec import PLANES, QKV, AttentionSpec, Operands

# A backward pass takes these arrays of queries, in the order in which the op binds them.
_ROWS = ("out", "lse", "dout", "dlse")


def forward(spec: AttentionSpec, operands: Operands) -> list[jax.Array]:
    """Returns output `[B, T, N, D]` and log-sum-exp `[B, T, N]` of a device's queries."""
    return list(_Forward(spec, operands, Travelers.of(operands)).run())


def gradient(spec: AttentionSpec, operands: Operands, rows: list[jax.Array], wanted: Names) -> Arrays:
    """Returns a device's share of the gradients named in `wanted`, as `gradient.gradient` does; sinks have none here.

    Args:
        rows: output, log-sum-exp, cotangent of the output and, if it is not zero, cotangent of the log-sum-exp.
        wanted: names of operands, "query", "key" and "value" among them.
    """
    travelers = Travelers.of(operands, dict(zip(_ROWS, rows, strict=False)))
    return _Backward(spec, operands, travelers, wanted).run()


class _Pass(abc.ABC):
    """A pass over the blocks of a device.

    Attributes:
        spec, operands: the call.
        ring: its devices.
        own: the rows of this device that blocks read.
        sums: what the blocks of steps add up to.
    """

    def __init__(self, spec: AttentionSpec, operands: Operands, own: Travelers) -> None:
        assert spec.ring is not None
        self.spec, self.operands, self.own, self.ring = spec, operands, own, spec.ring
        self.rows: int = operands.query.shape[1]
        self.sums: Any = None

    def run(self) -> Any:
        """Returns the results of the pass."""
        opening, closing = own_blocks(self.rows)
        first, *others = steps(self.ring, self.rows)
        arrived, opened = first.fetch(self.own, self._own(opening))
        before, last = None, opened
        for step, following in zip([first, *others], [*others, None], strict=True):
            last = self._wait(last)
            found = self.compute(step.block, step.place(), step.choose(self.own, arrived))
            if before is None:
                opened = last
            else:
                home, found = self.send_home(before, last, found)
                self.add(before, last, home)
            if following is not None:
                arrived, found = following.fetch(self.own, found)
            before, last = step, found
        last = self._wait(last)
        closed = self._own(closing)
        assert before is not None
        home, closed = self.send_home(before, last, closed)
        self.add(before, last, home)
        return self.finish(opened, closed)

    def _own(self, block: Block) -> Any:
        device = jax.lax.axis_index(self.ring.axes).astype(jnp.int32)
        return self.compute(block, BlockPlace(device, device, self.rows, self.rows, 0), self.own)

    def _wait(self, last: Any) -> Any:
        """Returns the results of the last kernel. Work that reads them, `own` or `sums` starts after this kernel.

        Otherwise XLA may fetch the operands of all steps at once, or run the closing before the last step.
        """
        self.own, self.sums, last = jax.lax.optimization_barrier((self.own, self.sums, last))
        return last

    @abc.abstractmethod
    def compute(self, block: Block, place: BlockPlace, rows: Travelers) -> Any:
        """Returns the results of a block."""

    @abc.abstractmethod
    def send_home(self, step: HelpStep, found: Any, results: Any) -> tuple[Any, Any]:
        """Sends what was found for other devices while a kernel runs. Returns what came home, and its results."""

    @abc.abstractmethod
    def add(self, step: HelpStep, found: Any, home: Any) -> None:
        """Adds the results of a step: what this device found, and what came home."""

    @abc.abstractmethod
    def finish(self, opened: Any, closed: Any) -> Any:
        """Returns the results of all blocks, given the results of opening and closing."""


@final
class _Forward(_Pass):
    """Merges `RowResults`."""

    def compute(self, block: Block, place: BlockPlace, rows: Travelers) -> RowResults:
        operands = self.operands._replace(**rows.queries, **rows.keys)
        spec, operands = block_call(self.spec, operands, block, place, with_sinks=block.is_diagonal)
        return RowResults(*attend(spec, *operands.arrays()))

    def send_home(self, step: HelpStep, found: RowResults, results: RowResults) -> tuple[RowResults, RowResults]:
        (home,), results = permute_during(self.ring, [list(found)], step.home[: step.shift], results)
        return RowResults(*home), results

    def add(self, step: HelpStep, found: RowResults, home: RowResults) -> None:
        own, helper = found.where(~step.helps()), home.where(step.is_helped())
        joined = RowResults(*map(_halves, helper, own)) if step.is_shared else merge(own, helper)
        self.sums = joined if self.sums is None else merge(self.sums, joined)

    def finish(self, opened: RowResults, closed: RowResults) -> RowResults:
        whole = RowResults(*map(_halves, opened, closed))
        found = merge(whole, self.sums)
        return RowResults(found.out.astype(whole.out.dtype), found.lse)


@final
class _Backward(_Pass):
    """Adds up gradients by name, in float32 or wider."""

    def __init__(self, spec: AttentionSpec, operands: Operands, own: Travelers, wanted: Names) -> None:
        super().__init__(spec, operands, own)
        self.wanted, self.dtype = wanted, statistics_dtype(operands.query.dtype)
        others = [name for name in wanted if name not in QKV]
        self.sums = {name: jnp.zeros(getattr(operands, name).shape, self.dtype) for name in others}

    def compute(self, block: Block, place: BlockPlace, rows: Travelers) -> Arrays:
        """Returns the gradients of query, key and value, and adds the gradients of other operands to `sums`."""
        saved = [block.queries.take(rows.queries[name]) for name in _ROWS if name in rows.queries]
        queries = {name: x for name, x in rows.queries.items() if name not in _ROWS}
        spec, operands = block_call(self.spec, self.operands._replace(**queries, **rows.keys), block, place)
        found = gradient_op.share.bind(
            *operands.arrays(),
            *saved,
            spec=spec,
            with_dlse="dlse" in rows.queries,
            wanted=self.wanted,
        )
        found = dict(zip(self.wanted, found, strict=True))
        of_rows = {name: found.pop(name) for name in QKV}
        for name, x in found.items():
            total = self.sums[name]
            if name == "bias":
                self.sums[name] = add_columns(total, x, 0, first_column(self.ring, block, place))
            elif name in PLANES:
                self.sums[name] = part_of(self.ring, block, place).add(name, total, x)
            else:
                self.sums[name] = total + reduce_to(total.shape, x)
        return of_rows

    def send_home(self, step: HelpStep, found: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        groups = [[found[name] for name in names] for names in (QKV[1:], QKV[:1])]
        (of_keys, of_query), results = permute_during(self.ring, groups, step.home, results, is_second=step.helps())
        return dict(zip(QKV, of_query + of_keys, strict=True)), results

    def add(self, step: HelpStep, found: Arrays, home: Arrays) -> None:
        helps, is_helped = step.helps(), step.is_helped()
        for name in QKV:
            mine, other = (~helps, is_helped) if name == "query" else (helps, ~is_helped)
            own, back = (jnp.where(a, x[name], 0).astype(self.dtype) for a, x in ((mine, found), (other, home)))
            x = _halves(back, own) if name == "query" and step.is_shared else own + back
            self.sums[name] = self.sums[name] + x if name in self.sums else x

    def finish(self, opened: Arrays, closed: Arrays) -> Arrays:
        whole = {"query": _halves(opened["query"], closed["query"]).astype(self.dtype)}
        for name in QKV[1:]:
            x, y = (part[name].astype(self.dtype) for part in (opened, closed))
            whole[name] = jnp.pad(x, ((0, 0), (0, y.shape[1] - x.shape[1]), (0, 0), (0, 0))) + y
        total = {name: (whole[name] + self.sums[name]).astype(closed[name].dtype) for name in QKV}
        return self.sums | total


def _halves(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.concatenate([x, y], axis=1)
