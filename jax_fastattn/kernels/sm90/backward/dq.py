# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The query-stationary Hopper backward kernel: dq without additions in memory, the same bits in every run.

A CTA owns 128 query rows of one head: two consumer warpgroups of 64 rows each, and one producer warp. Q and dO stay in
shared memory, tiles of V and K pass through one ring of slots. Per tile:

    S = Q K^T    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

dS goes from accumulator to A operand inside registers, K is read twice from one slot. The warpgroups never wait for
each other: the exponentials of one run under the products of the other.

Key tiles are visited as in `forward/consumer.py`: from the right edge to the left, full ones without mask code. Keys
past the end can only be in the first tile visited, where each warpgroup zeroes those rows of K (0 * NaN is NaN).
Queries past the end need nothing: what they hold stays in their own rows. The kernel stores zeros there, or nothing if
the rows belong to another packed sequence. Reads the statistics that are described in `gradient.py`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels import plan
from jax_fastattn.kernels.arguments import BackwardBuffers, Scalars, Sizes
from jax_fastattn.kernels.device import copies, ptx, softmax, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward import gradient
from jax_fastattn.kernels.sm90.backward.config import ROW_ALIGNMENT, DqConfig, DqMemory, dq_config
from jax_fastattn.kernels.sm90.backward.row_schedule import HeadOrder, PackedSlots, SectionedTiles
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


class RowStatistics(NamedTuple):
    """Statistics of a query row, see `gradient.py`."""

    lse2: Float32
    delta: Float32


class DqKernel:
    """Writes dq.

    Args:
        spec: the compile key.
        config: the variant; by default the one of the table in `forward/config.py`.
    """

    def __init__(self, spec: KernelSpec, config: DqConfig | None = None):
        self.spec, self.config = spec, config or dq_config(spec)
        self.memory = DqMemory.of(spec, self.config)
        self.schedule = (PackedSlots if spec.packed else SectionedTiles)(spec, self.config.rows)
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
        self.mma_dtype = ptx.MMA_DTYPE[spec.dtype]

    def launch(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """The launch of the kernel."""
        config, memory = self.config, self.memory
        return Launch(
            self.kernel,
            (buffers, Sizes.of(scalars), order),
            grid=self.schedule.blocks(scalars, order),
            block=config.threads,
            shared_bytes=memory.nbytes,
            tma=Tma.boxes(self.spec, memory, buffers, scalars, query_rows=WARPGROUP_ROWS, key_rows=config.keys),
            begins_early=True,
        )

    @cute.kernel
    def kernel(self, tma: Tma, buffers: BackwardBuffers, sizes: Sizes, order: HeadOrder):
        config = self.config
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = self._shared()
        self._initialize(warp_index, shared, tma)
        # Of statistics; what is launched next may rely on them, then.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        work = self._work(buffers, sizes, order)

        def produce() -> None:
            cute.arch.setmaxregister_decrease(config.registers.producer)
            producer = config.consumer_threads // 32
            cutlass.if_generate(warp_index == producer, lambda: self._produce(shared, work, tma))

        def consume() -> None:
            cute.arch.setmaxregister_increase(config.registers.consumer)
            transform = softmax.Transform.of(self.spec, sizes.scale, sizes.logits_soft_cap)
            state = self._consumer(shared, work, transform, buffers.stats, thread, warp_index)
            self._consume(state)
            self._store(state, buffers.dq, sizes.scale)

        cutlass.if_generate(warp_index >= config.consumer_threads // 32, produce, consume)

    # Set-up.

    def _shared(self) -> SimpleNamespace:
        """Tiles and barriers in shared memory."""
        config, memory = self.config, self.memory
        base = wgmma.shared_memory()

        def staged(start: int, rows: int, columns: int, count: int, pitch: int) -> cute.Tensor:
            return wgmma.staged_tile(base + start, self.dtype, (rows, columns), count, pitch // 2)

        ring = (config.slots, memory.slot_nbytes)
        barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
        return SimpleNamespace(
            address=base.toint(),
            query=staged(0, WARPGROUP_ROWS, memory.head_dim, 2, memory.query_nbytes),
            dout=staged(memory.dout_start, WARPGROUP_ROWS, memory.v_head_dim, 2, memory.dout_nbytes),
            key=staged(memory.ring_start, config.keys, memory.head_dim, *ring),
            value=staged(memory.ring_start, config.keys, memory.v_head_dim, *ring),
            full=barriers,
            empty=barriers + config.slots,
            query_full=barriers + 2 * config.slots,
            dout_full=barriers + (2 * config.slots + 2),
        )

    def _initialize(self, warp_index: Int32, shared: SimpleNamespace, tma: Tma) -> None:
        """Initialises the barriers, and makes them visible to all threads and to TMA."""
        config = self.config

        def initialize() -> None:
            tma.prefetch_descriptors()
            with cute.arch.elect_one():
                for slot in range(config.slots):
                    cute.arch.mbarrier_init(shared.full + slot, 1)
                    cute.arch.mbarrier_init(shared.empty + slot, config.consumer_threads // 32)
                for group in range(2):
                    cute.arch.mbarrier_init(shared.query_full + group, 1)
                    cute.arch.mbarrier_init(shared.dout_full + group, 1)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    def _work(self, buffers: BackwardBuffers, sizes: Sizes, order: HeadOrder) -> SimpleNamespace:
        """The query rows of this CTA, and the key tiles that they see."""
        config = self.config
        block, _, _ = cute.arch.block_idx()
        tile, head, kv_head, sequence, head_index = self.schedule.at(block, order, buffers, sizes)
        row = tile * config.rows
        bounds = sequence.bounds()
        return SimpleNamespace(
            tile=tile,
            row=row,
            queries=sequence.queries,
            keys=sequence.keys,
            head=head,
            head_index=head_index,
            kv_head=kv_head,
            num_heads=sizes.num_heads,
            bounds=bounds,
            visit=gradient.uniform(copies.key_tiles(row, config.rows, config.keys, **bounds)),
        )

    def _own_visit(self, work: SimpleNamespace, group: Int32) -> plan.TileRange:
        """Those of the key tiles to visit that one warpgroup's rows see."""
        seen = copies.key_tiles(work.row + group * WARPGROUP_ROWS, WARPGROUP_ROWS, self.config.keys, **work.bounds)
        end = copies.clamp(seen.end, work.visit.begin, work.visit.end)
        begin = copies.clamp(seen.begin, work.visit.begin, end)
        full_end = copies.clamp(seen.full_end, begin, end)
        return gradient.uniform(plan.TileRange(begin, end, copies.clamp(seen.full_begin, begin, full_end), full_end))

    # Producer.

    def _produce(self, shared: SimpleNamespace, work: SimpleNamespace, tma: Tma) -> None:
        """Loads Q, dO and all tiles of V and K. Runs in one warp."""
        config, memory = self.config, self.memory
        ring = wgmma.Ring(shared.full, shared.empty, config.slots)
        copy_query = tma.query.copy(shared.query, work.head, work.queries)
        copy_dout = tma.dout.copy(shared.dout, work.head, work.queries)
        copy_key = tma.key.copy(shared.key, work.kv_head, work.keys)
        copy_value = tma.value.copy(shared.value, work.kv_head, work.keys)

        def load_rows(copy: Callable[..., None], barrier: cute.Pointer, nbytes: int) -> None:
            for group in range(2):
                wgmma.expect(barrier + group, nbytes)
                copy(2 * work.tile + group, group, barrier + group)

        def load(i: Int32) -> None:
            # V first: with three slots the next K takes its place, long before this K is done with.
            tile = work.visit.end - 1 - i
            ring.fill(copy_value, tile, config.keys * memory.v_head_dim * 2)
            ring.fill(copy_key, tile, config.keys * memory.head_dim * 2)

        # The first product needs Q and K.
        count = work.visit.end - work.visit.begin
        load_rows(copy_query, shared.query_full, memory.query_nbytes)
        wgmma.loop(Int32(cutlass.min(count, 1)), load)
        load_rows(copy_dout, shared.dout_full, memory.dout_nbytes)
        wgmma.loop(count - 1, lambda i: load(i + 1))

    # Consumers.

    def _consumer(
        self,
        shared: SimpleNamespace,
        work: SimpleNamespace,
        transform: softmax.Transform,
        stats: cute.Pointer,
        thread: Int32,
        warp_index: Int32,
    ) -> SimpleNamespace:
        """What a consumer warpgroup has."""
        config, memory = self.config, self.memory
        group = warp_index // 4
        lane_row, lane_column = accumulator_lane(thread % 32)
        score_mma = wgmma.product(self.dtype, config.keys, a_in_registers=False, b_transposed=False)
        dq_mma = wgmma.product(self.dtype, memory.head_dim, a_in_registers=True, b_transposed=True)
        scores = (WARPGROUP_ROWS, config.keys)
        row = warp_index * 16 + lane_row
        return SimpleNamespace(
            shared=shared,
            work=work,
            transform=transform,
            ring=wgmma.Ring(shared.full, shared.empty, config.slots),
            key_slot=cute.make_rmem_tensor((1,), Int32),
            group=group,
            thread=thread % 128,
            row=row,
            lane_column=lane_column,
            score_mma=score_mma,
            dq_mma=dq_mma,
            query=wgmma.operand_a(score_mma, shared.query)[None, None, None, group],
            dout=wgmma.operand_a(score_mma, shared.dout)[None, None, None, group],
            key=wgmma.operand_b(score_mma, shared.key),
            value=wgmma.operand_b(score_mma, shared.value),
            key_t=wgmma.operand_b(dq_mma, wgmma.transposed(shared.key)),
            score=wgmma.accumulator(score_mma, scores),
            dscore=wgmma.accumulator(score_mma, scores),
            fragment=wgmma.fragment_a(dq_mma, scores, self.dtype),
            dq=wgmma.accumulator(dq_mma, (WARPGROUP_ROWS, memory.head_dim)),
            stats=self._stats(stats, work, work.row + row),
        )

    def _consume(self, state: SimpleNamespace) -> None:
        """dQ of a consumer warpgroup, in its accumulator."""
        work, group = state.work, state.group
        state.dq.fill(0.0)
        state.key_slot.fill(0)
        visit = self._own_visit(work, group)
        wgmma.wait(state.shared.query_full + group, Int32(0))
        self._pass_by(state, work.visit.end - visit.end)
        some = visit.begin < visit.end
        cutlass.if_generate(some, lambda: self._visit(state, visit), lambda: self._await_dout(state))
        self._pass_by(state, visit.begin - work.visit.begin)

    def _stats(self, stats: cute.Pointer, work: SimpleNamespace, row: Int32) -> list[RowStatistics]:
        """Those of the lane's two rows."""
        rows = work.queries.padded_rows(ROW_ALIGNMENT)
        head_row = work.queries.padded_row(Int64(work.head_index), ROW_ALIGNMENT)
        first = stats.toint() + (head_row * 2 + work.queries.padded(row, ROW_ALIGNMENT)) * 4
        addresses = [first + 32 * i for i in range(2)]
        return [RowStatistics(ptx.load_global(at), ptx.load_global(at + Int64(rows) * 4)) for at in addresses]

    def _pass_by(self, state: SimpleNamespace, count: Int32) -> None:
        """Lets tiles go by that only the other warpgroup sees."""
        wgmma.loop(2 * count, lambda _: state.ring.release(state.ring.wait()))

    def _visit(self, state: SimpleNamespace, visit: plan.TileRange) -> None:
        """All key tiles of this warpgroup, from the last to the first."""
        last = visit.end - 1
        full_end, full_begin = (Int32(cutlass.min(end, last)) for end in (visit.full_end, visit.full_begin))

        def visit_tiles(begin: Int32, end: Int32, masked: bool) -> None:
            state.ring.settle()
            state.key_slot[0] = cute.arch.make_warp_uniform(state.key_slot[0])
            wgmma.loop(end - begin, lambda i: self._tile(state, end - 1 - i, masked=masked))

        self._tile(state, last, masked=True, first=True)
        if self.spec.window_right:
            visit_tiles(full_end, last, True)
        visit_tiles(full_begin, full_end, False)
        if self.spec.window_left:
            visit_tiles(visit.begin, full_begin, True)
        if self.config.overlap:
            self._start_dq(state)
            self._finish_dq(state)

    def _tile(self, state: SimpleNamespace, tile: Int32, *, masked: bool, first: bool = False) -> None:
        """dS of one tile; its dQ too, or with overlap that of the tile before."""
        overlap = self.config.overlap
        adds_previous = overlap and not first
        value_slot = state.ring.wait()
        key_slot = state.ring.wait()
        wgmma.gemm(state.score_mma, state.score, state.query, state.key[None, None, None, key_slot], accumulate=False)
        if adds_previous:
            self._start_dq(state)
        if first:
            self._await_dout(state)
        value = state.value[None, None, None, value_slot]
        wgmma.gemm(state.score_mma, state.dscore, state.dout, value, accumulate=False)
        warpgroup.wait_group(2 if adds_previous else 1)
        for i in range(cute.size(state.score)):
            lse2 = state.stats[i // 2 % 2].lse2
            _, state.score[i] = gradient.exponentiate(state.score[i], lse2, state.transform)
        if adds_previous:
            self._finish_dq(state)
        else:
            warpgroup.wait_group(0)
        state.ring.release(value_slot)
        self._dscores(state, tile, masked)
        state.key_slot[0] = key_slot
        if (first and self.spec.hides_last_keys) or (masked and self.spec.hides_first_keys):
            self._zero_keys(state, tile, key_slot)
        if not overlap:
            self._start_dq(state)
            self._finish_dq(state)

    def _await_dout(self, state: SimpleNamespace) -> None:
        """Waits for this warpgroup's dO, once: no copy may outlive its CTA."""
        wgmma.wait(state.shared.dout_full + state.group, Int32(0))

    def _dscores(self, state: SimpleNamespace, tile: Int32, masked: bool) -> None:
        """dP to dS in 16 bits. Where a query does not see the key, anything is replaced: it may be no number."""
        visibilities = self._visibilities(state, tile) if masked else None
        pairs = cute.recast_tensor(state.fragment, Int32)
        for pair in range(cute.size(state.score) // 2):
            block, i = pair // 2, pair % 2
            values = []
            for e in range(2):
                value = state.score[2 * pair + e] * (state.dscore[2 * pair + e] - state.stats[i].delta)
                values.append(value if visibilities is None else visibilities[i].select(value, 8 * block + e))
            pairs[pair] = ptx.pack(*values, dtype=self.mma_dtype)

    def _visibilities(self, state: SimpleNamespace, tile: Int32) -> list[gradient.Visibility]:
        """Of the lane's two rows in one tile."""
        work = state.work
        bounds = {name: x for name, x in work.bounds.items() if name != "query_end"}
        column = tile * self.config.keys + state.lane_column
        limits = [softmax.key_limits(work.row + state.row + 8 * i, **bounds) for i in range(2)]
        return [gradient.Visibility.of(limit, column, self.spec.window_left) for limit in limits]

    def _start_dq(self, state: SimpleNamespace) -> None:
        """Starts dQ += dS K of the last tile whose dS is there."""
        key = state.key_t[None, None, None, state.key_slot[0]]
        wgmma.gemm(state.dq_mma, state.dq, state.fragment, key, accumulate=True)

    def _finish_dq(self, state: SimpleNamespace) -> None:
        """Waits for all products and gives the slot back."""
        warpgroup.wait_group(0)
        state.ring.release(state.key_slot[0])

    def _zero_keys(self, state: SimpleNamespace, tile: Int32, slot: Int32) -> None:
        """Zeroes the rows of K that no query sees. Each warpgroup does so for itself."""
        config, memory, spec, work = self.config, self.memory, self.spec, state.work
        live, first = copies.live_keys(**work.bounds), tile * config.keys
        wgmma.zero_hidden_rows(
            config.keys,
            lambda: [(state.shared.address + memory.ring_start + slot * memory.slot_nbytes, memory.head_dim)],
            copies.Rows.live(live, first, hides_first=spec.hides_first_keys, length=work.keys.zeros_from()),
            threads=128,
            barrier=1,
        )

    def _store(self, state: SimpleNamespace, dq: cute.Pointer, scale: Float32) -> None:
        """Stores dq from registers."""
        work, nbytes = state.work, 2 * self.spec.head_dim
        first = work.queries.row_head(work.row, work.num_heads, work.head)
        gradient.store_rows(
            state.dq,
            self.spec.head_dim,
            dq.toint() + first * nbytes,
            Int64(work.num_heads) * nbytes,
            row=state.row,
            quad_lane=state.thread % 4,
            live=copies.Rows(None, work.bounds["query_end"] - work.row),
            stored_rows=work.queries.length - work.row,
            mma_dtype=self.mma_dtype,
            factor=scale,
        )
