# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper backward kernel for head dims up to 128: dk, dv and dq.

A CTA works on 128 keys of one key/value head: two consumer warpgroups of 64 keys each, and a warp that loads
(`producer.py`). K and V stay in shared memory, tiles of Q (with statistics) and of dO pass through two rings, for all
query heads of the group. Per tile, everything transposed so that keys are rows:

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

P^T and dS^T go from accumulator to A operand inside registers. The warpgroups never wait for each other. For dq the
consumers put dS into shared memory as well, where a third warpgroup takes it up (`dq_sum.py`). There is a CTA per SM,
which takes one tile of keys after the other (`key_tiles.py`). `wide.py`, over head dim 128, has the launch and the
producer from here, but a tile of keys a CTA; there dq has a kernel of its own, `dq.py`.

Query tiles are visited from the last one down: masked ones (left window edge, end of the queries), full ones without
mask code, masked ones (right window edge). Reads the statistics that are described in `gradient.py`.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.arguments import BackwardBuffers, Scalars, Sizes
from jax_fastattn.kernels.device import ptx, rescue, softmax, tiles, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import SLOTS, BackwardConfig, BackwardMemory
from jax_fastattn.kernels.sm90.config import WARPGROUP_ROWS
from jax_fastattn.kernels.sm90.dq_ordered import DqOrdered
from jax_fastattn.kernels.sm90.dq_sum import BLOCK, DqSum
from jax_fastattn.kernels.sm90.key_tiles import Call, KeyTiles, PackedKeyTiles
from jax_fastattn.kernels.sm90.producer import Producer
from jax_fastattn.kernels.sm90.schedule import HeadOrder
from jax_fastattn.kernels.sm90.taken import TakenTile
from jax_fastattn.kernels.spec import UNBOUNDED, KernelSpec

# Columns of a step of a product.
_STEP = 16
# Lanes of an accumulator's row: each has columns of its own.
_COLUMN_LANES = 4
# 1 in bfloat16.
_ONE = 0x3F80


class Edges(NamedTuple):
    """Which edges of the visible queries a masked tile may hold."""

    low: bool
    high: bool


class FusedKernel:
    """Writes dk and dv, and adds dq to `dq_sum` unless the config is wide.

    Args:
        spec: the compile key.
        config: the variant.
    """

    def __init__(self, spec: KernelSpec, config: BackwardConfig):
        self.spec, self.config = spec, config
        self.memory = BackwardMemory.of(spec, config)
        self.key_tiles = (PackedKeyTiles if spec.packed else KeyTiles)(spec, self.memory)
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
        self.mma_dtype = ptx.MMA_DTYPE[spec.dtype]

    def launch(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """The launch of the kernel.

        The statistics of the first `order.prepared` heads, and the zeros of the first `order.ahead` heads, are written
        before it begins, and those of others once their counter says so. With `spec.ordered` sums may hold anything.
        Rows of dq that no key tile adds to stay as they are.
        """
        config, memory = self.config, self.memory
        return Launch(
            self.kernel,
            (buffers, Sizes.of(scalars), order),
            grid=self.key_tiles.blocks(scalars, order),
            block=config.threads,
            shared_bytes=memory.nbytes,
            tma=Tma.boxes(self.spec, memory, buffers, scalars, query_rows=config.queries, key_rows=WARPGROUP_ROWS),
            begins_early=True,
        )

    @cute.kernel
    def kernel(self, tma: Tma, buffers: BackwardBuffers, sizes: Sizes, order: HeadOrder):
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = self._shared()
        if self.config.adds_dq:
            self._write_constants(thread, shared)
        self._initialize(warp_index, shared, tma)
        self._divide(shared, Call(tma, buffers, sizes, order), thread, warp_index)
        # For the kernel before it, beside which it runs: what is launched next relies on both.
        cute.arch.griddepcontrol_wait()

    def _divide(self, shared: SimpleNamespace, call: Call, thread: Int32, warp_index: Int32) -> None:
        """Warpgroups: two consumers, the one that computes dq if the kernel does, and the producer's.

        The producer's other warps zero sums of dq and count their tiles.
        """
        spec, config, buffers, scale = self.spec, self.config, call.buffers, call.sizes.scale
        adder = (DqOrdered if spec.ordered else DqSum)(spec, self.memory, self.dtype)
        consumers, producer = config.consumer_threads // 32, config.threads // 32 - 4

        def produce() -> None:
            cute.arch.setmaxregister_decrease(config.registers.producer)
            emit = Producer(spec.group, self.memory)
            load = emit.start(shared, call.tma, buffers.stats, lambda work: adder.prepare(work, buffers.arrivals))
            if not config.adds_dq:
                cutlass.if_generate(warp_index == producer, lambda: self.key_tiles.each(shared, call, load, takes=True))
                return
            slot, at = warp_index - (producer + 1), wgmma.Uniform(Int32(0), Int32(0))

            def zero_and_count(work: SimpleNamespace, _: Int32) -> None:
                adder.zero(work, buffers, slot)
                adder.count(shared, work, buffers.arrivals, slot, at)

            cutlass.if_generate(
                slot >= 0,
                lambda: self.key_tiles.each(shared, call, zero_and_count),
                lambda: self.key_tiles.each(shared, call, load, takes=True),
            )

        def add_dq() -> None:
            cute.arch.setmaxregister_decrease(config.registers.dq)
            state = adder.start(shared, buffers, thread - config.consumer_threads, scale)
            self.key_tiles.each(shared, call, lambda work, phase: adder.run(state, work, phase))

        def others() -> None:
            if config.adds_dq:
                cutlass.if_generate(warp_index >= producer, produce, add_dq)
            else:
                produce()

        def consume() -> None:
            cute.arch.setmaxregister_increase(config.registers.consumer)
            factor = gradient.nonzero(scale) if spec.divides_lse else scale
            transform = softmax.Transform.of(spec, factor, call.sizes.logits_soft_cap)
            state = self._consumer(shared, transform, thread, warp_index)
            self.key_tiles.each(shared, call, lambda work, phase: self._consume(state, work, phase, buffers, scale))

        cutlass.if_generate(warp_index >= consumers, others, consume)

    # Set-up.

    def _shared(self) -> SimpleNamespace:
        """Tiles and barriers in shared memory."""
        config, memory, stages = self.config, self.memory, self.config.stages
        base = wgmma.shared_memory()

        def staged(start: int, rows: int, columns: int, count: int) -> cute.Tensor:
            return wgmma.staged_tile(base + start, self.dtype, (rows, columns), count, rows * columns)

        barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
        shared = SimpleNamespace(
            address=base.toint(),
            key=staged(0, WARPGROUP_ROWS, memory.head_dim, config.keys // WARPGROUP_ROWS),
            value=staged(memory.value_start, WARPGROUP_ROWS, memory.v_head_dim, config.keys // WARPGROUP_ROWS),
            query=staged(memory.query_start, config.queries, memory.head_dim, stages),
            dout=staged(memory.dout_start, config.queries, memory.v_head_dim, stages),
            key_full=barriers,
            value_full=barriers + 1,
            query_full=barriers + 2,
            query_empty=barriers + (2 + stages),
            dout_full=barriers + (2 + 2 * stages),
            dout_empty=barriers + (2 + 3 * stages),
        )
        if config.adds_dq:
            count = 2 * config.keys * config.queries // (BLOCK * BLOCK)
            shared.dscore = staged(memory.dscore_start, BLOCK, BLOCK, count)
            # Factors of products in bfloat16, whatever the operands are.
            statistics = (config.queries, _STEP)
            shared.stats = wgmma.staged_tile(
                base + memory.stats_start, cutlass.BFloat16, statistics, 2 * stages, config.queries * _STEP
            )
            if config.shared_ones:
                shared.ones = wgmma.staged_tile(
                    base + memory.ones_start, cutlass.BFloat16, (WARPGROUP_ROWS, _STEP), 1, WARPGROUP_ROWS * _STEP
                )
            shared.dscore_full = barriers + (2 + 4 * stages)
            shared.dscore_empty = barriers + (4 + 4 * stages)
            shared.added = barriers + (6 + 4 * stages)
            shared.counted = barriers + (6 + 4 * stages + SLOTS)
            shared.keys_empty = barriers + (6 + 4 * stages + 2 * SLOTS)
            taken_full = barriers + (7 + 4 * stages + 2 * SLOTS)
            shared.taken = TakenTile(shared.address, memory.index_start, 1, taken_full, taken_full + 1)
            # K once more, of as many columns as dq is computed of at a time: atoms of 64 columns follow each other.
            columns = DqSum(self.spec, memory, self.dtype).columns
            shared.key_columns = staged(0, WARPGROUP_ROWS, columns, 2 * memory.head_dim // columns)
        return shared

    def _initialize(self, warp_index: Int32, shared: SimpleNamespace, tma: Tma) -> None:
        """Initialises the barriers, and makes them visible to all threads and to TMA."""
        config = self.config
        arrivals = config.consumer_threads // 32

        def initialize() -> None:
            tma.prefetch_descriptors()
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.key_full, 1)
                cute.arch.mbarrier_init(shared.value_full, 1)
                for stage in range(config.stages):
                    for full, empty in ((shared.query_full, shared.query_empty), (shared.dout_full, shared.dout_empty)):
                        cute.arch.mbarrier_init(full + stage, 1)
                        cute.arch.mbarrier_init(empty + stage, arrivals)
                if config.adds_dq:
                    for buffer in range(2):
                        cute.arch.mbarrier_init(shared.dscore_full + buffer, config.consumer_threads // 32)
                        cute.arch.mbarrier_init(shared.dscore_empty + buffer, 4)
                    for slot in range(SLOTS):
                        cute.arch.mbarrier_init(shared.added + slot, 4)
                        cute.arch.mbarrier_init(shared.counted + slot, 1)
                    cute.arch.mbarrier_init(shared.keys_empty, config.consumer_threads // 32 + 4)
                    shared.taken.initialize(config.threads // 32)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    def _write_constants(self, thread: Int32, shared: SimpleNamespace) -> None:
        """Writes the zeros that follow statistics as factors of products, and, if it is shared, the factor of ones."""
        memory, threads = self.memory, self.config.threads
        if self.config.shared_ones:
            chunk = ptx.where(thread < WARPGROUP_ROWS, Int32(_ONE), Int32(0))
            target = shared.address + memory.ones_start + thread * 16
            values = [chunk << 16 | chunk, chunk, Int32(0), Int32(0)]
            cutlass.if_generate(thread < 2 * WARPGROUP_ROWS, lambda: ptx.store_shared_chunk(target, values))
        for i in range(2 * self.config.stages):
            zeros = shared.address + memory.stats_start + i * memory.stats_pitch + memory.stats_nbytes
            all_rows = Int32(0), Int32(self.config.queries)
            wgmma.zero_rows(zeros, (self.config.queries, 8), all_rows, thread=thread, threads=threads)
        cute.arch.fence_proxy("async.shared", space="cta")

    # Consumers.

    def _consumer(
        self, shared: SimpleNamespace, transform: softmax.Transform, thread: Int32, warp_index: Int32
    ) -> SimpleNamespace:
        """What a consumer warpgroup keeps from one tile of keys to the next."""
        config, memory = self.config, self.memory
        group = warp_index // 4
        lane_row, lane_column = accumulator_lane(thread % 32)
        score_mma = wgmma.product(self.dtype, config.queries, a_in_registers=False, b_transposed=False)
        dk_mma = wgmma.product(self.dtype, memory.head_dim, a_in_registers=True, b_transposed=True)
        dv_mma = wgmma.product(self.dtype, memory.v_head_dim, a_in_registers=True, b_transposed=True)
        stats_mma = wgmma.product(
            cutlass.BFloat16, config.queries, a_in_registers=not config.shared_ones, b_transposed=False
        )
        scores = (WARPGROUP_ROWS, config.queries)
        state = SimpleNamespace(
            shared=shared,
            transform=transform,
            thread=thread,
            group=group,
            warp=warp_index % 4,
            row=warp_index * 16 + lane_row,
            lane_column=lane_column,
            stage=wgmma.Uniform(Int32(0), Int32(0)),
            buffer=wgmma.Uniform(Int32(0), Int32(0)),
            stats_mma=stats_mma,
            stats=wgmma.operand_b(stats_mma, shared.stats),
            score_mma=score_mma,
            dk_mma=dk_mma,
            dv_mma=dv_mma,
            key=wgmma.operand_a(score_mma, shared.key)[None, None, None, group],
            value=wgmma.operand_a(score_mma, shared.value)[None, None, None, group],
            query=wgmma.operand_b(score_mma, shared.query),
            dout=wgmma.operand_b(score_mma, shared.dout),
            query_t=wgmma.operand_b(dk_mma, wgmma.transposed(shared.query)),
            dout_t=wgmma.operand_b(dv_mma, wgmma.transposed(shared.dout)),
            score=wgmma.accumulator(score_mma, scores),
            p_fragment=wgmma.fragment_a(dv_mma, scores, self.dtype),
            ds_fragment=wgmma.fragment_a(dk_mma, scores, self.dtype),
            dk=wgmma.accumulator(dk_mma, (WARPGROUP_ROWS, memory.head_dim)),
            dv=wgmma.accumulator(dv_mma, (WARPGROUP_ROWS, memory.v_head_dim)),
        )
        state.ones = self._ones(state)
        return state

    def _consume(
        self, state: SimpleNamespace, work: SimpleNamespace, phase: Int32, buffers: BackwardBuffers, scale: Float32
    ) -> None:
        """Everything a consumer warpgroup does for a tile of keys."""
        config, spec, shared, visit = self.config, self.spec, state.shared, work.visit
        state.work = work
        state.dk.fill(0.0)
        state.dv.fill(0.0)
        wgmma.wait(shared.key_full, phase)
        wgmma.wait(shared.value_full, phase)
        if spec.hides_first_keys or spec.hides_last_keys:
            self._zero_keys(state)

        def visit_tiles(begin: Int32, end: Int32, edges: Edges | None) -> None:
            state.stage.settle()
            state.buffer.settle()
            wgmma.loop(end - begin, lambda i: self._tile(state, config.tile_index(begin, end, i), edges))

        # Scores of queries past query_seq_lengths may be no numbers. Past the end of the array P is 0 by statistics.
        checks_high = spec.window_left or spec.query_seq_lengths
        masked, full_end = Edges(True, checks_high), visit.full_end if checks_high else visit.end

        def visit_end(i: Int32) -> None:
            """Full tiles, then masked ones: those of the upper end, then, behind the full ones, of the lower end.

            One loop for both ends, behind that of full tiles: these need fewer uniform instructions in the first loop.
            """
            upper = i == 0
            visit_tiles(visit.full_begin, ptx.where(upper, visit.full_begin, full_end), None)
            visit_tiles(ptx.where(upper, full_end, visit.begin), ptx.where(upper, visit.end, visit.full_begin), masked)

        def visit_head(_: Int32) -> None:
            if spec.packed:
                self._zero_last_queries(state)
            if checks_high:
                wgmma.loop(Int32(2), visit_end)
            else:
                visit_tiles(visit.full_begin, visit.end, None)
                visit_tiles(visit.begin, visit.full_begin, masked)

        wgmma.loop(Int32(spec.group), visit_head)
        wgmma.release(shared.keys_empty)
        self._store(state, buffers, scale)

    def _tile(self, state: SimpleNamespace, tile: Int32, edges: Edges | None) -> None:
        """One query tile: scores and dP pass through the same registers, to leave enough."""
        shared, stage, phase = state.shared, state.stage[0], state.stage[1]
        wgmma.wait(shared.query_full + stage, phase)
        query = state.query[None, None, None, stage]
        steps, minus, slopes = wgmma.steps_of(state.score_mma, state.key, query), self._minus(state, stage, 0), []
        if self.spec.logits_soft_cap:
            # Capped scores are what the product starts from that takes the log-sum-exps off.
            wgmma.gemm_steps(state.score, steps, accumulate=False)
            warpgroup.wait_group(0)
            slopes = self._cap(state)
            wgmma.gemm_steps(state.score, [minus], accumulate=True)
        else:
            wgmma.gemm_steps(state.score, [minus, *steps], accumulate=False)
        warpgroup.wait_group(0)
        weights = self._probabilities(state, tile, slopes, edges)
        self._start_dp(state, tile, edges)
        self._add_dv(state, stage)
        warpgroup.wait_group(1)
        self._dscores(state, weights)
        dscores = copied(state.ds_fragment)
        self._add_dk(state, stage)
        self._wait_for_room(state)
        self._give_dscores(state, dscores)
        self._leave(state, stage)

    def _start_dp(self, state: SimpleNamespace, tile: Int32, edges: Edges | None) -> None:
        """Starts dP - delta, in the registers of the scores."""
        stage, phase = state.stage[0], state.stage[1]
        wgmma.wait(state.shared.dout_full + stage, phase)
        if edges is not None:
            self._zero_queries(state, tile, stage)
        steps = wgmma.steps_of(state.score_mma, state.value, state.dout[None, None, None, stage])
        wgmma.gemm_steps(state.score, [self._minus(state, stage, 1), *steps], accumulate=False)

    def _add_dv(self, state: SimpleNamespace, stage: Int32) -> None:
        dout_t = state.dout_t[None, None, None, stage]
        wgmma.gemm(state.dv_mma, state.dv, state.p_fragment, dout_t, accumulate=True)

    def _add_dk(self, state: SimpleNamespace, stage: Int32) -> None:
        query_t = state.query_t[None, None, None, stage]
        wgmma.gemm(state.dk_mma, state.dk, state.ds_fragment, query_t, accumulate=True)

    def _leave(self, state: SimpleNamespace, stage: Int32) -> None:
        """Gives dO back when dv has it, Q when dk has it; both rings move alike."""
        warpgroup.wait_group(1)
        wgmma.release(state.shared.dout_empty + stage)
        wgmma.advance(state.stage, self.config.stages)
        warpgroup.wait_group(0)
        wgmma.release(state.shared.query_empty + stage)

    def _lane(self) -> tuple[Int32, Int32, Int32]:
        """A consumer thread's index and the first row and column of its accumulators, read anew."""
        thread = ptx.thread_index() % self.config.consumer_threads
        row, column = accumulator_lane(thread % 32)
        return thread, thread // 32 * 16 + row, column

    def _visibilities(self, state: SimpleNamespace, tile: Int32, edges: Edges) -> list[gradient.Visibility]:
        """Of the lane's two rows in one tile.

        What depends on the lane is added last: one register lives through the loops instead of four limits.
        """
        work, bounds = state.work, state.work.bounds
        end = bounds["query_end"] - tile * self.config.queries if self.spec.query_seq_lengths else Int32(UNBOUNDED)
        window = {name: bounds[name] for name in ("offset", "left", "right")}
        first = softmax.query_limits(work.row - tile * self.config.queries, query_end=Int32(UNBOUNDED), **window)
        row, column = state.row, state.lane_column
        if self.spec.logits_soft_cap or self.config.adds_dq:
            # Registers that would spill: a masked tile reads the thread's index anew.
            _, row, column = self._lane()
        result = []
        for i in range(2):
            shift = row + 8 * i - column
            low, high = first.low + shift, first.high + shift
            if self.spec.query_seq_lengths:
                high = Int32(cutlass.min(high, end - column))
            if self.config.adds_dq:
                # No query sees a key past the end.
                low = ptx.where(row + 8 * i < bounds["key_end"] - work.row, low, Int32(UNBOUNDED))
            result.append(gradient.Visibility(softmax.Limits(low, high), edges.low, edges.high))
        return result

    def _minus(self, state: SimpleNamespace, stage: Int32, which: int) -> wgmma.Step:
        """A step of a product that adds minus the log-sum-exps (0) or delta (1) of its queries."""
        return state.stats_mma, state.ones, state.stats[None, None, 0, 2 * stage + which]

    def _ones(self, state: SimpleNamespace) -> Any:
        """The left factor of those steps, the same in all rows: [1, 1, 1, 0, ...], see `gradient.thirds`."""
        if self.config.shared_ones:
            return wgmma.operand_a(state.stats_mma, state.shared.ones)[None, None, 0, 0]
        fragment = wgmma.fragment_a(state.stats_mma, (WARPGROUP_ROWS, _STEP), cutlass.BFloat16)
        pairs, pair = cute.recast_tensor(fragment, Int32), state.thread % _COLUMN_LANES
        ones = ptx.where(pair == 0, Int32(_ONE << 16 | _ONE), ptx.where(pair == 1, Int32(_ONE), Int32(0)))
        # Of both rows of a lane; then their columns from 8 on.
        for i in range(4):
            pairs[i] = ones if i < 2 else Int32(0)
        return fragment[None, None, 0]

    def _cap(self, state: SimpleNamespace) -> list[Int32]:
        """S to capped scores in base 2; pairs of slopes in 16 bits."""
        slopes = []
        for i in range(cute.size(state.score)):
            capped, slope = state.transform.cap(state.score[i])
            state.score[i] = capped * state.transform.factor
            slopes.append(slope)
        return [ptx.pack(*slopes[i : i + 2], dtype=self.mma_dtype) for i in range(0, len(slopes), 2)]

    def _probabilities(
        self, state: SimpleNamespace, tile: Int32, slopes: list[Int32], edges: Edges | None
    ) -> list[Int32]:
        """S to P in 16 bits, and weights, see `gradient.weigh_pairs`."""
        visibilities = self._visibilities(state, tile, edges) if edges is not None else [None, None]
        probabilities, weights = gradient.weigh_pairs(
            state.score, [], slopes, state.transform, visibilities, self.mma_dtype
        )
        pairs = cute.recast_tensor(state.p_fragment, Int32)
        for i, pair in enumerate(probabilities):
            pairs[i] = pair
        # Without a cap weights are P. No register that a product in flight reads may be read by others.
        return weights if self.spec.logits_soft_cap else copied(state.p_fragment)

    def _dscores(self, state: SimpleNamespace, weights: list[Int32]) -> None:
        """dP - delta to dS in 16 bits. Weights have as many, so that half as many registers wait."""
        pairs = cute.recast_tensor(state.ds_fragment, Int32)
        for i, pair in enumerate(weights):
            factors = ptx.unpack(pair, dtype=self.mma_dtype)
            values = [factors[e] * state.score[2 * i + e] for e in range(2)]
            pairs[i] = ptx.pack(*values, dtype=self.mma_dtype)

    # What dQ needs.

    def _wait_for_room(self, state: SimpleNamespace) -> None:
        """Waits until the next buffer of dS is free."""
        wgmma.wait(state.shared.dscore_empty + state.buffer[0], state.buffer[1] ^ 1)

    def _give_dscores(self, state: SimpleNamespace, pairs: list[Int32]) -> None:
        """Puts dS^T, transposed, into this warpgroup's part of the next buffer of dS."""
        queries, lane = self.config.queries, state.thread % 32
        buffer, phase = state.buffer[0], state.buffer[1]
        # Four matrices of an A fragment: keys 0 and 8 of queries 0, the same of queries 8.
        corner = rescue.swizzled_offset(lane // 16 * 8 + lane % 8, state.warp, lane // 8 % 2, BLOCK, BLOCK)
        part = 2 * buffer + state.group
        address = state.shared.address + self.memory.dscore_start + part * (queries * BLOCK * 2) + corner
        for step in range(queries // 16):
            # Rows of 128 bytes; a tile of 64 queries ends where the next begins.
            ptx.store_matrices_transposed(address + step * (16 * BLOCK * 2), pairs[4 * step : 4 * step + 4])
        cute.arch.fence_proxy("async.shared", space="cta")
        wgmma.release(state.shared.dscore_full + buffer)
        state.buffer[1] = phase ^ buffer
        state.buffer[0] = buffer ^ 1

    # Operands in shared memory that TMA cannot prepare.

    def _zero_keys(self, state: SimpleNamespace) -> None:
        """Zeroes the rows of K and V that no query sees. Each warpgroup does so for its own keys.

        P of such a key is 0. But its dP would be NaN if V were, and NaN * 0 would enter dS; so would 0 * NaN dQ.
        """
        spec, memory, work = self.spec, self.memory, state.work
        live, first = tiles.live_keys(**work.bounds), work.row + state.group * WARPGROUP_ROWS

        def operands() -> list[tuple[Int32, int]]:
            group = ptx.thread_index() // 128  # read anew, as in `zero_hidden_rows`
            return [
                (state.shared.address + start + group * (WARPGROUP_ROWS * columns * 2), columns)
                for start, columns in ((0, memory.head_dim), (memory.value_start, memory.v_head_dim))
            ]

        wgmma.zero_hidden_rows(
            WARPGROUP_ROWS,
            operands,
            tiles.Rows.live(live, first, hides_first=spec.hides_first_keys, length=work.keys.zeros_from()),
            threads=128,
            barrier=2,
        )

    def _zero_queries(self, state: SimpleNamespace, tile: Int32, stage: Int32) -> None:
        """Zeroes the rows of Q and dO that see no key, for both warpgroups."""
        spec = self.spec
        if spec.hides_first_queries or (spec.hides_last_queries and not spec.packed):
            self._zero_hidden_queries(state, tile, stage)

    def _zero_last_queries(self, state: SimpleNamespace) -> None:
        """Zeroes the rows of Q and dO past the last query that sees a key, before the first tile of a head.

        Only that tile has such rows, where the next sequence begins. The statistics make P 0 there, as they do past the
        end of an array, provided that scores are numbers. So no tile needs a mask for that end.
        """
        work, visit = state.work, state.work.visit
        live = tiles.live_queries(**work.bounds)

        def zero() -> None:
            stage, phase = state.stage[0], state.stage[1]
            wgmma.wait(state.shared.query_full + stage, phase)
            wgmma.wait(state.shared.dout_full + stage, phase)
            self._zero_hidden_queries(state, visit.end - 1, stage)

        straddles = visit.end * self.config.queries > live.end
        cutlass.if_generate(Boolean(straddles & (visit.begin < visit.end)), zero)

    def _zero_hidden_queries(self, state: SimpleNamespace, tile: Int32, stage: Int32) -> None:
        """Zeroes the rows of a loaded tile of Q and dO that see no key."""
        spec, config, memory, work = self.spec, self.config, self.memory, state.work
        live, first = tiles.live_queries(**work.bounds), tile * config.queries
        wgmma.zero_hidden_rows(
            config.queries,
            lambda: [
                (state.shared.address + start + stage * nbytes, columns)
                for start, nbytes, columns in (
                    (memory.query_start, memory.query_nbytes, memory.head_dim),
                    (memory.dout_start, memory.dout_nbytes, memory.v_head_dim),
                )
            ],
            tiles.Rows.live(live, first, hides_first=spec.hides_first_queries, length=work.queries.zeros_from()),
            threads=config.consumer_threads,
            barrier=1,
        )

    # Results.

    def _store(self, state: SimpleNamespace, buffers: BackwardBuffers, scale: Float32) -> None:
        """Stores dk and dv from registers."""
        work = state.work
        thread, row, _ = self._lane()
        first = work.keys.row_head(work.row, work.kv_heads, work.kv_head)
        for acc, target, head_dim, factor in (
            (state.dk, buffers.dk, self.spec.head_dim, scale),
            (state.dv, buffers.dv, self.spec.v_head_dim, None),
        ):
            gradient.store_rows(
                acc,
                head_dim,
                target.toint() + first * (2 * head_dim),
                Int64(work.kv_heads) * (2 * head_dim),
                row=row,
                quad_lane=thread % 4,
                live=tiles.Rows(None, work.bounds["key_end"] - work.row),
                stored_rows=work.keys.length - work.row,
                mma_dtype=self.mma_dtype,
                factor=factor,
            )


def copied(fragment: cute.Tensor) -> list[Int32]:
    """The pairs of a fragment in registers of their own."""
    pairs = cute.recast_tensor(fragment, Int32)
    return [ptx.move(pairs[i]) for i in range(cute.size(pairs))]
