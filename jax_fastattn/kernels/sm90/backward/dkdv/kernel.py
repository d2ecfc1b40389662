# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The key-stationary Hopper backward kernel for head dims over 128 and operands in two terms: dk and dv.

`dq/` computes dq. This kernel works as `dkdv_dq/` does, but both warpgroups share 64 keys, of which dk and dv fill the
registers of one warpgroup each:

    scores warpgroup:   S^T = K Q^T    P    dV += P^T dO
    weights warpgroup:  dP^T = V dO^T    dS = P (dP - delta)    dK += dS^T Q

P passes from one to the other through shared memory, in the order of the registers: in float16, or in float32 if
operands have two terms. With a soft cap it is P times the slope. Nothing else makes a warpgroup wait for the other: the
scores warpgroup may be as many tiles ahead as there are stages. With three stages each warpgroup issues the second
product of a tile after the first one of the next tile, and it runs concurrently with that tile's exponentials. With
two, that would leave no stage to load into: the products of a tile follow each other, and the products of the other
warpgroup fill the gaps.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import copies, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import crossing_words, result_words, warpgroup_words
from jax_fastattn.kernels.device.row_store import ResultRow, RowStore, strided
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.dkdv.role import DkdvState, Role, Stages
from jax_fastattn.kernels.sm90.backward.dkdv.weights import WeightExchange
from jax_fastattn.kernels.sm90.backward.hidden_rows import SharedRows
from jax_fastattn.kernels.sm90.backward.key_schedule import Call, KeyTile
from jax_fastattn.kernels.sm90.backward.key_stationary import KeyStationary
from jax_fastattn.kernels.sm90.backward.mask import QueryMask
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sm90.query_order import HeadOrder
from jax_fastattn.kernels.sums.head_sums import head_sums
from jax_fastattn.kernels.sums.sums import LaneKeys
from jax_fastattn.kernels.sums.units import over_ds


class DkdvKernel:
    """Writes dk and dv."""

    def __init__(self, spec: KernelSpec):
        self.common = KeyStationary.of(spec)
        self.config = self.common.config

    def launch(self, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """Returns the launch of the kernel."""
        return self.common.launch(self.kernel, buffers, scalars, order)

    @cute.kernel
    def kernel(self, tma: Tma, buffers: Buffers, sizes: Sizes, order: HeadOrder):
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = BackwardShared.of(self.common.memory, self.common.dtype)
        shared.initialize(thread, warp_index, tma)
        call = Call(tma, buffers, sizes, order)
        # The warpgroups are two consumers, and the producer's.
        if warp_index >= self.config.consumer_threads // 32:
            self._produce(shared, call, warp_index)
        else:
            self.common.compute(DkdvConsumer.start, shared, call, thread, warp_index)
        # This waits for the previous kernel, which runs concurrently: what is launched next relies on both.
        cute.arch.griddepcontrol_wait()

    def _produce(self, shared: BackwardShared, call: Call, warp_index: Int32) -> None:
        """Emits the producer's warpgroup, of which one warp loads."""
        load_all = self.common.loader(shared, call)
        cutlass.if_generate(warp_index == self.common.first_producer, load_all)


class _Result(NamedTuple):
    """Says where a sum goes.

    Attributes:
        target: dk or dv.
        head_dim: its columns.
        factor: factor on the sum.
    """

    target: cute.Pointer
    head_dim: int
    factor: Float32 | float


@dataclass(frozen=True, eq=False)
class DkdvConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        state: what both warpgroups have.
        group: the warpgroup: 0 computes dv, 1 computes dk.
        weights: turns the product into P or dS.
    """

    state: DkdvState
    group: Int32
    weights: WeightExchange

    @classmethod
    def start(
        cls, spec: KernelSpec, shared: BackwardShared, score: Score, thread: Int32, warp_index: Int32
    ) -> "DkdvConsumer":
        """Returns the role with its registers."""
        config = shared.memory.config
        lane_row, lane_column = accumulator_lane(thread % 32)
        row = warp_index % 4 * 16 + lane_row
        mma = wgmma.product(shared.query[0].element_type, config.queries, a_in_registers=False, b_transposed=False)
        group, stage = warp_index // 4, wgmma.Uniform(Int32(0), Int32(0))
        product = wgmma.accumulator(mma, (WARPGROUP_ROWS, config.queries))
        mask, words = QueryMask(spec, shared, row, lane_column), warpgroup_words(spec)
        crossing = crossing_words(spec) if spec.config.main.float16_weights or spec.terms > 1 else words
        sums = head_sums(spec, 1, config.queries // 8)
        return cls(
            state=DkdvState(
                spec=spec,
                words=words,
                shared=shared,
                thread=thread,
                score=score,
                row=row,
                rows=SharedRows(spec, shared.memory, shared),
                stage=stage,
                mma=mma,
                product=product,
            ),
            group=group,
            weights=WeightExchange(spec, words, crossing, shared, thread, lane_column, mask, stage, product, sums),
        )

    def run(self, work: KeyTile, phase: Int32, buffers: Buffers, scale: Float32) -> None:
        """Computes dk or dv of a tile of keys, see `key_stationary.Consumer`."""
        state, shared = self.state, self.state.shared
        wgmma.wait(shared.key_full, phase)
        wgmma.wait(shared.value_full, phase)

        queries, douts = Stages(shared.query, shared.query_empty), Stages(shared.dout, shared.dout_empty)

        sums = self.weights.sums

        def finish_head(member: Int32) -> None:
            plane, first = work.queries.head(work.num_heads, work.first_head + member), work.row + state.row
            live, units = self._are_live(work), work.units(state.spec, buffers)
            keys = LaneKeys(buffers, plane, work.keys.length, first, self.weights.lane_column, live, units.over_ds)
            for kind in sums:
                kind.store(keys)
                kind.clear()

        def compute_dv() -> None:
            role = Role.start(state, work, shared.key, queries, douts, self.weights.give)
            role.run()
            self._store_sum(
                work, role.sum, _Result(buffers.dv, state.spec.v_head_dim, work.units(state.spec, buffers).over_p)
            )

        def compute_dk() -> None:
            state.rows.scale_values(0, work.units(state.spec, buffers))
            role = Role.start(state, work, shared.value, douts, queries, self.weights.take)
            for kind in sums:
                kind.clear()
            # A head without tiles of queries has sums, too.
            role = replace(role, finish_head=finish_head if sums else None)
            role.run()
            factor = over_ds(work.units(state.spec, buffers), scale)
            self._store_sum(work, role.sum, _Result(buffers.dk, state.spec.head_dim, factor))

        cutlass.if_generate(self.group == 0, compute_dv, compute_dk)

    # The methods below store the results.

    def _store_sum(self, work: KeyTile, acc: cute.Tensor, result: _Result) -> None:
        """Stores dk or dv from registers. Rows of keys that no query sees may hold NaN there, of their K or V."""
        if work.listed is not None:
            live = work.listed.entries.are_live(self.state.row)
            self._row_store(work, result).store(acc, [ResultRow(x, result.factor) for x in live])
            return
        live = copies.Rows(None, work.bounds.key_end - work.row)
        if work.bounds.kind.hides_keys:
            live = copies.moved(work.bounds).live_keys()
            live = copies.Rows.live(live, work.row)
        self._row_store(work, result).store_live(acc, live, result.factor)

    def _are_live(self, work: KeyTile) -> list[Boolean]:
        """Returns whether some query sees each of the lane's keys: what others hold may be no number."""
        if work.listed is not None:
            return work.listed.entries.are_live(self.state.row)
        live = copies.moved(work.bounds).live_keys()
        rows = [work.row + self.state.row + 8 * i for i in range(2)]
        return [Boolean((row >= live.begin) & (row < live.end)) for row in rows]

    def _row_store(self, work: KeyTile, result: _Result) -> RowStore:
        """Returns where the lane's rows of a sum go."""
        first = work.keys.row_head(work.row, work.kv_heads, work.kv_head)
        nbytes = self.state.spec.result_nbytes * result.head_dim
        return RowStore(
            address=strided(result.target.toint() + first * nbytes, Int64(work.kv_heads) * nbytes),
            columns=result.head_dim,
            row=self.state.row,
            end=work.keys.length - work.row,
            quad_lane=self.state.thread % 4,
            words=result_words(self.state.spec),
        )
