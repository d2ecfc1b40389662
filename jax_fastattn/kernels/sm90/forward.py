# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Forward attention with TMA and WGMMA, warp-specialised: one producer warp, one to three consumer warpgroups.

Where CTAs take tiles by a counter, one more warp does that.

A consumer warpgroup owns 64 query rows. S = Q K^T and the online softmax stay in its registers, P feeds O += P V from
registers. K and V tiles pass through one ring of slots, in the order in which they are consumed; a slot has a barrier
that TMA completes ("full") and one on which every consumer warp arrives ("empty").

Key tiles are visited from the right edge to the left:

    [full_end, end)           masked: diagonal, right window edge, end of the keys
    [full_begin, full_end)    no mask code at all
    [begin, full_begin)       masked: left window edge

Keys past the end of the array are zeros by TMA. Keys that no query of the batch entry sees may hold anything: scores of
them are masked, and the consumers zero those rows of V (0 * NaN is NaN). They lie at the end of the first tile that is
visited, or at the beginning of the last one.

Masked tiles take part in the running maximum. Full tiles assume that their scores do not lie far above it: no maximum,
no shuffles, no rescaling. Where that turns out wrong, the warp computes the scores of the tile again, by mma.sync.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels import plan
from jax_fastattn.kernels.arguments import ForwardBuffers, Scalars
from jax_fastattn.kernels.device import ptx, rescue, softmax, tiles, wgmma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.sm90.config import TAKEN_WORDS, WARPGROUP_ROWS, ForwardConfig, SharedMemory, forward_config
from jax_fastattn.kernels.sm90.forward_schedule import TakenTiles, forward_schedule
from jax_fastattn.kernels.sm90.schedule import Work
from jax_fastattn.kernels.sm90.taken import ResetKernel, TakenTile
from jax_fastattn.kernels.spec import UNBOUNDED, KernelSpec

# Beyond which a lane's sum of a tile's probabilities is not accepted. P has to fit its 16 bits, O and the sums float32.
_SUM_LIMITS = {"bfloat16": 2.0**24, "float16": 2.0**14}
_NEVER = float("-inf")


@dataclass(frozen=True)
class _Call:
    """What a launch computes with."""

    tma: Tma
    buffers: ForwardBuffers
    scalars: Scalars
    scaling: softmax.Scaling


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
        self.schedule = forward_schedule(spec, self.config)
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
        self.mma_dtype = ptx.MMA_DTYPE[spec.dtype]
        self.out_blocks = self.memory.v_head_dim // 8

    @cute.jit
    def __call__(self, buffers: ForwardBuffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernel."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: ForwardBuffers, scalars: Scalars) -> list[Launch]:
        """What is launched."""
        spec, config, memory = self.spec, self.config, self.memory
        launch = Launch(
            self.kernel,
            (buffers, scalars),
            grid=self.schedule.blocks(scalars),
            block=config.threads,
            shared_bytes=memory.nbytes,
            tma=Tma.boxes(spec, memory, buffers, scalars, query_rows=WARPGROUP_ROWS, key_rows=config.keys),
            min_blocks=config.blocks,
            begins_early=spec.takes_tiles,
        )
        return [ResetKernel().launch(buffers), launch] if spec.takes_tiles else [launch]

    @cute.kernel
    def kernel(self, tma: Tma, buffers: ForwardBuffers, scalars: Scalars):
        spec, config = self.spec, self.config
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = self._shared()
        self._initialize(warp_index, shared, tma)
        if cutlass.const_expr(spec.takes_tiles):
            # The launch before resets the counter.
            cute.arch.griddepcontrol_wait()
        cap = scalars.logits_soft_cap if spec.logits_soft_cap else None
        call = _Call(tma, buffers, scalars, softmax.scaling(scalars.scale, cap))

        def produce() -> None:
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_decrease(config.registers.producer)
            cutlass.if_generate(warp_index == config.consumer_threads // 32, lambda: self._produce(shared, call))
            if cutlass.const_expr(spec.takes_tiles):
                cutlass.if_generate(thread == config.consumer_threads + 32, take)

        def take() -> None:
            assert isinstance(shared.schedule, TakenTiles)
            shared.schedule.take_each(buffers, scalars)

        def consume() -> None:
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_increase(config.registers.consumer)
            self._consume(shared, call, thread, warp_index)

        cutlass.if_generate(warp_index >= config.consumer_threads // 32, produce, consume)

    # Set-up.

    def _shared(self) -> SimpleNamespace:
        """Tiles and barriers in shared memory, and the schedule, which may have words and barriers there."""
        config, memory, schedule = self.config, self.memory, self.schedule
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)

        def stages(start: int, rows: int, columns: int, count: int, pitch: int) -> cute.Tensor:
            return wgmma.staged_tile(base + start, self.dtype, (rows, columns), count, pitch // 2)

        groups, rows = config.warpgroups, WARPGROUP_ROWS
        ring = (config.slots, memory.slot_nbytes)
        barriers = cute.recast_ptr(base + memory.barrier_start, dtype=Int64)
        if isinstance(schedule, TakenTiles):
            after = barriers + 2 * (config.slots + config.warpgroups)
            taken = TakenTile(base.toint(), memory.taken_start, TAKEN_WORDS, full=after, empty=after + 1)
            schedule = dataclasses.replace(schedule, taken=taken)
        return SimpleNamespace(
            address=base.toint(),
            query=stages(0, rows, memory.head_dim, groups, memory.query_nbytes),
            key=stages(memory.ring_start, config.keys, memory.head_dim, *ring),
            value=stages(memory.ring_start, config.keys, memory.v_head_dim, *ring),
            full=barriers,
            empty=barriers + config.slots,
            query_full=barriers + 2 * config.slots,
            query_empty=barriers + (2 * config.slots + config.warpgroups),
            schedule=schedule,
        )

    def _initialize(self, warp_index: Int32, shared: SimpleNamespace, tma: Tma) -> None:
        """Initialises the barriers, and makes them visible to all threads and to TMA."""
        config = self.config

        def initialize() -> None:
            tma.prefetch_descriptors()
            with cute.arch.elect_one():
                for slot in range(config.slots):
                    cute.arch.mbarrier_init(shared.full + slot, 1)
                    cute.arch.mbarrier_init(shared.empty + slot, 4 * config.warpgroups)
                for group in range(config.warpgroups):
                    cute.arch.mbarrier_init(shared.query_full + group, 1)
                    cute.arch.mbarrier_init(shared.query_empty + group, 4)
                if self.spec.takes_tiles:
                    shared.schedule.taken.initialize(4 * config.warpgroups + 1)
            cute.arch.mbarrier_init_fence()

        cutlass.if_generate(warp_index == 0, initialize)
        cute.arch.sync_threads()

    # Work.

    def _each_work(self, shared: SimpleNamespace, call: _Call, body: Callable[[SimpleNamespace], None]) -> None:
        """Runs `body` for each query tile of this CTA."""

        def visit(work: Work) -> None:
            body(self._work(work))

        shared.schedule.each(call.buffers, call.scalars, visit)

    def _work(self, work: Work) -> SimpleNamespace:
        """A query tile: its rows, what they may see, and the key tiles to visit."""
        config = self.config
        row = work.tile * config.rows
        bounds = work.sequence.bounds()
        visit = tiles.key_tiles(row, config.rows, config.keys, **bounds)
        return SimpleNamespace(
            tile=work.tile,
            row=row,
            queries=work.sequence.queries,
            keys=work.sequence.keys,
            head=work.head,
            kv_head=work.kv_head,
            bounds=bounds,
            visit=_uniform(visit),
        )

    def _own_visit(self, work: SimpleNamespace, group: Int32) -> plan.TileRange:
        """Those of the key tiles to visit that one warpgroup's rows see."""
        if self.config.warpgroups == 1:
            return work.visit
        row = work.row + group * WARPGROUP_ROWS
        seen = tiles.key_tiles(row, WARPGROUP_ROWS, self.config.keys, **work.bounds)
        end = tiles.clamp(seen.end, work.visit.begin, work.visit.end)
        begin = tiles.clamp(seen.begin, work.visit.begin, end)
        full_end = tiles.clamp(seen.full_end, begin, end)
        return _uniform(plan.TileRange(begin, end, tiles.clamp(seen.full_begin, begin, full_end), full_end))

    # Producer.

    def _produce(self, shared: SimpleNamespace, call: _Call) -> None:
        """Loads Q, K and V tiles in the order in which the consumers take them. Runs in one warp."""
        config = self.config
        ring = wgmma.Ring(shared.full, shared.empty, config.slots)
        query_phase = cute.make_rmem_tensor((1,), Int32)
        query_phase[0] = Int32(1)

        def load(work: SimpleNamespace) -> None:
            copy_query = call.tma.query.copy(shared.query, work.head, work.queries)
            copy_key = call.tma.key.copy(shared.key, work.kv_head, work.keys)
            copy_value = call.tma.value.copy(shared.value, work.kv_head, work.keys)

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
                if config.walks:
                    wgmma.wait(shared.query_empty + group, query_phase[0])
                wgmma.expect(barrier, WARPGROUP_ROWS * self.memory.head_dim * 2)
                copy_query(work.tile * config.warpgroups + group, group, barrier)
            query_phase[0] = query_phase[0] ^ 1
            cutlass.if_generate(some, load_rest)

        self._each_work(shared, call, load)

    # Consumers.

    def _consume(self, shared: SimpleNamespace, call: _Call, thread: Int32, warp_index: Int32) -> None:
        """Everything a consumer warpgroup does."""
        config = self.config
        score_mma, out_mma = self._products()
        held_mma = wgmma.product(self.dtype, config.keys, a_in_registers=True, b_transposed=False)
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
            held_mma=held_mma,
            held=None,
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
        self._each_work(shared, call, lambda work: self._attend(state, work))

    def _attend(self, state: SimpleNamespace, work: SimpleNamespace) -> None:
        """One query tile, from Q to the stored output."""
        state.work, state.visit = work, self._own_visit(work, state.group)
        first_row = work.row + state.row
        key_bounds = {name: x for name, x in work.bounds.items() if name != "query_end"}
        state.limits = [softmax.key_limits(first_row + 8 * i, **key_bounds) for i in range(2)]
        state.out.fill(0.0)
        state.maxima.fill(_NEVER)
        state.sums.fill(0.0)
        wgmma.wait(state.shared.query_full + state.group, state.query_phase[0])
        state.query_phase[0] = state.query_phase[0] ^ 1
        if self.spec.query_seq_lengths or self.spec.packed:
            self._zero_padding(state)
        if not self.spec.logits_soft_cap:
            cutlass.if_generate(state.call.scaling.negative, lambda: self._negate_query(state))
        self._hold_query(state)

        def pass_by() -> None:
            self._release_query(state)
            count = work.visit.end - work.visit.begin
            self._skip(state, count, slots=2 * count, turns=count - 1)

        cutlass.if_generate(state.visit.begin < state.visit.end, lambda: self._visit(state), pass_by)
        sink = None
        if self.spec.sinks:
            sink = _load(state.call.buffers.sinks, work.queries.batch * state.call.scalars.sinks_stride + work.head)
        weights = self._finish_rows(state, sink, first_row)
        self._store(state, weights, first_row)

    def _products(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q K^T from shared memory, and O += P V with P from registers, of one warpgroup."""
        return (
            wgmma.product(self.dtype, self.config.keys, a_in_registers=False, b_transposed=False),
            wgmma.product(self.dtype, self.memory.v_head_dim, a_in_registers=True, b_transposed=True),
        )

    def _visit(self, state: SimpleNamespace) -> None:
        """All key tiles of this warpgroup, from the last to the first, between those that only others see."""
        visit, union, overlap = state.visit, state.work.visit, self.config.overlap
        last = visit.end - 1
        step = self._overlapped_tile if overlap else self._tile
        ahead, behind = union.end - visit.end, visit.begin - union.begin
        # With overlap, V of a tile comes after K of the next one.
        state.ahead = ahead
        self._skip(state, ahead, slots=2 * ahead - int(overlap), turns=ahead)
        self._first_tile(state, last)
        full_end = Int32(cutlass.min(visit.full_end, last))
        full_begin = Int32(cutlass.min(visit.full_begin, last))

        def visit_tiles(begin: Int32, end: Int32, masked: bool) -> None:
            state.ring.settle()
            wgmma.loop(end - begin, lambda i: step(state, end - 1 - i, masked=masked))

        visit_tiles(full_end, last, masked=True)
        visit_tiles(full_begin, full_end, masked=False)
        if self.spec.window_left:
            visit_tiles(visit.begin, full_begin, masked=True)
        self._release_query(state)
        if overlap:
            self._last_values(state, visit.begin, behind)
        self._skip(state, behind, slots=2 * behind - int(overlap), turns=behind)

    def _skip(self, state: SimpleNamespace, tiles: Any, *, slots: Any, turns: Any) -> None:
        """Lets tiles go by that only other warpgroups see: `slots` slots and `turns` turns, two and one for a tile.

        A turn is passed on before its tile is waited for: the others free the slots that the tile needs.
        """

        if self.config.warpgroups == 1:
            return

        def release(_: Any) -> None:
            state.ring.release(state.ring.wait())

        def take_turn() -> None:
            self._await_turn(state)
            self._pass_turn(state)

        def skip(i: Int32) -> None:
            if self.config.ping_pong:
                cutlass.if_generate(i < turns, take_turn)
            wgmma.loop(Int32(cutlass.min(slots - 2 * i, 2)), release)

        wgmma.loop(Int32(tiles), skip)

    def _skip_slot(self, state: SimpleNamespace, tiles: Int32) -> None:
        """Lets the one slot go by that lies out of order where `tiles` are skipped; none for 0."""
        if self.config.warpgroups > 1:
            cutlass.if_generate(tiles > 0, lambda: state.ring.release(state.ring.wait()))

    def _first_tile(self, state: SimpleNamespace, tile: Int32) -> None:
        """Softmax of the first tile; without overlap its values too."""
        slot = state.ring.wait()
        scores = self._score(state, slot)
        if self.config.overlap:
            self._skip_slot(state, state.ahead)
        warpgroup.wait_group(0)
        state.ring.release(slot)
        self._softmax(state, scores, tile, masked=True)
        self._round(state, scores)
        if self.spec.hides_last_keys:
            # With overlap V of this tile follows K of the next one, which exists unless this tile is the only one.
            ahead = ptx.where(tile > state.work.visit.begin, Int32(1), Int32(0)) if self.config.overlap else Int32(0)
            self._zero_values(state, tile, lambda: state.ring.peek(ahead))
        if not self.config.overlap:
            self._last_values(state, tile)

    def _last_values(self, state: SimpleNamespace, tile: Int32, behind: Any = None) -> None:
        """Adds the values of a tile with nothing else to do meanwhile; `behind` tiles follow that others see."""
        if behind is not None:
            self._skip_slot(state, behind)
        slot = state.ring.wait()
        if self.spec.hides_first_keys:
            self._zero_values(state, tile, lambda: slot)
        self._add_values(state, slot)
        warpgroup.wait_group(0)
        state.ring.release(slot)

    def _overlapped_tile(self, state: SimpleNamespace, tile: Int32, *, masked: bool) -> None:
        """Scores of this tile, with P V of the previous one in flight during the softmax."""
        key_slot = state.ring.wait()
        self._await_turn(state)
        scores = self._score(state, key_slot)
        value_slot = state.ring.wait()
        self._add_values(state, value_slot)
        self._pass_turn(state)
        warpgroup.wait_group(1)
        self._probabilities(state, scores, tile, key_slot, masked)
        state.ring.release(value_slot)

    def _tile(self, state: SimpleNamespace, tile: Int32, *, masked: bool) -> None:
        """One tile after the other; other warpgroups fill the gaps."""
        slot = state.ring.wait()
        self._await_turn(state)
        scores = self._score(state, slot)
        self._pass_turn(state)
        warpgroup.wait_group(0)
        self._probabilities(state, scores, tile, slot, masked)
        self._last_values(state, tile)

    def _score(self, state: SimpleNamespace, slot: Int32) -> cute.Tensor:
        """Starts S = Q K^T and returns where it will be."""
        key = state.key[None, None, None, slot]
        count = self.memory.head_dim // 16
        held = [(state.held_mma, state.held, k) for k in range(min(self.config.held, count))]
        rest = [(state.score_mma, state.query, k) for k in range(len(held), count)]
        steps = ((mma, a[None, None, k], key[None, None, k]) for mma, a, k in held + rest)
        wgmma.gemm_steps(state.scores, steps, accumulate=False)
        return state.scores

    def _hold_query(self, state: SimpleNamespace) -> None:
        """Loads the fragments of Q that stay in registers."""
        count = min(self.config.held, self.memory.head_dim // 16)
        state.held = wgmma.load_a(state.held_mma, state.shared.query, state.group, count, state.thread)

    def _add_values(self, state: SimpleNamespace, slot: Int32) -> None:
        """Starts O += P V."""
        values = state.value[None, None, None, slot]
        wgmma.gemm(state.out_mma, state.out, state.probabilities, values, accumulate=True)

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

    def _zero_padding(self, state: SimpleNamespace) -> None:
        """Zeroes the padding rows of this warpgroup's Q, and those of other sequences.

        No mask hides them: NaN there, or scores far above the maxima, would fail full tiles.
        """
        work, memory, first = state.work, self.memory, state.work.row + state.group * WARPGROUP_ROWS
        inside = plan.LiveRange(Int32(0), work.bounds["query_end"])

        def own_query() -> list[tuple[Int32, int]]:
            # All warps have loaded what they hold of the tile before. racecheck does not see that by `query_empty`,
            # the producer and TMA, which come in between.
            self._sync_warpgroup(state)
            return [(state.shared.address + state.group * memory.query_nbytes, memory.head_dim)]

        wgmma.zero_hidden_rows(
            WARPGROUP_ROWS,
            own_query,
            tiles.Rows.live(inside, first, hides_first=False, length=work.queries.zeros_from()),
            threads=128,
            barrier=1,
        )

    def _zero_values(self, state: SimpleNamespace, tile: Int32, slot: Callable[[], Int32]) -> None:
        """Zeroes the rows of V that no query sees; `slot` waits for it. Every warpgroup does so for itself."""
        spec, config, memory, work = self.spec, self.config, self.memory, state.work
        live = tiles.live_keys(**tiles.moved(work.bounds))
        rows = tiles.Rows.live(
            live, tile * config.keys, hides_first=spec.hides_first_keys, length=work.keys.zeros_from()
        )
        wgmma.zero_hidden_rows(
            config.keys,
            lambda: [(state.shared.address + memory.ring_start + slot() * memory.slot_nbytes, memory.v_head_dim)],
            rows,
            threads=128,
            barrier=1,
        )

    # Softmax.

    def _probabilities(
        self, state: SimpleNamespace, scores: cute.Tensor, tile: Int32, slot: Int32, masked: bool
    ) -> None:
        """Scores to P, with products in flight that are then awaited; releases K's slot; rescales O."""
        if masked:
            state.ring.release(slot)
            grown = self._softmax(state, scores, tile, masked=True)
            warpgroup.wait_group(0)
            self._round(state, scores)
        else:
            sums, grown = self._assumed_softmax(state, scores)
            late = self.config.waits_late

            def wait() -> None:
                # All warps of a warpgroup have to wait in the same place: not on the two sides of a warp's branch.
                warpgroup.wait_group(0)
                self._round(state, scores)

            def start_over() -> None:
                self._start_over(state, scores, slot)
                if not late:
                    self._round(state, scores)

            if not late:
                wait()
            cutlass.if_generate(grown, start_over, lambda: self._accept(state, slot, sums))
            if late:
                wait()
        self._rescale(state, grown)

    def _softmax(self, state: SimpleNamespace, scores: cute.Tensor, tile: Int32, *, masked: bool) -> Boolean:
        """Turns scores into probabilities relative to the running maxima, which it raises first, in place.

        Returns:
            whether the warp has to rescale its output by `state.factors`.
        """
        factor = state.call.scaling.factor
        blocks = (1, cute.size(scores) // 4)
        self._cap(state, scores)
        if masked:
            column = tile * self.config.keys + state.column
            softmax.mask_columns(scores, *blocks, column, state.limits, check_low=self.spec.window_left)
        shifts, grown = [], Boolean(False)
        for i, x in enumerate(softmax.row_maxima(scores, *blocks)):
            old = state.maxima[i]
            grown = Boolean(grown | (x > old))
            state.maxima[i] = ptx.maximum(old, x)
            # A row that has seen no key yet: 2^(-inf - 0) is 0, while -inf minus -inf is not a number.
            shift = ptx.where(state.maxima[i] == Float32(_NEVER), Float32(0.0), state.maxima[i])
            state.factors[i] = ptx.exp2((old - shift) * factor)
            shifts.append(shift * factor)
        sums = softmax.exponentials(scores, *blocks, factor, shifts)
        for i, total in enumerate(sums):
            state.sums[i] = ptx.fma(state.sums[i], state.factors[i], total)
        return cute.arch.vote_any_sync(grown)

    def _assumed_softmax(self, state: SimpleNamespace, scores: cute.Tensor) -> tuple[list[Float32], Boolean]:
        """`_softmax` of a full tile whose scores are assumed to lie not far above the running maxima.

        No maximum, no exchange between lanes: the probabilities may exceed 1, which costs nothing in floating point.
        A sum over the limit, infinite or not a number says that the assumption is wrong, or that the row has not seen a
        key yet.

        Returns:
            sums of the lane's two rows, and whether the assumption is wrong for a row of the warp.
        """
        factor = state.call.scaling.factor
        self._cap(state, scores)
        blocks = (1, cute.size(scores) // 4)
        sums = softmax.exponentials(scores, *blocks, factor, [state.maxima[i] * factor for i in range(2)])
        limit = Float32(_SUM_LIMITS[self.spec.dtype])
        holds = Boolean((sums[0] < limit) & (sums[1] < limit))
        return sums, cute.arch.vote_any_sync(Boolean(holds == Boolean(False)))

    def _accept(self, state: SimpleNamespace, slot: Int32, sums: list[Float32]) -> None:
        """The assumption was right."""
        state.ring.release(slot)
        for i, total in enumerate(sums):
            state.sums[i] = state.sums[i] + total

    def _start_over(self, state: SimpleNamespace, scores: cute.Tensor, slot: Int32) -> None:
        """The softmax of a full tile from the beginning: the scores are gone, the tiles still in shared memory."""
        rescue.warp_scores(
            scores,
            state.shared.address + state.group * self.memory.query_nbytes,
            state.shared.address + self.memory.ring_start + slot * self.memory.slot_nbytes,
            warp=state.warp,
            lane=state.thread % 32,
            keys=self.config.keys,
            head_dim=self.memory.head_dim,
            mma_dtype=self.mma_dtype,
        )
        state.ring.release(slot)
        self._softmax(state, scores, Int32(0), masked=False)

    def _cap(self, state: SimpleNamespace, scores: cute.Tensor) -> None:
        """Soft cap, but for the factor."""
        if not self.spec.logits_soft_cap:
            return
        cap = softmax.cap_score if self.spec.exact_cap else softmax.cap_score_roughly
        for i in range(cute.size(scores)):
            scores[i] = cap(scores[i], state.call.scaling.inner)

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
        lse_row = work.queries.row()
        for i in range(2):
            row = first_row + 8 * i
            total = softmax.quad_sum(state.sums[i])
            live = Boolean((total != Float32(0.0)) & (row < work.bounds["query_end"]))
            log_max, weight = state.maxima[i] * call.scaling.factor, Float32(1.0)
            if sink is not None:
                scaled = sink * softmax.LOG2_E
                top = ptx.maximum(log_max, scaled)
                shift = ptx.where(top == Float32(_NEVER), Float32(0.0), top)
                weight = ptx.exp2(log_max - shift)
                total = total * weight + ptx.exp2(scaled - shift)
                log_max = top
            value = (log_max + ptx.log2(total)) * softmax.LN_2
            value = ptx.where(row < work.bounds["query_end"], value, Float32(_NEVER))
            address = call.buffers.lse.toint() + ((lse_row + row) * call.scalars.num_heads + work.head) * 4
            stores = Boolean((row < work.queries.length) & (state.column == 0))
            cutlass.if_generate(stores, lambda address=address, value=value: ptx.store_global(address, value))
            weights.append((weight * ptx.reciprocal(total), live))
        return weights

    def _store(self, state: SimpleNamespace, weights: list, first_row: Int32) -> None:
        """Stores this warpgroup's output from registers: 16 bytes a lane, 64 neighbouring bytes of a row the quad."""
        work, num_heads, out = state.work, state.call.scalars.num_heads, state.call.buffers.out
        nbytes = 2 * self.spec.v_head_dim
        lane = state.column // 2
        for i, (weight, live) in enumerate(weights):
            row = first_row + 8 * i
            offset = work.queries.row_head(row, num_heads, work.head) * nbytes
            address = out.toint() + offset + lane * 16
            for block in range(0, self.spec.v_head_dim // 8, 4):
                chunk = [self._rounded(state, block + j, i, weight, live) for j in range(4)]
                chunk = ptx.transpose_quad(chunk, lane)
                stores = row < work.queries.length
                if block + 4 > self.spec.v_head_dim // 8:
                    stores = Boolean(stores & (lane < self.spec.v_head_dim // 8 - block))

                def store(address: Int64 = address + block * 16, chunk: list = chunk) -> None:
                    ptx.store_global_chunk(address, chunk)

                cutlass.if_generate(stores, store)

    def _rounded(self, state: SimpleNamespace, block: int, i: int, weight: Float32, live: Boolean) -> Int32:
        """This lane's two elements of a block of 8 columns, in row i of its two."""
        # A select, not a product: a padding row's sum can be NaN.
        pair = [ptx.where(live, state.out[4 * block + 2 * i + e] * weight, Float32(0.0)) for e in range(2)]
        return ptx.pack(*pair, dtype=self.mma_dtype)

    def _release_query(self, state: SimpleNamespace) -> None:
        """Lets the producer load this warpgroup's next Q."""
        if self.config.walks:
            wgmma.release(state.shared.query_empty + state.group)


def _uniform(visit: plan.TileRange) -> plan.TileRange:
    """The compiler has to know that all lanes take the same turns through loops around wgmma."""
    return plan.TileRange(*[cute.arch.make_warp_uniform(Int32(end)) for end in visit])


def _load(pointer: cute.Pointer, index: Int32) -> Any:
    return cute.make_tensor(pointer, cute.make_layout((UNBOUNDED,)))[index]
