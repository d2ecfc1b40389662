# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents of output and log-sum-exp with TMA and WGMMA: one CTA per (query tile, query head, batch entry).

With a prime for the tangent of an operand, it computes for each tile of keys

    S = Q K^T    S' = Q' K^T + Q K'^T    P = 2^(S - lse)    W = P (S' - c)    O' += W V + P V'

from the saved log-sum-exp, so that there is no maximum and nothing is rescaled. `sums/tangent_rows.py` has the sums of
rows and what becomes of O'. Products with an operand that does not move are left out. The producer warp loads tiles
into one ring, in the order of `consumer.tile_loads`.

Queries of padding, and of other sequences, may hold anything: what they hold stays in their own rows. The kernel stores
zeros there, or nothing if the rows belong to another packed sequence.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.query_order import HeadOrder, query_schedule
from jax_fastattn.kernels.sm90.query_tile import RowTile
from jax_fastattn.kernels.sm90.tangent.config import TangentConfig, TangentMemory
from jax_fastattn.kernels.sm90.tangent.consumer import TangentConsumer, tile_loads
from jax_fastattn.kernels.sm90.tangent.shared import TangentShared
from jax_fastattn.kernels.tiles.plan import Order


class TangentKernel:
    """Launches the kernel of one compile key."""

    def __init__(self, spec: KernelSpec):
        stages.refuse(spec.features, "the kernel of tangents")
        self.spec = spec
        self.config: TangentConfig = spec.config
        self.memory = TangentMemory.of(spec, self.config)
        self.schedule = query_schedule(spec, self.config.rows)
        self.dtype = wgmma.OPERAND_DTYPE[spec.product_dtype]

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernel."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: Buffers, scalars: Scalars) -> list[Launch]:
        """Returns what is launched."""
        order = self.schedule.order(scalars)
        arguments, grid = (buffers, scalars, order), self.schedule.blocks(scalars, order)
        launch = Launch.of_tma(
            self.kernel, self.spec, self.memory, arguments, scalars, grid=grid, begins_early=self.spec.listed
        )
        return [launch]

    @cute.kernel
    def kernel(self, tma: Tma, buffers: Buffers, scalars: Scalars, order: HeadOrder):
        config = self.config
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = TangentShared.of(self.memory, self.dtype)
        shared.regions.initialize(warp_index, tma)
        if cutlass.const_expr(self.spec.listed):
            # The previous launch is the prepass.
            cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        work = RowTile.of(self.spec, config, self.schedule.at(block, order, buffers, scalars), buffers, scalars)

        def produce() -> None:
            cute.arch.setmaxregister_decrease(config.registers.producer)
            producer = config.consumer_threads // 32
            cutlass.if_generate(warp_index == producer, lambda: self._produce(shared, work, tma))

        def consume() -> None:
            cute.arch.setmaxregister_increase(config.registers.consumer)
            score = Score.backward(self.spec, buffers, scalars, scalars.scale).start(work.score_head)
            TangentConsumer.start(self.spec, shared, work, score, buffers, scalars.scale, thread, warp_index).run()

        cutlass.if_generate(warp_index >= config.consumer_threads // 32, produce, consume)

    def _produce(self, shared: TangentShared, work: RowTile, tma: Tma) -> None:
        """Loads Q and its tangent, and all tiles of keys. Runs in one warp."""
        config, memory, ring, whole = self.config, self.memory, shared.ring(), work.visit.whole(Order.DOWN)
        queries = [x.copy(shared.query, work.head, work.queries) for x in (tma.query, tma.query_tangent) if x]
        copies = []
        for name in tile_loads(self.spec):
            of_key = name.startswith("key")
            tiles, columns = (shared.key, memory.head_dim) if of_key else (shared.value, memory.v_head_dim)
            copies.append((getattr(tma, name).copy(tiles, work.kv_head, work.keys), config.keys * columns * 2))
        for group in range(2):
            barrier = shared.query_full + group
            wgmma.expect(barrier, len(queries) * memory.table["query"].pitch)
            for which, copy in enumerate(queries):
                copy(2 * work.index + group, 2 * which + group, barrier)

        def load(i: Int32) -> None:
            tile = work.visit.tile(whole.position(i))
            for copy, nbytes in copies:
                ring.producer_load(copy, tile, nbytes)

        wgmma.loop(whole.steps, load)
