# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The key-stationary Hopper backward kernel for padded head dims up to 128: dk and dv, on request the sums of dq.

A CTA owns 128 keys of one key/value head: two consumer warpgroups of 64 keys each, and one producer warp. K and V stay
in shared memory, tiles of Q (with statistics) and of dO pass through two rings, for all query heads of the group. Per
tile, everything transposed so that keys are rows:

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    and with `adds_dq`  dQ = dS K

P^T and dS^T go from accumulator to A operand inside registers; dS also to shared memory for dQ, of which each
warpgroup computes half and adds it to a float32 buffer, in an order that differs from run to run.

Query tiles are visited in ascending order: masked ones (right window edge), full ones without mask code, masked ones
(left window edge, end of the queries). Reads the statistics that are described in `gradient.py`.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from jax_fastattn.kernels import plan
from jax_fastattn.kernels.device import ptx, rescue, softmax, tiles, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import DkdvConfig, DkdvMemory
from jax_fastattn.kernels.sm90.config import WARPGROUP_ROWS
from jax_fastattn.kernels.spec import KernelSpec

# Rows and columns of a tile of dS: a whole 128-byte swizzle atom wide.
_BLOCK = 64
_BLOCK_NBYTES = 2 * _BLOCK * _BLOCK


class DkdvKernel:
    """Writes dk and dv; with `config.adds_dq` adds dq to `dq_sum`.

    Args:
        spec: the compile key.
        config: the variant.
    """

    def __init__(self, spec: KernelSpec, config: DkdvConfig):
        self.spec, self.config = spec, config
        self.memory = DkdvMemory.of(spec, config)
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
        self.mma_dtype = gradient.MMA_DTYPE[spec.dtype]

    def launch(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        dout: cute.Pointer,
        stats: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        dq_sum: cute.Pointer | None,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        scale: Float32,
        logits_soft_cap: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; to be called from a `cute.jit` function.

        Args:
            query: `[B, T, N, H]`; this and the operands up to dv as `backward.py` says.
            key: `[B, S, K, H]`.
            value: `[B, S, K, D]`.
            query_seq_lengths: int32 `[B]` or None.
            key_value_seq_lengths: int32 `[B]` or None.
            query_offset: int32 `[B]` or None.
            dout: `[B, T, N, D]`.
            stats: float32 `[B, N, padded_rows(T), 2]`, every row written.
            dk: `[B, S, K, H]`, written in full, like dv.
            dv: `[B, S, K, D]`.
            dq_sum: float32 `[B, N, padded_rows(T) * padded H]` in the order of `gradient.dq_sum_offset`, zeroed by the
                caller; None without `adds_dq`.
            batch: B.
            query_length: T.
            key_length: S.
            num_heads: N.
            window_left: keys to the left of its own position that a query sees.
            window_right: the same to the right.
            scale: factor on q . k, of any sign.
            logits_soft_cap: the cap.
            stream: CUDA stream.
        """
        spec, config, memory = self.spec, self.config, self.memory
        kv_heads = num_heads // spec.group
        keys, queries = (batch, key_length, kv_heads), (batch, query_length, num_heads)
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tma = wgmma.tma_operand(load, query, queries, spec.head_dim, (config.queries, memory.head_dim))
        key_tma = wgmma.tma_operand(load, key, keys, spec.head_dim, (WARPGROUP_ROWS, memory.head_dim))
        value_tma = wgmma.tma_operand(load, value, keys, spec.v_head_dim, (WARPGROUP_ROWS, memory.v_head_dim))
        dout_tma = wgmma.tma_operand(load, dout, queries, spec.v_head_dim, (config.queries, memory.v_head_dim))
        key_tiles = (key_length + (config.keys - 1)) // config.keys
        self.kernel(
            *query_tma,
            *key_tma,
            *value_tma,
            *dout_tma,
            query_seq_lengths,
            key_value_seq_lengths,
            query_offset,
            stats,
            dk,
            dv,
            dq_sum,
            query_length,
            key_length,
            num_heads,
            window_left,
            window_right,
            scale,
            logits_soft_cap,
        ).launch(
            grid=(key_tiles * batch * kv_heads, 1, 1),
            block=(config.threads, 1, 1),
            smem=memory.nbytes,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        query_atom: cute.CopyAtom,
        query: cute.Tensor,
        key_atom: cute.CopyAtom,
        key: cute.Tensor,
        value_atom: cute.CopyAtom,
        value: cute.Tensor,
        dout_atom: cute.CopyAtom,
        dout: cute.Tensor,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        stats: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        dq_sum: cute.Pointer | None,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        scale: Float32,
        logits_soft_cap: Float32,
    ):
        spec, config = self.spec, self.config
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = self._shared()
        self._initialize(warp_index, shared, (query_atom, key_atom, value_atom, dout_atom))
        work = self._work(
            (query_length, key_length, num_heads),
            (query_seq_lengths, key_value_seq_lengths, query_offset),
            (window_left, window_right),
        )

        def produce() -> None:
            cute.arch.setmaxregister_decrease(config.registers[1])
            operands = ((query_atom, query), (key_atom, key), (value_atom, value), (dout_atom, dout))
            producer = config.consumer_threads // 32
            cutlass.if_generate(warp_index == producer, lambda: self._produce(shared, work, operands, stats))

        def consume() -> None:
            cute.arch.setmaxregister_increase(config.registers[0])
            transform = gradient.Transform.of(spec, scale, logits_soft_cap)
            self._consume(shared, work, transform, (thread, warp_index), (dk, dv, dq_sum), scale)

        cutlass.if_generate(warp_index >= config.consumer_threads // 32, produce, consume)

    # Set-up.

    def _shared(self) -> SimpleNamespace:
        """Tiles and barriers in shared memory."""
        config, memory, stages = self.config, self.memory, self.config.stages
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)

        def staged(start: int, rows: int, columns: int, count: int) -> cute.Tensor:
            return wgmma.staged_tile(base + start, self.dtype, (rows, columns), count, rows * columns)

        barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
        # A tile of 64 keys and n 64-column atoms is n tiles of one atom, one after the other.
        blocks = memory.head_dim // _BLOCK
        return SimpleNamespace(
            address=base.toint(),
            key=staged(0, WARPGROUP_ROWS, memory.head_dim, 2),
            value=staged(memory.value_start, WARPGROUP_ROWS, memory.v_head_dim, 2),
            query=staged(memory.query_start, config.queries, memory.head_dim, stages),
            dout=staged(memory.dout_start, config.queries, memory.v_head_dim, stages),
            key_blocks=staged(0, _BLOCK, _BLOCK, 2 * blocks) if config.adds_dq else None,
            dscore=staged(memory.dscore_start, _BLOCK, _BLOCK, config.queries // 16) if config.adds_dq else None,
            key_full=barriers,
            value_full=barriers + 1,
            query_full=barriers + 2,
            query_empty=barriers + (2 + stages),
            dout_full=barriers + (2 + 2 * stages),
            dout_empty=barriers + (2 + 3 * stages),
        )

    def _initialize(self, warp_index: Int32, shared: SimpleNamespace, atoms: tuple) -> None:
        """Initialises the barriers, and makes them visible to all threads and to TMA."""
        config = self.config

        def initialize() -> None:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.key_full, 1)
                cute.arch.mbarrier_init(shared.value_full, 1)
                for stage in range(config.stages):
                    for full, empty in ((shared.query_full, shared.query_empty), (shared.dout_full, shared.dout_empty)):
                        cute.arch.mbarrier_init(full + stage, 1)
                        cute.arch.mbarrier_init(empty + stage, config.consumer_threads // 32)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    def _work(self, sizes: tuple[Int32, Int32, Int32], operands: tuple, window: tuple) -> SimpleNamespace:
        """The keys of this CTA and the query tiles that see them.

        Block index, fastest first: key tile, key/value head, batch entry. Neighbouring CTAs read the same Q and dO, and
        under a causal mask the longest of a head start first.
        """
        spec, config = self.spec, self.config
        query_length, key_length, num_heads = sizes
        block, _, _ = cute.arch.block_idx()
        kv_heads = num_heads // spec.group
        key_tiles = (key_length + (config.keys - 1)) // config.keys
        tile, head_index = block % key_tiles, block // key_tiles
        batch = head_index // kv_heads
        row = tile * config.keys
        bounds = tiles.load_bounds(spec, batch, (query_length, key_length), operands, window)
        visit = tiles.query_tiles(row, config.keys, config.queries, **bounds)
        if config.adds_dq:
            # Keys past the end would add to dq: where there are some, every tile is masked.
            full_end = ptx.where(row + config.keys > bounds["key_end"], visit.begin, visit.full_end)
            full_begin = Int32(cutlass.min(visit.full_begin, full_end))
            visit = plan.TileRange(visit.begin, visit.end, full_begin, full_end)
        return SimpleNamespace(
            tile=tile,
            row=row,
            batch=batch,
            kv_head=head_index % kv_heads,
            kv_heads=kv_heads,
            first_head=head_index % kv_heads * spec.group,
            num_heads=num_heads,
            query_length=query_length,
            key_length=key_length,
            bounds=bounds,
            visit=gradient.uniform(visit),
        )

    # Producer.

    def _produce(self, shared: SimpleNamespace, work: SimpleNamespace, operands: tuple, stats: cute.Pointer) -> None:
        """Loads K, V and all tiles of Q and dO. Runs in one warp."""
        config, memory = self.config, self.memory
        query, key, value, dout = operands
        queries = wgmma.Ring(shared.query_full, shared.query_empty, config.stages)
        douts = wgmma.Ring(shared.dout_full, shared.dout_empty, config.stages)

        def load_keys(operand: tuple, tile: cute.Tensor, barrier: cute.Pointer, columns: int) -> None:
            copy = wgmma.tma_copy(*operand, tile, (work.kv_head, work.batch))
            wgmma.expect(barrier, config.keys * columns * 2)
            for half in range(2):
                copy(2 * work.tile + half, half, barrier)

        def load_head(member: Int32) -> None:
            head = work.first_head + member
            copy_query = wgmma.tma_copy(*query, shared.query, (head, work.batch))
            copy_dout = wgmma.tma_copy(*dout, shared.dout, (head, work.batch))
            head_row = (Int64(work.batch) * work.num_heads + head) * gradient.padded_rows(work.query_length)

            def copy_both(tile: Int32, stage: Int32, barrier: cute.Pointer) -> None:
                copy_query(tile, stage, barrier)
                source = stats.toint() + (head_row + tile * config.queries) * 8
                target = shared.address + memory.stats_start + stage * memory.stats_nbytes
                with cute.arch.elect_one():
                    ptx.copy_bulk(target, source, memory.stats_nbytes, barrier.toint())

            def load(i: Int32) -> None:
                tile = work.visit.begin + i
                queries.fill(copy_both, tile, memory.query_nbytes + memory.stats_nbytes)
                douts.fill(copy_dout, tile, memory.dout_nbytes)

            wgmma.loop(work.visit.end - work.visit.begin, load)

        load_keys(key, shared.key, shared.key_full, memory.head_dim)
        load_keys(value, shared.value, shared.value_full, memory.v_head_dim)
        wgmma.loop(Int32(self.spec.group), load_head)

    # Consumers.

    def _consume(
        self,
        shared: SimpleNamespace,
        work: SimpleNamespace,
        transform: gradient.Transform,
        who: tuple[Int32, Int32],
        outputs: tuple,
        scale: Float32,
    ) -> None:
        """Everything a consumer warpgroup does."""
        config, memory, spec = self.config, self.memory, self.spec
        thread, warp_index = who
        group = warp_index // 4
        lane_row, lane_column = accumulator_lane(thread % 32)
        score_mma = wgmma.product(self.dtype, config.queries, a_in_registers=False, b_transposed=False)
        dk_mma = wgmma.product(self.dtype, memory.head_dim, a_in_registers=True, b_transposed=True)
        dv_mma = wgmma.product(self.dtype, memory.v_head_dim, a_in_registers=True, b_transposed=True)
        scores = (WARPGROUP_ROWS, config.queries)
        row = work.row + warp_index * 16 + lane_row
        state = SimpleNamespace(
            shared=shared,
            work=work,
            transform=transform,
            thread=thread,
            group=group,
            warp=warp_index % 4,
            lane_column=lane_column,
            limits=self._limits(work, row),
            queries=wgmma.Ring(shared.query_full, shared.query_empty, config.stages),
            douts=wgmma.Ring(shared.dout_full, shared.dout_empty, config.stages),
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
            dscore=wgmma.accumulator(score_mma, scores),
            p_fragment=wgmma.fragment_a(dv_mma, scores, self.dtype),
            ds_fragment=wgmma.fragment_a(dk_mma, scores, self.dtype),
            dk=wgmma.accumulator(dk_mma, (WARPGROUP_ROWS, memory.head_dim)),
            dv=wgmma.accumulator(dv_mma, (WARPGROUP_ROWS, memory.v_head_dim)),
        )
        state.dk.fill(0.0)
        state.dv.fill(0.0)
        visit = work.visit
        wgmma.wait(shared.key_full, Int32(0))
        if config.adds_dq:
            self._prepare_dq(state, outputs[2])
        if config.rotated:
            state.remaining, state.query_slot = cute.make_rmem_tensor((1,), Int32), cute.make_rmem_tensor((1,), Int32)
            state.remaining[0] = spec.group * (visit.end - visit.begin)
            state.query_slot[0] = Int32(0)
            cutlass.if_generate(state.remaining[0] > 0, lambda: self._take_query(state))
            self._start_scores(state, state.query_slot[0])
            warpgroup.wait_group(0)
        wgmma.wait(shared.value_full, Int32(0))

        def visit_tiles(head: Int32, begin: Int32, end: Int32, masked: bool) -> None:
            state.queries.settle()
            state.douts.settle()
            wgmma.loop(end - begin, lambda i: self._tile(state, head, begin + i, masked=masked))

        def visit_head(member: Int32) -> None:
            head = work.first_head + member
            if spec.window_right:
                visit_tiles(head, visit.begin, visit.full_begin, masked=True)
            visit_tiles(head, visit.full_begin, visit.full_end, masked=False)
            visit_tiles(head, visit.full_end, visit.end, masked=True)

        wgmma.loop(Int32(spec.group), visit_head)
        self._store(state, (row - work.row, thread % 4), outputs, scale)

    def _limits(self, work: SimpleNamespace, row: Int32) -> list[softmax.Limits]:
        """Which queries see each of the lane's two keys."""
        bounds = {name: x for name, x in work.bounds.items() if name != "key_end"}
        limits = [softmax.query_limits(row + 8 * i, **bounds) for i in range(2)]
        if self.config.adds_dq:
            end = work.bounds["key_end"]
            limits = [
                softmax.Limits(x.low, ptx.where(row + 8 * i < end, x.high, Int32(0))) for i, x in enumerate(limits)
            ]
        return limits

    def _tile(self, state: SimpleNamespace, head: Int32, tile: Int32, *, masked: bool) -> None:
        """One query tile, from its scores to the sums."""
        config = self.config
        if config.rotated:
            query_slot = state.query_slot[0]
        else:
            query_slot = state.queries.wait()
            self._start_scores(state, query_slot)
        dout_slot = state.douts.wait()
        if masked and self.spec.query_seq_lengths:
            self._zero_queries(state, tile, query_slot, dout_slot)
        dout = state.dout[None, None, None, dout_slot]
        wgmma.gemm(state.score_mma, state.dscore, state.value, dout, accumulate=False)
        if not config.rotated:
            warpgroup.wait_group(1)
        self._probabilities(state, tile, query_slot, masked)
        if not config.rounds_late:
            self._add_dv(state, dout_slot)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self._dscores(state, tile, query_slot, masked)
        if config.adds_dq:
            self._store_dscores(state)
        if config.rounds_late:
            self._add_dv(state, dout_slot)
        query_t = state.query_t[None, None, None, query_slot]
        wgmma.gemm(state.dk_mma, state.dk, state.ds_fragment, query_t, accumulate=True)
        if config.adds_dq:
            self._start_dq(state)
        flying = int(config.adds_dq)
        if config.rotated:
            warpgroup.wait_group(flying)
            state.douts.release(dout_slot)
            self._start_next_scores(state)
            flying += 1
        else:
            warpgroup.wait_group(flying + 1)
            state.douts.release(dout_slot)
        # Of the groups in flight dk is the oldest; then dq, then the next scores.
        warpgroup.wait_group(flying)
        state.queries.release(query_slot)
        if config.adds_dq:
            warpgroup.wait_group(int(config.rotated))
            self._add_dq(state, head, tile)
        warpgroup.wait_group(0)

    def _start_scores(self, state: SimpleNamespace, slot: Int32) -> None:
        query = state.query[None, None, None, slot]
        wgmma.gemm(state.score_mma, state.score, state.key, query, accumulate=False)

    def _start_next_scores(self, state: SimpleNamespace) -> None:
        """Starts the scores of the next tile, of this head or the next; after the last one, any that nobody reads."""
        state.remaining[0] = cute.arch.make_warp_uniform(state.remaining[0] - 1)
        cutlass.if_generate(state.remaining[0] > 0, lambda: self._take_query(state))
        self._start_scores(state, state.query_slot[0])

    def _take_query(self, state: SimpleNamespace) -> None:
        state.query_slot[0] = state.queries.wait()

    def _add_dv(self, state: SimpleNamespace, slot: Int32) -> None:
        dout_t = state.dout_t[None, None, None, slot]
        wgmma.gemm(state.dv_mma, state.dv, state.p_fragment, dout_t, accumulate=True)

    def _visibilities(self, state: SimpleNamespace, tile: Int32) -> list[gradient.Visibility]:
        """Of the lane's two rows in one tile."""
        column = tile * self.config.queries + state.lane_column
        return [gradient.Visibility.of(x, column, self.spec.window_right) for x in state.limits]

    def _stats(self, state: SimpleNamespace, slot: Int32) -> Int32:
        """Address of the statistics of the lane's first query."""
        memory = self.memory
        return state.shared.address + memory.stats_start + slot * memory.stats_nbytes + state.lane_column * 8

    def _probabilities(self, state: SimpleNamespace, tile: Int32, slot: Int32, masked: bool) -> None:
        """S to P in 16 bits, and to the factor of dP - delta in its own place."""
        visibilities = self._visibilities(state, tile) if masked else [None, None]
        stats, pairs = self._stats(state, slot), cute.recast_tensor(state.p_fragment, Int32)
        for block in range(self.config.queries // 8):
            rows = ptx.load_shared_pairs(stats + 64 * block)
            for i in range(2):
                values = []
                for e in range(2):
                    index = 4 * block + 2 * i + e
                    probability, state.score[index] = gradient.exponentiate(
                        state.score[index], rows[2 * e], state.transform, visibilities[i], 8 * block + e
                    )
                    values.append(probability)
                if not self.config.rounds_late:
                    pairs[2 * block + i] = ptx.pack(*values, dtype=self.mma_dtype)

    def _dscores(self, state: SimpleNamespace, tile: Int32, slot: Int32, masked: bool) -> None:
        """dP to dS in 16 bits."""
        visibilities = self._visibilities(state, tile) if masked and self.config.adds_dq else None
        stats, pairs = self._stats(state, slot), cute.recast_tensor(state.ds_fragment, Int32)
        p_pairs = cute.recast_tensor(state.p_fragment, Int32)
        for block in range(self.config.queries // 8):
            rows = ptx.load_shared_pairs(stats + 64 * block)
            for i in range(2):
                values, probabilities = [], []
                for e in range(2):
                    index = 4 * block + 2 * i + e
                    probabilities.append(state.score[index])
                    value = state.score[index] * (state.dscore[index] - rows[2 * e + 1])
                    if visibilities is not None:
                        value = visibilities[i].select(value, 8 * block + e)
                    values.append(value)
                if self.config.rounds_late:
                    p_pairs[2 * block + i] = ptx.pack(*probabilities, dtype=self.mma_dtype)
                pairs[2 * block + i] = ptx.pack(*values, dtype=self.mma_dtype)

    # dQ.

    def _store_dscores(self, state: SimpleNamespace) -> None:
        """Puts dS^T, transposed, into this warpgroup's half of the next buffer, for both warpgroups to read."""
        queries, lane = self.config.queries, state.thread % 32
        state.buffer[0] = state.buffer[0] ^ 1
        half = state.buffer[0] * 2 + state.group
        # Four matrices of an A fragment: keys 0 and 8 of queries 0, the same of queries 8.
        corner = rescue.swizzled_offset(lane // 16 * 8 + lane % 8, state.warp, lane // 8 % 2, _BLOCK, _BLOCK)
        address = state.shared.address + self.memory.dscore_start + half * (queries * _BLOCK * 2) + corner
        pairs = cute.recast_tensor(state.ds_fragment, Int32)
        for step in range(queries // 16):
            # Rows of 128 bytes; a tile of 64 queries ends where the next begins.
            registers = [pairs[4 * step + i] for i in range(4)]
            ptx.store_matrices_transposed(address + step * (16 * _BLOCK * 2), registers)
        cute.arch.fence_proxy("async.shared", space="cta")

    def _start_dq(self, state: SimpleNamespace) -> None:
        """Starts this warpgroup's half of dQ = dS K, when both have stored their dS.

        With 128 queries a warpgroup takes 64 of them, with 64 queries 64 of the 128 columns.
        """
        cute.arch.barrier(barrier_id=3, number_of_threads=self.config.consumer_threads)
        tall, columns = self.config.queries // _BLOCK, self.memory.head_dim // _BLOCK
        warpgroup.fence()
        for half in range(2):
            a_tile = (state.buffer[0] * 2 + half) * tall + (state.group if tall == 2 else 0)
            b_tile = half * columns + (state.group if columns == 2 else 0)
            for k in range(_BLOCK // 16):
                atom = cute.make_mma_atom(state.dq_mma.op)
                atom.set(warpgroup.Field.ACCUMULATE, half + k > 0)
                a, b = state.dscore_tiles[None, None, k, a_tile], state.key_blocks[None, None, k, b_tile]
                cute.gemm(atom, state.dq, a, b, state.dq)
        warpgroup.commit_group()

    def _add_dq(self, state: SimpleNamespace, head: Int32, tile: Int32) -> None:
        """Adds this warpgroup's half of dQ to the sums, in the order of `gradient.dq_sum_offset`."""
        work, columns = state.work, self.memory.head_dim
        tall = self.config.queries // _BLOCK
        head_row = (Int64(work.batch) * work.num_heads + head) * gradient.padded_rows(work.query_length)
        block_row = tile * tall + (state.group if tall == 2 else 0)
        block_column = state.group * (_BLOCK // 8) if tall == 1 else 0
        # 8 columns of 64 rows are 2048 bytes, 16 of each lane.
        address = state.dq_sum + head_row * (4 * columns) + state.thread % 128 * 16
        address = address + (block_row * (columns // 8) + block_column) * 2048
        for n in range(_BLOCK // 8):
            ptx.add_global_chunk(address + 2048 * n, [state.dq[4 * n + i] for i in range(4)])

    def _prepare_dq(self, state: SimpleNamespace, dq_sum: cute.Pointer) -> None:
        """What the sums of dq need."""
        mma = wgmma.product(self.dtype, _BLOCK, a_in_registers=False, b_transposed=True)
        state.dq_mma = mma
        state.dq = wgmma.accumulator(mma, (_BLOCK, _BLOCK))
        state.dscore_tiles = wgmma.operand_a(mma, state.shared.dscore)
        state.key_blocks = wgmma.operand_b(mma, wgmma.transposed(state.shared.key_blocks))
        state.dq_sum = dq_sum.toint()
        state.buffer = cute.make_rmem_tensor((1,), Int32)
        state.buffer[0] = Int32(0)
        if self.spec.key_value_seq_lengths:
            self._zero_keys(state)

    def _zero_keys(self, state: SimpleNamespace) -> None:
        """Zeroes the rows of K past the end of the keys: their dS is 0, but 0 * NaN is NaN. Each warpgroup its own."""
        memory, work = self.memory, state.work
        valid = tiles.clamp(work.bounds["key_end"] - work.row - state.group * WARPGROUP_ROWS, 0, WARPGROUP_ROWS)

        def zero() -> None:
            gradient.zero_rows(
                state.shared.address + state.group * (WARPGROUP_ROWS * memory.head_dim * 2),
                (WARPGROUP_ROWS, memory.head_dim),
                2 * wgmma.atom_columns(memory.head_dim),
                valid,
                thread=state.thread % 128,
                threads=128,
            )
            cute.arch.fence_proxy("async.shared", space="cta")

        cutlass.if_generate(valid < WARPGROUP_ROWS, zero)

    # Operands in shared memory that TMA cannot prepare.

    def _zero_queries(self, state: SimpleNamespace, tile: Int32, query_slot: Int32, dout_slot: Int32) -> None:
        """Zeroes the rows of Q and dO past the end of the queries. Every warpgroup does it for itself."""
        config, memory, work = self.config, self.memory, state.work
        valid = work.bounds["query_end"] - tile * config.queries

        def zero() -> None:
            for start, slot, nbytes, columns in (
                (memory.query_start, query_slot, memory.query_nbytes, memory.head_dim),
                (memory.dout_start, dout_slot, memory.dout_nbytes, memory.v_head_dim),
            ):
                gradient.zero_rows(
                    state.shared.address + start + slot * nbytes,
                    (config.queries, columns),
                    2 * wgmma.atom_columns(columns),
                    valid,
                    thread=state.thread % 128,
                    threads=128,
                )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + state.group, number_of_threads=128)

        straddles = Boolean((valid < config.queries) & (work.bounds["query_end"] < work.query_length))
        cutlass.if_generate(straddles, zero)

    # Results.

    def _store(self, state: SimpleNamespace, lane: tuple[Int32, Int32], outputs: tuple, scale: Float32) -> None:
        """Stores dk and dv from registers."""
        work, (dk, dv, _) = state.work, outputs
        first = (Int64(work.batch) * work.key_length + work.row) * work.kv_heads + work.kv_head
        for acc, target, head_dim, factor in (
            (state.dk, dk, self.spec.head_dim, scale),
            (state.dv, dv, self.spec.v_head_dim, None),
        ):
            gradient.store_rows(
                acc,
                head_dim,
                target.toint() + first * (2 * head_dim),
                Int64(work.kv_heads) * (2 * head_dim),
                row=lane[0],
                quad_lane=lane[1],
                live_rows=work.bounds["key_end"] - work.row,
                stored_rows=work.key_length - work.row,
                mma_dtype=self.mma_dtype,
                factor=factor,
            )
