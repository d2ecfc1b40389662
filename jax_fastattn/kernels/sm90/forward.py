# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Forward attention with TMA and WGMMA, warp-specialised: one producer warp, one to three consumer warpgroups.

A consumer warpgroup owns 64 query rows. S = Q K^T and the online softmax stay in its registers, P feeds O += P V from
registers. K and V tiles pass through one ring of slots, in the order in which they are consumed; a slot has a barrier
that TMA completes ("full") and one on which every consumer warp arrives ("empty").

Key tiles are visited from the right edge to the left:

    [full_end, end)           masked: diagonal, right window edge, end of the keys
    [full_begin, full_end)    no mask code at all
    [begin, full_begin)       masked: left window edge

Keys past the end of the array are zeros by TMA. Keys past key_value_seq_lengths hold anything; they can only be in the
first tile visited, where the consumers zero those rows of V (0 * NaN is NaN) and mask the scores.

The maximum that shifts the exponentials may lag behind the true one by a factor of 2^8: the accumulator is rescaled
only when a row outgrows that, which after the first tiles is almost never.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from jax_fastattn.kernels.device import ptx, softmax, tiles, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.sm90.config import WARPGROUP_ROWS, ForwardConfig, SharedMemory, forward_config
from jax_fastattn.kernels.spec import UNBOUNDED, KernelSpec

_LAZY_RESCALE = 8.0
_NEVER = float("-inf")


class ForwardKernel:
    """The forward kernel of one compile key.

    Args:
        spec: what is compiled in.
        config: the variant; by default the one of the table in `config.py`.
    """

    def __init__(self, spec: KernelSpec, config: ForwardConfig | None = None):
        self.spec = spec
        self.config = config or forward_config(spec)
        self.memory = SharedMemory.of(spec, self.config)
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
        self.mma_dtype = {"bfloat16": "bf16", "float16": "f16"}[spec.dtype]
        self.out_blocks = self.memory.v_head_dim // 8

    @cute.jit
    def __call__(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        sinks: cute.Pointer | None,
        out: cute.Pointer,
        lse: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        sinks_stride: Int32,
        scale: Float32,
        logits_soft_cap: Float32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Args:
            query: `[B, T, N, H]`; it, key, value and out are contiguous, aligned to 16 bytes, of the spec's dtype.
            key: `[B, S, K, H]`, K = N // group.
            value: `[B, S, K, D]`.
            query_seq_lengths: int32 `[B]`; None, like the next three, when the spec lacks the operand.
            key_value_seq_lengths: int32 `[B]`.
            query_offset: int32 `[B]`.
            sinks: float32 `[b, N]`.
            out: `[B, T, N, D]`.
            lse: float32 `[B, T, N]`.
            batch: B; it and the lengths are positive.
            query_length: T.
            key_length: S.
            num_heads: N.
            window_left: keys to the left of its own position that a query sees; read if the spec has the bound.
            window_right: the same to the right.
            sinks_stride: elements from one row of sinks to the next, 0 when all batch entries share one.
            scale: factor on q . k, of any sign.
            logits_soft_cap: the cap; read if the spec has one.
            stream: CUDA stream.
        """
        spec, config, memory = self.spec, self.config, self.memory
        kv_heads = num_heads // spec.group
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        query_tma = wgmma.tma_operand(
            load, query, (batch, query_length, num_heads), spec.head_dim, (WARPGROUP_ROWS, memory.head_dim)
        )
        key_tma = wgmma.tma_operand(
            load, key, (batch, key_length, kv_heads), spec.head_dim, (config.keys, memory.head_dim)
        )
        value_tma = wgmma.tma_operand(
            load, value, (batch, key_length, kv_heads), spec.v_head_dim, (config.keys, memory.v_head_dim)
        )
        out_tma = wgmma.tma_operand(
            store, out, (batch, query_length, num_heads), spec.v_head_dim, (WARPGROUP_ROWS, memory.v_head_dim)
        )
        tile_count = (query_length + (config.rows - 1)) // config.rows
        ctas = batch * num_heads * tile_count
        if cutlass.const_expr(config.ctas):
            ctas = Int32(cutlass.min(batch * num_heads * ((tile_count + 1) // 2), config.ctas))
        self.kernel(
            *query_tma,
            *key_tma,
            *value_tma,
            *out_tma,
            query_seq_lengths,
            key_value_seq_lengths,
            query_offset,
            sinks,
            lse,
            batch,
            query_length,
            key_length,
            num_heads,
            window_left,
            window_right,
            sinks_stride,
            scale,
            logits_soft_cap,
        ).launch(
            grid=(ctas, 1, 1),
            block=(config.threads, 1, 1),
            smem=memory.nbytes,
            stream=stream,
            min_blocks_per_mp=config.blocks,
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
        out_atom: cute.CopyAtom,
        out: cute.Tensor,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        sinks: cute.Pointer | None,
        lse: cute.Pointer,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        sinks_stride: Int32,
        scale: Float32,
        logits_soft_cap: Float32,
    ):
        spec, config = self.spec, self.config
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = self._shared()
        self._initialize(warp_index, shared, (query_atom, key_atom, value_atom, out_atom))
        call = SimpleNamespace(
            query=(query_atom, query),
            key=(key_atom, key),
            value=(value_atom, value),
            out=(out_atom, out),
            lse=lse,
            sinks=sinks,
            sinks_stride=sinks_stride,
            operands=(query_seq_lengths, key_value_seq_lengths, query_offset),
            batch=batch,
            query_length=query_length,
            key_length=key_length,
            num_heads=num_heads,
            left=window_left,
            right=window_right,
            scaling=softmax.scaling(scale, logits_soft_cap if spec.logits_soft_cap else None),
        )
        if cutlass.const_expr(spec.logits_soft_cap):
            call.inner = scale / logits_soft_cap

        def produce() -> None:
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_decrease(config.registers[1])
            cutlass.if_generate(warp_index == config.consumer_threads // 32, lambda: self._produce(shared, call))

        def consume() -> None:
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_increase(config.registers[0])
            self._consume(shared, call, thread, warp_index)

        cutlass.if_generate(warp_index >= config.consumer_threads // 32, produce, consume)

    # Set-up.

    def _shared(self) -> SimpleNamespace:
        """Tiles and barriers in shared memory."""
        config, memory = self.config, self.memory
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)

        def stages(start: int, rows: int, columns: int, count: int, pitch: int) -> cute.Tensor:
            return wgmma.staged_tile(base + start, self.dtype, (rows, columns), count, pitch // 2)

        groups, rows = config.warpgroups, WARPGROUP_ROWS
        ring = (config.slots, memory.slot_nbytes)
        barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
        return SimpleNamespace(
            address=base.toint(),
            query=stages(0, rows, memory.head_dim, groups, memory.query_nbytes),
            out=stages(memory.out_start, rows, memory.v_head_dim, groups, memory.out_nbytes),
            key=stages(memory.ring_start, config.keys, memory.head_dim, *ring),
            value=stages(memory.ring_start, config.keys, memory.v_head_dim, *ring),
            full=barriers,
            empty=barriers + config.slots,
            query_full=barriers + 2 * config.slots,
            query_empty=barriers + (2 * config.slots + config.warpgroups),
        )

    def _initialize(self, warp_index: Int32, shared: SimpleNamespace, atoms: tuple) -> None:
        """Initialises the barriers, and makes them visible to all threads and to TMA."""
        config = self.config

        def initialize() -> None:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for slot in range(config.slots):
                    cute.arch.mbarrier_init(shared.full + slot, 1)
                    cute.arch.mbarrier_init(shared.empty + slot, 4 * config.warpgroups)
                for group in range(config.warpgroups):
                    cute.arch.mbarrier_init(shared.query_full + group, 1)
                    cute.arch.mbarrier_init(shared.query_empty + group, 4)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    # Schedule.

    def _each_work(self, call: SimpleNamespace, body: Callable[[SimpleNamespace], None]) -> None:
        """Runs `body` for each query tile of this CTA; the producer and the consumers walk alike.

        Heads of a group come next to each other (they share K and V in L2), then the query tiles of the group, then
        key/value heads and batch entries. One CTA per tile: from the last tile to the first, since the longest of a
        causal mask should start first. Walking CTAs take a tile from the end and its counterpart from the beginning:
        with a causal mask all such pairs are equally long.
        """
        spec, config = self.spec, self.config
        block, _, _ = cute.arch.block_idx()
        tile_count = (call.query_length + (config.rows - 1)) // config.rows
        kv_heads = call.num_heads // spec.group

        def locate(index: Int32, tiles_per_head: Int32) -> tuple[Int32, Int32, Int32, Int32]:
            member, index = index % spec.group, index // spec.group
            position, index = index % tiles_per_head, index // tiles_per_head
            kv_head, batch = index % kv_heads, index // kv_heads
            return position, kv_head, kv_head * spec.group + member, batch

        if not config.ctas:
            position, *where = locate(block, tile_count)
            body(self._work(call, tile_count - 1 - position, *where))
            return
        pair_count = (tile_count + 1) // 2
        grid, _, _ = cute.arch.grid_dim()
        total = pair_count * call.num_heads * call.batch

        def walk(i: Int32) -> None:
            position, *where = locate(block + i * grid, pair_count)
            # The middle of an odd number of tiles is its own counterpart.
            count = ptx.where(2 * position == tile_count - 1, Int32(1), Int32(2))

            def visit(half: Int32) -> None:
                tile = ptx.where(half == 0, tile_count - 1 - position, position)
                body(self._work(call, tile, *where))

            wgmma.loop(count, visit)

        wgmma.loop((total - block + (grid - 1)) // grid, walk)

    def _work(self, call: SimpleNamespace, tile: Int32, kv_head: Int32, head: Int32, batch: Int32) -> SimpleNamespace:
        """One query tile of one head: its rows, what they may see, and the key tiles to visit."""
        config = self.config
        row = tile * config.rows
        bounds = tiles.load_bounds(
            self.spec, batch, (call.query_length, call.key_length), call.operands, (call.left, call.right)
        )
        visit = tiles.key_tiles(row, config.rows, config.keys, **bounds)
        if any(operand is not None for operand in call.operands):
            # Loops around wgmma: the compiler has to know that all lanes take the same turns.
            visit = type(visit)(*[cute.arch.make_warp_uniform(end) for end in visit])
        query_end = bounds.pop("query_end")
        return SimpleNamespace(
            tile=tile, row=row, batch=batch, head=head, kv_head=kv_head, bounds=bounds, query_end=query_end, visit=visit
        )

    # Producer.

    def _produce(self, shared: SimpleNamespace, call: SimpleNamespace) -> None:
        """Loads Q, K and V tiles in the order in which the consumers take them. Runs in one warp."""
        config = self.config
        ring = wgmma.Ring(shared.full, shared.empty, config.slots)
        query_phase = cute.make_rmem_tensor((1,), Int32)
        query_phase[0] = Int32(1)

        def load(work: SimpleNamespace) -> None:
            copy_query = wgmma.tma_copy(*call.query, shared.query, (work.head, work.batch))
            copy_key = wgmma.tma_copy(*call.key, shared.key, (work.kv_head, work.batch))
            copy_value = wgmma.tma_copy(*call.value, shared.value, (work.kv_head, work.batch))

            def load_key(tile: Int32) -> None:
                ring.fill(copy_key, tile, config.keys * self.memory.head_dim * 2)

            def load_value(tile: Int32) -> None:
                ring.fill(copy_value, tile, config.keys * self.memory.v_head_dim * 2)

            def step(i: Int32) -> None:
                if config.overlap:
                    load_key(last - 1 - i)
                    load_value(last - i)
                else:
                    load_value(last - i)
                    load_key(last - 1 - i)

            def load_rest() -> None:
                wgmma.loop(last - work.visit.begin, step)
                load_value(work.visit.begin)

            last = work.visit.end - 1
            some = work.visit.begin < work.visit.end
            cutlass.if_generate(some, lambda: load_key(last))
            for group in range(config.warpgroups):
                barrier = shared.query_full + group
                if config.ctas:
                    wgmma.wait(shared.query_empty + group, query_phase[0])
                wgmma.expect(barrier, WARPGROUP_ROWS * self.memory.head_dim * 2)
                copy_query(work.tile * config.warpgroups + group, group, barrier)
            query_phase[0] = query_phase[0] ^ 1
            cutlass.if_generate(some, load_rest)

        self._each_work(call, load)

    # Consumers.

    def _consume(self, shared: SimpleNamespace, call: SimpleNamespace, thread: Int32, warp_index: Int32) -> None:
        """Everything a consumer warpgroup does."""
        config = self.config
        score_mma, out_mma = self._products()
        group = warp_index // 4 if config.warpgroups > 1 else Int32(0)
        row, column = accumulator_lane(thread % 32)
        state = SimpleNamespace(
            shared=shared,
            call=call,
            work=None,
            ring=wgmma.Ring(shared.full, shared.empty, config.slots),
            query_phase=cute.make_rmem_tensor((1,), Int32),
            group=group,
            thread=thread % 128,
            warp=warp_index % 4,
            row=warp_index * 16 + row,
            column=column,
            score_mma=score_mma,
            out_mma=out_mma,
            query=wgmma.operand_a(score_mma, shared.query)[None, None, None, group],
            key=wgmma.operand_b(score_mma, shared.key),
            value=wgmma.operand_b(out_mma, wgmma.transposed(shared.value)),
            scores=wgmma.accumulator(score_mma, (WARPGROUP_ROWS, config.keys)),
            probabilities=wgmma.fragment_a(out_mma, (WARPGROUP_ROWS, config.keys), self.dtype),
            out=wgmma.accumulator(out_mma, (WARPGROUP_ROWS, self.memory.v_head_dim)),
            maxima=cute.make_rmem_tensor((2,), Float32),
            sums=cute.make_rmem_tensor((2,), Float32),
            factors=cute.make_rmem_tensor((2,), Float32),
            limits=None,
        )
        state.query_phase[0] = Int32(0)
        if config.ping_pong and config.warpgroups > 1:
            # The last warpgroup gives the first turn to the first one.
            cutlass.if_generate(group == config.warpgroups - 1, lambda: self._pass_turn(state))
        self._each_work(call, lambda work: self._attend(state, work))
        if config.own_out:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _attend(self, state: SimpleNamespace, work: SimpleNamespace) -> None:
        """One query tile, from Q to the stored output."""
        state.work = work
        first_row = work.row + state.row
        state.limits = [softmax.key_limits(first_row + 8 * i, **work.bounds) for i in range(2)]
        state.out.fill(0.0)
        state.maxima.fill(_NEVER)
        state.sums.fill(0.0)
        wgmma.wait(state.shared.query_full + state.group, state.query_phase[0])
        state.query_phase[0] = state.query_phase[0] ^ 1
        cutlass.if_generate(
            work.visit.begin < work.visit.end, lambda: self._visit(state), lambda: self._release_early(state)
        )
        sink = None
        if self.spec.sinks:
            sink = _load(state.call.sinks, work.batch * state.call.sinks_stride + work.head)
        weights = self._finish_rows(state, sink, first_row)
        self._store(state, weights)

    def _products(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q K^T from shared memory, and O += P V with P from registers, of one warpgroup."""
        return (
            wgmma.product(self.dtype, self.config.keys, a_in_registers=False, b_transposed=False),
            wgmma.product(self.dtype, self.memory.v_head_dim, a_in_registers=True, b_transposed=True),
        )

    def _visit(self, state: SimpleNamespace) -> None:
        """All key tiles, from the last to the first."""
        visit, overlap = state.work.visit, self.config.overlap
        last = visit.end - 1
        step = self._overlapped_tile if overlap else self._tile
        short = self._sees_left_half(state, last)
        rest, due = last, Boolean(True)
        if short is None:
            self._first_tile(state, last)
        else:
            more = visit.begin < last

            def begin_short() -> None:
                self._first_tile(state, last, short=True)
                if overlap:
                    # The next step adds the values of this tile.
                    cutlass.if_generate(
                        more,
                        lambda: step(state, last - 1, masked=True, short=True),
                        lambda: self._last_values(state, short=True),
                    )

            cutlass.if_generate(short, begin_short, lambda: self._first_tile(state, last))
            if overlap:
                rest = ptx.where(Boolean(short & more), last - 1, last)
                due = ptx.where(short, more, due)
        full_end = Int32(cutlass.min(visit.full_end, rest))
        full_begin = Int32(cutlass.min(visit.full_begin, rest))
        wgmma.loop(rest - full_end, lambda i: step(state, rest - 1 - i, masked=True))
        wgmma.loop(full_end - full_begin, lambda i: step(state, full_end - 1 - i, masked=False))
        if self.spec.window_left:
            wgmma.loop(full_begin - visit.begin, lambda i: step(state, full_begin - 1 - i, masked=True))
        self._release_early(state)
        if overlap:
            cutlass.if_generate(due, lambda: self._last_values(state))

    def _sees_left_half(self, state: SimpleNamespace, tile: Int32) -> Any:
        """Whether this warpgroup's rows see only the left half of the first tile; None if that is not exploited."""
        if not (self.config.trim and self.spec.window_right):
            return None
        bounds = state.work.bounds
        last_row = state.work.row + state.group * WARPGROUP_ROWS + (WARPGROUP_ROWS - 1)
        end = cute.arch.make_warp_uniform(last_row + bounds["offset"] + bounds["right"] + 1)
        return end <= tile * self.config.keys + self.config.keys // 2

    def _first_tile(self, state: SimpleNamespace, tile: Int32, short: bool = False) -> None:
        """Softmax of the first tile, or of its left half; without overlap its values too."""
        if not self.spec.logits_soft_cap:
            cutlass.if_generate(state.call.scaling.negative, lambda: self._negate_query(state))
        slot = state.ring.wait()
        scores = self._score_left_half(state, slot) if short else self._score(state, slot)
        warpgroup.wait_group(0)
        state.ring.release(slot)
        self._softmax(state, scores, tile, masked=True, first=True)
        self._round(state, scores)
        if self.spec.key_value_seq_lengths:
            self._zero_values(state, tile)
        if not self.config.overlap:
            self._last_values(state, short)

    def _last_values(self, state: SimpleNamespace, short: bool = False) -> None:
        """Adds the values of a tile with nothing else to do meanwhile."""
        slot = state.ring.wait()
        self._add_values(state, slot, short)
        warpgroup.wait_group(0)
        state.ring.release(slot)

    def _overlapped_tile(self, state: SimpleNamespace, tile: Int32, *, masked: bool, short: bool = False) -> None:
        """Scores of this tile, with P V of the previous one in flight during the softmax."""
        key_slot = state.ring.wait()
        self._await_turn(state)
        scores = self._score(state, key_slot)
        value_slot = state.ring.wait()
        self._add_values(state, value_slot, short)
        self._pass_turn(state)
        warpgroup.wait_group(1)
        state.ring.release(key_slot)
        grown = self._softmax(state, scores, tile, masked=masked)
        warpgroup.wait_group(0)
        state.ring.release(value_slot)
        self._rescale(state, grown)
        self._round(state, scores)

    def _tile(self, state: SimpleNamespace, tile: Int32, *, masked: bool) -> None:
        """One tile after the other; other warpgroups fill the gaps."""
        slot = state.ring.wait()
        self._await_turn(state)
        scores = self._score(state, slot)
        self._pass_turn(state)
        warpgroup.wait_group(0)
        state.ring.release(slot)
        grown = self._softmax(state, scores, tile, masked=masked)
        self._rescale(state, grown)
        self._round(state, scores)
        self._last_values(state)

    def _score(self, state: SimpleNamespace, slot: Int32) -> cute.Tensor:
        """Starts S = Q K^T and returns where it will be."""
        wgmma.gemm(state.score_mma, state.scores, state.query, state.key[None, None, None, slot], accumulate=False)
        return state.scores

    def _score_left_half(self, state: SimpleNamespace, slot: Int32) -> cute.Tensor:
        """The same for the left half of a tile."""
        half = self.config.keys // 2
        mma = wgmma.product(self.dtype, half, a_in_registers=False, b_transposed=False)
        halves = cute.local_tile(state.shared.key, (half, self.memory.head_dim), (None, 0, None))
        keys = wgmma.operand_b(mma, halves)[None, None, None, 0, slot]
        scores = wgmma.accumulator(mma, (WARPGROUP_ROWS, half))
        wgmma.gemm(mma, scores, state.query, keys, accumulate=False)
        return scores

    def _add_values(self, state: SimpleNamespace, slot: Int32, short: bool = False) -> None:
        """Starts O += P V, or adds the left half of the tile only."""
        values = state.value[None, None, None, slot]
        steps = range(self.config.keys // 32) if short else None
        wgmma.gemm(state.out_mma, state.out, state.probabilities, values, accumulate=True, steps=steps)

    def _round(self, state: SimpleNamespace, scores: cute.Tensor) -> None:
        """P in 16 bits: the accumulator's fragments are those of the A operand."""
        pairs = cute.recast_tensor(state.probabilities, Int32)
        for i in range(cute.size(scores) // 2):
            pairs[i] = ptx.pack(scores[2 * i], scores[2 * i + 1], dtype=self.mma_dtype)

    # Turns of the warpgroups: barrier 1 + g belongs to warpgroup g itself, 5 + g is its turn to issue.

    def _await_turn(self, state: SimpleNamespace) -> None:
        if self.config.ping_pong and self.config.warpgroups > 1:
            cute.arch.barrier(barrier_id=5 + state.group, number_of_threads=256)

    def _pass_turn(self, state: SimpleNamespace) -> None:
        if self.config.ping_pong and self.config.warpgroups > 1:
            following = state.group + 1
            following = ptx.where(following == self.config.warpgroups, Int32(0), following)
            cute.arch.barrier_arrive(barrier_id=5 + following, number_of_threads=256)

    def _sync_warpgroup(self, state: SimpleNamespace) -> None:
        cute.arch.barrier(barrier_id=1 + state.group, number_of_threads=128)

    # Operands in shared memory that TMA cannot prepare.

    def _negate_query(self, state: SimpleNamespace) -> None:
        """Flips the signs of this warpgroup's Q."""
        nbytes = WARPGROUP_ROWS * self.memory.head_dim * 2
        first = state.shared.address + state.group * self.memory.query_nbytes + state.thread * 16
        for start in range(0, nbytes, 16 * 128):
            chunk = ptx.load_shared_chunk(first + start)
            ptx.store_shared_chunk(first + start, [x ^ Int32(-0x7FFF8000) for x in chunk])
        cute.arch.fence_proxy("async.shared", space="cta")
        self._sync_warpgroup(state)

    def _zero_values(self, state: SimpleNamespace, tile: Int32) -> None:
        """Zeroes the rows of V past the end of the keys in the first tile. Every warpgroup does it for itself."""
        config, work = self.config, state.work
        valid = work.bounds["key_end"] - tile * config.keys

        def zero() -> None:
            # With overlap V of this tile follows K of the next one, which exists unless this tile is the only one.
            ahead = ptx.where(tile > work.visit.begin, Int32(1), Int32(0)) if config.overlap else Int32(0)
            slot = state.ring.peek(ahead)
            first = state.shared.address + self.memory.ring_start + slot * self.memory.slot_nbytes
            row_nbytes = 2 * wgmma.atom_columns(self.memory.v_head_dim)
            block_nbytes = config.keys * row_nbytes
            start = valid * row_nbytes + state.thread * 16
            for block in range(2 * self.memory.v_head_dim // row_nbytes):
                for offset in range(0, block_nbytes, 16 * 128):
                    position = start + offset

                    def clear(address: Int32 = first + block * block_nbytes + position) -> None:
                        ptx.store_shared_chunk(address, [Int32(0)] * 4)

                    cutlass.if_generate(position < block_nbytes, clear)
            cute.arch.fence_proxy("async.shared", space="cta")
            self._sync_warpgroup(state)

        cutlass.if_generate(Boolean((valid < config.keys) & (work.bounds["key_end"] < state.call.key_length)), zero)

    # Softmax.

    def _softmax(
        self, state: SimpleNamespace, scores: cute.Tensor, tile: Int32, *, masked: bool, first: bool = False
    ) -> Any:
        """Turns scores into probabilities relative to the running maxima, in place.

        Returns:
            whether the warp has to rescale its output by `state.factors`; None for the first tile.
        """
        factor = state.call.scaling.factor
        blocks = (1, cute.size(scores) // 4)
        if self.spec.logits_soft_cap:
            for i in range(cute.size(scores)):
                scores[i] = ptx.tanh(scores[i] * state.call.inner)
        if masked:
            column = tile * self.config.keys + state.column
            softmax.mask_columns(scores, *blocks, column, state.limits, check_low=self.spec.window_left)
        maxima = softmax.row_maxima(scores, *blocks)
        grown = None
        if first:
            for i, x in enumerate(maxima):
                state.maxima[i] = x
        else:
            grown = self._raise_maxima(state, maxima)
        maxima = [state.maxima[i] for i in range(2)]
        if masked:
            # A row that has seen no key yet: 2^(-inf - 0) is 0, while -inf minus -inf is not a number.
            maxima = [ptx.where(x == Float32(_NEVER), Float32(0.0), x) for x in maxima]
        sums = softmax.exponentials(scores, *blocks, factor, [x * factor for x in maxima])
        for i, total in enumerate(sums):
            state.sums[i] = state.sums[i] + total
        return grown

    def _raise_maxima(self, state: SimpleNamespace, maxima: list[Float32]) -> Boolean:
        """Raises the maxima of a warp if one of its rows has outgrown the allowed lag."""
        factor = state.call.scaling.factor
        outgrown = [(x - state.maxima[i]) * factor > Float32(_LAZY_RESCALE) for i, x in enumerate(maxima)]
        grown = cute.arch.vote_any_sync(Boolean(outgrown[0] | outgrown[1]))

        def rescale() -> None:
            for i, x in enumerate(maxima):
                old = state.maxima[i]
                new = ptx.maximum(old, x)
                # Both -inf: no key seen so far, so there is nothing to rescale and any finite factor will do.
                shift = ptx.where(new == Float32(_NEVER), Float32(0.0), new)
                state.factors[i] = ptx.exp2((old - shift) * factor)
                state.maxima[i] = new
                state.sums[i] = state.sums[i] * state.factors[i]

        cutlass.if_generate(grown, rescale)
        return grown

    def _rescale(self, state: SimpleNamespace, grown: Boolean) -> None:
        """Brings the output to the raised maxima."""

        def rescale() -> None:
            for i in range(4 * self.out_blocks):
                state.out[i] = state.out[i] * state.factors[i // 2 % 2]

        cutlass.if_generate(grown, rescale)

    # Results.

    def _finish_rows(self, state: SimpleNamespace, sink: Any, first_row: Int32) -> list[tuple[Float32, Any]]:
        """Stores the log-sum-exp and returns (weight, whether the row has an output) of each row of the lane."""
        call, work = state.call, state.work
        weights = []
        lse_row = Int64(work.batch) * call.query_length
        for i in range(2):
            row = first_row + 8 * i
            total = softmax.quad_sum(state.sums[i])
            live = Boolean((total != Float32(0.0)) & (row < work.query_end))
            log_max, weight = state.maxima[i] * call.scaling.factor, Float32(1.0)
            if sink is not None:
                scaled = sink * softmax.LOG2_E
                top = ptx.maximum(log_max, scaled)
                shift = ptx.where(top == Float32(_NEVER), Float32(0.0), top)
                weight = ptx.exp2(log_max - shift)
                total = total * weight + ptx.exp2(scaled - shift)
                log_max = top
            value = (log_max + ptx.log2(total)) * softmax.LN_2
            value = ptx.where(row < work.query_end, value, Float32(_NEVER))
            address = call.lse.toint() + ((lse_row + row) * call.num_heads + work.head) * 4
            stores = Boolean((row < call.query_length) & (state.column == 0))
            cutlass.if_generate(stores, lambda address=address, value=value: ptx.store_global(address, value))
            weights.append((weight * ptx.reciprocal(total), live))
        return weights

    def _store(self, state: SimpleNamespace, weights: list) -> None:
        """Stores this warpgroup's output tile: registers, shared memory, TMA, which leaves out rows past the end."""
        rounded = cute.make_rmem_tensor(state.out.layout, self.dtype)
        pairs = cute.recast_tensor(rounded, Int32)
        for i in range(4 * self.out_blocks // 2):
            weight, live = weights[i % 2]
            # A select, not a product: a padding row's sum can be NaN.
            pair = [ptx.where(live, state.out[2 * i + e] * weight, Float32(0.0)) for e in range(2)]
            pairs[i] = ptx.pack(*pair, dtype=self.mma_dtype)
        if self.config.own_out:
            # The previous output may still be on its way from there.
            cutlass.if_generate(state.warp == 0, lambda: cute.arch.cp_async_bulk_wait_group(0, read=True))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, state.out_mma).get_slice(state.thread)
        target = copy.partition_D(state.shared.out)[None, None, None, state.group]
        # The other warps no longer read Q, which may lie there, and that previous output is gone.
        self._sync_warpgroup(state)
        cute.copy(atom, copy.retile(rounded), target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self._sync_warpgroup(state)

        def store() -> None:
            work = state.work
            send = wgmma.tma_copy(*state.call.out, state.shared.out, (work.head, work.batch), store=True)
            # Unlike loads, CuTe does not restrict stores to one lane. The same lane waits for them.
            with cute.arch.elect_one():
                send(work.tile * self.config.warpgroups + state.group, state.group)
                cute.arch.cp_async_bulk_commit_group()
                if not self.config.own_out:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            if not self.config.own_out:
                self._release_query(state, arrivals=4)

        cutlass.if_generate(state.warp == 0, store)

    def _release_early(self, state: SimpleNamespace) -> None:
        """Releases Q after the last scores where the output does not lie over it."""
        if self.config.own_out:
            self._release_query(state, arrivals=1)

    def _release_query(self, state: SimpleNamespace, arrivals: int) -> None:
        """Lets the producer load this warpgroup's next Q, once 4 warps have arrived, or one for all."""
        if self.config.ctas:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(state.shared.query_empty + state.group, arrive_count=arrivals)


def _load(pointer: cute.Pointer, index: Int32) -> Any:
    return cute.make_tensor(pointer, cute.make_layout((UNBOUNDED,)))[index]
