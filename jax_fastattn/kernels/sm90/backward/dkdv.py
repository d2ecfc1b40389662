# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The key-stationary Hopper backward kernel for head dims over 128: dk and dv. `dq.py` computes dq.

As `dkdv_dq.py`, but both warpgroups share 64 keys, of which dk and dv fill the registers of one warpgroup each:

    scores warpgroup:   S^T = K Q^T    P    dV += P^T dO
    weights warpgroup:  dP^T = V dO^T    dS = P (dP - delta)    dK += dS^T Q

P passes from one to the other in 16 bits through shared memory, in the order of the registers; with a soft cap it is P
times the slope. Nothing else makes a warpgroup wait for the other: the scores warpgroup may be as many tiles ahead as
there are stages. With three stages each warpgroup issues the second product of a tile after the first one of the next
tile, and it runs concurrently with that tile's exponentials. With two, that would leave no stage to load into: the
products of a tile follow each other, and those of the other warpgroup fill the gaps.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments import BackwardBuffers, Scalars, Sizes
from jax_fastattn.kernels.device import copies, ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.row_store import ResultRow, RowStore, strided
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig
from jax_fastattn.kernels.sm90.backward.dkdv_weights import Differentiate, WeightExchange
from jax_fastattn.kernels.sm90.backward.hidden_rows import SharedRows
from jax_fastattn.kernels.sm90.backward.key_schedule import Call, KeyTile, QueryHead
from jax_fastattn.kernels.sm90.backward.key_stationary import KeyStationary
from jax_fastattn.kernels.sm90.backward.mask import QueryMask
from jax_fastattn.kernels.sm90.backward.row_schedule import HeadOrder
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.visits import Edges, Phase


class DkdvKernel:
    """Writes dk and dv.

    Args:
        spec: the compile key.
    """

    def __init__(self, spec: KernelSpec):
        self.common = KeyStationary.of(spec)
        self.config = self.common.config

    def launch(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """Returns the launch of the kernel."""
        return self.common.launch(self.kernel, buffers, scalars, order)

    @cute.kernel
    def kernel(self, tma: Tma, buffers: BackwardBuffers, sizes: Sizes, order: HeadOrder):
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = BackwardShared.of(self.common.memory, self.common.dtype)
        shared.initialize(thread, warp_index, tma)
        call = Call(tma, buffers, sizes, order)
        # Warpgroups: two consumers, and the producer's.
        if warp_index >= self.config.consumer_threads // 32:
            self._produce(shared, call, warp_index)
        else:
            self.common.compute(DkdvConsumer.start, shared, call, thread, warp_index)
        # For the kernel before it, which runs concurrently: what is launched next relies on both.
        cute.arch.griddepcontrol_wait()

    def _produce(self, shared: BackwardShared, call: Call, warp_index: Int32) -> None:
        """Emits the producer's warpgroup, of which one warp loads."""
        load_all = self.common.loader(shared, call)
        cutlass.if_generate(warp_index == self.common.first_producer, load_all)


class _Stages(NamedTuple):
    """A ring of tiles in shared memory.

    Attributes:
        tiles: `[rows, columns, stage]`.
        empty: barriers on which its stages are given back.
    """

    tiles: cute.Tensor
    empty: cute.Pointer


class _Result(NamedTuple):
    """Where a sum goes.

    Attributes:
        target: dk or dv.
        head_dim: its columns.
        factor: on the sum; None for 1.
    """

    target: cute.Pointer
    head_dim: int
    factor: Float32 | None


class _LeftStep(NamedTuple):
    """The left factor of a step of 16 along a product's columns.

    Attributes:
        mma: the product, with its left factor in registers or in shared memory.
        left: the left factor of all steps, a fragment or descriptors.
        k: index of the step.
    """

    mma: cute.TiledMma
    left: cute.Tensor
    k: int

    def times(self, right: cute.Tensor) -> wgmma.Step:
        """Returns the step with its right factor, given descriptors of all steps."""
        return self.mma, self.left[None, None, self.k], right[None, None, self.k]


@dataclass(frozen=True, eq=False)
class DkdvConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        spec: the compile key.
        shared: tiles and barriers.
        thread: index of this thread in the CTA.
        group: the warpgroup: 0 computes dv, 1 computes dk.
        score: from products to probabilities.
        row: the lane's first row of an accumulator, counted from the CTA's first key; the other one is 8 further.
        rows: what it zeroes in shared memory.
        stage: stage of the rings of Q and dO, which move alike, and the parity of its lap.
        mma: S^T or dP^T, both factors from shared memory.
        product: its accumulator `[64, queries]`.
        weights: from the product to P or dS.
    """

    spec: KernelSpec
    shared: BackwardShared
    thread: Int32
    group: Int32
    score: Score
    row: Int32
    rows: SharedRows
    stage: wgmma.Uniform
    mma: cute.TiledMma
    product: cute.Tensor
    weights: WeightExchange

    @classmethod
    def start(
        cls, spec: KernelSpec, shared: BackwardShared, score: Score, thread: Int32, warp_index: Int32
    ) -> "DkdvConsumer":
        """Returns the role with its registers."""
        config = shared.memory.config
        lane_row, lane_column = accumulator_lane(thread % 32)
        row = warp_index % 4 * 16 + lane_row
        mma = wgmma.product(shared.query.element_type, config.queries, a_in_registers=False, b_transposed=False)
        group, stage = warp_index // 4, wgmma.Uniform(Int32(0), Int32(0))
        product = wgmma.accumulator(mma, (WARPGROUP_ROWS, config.queries))
        mask = QueryMask(spec, shared, row, lane_column)
        return cls(
            spec=spec,
            shared=shared,
            thread=thread,
            group=group,
            score=score,
            row=row,
            rows=SharedRows(spec, shared.memory, shared),
            stage=stage,
            mma=mma,
            product=product,
            weights=WeightExchange(spec, shared, thread, lane_column, mask, stage, product),
        )

    @property
    def config(self) -> BackwardConfig:
        """The variant."""
        return self.shared.memory.config

    @property
    def dtype(self) -> Any:
        """That of the operands."""
        return self.shared.query.element_type

    def run(self, work: KeyTile, phase: Int32, buffers: BackwardBuffers, scale: Float32) -> None:
        """Does everything for a tile of keys, see `key_stationary.Consumer`."""
        shared = self.shared
        wgmma.wait(shared.key_full, phase)
        wgmma.wait(shared.value_full, phase)

        queries, douts = _Stages(shared.query, shared.query_empty), _Stages(shared.dout, shared.dout_empty)
        dk = _Result(buffers.dk, self.spec.head_dim, scale)
        dv = _Result(buffers.dv, self.spec.v_head_dim, None)

        def compute_dv() -> None:
            role = _Role.start(self, work, shared.key, queries, douts, self.weights.give)
            role.run()
            self._store_sum(work, role.sum, dv)

        def compute_dk() -> None:
            role = _Role.start(self, work, shared.value, douts, queries, self.weights.take)
            role.run()
            self._store_sum(work, role.sum, dk)

        cutlass.if_generate(self.group == 0, compute_dv, compute_dk)

    # Results.

    def _store_sum(self, work: KeyTile, acc: cute.Tensor, result: _Result) -> None:
        """Stores dk or dv from registers. Rows of keys that no query sees may hold NaN there, of their K or V."""
        if work.listed is not None:
            live = work.listed.entries.are_live(self.row)
            self._row_store(work, result).store(acc, [ResultRow(x, result.factor) for x in live])
            return
        live = copies.Rows(None, work.bounds.key_end - work.row)
        if work.bounds.kind.hides_keys:
            live = copies.moved(work.bounds).live_keys()
            live = copies.Rows.live(live, work.row)
        self._row_store(work, result).store_live(acc, live, result.factor)

    def _row_store(self, work: KeyTile, result: _Result) -> RowStore:
        """Returns where the lane's rows of a sum go."""
        first = work.keys.row_head(work.row, work.kv_heads, work.kv_head)
        return RowStore(
            address=strided(
                result.target.toint() + first * (2 * result.head_dim), Int64(work.kv_heads) * (2 * result.head_dim)
            ),
            columns=result.head_dim,
            row=self.row,
            end=work.keys.length - work.row,
            quad_lane=self.thread % 4,
            mma_dtype=ptx.MMA_DTYPE[self.spec.dtype],
        )


@dataclass(frozen=True, eq=False)
class _Role:
    """What one of the two warpgroups does for a tile of keys: `product = left right^T`, `sum += fragment^T added`.

    Attributes:
        consumer: what both warpgroups have.
        work: the tile of keys.
        differentiate: from the product to the fragment, in 16 bits.
        right_empty: barriers on which stages of the right factor are given back.
        added_empty: barriers on which stages of the right factor of the sum are given back.
        left: left factor of the product, of the keys.
        right: descriptors of its right factor.
        sum_mma: the product that is added to the sum, its left factor from registers.
        added: descriptors of its right factor.
        fragment: its left factor in 16 bits.
        sum: accumulator `[64, columns]` of dk or dv.
        previous: stage of the last tile whose fragment is there.
    """

    consumer: DkdvConsumer
    work: KeyTile
    differentiate: Differentiate
    right_empty: cute.Pointer
    added_empty: cute.Pointer
    left: list[_LeftStep]
    right: cute.Tensor
    sum_mma: cute.TiledMma
    added: cute.Tensor
    fragment: cute.Tensor
    sum: cute.Tensor
    previous: wgmma.Uniform

    @classmethod
    def start(
        cls,
        consumer: DkdvConsumer,
        work: KeyTile,
        left: cute.Tensor,
        right: _Stages,
        added: _Stages,
        differentiate: Differentiate,
    ) -> "_Role":
        """Returns the role with its registers, and its sum at 0.

        Args:
            consumer: what both warpgroups have.
            work: the tile of keys.
            left: left factor of the product, `[64, columns, 1]` in shared memory.
            right: its right factor.
            added: right factor of the sum.
            differentiate: from the product to the fragment.
        """
        config, dtype, mma = consumer.config, consumer.dtype, consumer.mma
        columns, shape = cute.size(added.tiles, mode=[1]), (WARPGROUP_ROWS, config.queries)
        register_mma = wgmma.product(dtype, config.queries, a_in_registers=True, b_transposed=False)
        steps = cute.size(left, mode=[1]) // 16
        count = min(config.kv_in_regs, steps)
        first = wgmma.load_a(register_mma, left, 0, count, consumer.thread % 128)
        rest = wgmma.operand_a(mma, left)[None, None, None, 0]
        factors = [_LeftStep(register_mma, first, k) if k < count else _LeftStep(mma, rest, k) for k in range(steps)]
        descriptors = wgmma.operand_b(mma, right.tiles)
        sum_mma = wgmma.product(dtype, columns, a_in_registers=True, b_transposed=True)
        role = cls(
            consumer=consumer,
            work=work,
            differentiate=differentiate,
            right_empty=right.empty,
            added_empty=added.empty,
            left=factors,
            right=descriptors,
            sum_mma=sum_mma,
            added=wgmma.operand_b(sum_mma, wgmma.transposed(added.tiles)),
            fragment=wgmma.fragment_a(sum_mma, shape, dtype),
            sum=wgmma.accumulator(sum_mma, (WARPGROUP_ROWS, columns)),
            previous=wgmma.Uniform(Int32(0)),
        )
        role.sum.fill(0.0)
        return role

    def run(self) -> None:
        """Visits all tiles of queries of all heads of the group."""
        consumer, visit = self.consumer, self.work.visit
        spec, config = consumer.spec, consumer.config
        phases = visit.rest(config.order).phases(config.order)

        def run(head: QueryHead, phase: Phase) -> None:
            consumer.stage.make_uniform()
            self.previous.make_uniform()
            wgmma.loop(phase.steps, lambda i: self._step(head, phase.position(i), phase.edges))

        def visit_head(member: Int32) -> None:
            head = QueryHead.start(self.work, member, consumer.score)
            self._step(head, visit.begin, visit.edges, first=True)
            for phase in phases:
                run(head, phase)
            if config.overlap:
                self._start_sum()
                self._finish_sum()

        wgmma.loop(ptx.where(visit.begin < visit.end, Int32(spec.group), Int32(0)), visit_head)

    def _step(self, head: QueryHead, index: Int32, edges: Edges | None, first: bool = False) -> None:
        """Computes the product of one tile and its sum, or with overlap that of the one before."""
        consumer, overlap = self.consumer, self.consumer.config.overlap
        shared, spec, stage, phase = consumer.shared, consumer.spec, consumer.stage[0], consumer.stage[1]
        wgmma.wait(shared.query_full + stage, phase)
        wgmma.wait(shared.dout_full + stage, phase)
        if edges is not None:
            self._zero_queries(index, stage, first=first)
        right = self.right[None, None, None, stage]
        wgmma.gemm_steps(consumer.product, (step.times(right) for step in self.left), accumulate=False)
        adds_previous = overlap and not first
        if adds_previous:
            self._start_sum()
        pairs = self.differentiate(head, index, edges, 1 if adds_previous else 0, first)
        wgmma.release(self.right_empty + stage)
        if adds_previous:
            self._finish_sum()
        fragment = cute.recast_tensor(self.fragment, Int32)
        for i, pair in enumerate(pairs):
            fragment[i] = ptx.move(pair)
        self.previous[0] = stage
        wgmma.advance(consumer.stage, consumer.config.stages)
        if not overlap:
            self._start_sum()
            self._finish_sum()

    def _zero_queries(self, index: Int32, stage: Int32, *, first: bool) -> None:
        """Zeroes the rows of Q and dO of a masked tile that see no key. The first tile may be a full one."""
        rows, work = self.consumer.rows, self.work
        if work.listed is not None:
            is_edge = Boolean(work.visit.is_edge(index))
            if first:
                cutlass.if_generate(is_edge, lambda: rows.zero_dead_queries(stage))
            else:
                rows.zero_dead_queries(stage)
        elif work.bounds.kind.hides_queries:
            rows.zero_hidden_queries(work, index, stage)

    def _start_sum(self) -> None:
        """Starts the sum of the last tile whose fragment is there."""
        added = self.added[None, None, None, self.previous[0]]
        wgmma.gemm(self.sum_mma, self.sum, self.fragment, added, accumulate=True)

    def _finish_sum(self) -> None:
        """Waits for all products and gives the stage back."""
        warpgroup.wait_group(0)
        wgmma.release(self.added_empty + self.previous[0])
