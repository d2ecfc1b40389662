# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The query-stationary Hopper backward kernel: dq without additions in memory, the same bits in every run.

A CTA owns 128 query rows of one head (`tile.py`): two consumer warpgroups of 64 rows each (`consumer.py`), and
one producer warp. Q and dO stay in shared memory, tiles of V and K pass through one ring of stages (`shared.py`).
Per tile:

    S = Q K^T    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

Keys past the end can only be in the first tile visited, where each warpgroup zeroes those rows of K (0 * NaN is NaN).
Queries past the end need nothing: what they hold stays in their own rows. The kernel stores zeros there, or nothing if
the rows belong to another packed sequence. The kernel reads the statistics that are described in `gradient.py`.
"""

from collections.abc import Callable

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.dq.consumer import DqConsumer
from jax_fastattn.kernels.sm90.backward.dq.shared import DqShared
from jax_fastattn.kernels.sm90.backward.dq_config import DqConfig, DqMemory
from jax_fastattn.kernels.sm90.query_order import HeadOrder, query_schedule
from jax_fastattn.kernels.sm90.query_tile import RowTile
from jax_fastattn.kernels.tiles.plan import Order


class DqKernel:
    """Writes dq."""

    def __init__(self, spec: KernelSpec):
        stages.refuse(spec.features, "the dq kernel")
        self.spec = spec
        self.config: DqConfig = spec.config.dq
        self.memory = DqMemory.of(spec, self.config)
        self.schedule = query_schedule(spec, self.config.rows)
        self.dtype = wgmma.OPERAND_DTYPE[spec.product_dtype]

    def launch(self, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """Returns the launch of the kernel."""
        arguments, grid = (buffers, Sizes.of(scalars), order), self.schedule.blocks(scalars, order)
        return Launch.of_tma(self.kernel, self.spec, self.memory, arguments, scalars, grid=grid, begins_early=True)

    @cute.kernel
    def kernel(self, tma: Tma, buffers: Buffers, sizes: Sizes, order: HeadOrder):
        config = self.config
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = DqShared.of(self.memory, self.dtype)
        shared.initialize(warp_index, tma)
        # Statistics are there after this wait. What is launched next may rely on them too.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        work = self._work(buffers, sizes, order)

        def produce() -> None:
            cute.arch.setmaxregister_decrease(config.registers.producer)
            producer = config.consumer_threads // 32
            cutlass.if_generate(warp_index == producer, lambda: self._produce(shared, work, tma))

        def consume() -> None:
            cute.arch.setmaxregister_increase(config.registers.consumer)
            score = Score.backward(self.spec, buffers, sizes, sizes.scale).start(work.score_head)
            consumer = DqConsumer.start(self.spec, shared, work, score, buffers, thread, warp_index)
            consumer.run()
            consumer.store(sizes.scale)

        cutlass.if_generate(warp_index >= config.consumer_threads // 32, produce, consume)

    def _work(self, buffers: Buffers, sizes: Sizes, order: HeadOrder) -> RowTile:
        """Returns the query rows of this CTA, and the key tiles that they see."""
        block, _, _ = cute.arch.block_idx()
        work = self.schedule.at(block, order, buffers, sizes)
        return RowTile.of(self.spec, self.config, work, buffers, sizes)

    def _produce(self, shared: DqShared, work: RowTile, tma: Tma) -> None:
        """Loads Q, dO and all tiles of V and K. Runs in one warp."""
        config, memory = self.config, self.memory
        ring = wgmma.Ring(shared.full, shared.empty, config.stages)
        copy_query = tma.query.copy_terms(shared.query, work.head, work.queries)
        copy_dout = tma.dout.copy_terms(shared.dout, work.head, work.queries)
        copy_key = tma.key.copy_terms(shared.key, work.kv_head, work.keys)
        copy_value = tma.value.copy_terms(shared.value, work.kv_head, work.keys)
        whole = work.visit.whole(Order.DOWN)

        def load_rows(copy: Callable[..., None], barrier: cute.Pointer, nbytes: int) -> None:
            for group in range(2):
                wgmma.expect(barrier + group, nbytes)
                copy(2 * work.index + group, group, barrier + group)

        def load(i: Int32) -> None:
            # V comes first: with three stages the next K takes its place, long before this K is done with.
            tile = work.visit.tile(whole.position(i))
            ring.producer_load(copy_value, tile, memory.tile_nbytes(config.keys, memory.v_head_dim))
            ring.producer_load(copy_key, tile, memory.tile_nbytes(config.keys, memory.head_dim))

        # The first product needs Q and K.
        count = whole.steps
        load_rows(copy_query, shared.query_full, memory.table["query"].pitch)
        wgmma.loop(Int32(cutlass.min(count, 1)), load)
        load_rows(copy_dout, shared.dout_full, memory.table["dout"].pitch)
        wgmma.loop(count - 1, lambda i: load(i + 1))
