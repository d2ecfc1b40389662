# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of `kernel.py` does for a tile of keys: the same for dv and dk, with other factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import LeftFactor, Pair, WarpgroupWords
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig
from jax_fastattn.kernels.sm90.backward.dkdv.weights import Differentiate
from jax_fastattn.kernels.sm90.backward.hidden_rows import SharedRows
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile, QueryHead
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.visits.visit import Edges, Phase


class Stages(NamedTuple):
    """Holds a ring of tiles in shared memory.

    Attributes:
        tiles: `[rows, columns, stage]` of each term.
        empty: barriers on which its stages are given back.
    """

    tiles: list[cute.Tensor]
    empty: cute.Pointer


class _LeftStep(NamedTuple):
    """Holds the left factor of a step of 16 along a product's columns.

    Attributes:
        mma: the product, with its left factor in registers or in shared memory.
        left: the left factor of all steps, a fragment or descriptors.
        k: index of the step.
        term: the term of the right factor.
    """

    mma: cute.TiledMma
    left: cute.Tensor
    k: int
    term: int

    def times(self, right: list[cute.Tensor]) -> wgmma.Step:
        """Returns the step with its right factor, given descriptors of all steps of each term."""
        return self.mma, self.left[None, None, self.k], right[self.term][None, None, self.k]


@dataclass(frozen=True, eq=False)
class DkdvState:
    """Holds what both warpgroups have.

    Attributes:
        words: what P and dS become.
        thread: index of this thread in the CTA.
        score: turns products into probabilities.
        row: the lane's first row of an accumulator, counted from the CTA's first key; the other one is 8 rows below.
        rows: what it zeroes in shared memory.
        stage: stage of the rings of Q and dO, which move alike, and the parity of its lap.
        mma: S^T or dP^T, both factors from shared memory.
        product: its accumulator `[64, queries]`.
    """

    spec: KernelSpec
    words: WarpgroupWords
    shared: BackwardShared
    thread: Int32
    score: Score
    row: Int32
    rows: SharedRows
    stage: wgmma.Uniform
    mma: cute.TiledMma
    product: cute.Tensor

    @property
    def config(self) -> BackwardConfig:
        """Returns the variant."""
        return self.shared.memory.config

    @property
    def dtype(self) -> Any:
        """Returns the dtype of the operands."""
        return self.shared.query[0].element_type


@dataclass(frozen=True, eq=False)
class Role:
    """Emits one warpgroup's work on a tile of keys: `product = left right^T`, `sum += factor^T added`.

    Tensor cores truncate their sums. Of products of float32 that would be most of the error of dK and dV over many
    queries, so threads add the product of each tile of queries to the sum, and round.

    Attributes:
        state: what both warpgroups have.
        differentiate: turns the product into the left factor of the sum.
        right_empty: barriers on which stages of the right factor are given back.
        added_empty: barriers on which stages of the right factor of the sum are given back.
        left: left factor of the product, of the keys.
        right: descriptors of its right factor, of each term.
        factor: left factor of the product that is added to the sum, P or dS.
        added: descriptors of its right factor, of each term.
        sum: accumulator `[64, columns]` of dk or dv.
        tile_sum: accumulator like `sum` for one tile of queries; None if tensor cores add to the sum.
        previous: stage of the last tile whose left factor is there.
        finish_head: called after each query head of the group, with its index; None if there is nothing to do.
    """

    state: DkdvState
    work: KeyTile
    differentiate: Differentiate
    right_empty: cute.Pointer
    added_empty: cute.Pointer
    left: list[_LeftStep]
    right: list[cute.Tensor]
    factor: LeftFactor
    added: list[cute.Tensor]
    sum: Accumulator
    tile_sum: Accumulator | None
    previous: wgmma.Uniform
    finish_head: Callable[[Int32], None] | None = None

    @classmethod
    def start(
        cls,
        state: DkdvState,
        work: KeyTile,
        left: list[cute.Tensor],
        right: Stages,
        added: Stages,
        differentiate: Differentiate,
    ) -> Role:
        """Returns the role with its registers, and its sum at 0.

        Args:
            state: what both warpgroups have.
            left: left factor of the product, `[64, columns, 1]` of each term in shared memory.
            right: its right factor.
            added: right factor of the sum.
            differentiate: turns the product into the left factor of the sum.
        """
        config, dtype, mma = state.config, state.dtype, state.mma
        columns, shape = cute.size(added.tiles[0], mode=[1]), (WARPGROUP_ROWS, config.queries)
        register_mma = wgmma.product(dtype, config.queries, a_in_registers=True, b_transposed=False)
        steps = cute.size(left[0], mode=[1]) // 16
        count = min(config.kv_in_regs, steps)
        first = wgmma.load_a(register_mma, left[0], 0, count, state.thread % 128)
        rest = [wgmma.operand_a(mma, x)[None, None, None, 0] for x in left]
        factors = [
            _LeftStep(register_mma, first, k, j) if i == 0 and k < count else _LeftStep(mma, rest[i], k, j)
            for i, j in state.words.terms
            for k in range(steps)
        ]
        descriptors = [wgmma.operand_b(mma, x) for x in right.tiles]
        sum_mma = wgmma.product(dtype, columns, a_in_registers=True, b_transposed=True)
        role = cls(
            state=state,
            work=work,
            differentiate=differentiate,
            right_empty=right.empty,
            added_empty=added.empty,
            left=factors,
            right=descriptors,
            factor=state.words.left_factor(sum_mma, shape),
            added=[wgmma.operand_b(sum_mma, wgmma.transposed(x)) for x in added.tiles],
            sum=wgmma.accumulator(sum_mma, (WARPGROUP_ROWS, columns)),
            tile_sum=wgmma.accumulator(sum_mma, (WARPGROUP_ROWS, columns)) if len(left) > 1 else None,
            previous=wgmma.Uniform(Int32(0)),
        )
        role.sum.fill(0.0)
        return role

    def run(self) -> None:
        """Visits all tiles of queries of all heads of the group."""
        state, visit = self.state, self.work.visit
        spec, config = state.spec, state.config
        phases = visit.rest(config.order).phases(config.order)

        def run(head: QueryHead, phase: Phase) -> None:
            state.stage.make_uniform()
            self.previous.make_uniform()
            wgmma.loop(phase.steps, lambda i: self._step(head, phase.position(i), phase.edges))

        def visit_head(member: Int32) -> None:
            head = QueryHead.start(self.work, member, state.score, state.row)
            self._step(head, visit.begin, visit.edges, first=True)
            for phase in phases:
                run(head, phase)
            if config.overlap:
                self._start_sum()
                self._finish_sum()

        finish_head = self.finish_head
        if finish_head is None:
            wgmma.loop(ptx.where(visit.begin < visit.end, Int32(spec.group), Int32(0)), visit_head)
            return

        def visit_and_finish(member: Int32) -> None:
            cutlass.if_generate(visit.begin < visit.end, lambda: visit_head(member))
            finish_head(member)

        wgmma.loop(Int32(spec.group), visit_and_finish)

    def _step(self, head: QueryHead, index: Int32, edges: Edges | None, first: bool = False) -> None:
        """Computes the product of one tile and its sum, or with overlap the sum of the tile before."""
        state, overlap = self.state, self.state.config.overlap
        shared, spec, stage, phase = state.shared, state.spec, state.stage[0], state.stage[1]
        wgmma.wait(shared.query_full + stage, phase)
        wgmma.wait(shared.dout_full + stage, phase)
        if edges is not None:
            self._zero_queries(index, stage, first=first)
        right = [x[None, None, None, stage] for x in self.right]
        wgmma.gemm_steps(state.product, (step.times(right) for step in self.left), accumulate=False)
        adds_previous = overlap and not first
        if adds_previous:
            self._start_sum()
        pairs = self.differentiate(head, index, edges, 1 if adds_previous else 0, first)
        wgmma.release(self.right_empty + stage)
        if adds_previous:
            self._finish_sum()
        for i, pair in enumerate(pairs):
            self.factor.put(i, _moved(pair))
        self.previous[0] = stage
        wgmma.advance(state.stage, state.config.stages)
        if not overlap:
            self._start_sum()
            self._finish_sum()

    def _zero_queries(self, index: Int32, stage: Int32, *, first: bool) -> None:
        """Zeroes the rows of Q and dO of a masked tile that see no key. The first tile may be a full one."""
        rows, work = self.state.rows, self.work
        if work.listed is not None:
            is_edge = Boolean(work.visit.is_edge(index))
            if first:
                cutlass.if_generate(is_edge, lambda: rows.zero_dead_queries(stage))
            else:
                rows.zero_dead_queries(stage)
        elif work.bounds.kind.hides_queries:
            rows.zero_hidden_queries(work, index, stage)

    def _start_sum(self) -> None:
        """Starts the sum of the last tile whose left factor is there."""
        added = [x[None, None, None, self.previous[0]] for x in self.added]
        if self.tile_sum is None:
            self.factor.multiply(self.sum, added)
        else:
            self.factor.multiply(self.tile_sum, added, accumulate=False)

    def _finish_sum(self) -> None:
        """Waits for all products, gives the stage back, and adds what tensor cores do not."""
        warpgroup.wait_group(0)
        wgmma.release(self.added_empty + self.previous[0])
        if self.tile_sum is not None:
            for i in range(cute.size(self.sum)):
                self.sum[i] = self.sum[i] + self.tile_sum[i]


def _moved(pair: Pair) -> Pair:
    """Returns a pair in registers of its own."""
    return tuple(ptx.move(word) for word in pair) if isinstance(pair, tuple) else ptx.move(pair)
