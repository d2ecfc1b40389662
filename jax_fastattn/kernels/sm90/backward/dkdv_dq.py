# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper backward kernel for head dims up to 128: dk, dv and dq.

A CTA works on 128 keys of one key/value head: two consumer warpgroups of 64 keys each (`dkdv_consumer.py`), and a warp
that loads (`loader.py`). K and V stay in shared memory, tiles of Q (with statistics) and of dO pass through two rings
(`shared.py`), for all query heads of the group. Per tile, everything transposed so that keys are rows:

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

For dq the consumers put dS into shared memory as well, where a third warpgroup takes it up (`dq_atomic.py`). There is a
CTA per SM, which takes one tile of keys after the other (`key_schedule.py`). `dkdv.py`, over head dim 128, has the
launch and the producer from here, but a tile of keys a CTA; there dq has a kernel of its own, `dq.py`.

Reads the statistics that are described in `gradient.py`.
"""

from typing import Protocol

import cutlass
from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.arguments import BackwardBuffers, Scalars, Sizes
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward import gradient
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig, BackwardMemory
from jax_fastattn.kernels.sm90.backward.dkdv_consumer import FusedConsumer
from jax_fastattn.kernels.sm90.backward.dq_atomic import DqSum
from jax_fastattn.kernels.sm90.backward.dq_semaphore import DqOrdered
from jax_fastattn.kernels.sm90.backward.dq_state import CountingWarp
from jax_fastattn.kernels.sm90.backward.key_schedule import Call, KeyTile, key_schedule
from jax_fastattn.kernels.sm90.backward.loader import Producer
from jax_fastattn.kernels.sm90.backward.row_schedule import HeadOrder
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


class Consumer(Protocol):
    """A consumer warpgroup, with what it keeps from one tile of keys to the next."""

    def run(self, work: KeyTile, phase: Int32, buffers: BackwardBuffers, scale: Float32) -> None:
        """Does everything for a tile of keys.

        Args:
            work: the tile.
            phase: of the barriers of K and V.
            buffers: dk and dv, to which it stores.
            scale: factor on dk.
        """


class FusedKernel:
    """Writes dk and dv, and adds dq to `dq_sum` unless the config is wide.

    Args:
        spec: the compile key.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.config: BackwardConfig = spec.config.main
        self.memory = BackwardMemory.of(spec, self.config)
        self.key_tiles = key_schedule(spec, self.memory)
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
        self.mma_dtype = ptx.MMA_DTYPE[spec.dtype]
        self.dq_sum = (DqOrdered if spec.ordered else DqSum)(spec, self.memory, self.dtype)

    def launch(self, buffers: BackwardBuffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """Returns the launch of the kernel.

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
        config = self.config
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = BackwardShared.of(self.memory, self.dtype)
        shared.initialize(thread, warp_index, tma)
        call = Call(tma, buffers, sizes, order)
        # Warpgroups: two consumers, the one that computes dq if the kernel does, and the producer's.
        if warp_index >= config.consumer_threads // 32:
            if cutlass.const_expr(config.adds_dq):
                if warp_index >= config.threads // 32 - 4:
                    self._produce(shared, call, warp_index)
                else:
                    self._add_dq(shared, call, thread)
            else:
                self._produce(shared, call, warp_index)
        else:
            self._compute(shared, call, thread, warp_index)
        # For the kernel before it, beside which it runs: what is launched next relies on both.
        cute.arch.griddepcontrol_wait()

    # Roles.

    def _produce(self, shared: BackwardShared, call: Call, warp_index: Int32) -> None:
        """Emits the producer's warpgroup: one warp loads; if dq is computed, others zero its sums and count tiles."""
        config, buffers, producer = self.config, call.buffers, self.config.threads // 32 - 4
        cute.arch.setmaxregister_decrease(config.registers.producer)
        emit = Producer(self.spec.group, self.memory)
        load = emit.start(shared, call.tma, buffers.stats, lambda work: self.dq_sum.prepare(work, buffers.arrivals))

        def load_all() -> None:
            self.key_tiles.each(shared, call, load, takes=True)

        if not config.adds_dq:
            cutlass.if_generate(warp_index == producer, load_all)
            return
        warp = CountingWarp.start(warp_index - (producer + 1))

        def zero_and_count(work: KeyTile, _: Int32) -> None:
            self.dq_sum.zero(work, buffers, warp.slot)
            self.dq_sum.count(shared, work, buffers.arrivals, warp)

        cutlass.if_generate(warp.slot >= 0, lambda: self.key_tiles.each(shared, call, zero_and_count), load_all)

    def _add_dq(self, shared: BackwardShared, call: Call, thread: Int32) -> None:
        """Emits the warpgroup that computes dq."""
        cute.arch.setmaxregister_decrease(self.config.registers.dq)
        state = self.dq_sum.start(shared, call.buffers, thread - self.config.consumer_threads, call.sizes.scale)
        self.key_tiles.each(shared, call, lambda work, phase: self.dq_sum.run(state, work, phase))

    def _compute(self, shared: BackwardShared, call: Call, thread: Int32, warp_index: Int32) -> None:
        """Emits the consumers."""
        buffers, scale = call.buffers, call.sizes.scale
        cute.arch.setmaxregister_increase(self.config.registers.consumer)
        folds_lse = self.config.adds_dq and self.spec.is_affine
        factor = gradient.nonzero(scale) if folds_lse else scale
        score = Score.backward(self.spec, buffers, call.sizes, factor)
        consumer = self._consumer(shared, score, thread, warp_index)
        self.key_tiles.each(shared, call, lambda work, phase: consumer.run(work, phase, buffers, scale))

    # What `dkdv.py` replaces.

    def _consumer(self, shared: BackwardShared, score: Score, thread: Int32, warp_index: Int32) -> Consumer:
        """Returns a consumer warpgroup with its registers."""
        return FusedConsumer.start(self.spec, shared, score, thread, warp_index)
