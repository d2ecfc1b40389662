# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper backward kernel for head dims up to 128: dk, dv and dq.

A CTA works on 128 keys of one key/value head: two consumer warpgroups of 64 keys each (`consumer.py`), and a
warp that loads (`loader.py`). K and V stay in shared memory, tiles of Q (with statistics) and of dO pass through two
rings (`shared.py`), for all query heads of the group. For each tile everything is transposed, so that keys are rows:

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

For dq the consumers put dS into shared memory as well, where a third warpgroup takes it up (`dq_reduce.py`). There is a
CTA per SM, which takes one tile of keys after the other (`key_schedule.py`). Over head dim 128, `dkdv/` has a tile of
keys a CTA, and dq has a kernel of its own, `dq/`; `key_stationary.py` has the launch and the producer of both.

The kernel reads the statistics that are described in `gradient.py`.
"""

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.dkdv_dq.consumer import DkdvDqConsumer
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_atomic import DqAtomic
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_reduce import DqCounters, DqReduce
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_semaphore import DqSemaphore
from jax_fastattn.kernels.sm90.backward.dkdv_dq.dq_state import CountingWarp, DqWarpgroup
from jax_fastattn.kernels.sm90.backward.key_schedule import Call, KeyTile
from jax_fastattn.kernels.sm90.backward.key_stationary import KeyStationary
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.query_order import HeadOrder


class DkdvDqKernel:
    """Writes dk and dv, adds to `dq_accum`, and writes dq from there."""

    def __init__(self, spec: KernelSpec):
        self.spec, self.common = spec, KeyStationary.of(spec)
        self.config = config = self.common.config
        counters = DqCounters(spec, config.queries)
        self.dq_reduce: DqReduce = (
            DqSemaphore(counters, config.keys) if spec.ordered else DqAtomic(counters, self.common.memory)
        )

    def launch(self, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """Returns the launch of the kernel.

        The zeros of the first `order.prefetch_distance` heads are written before it begins, and the zeros of the other
        heads once their counter says so. With `spec.ordered` sums may hold anything. Rows of dq that no key tile adds
        to stay as they are.
        """
        return self.common.launch(self.kernel, buffers, scalars, order)

    @cute.kernel
    def kernel(self, tma: Tma, buffers: Buffers, sizes: Sizes, order: HeadOrder):
        thread = wgmma.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = BackwardShared.of(self.common.memory, self.common.dtype)
        shared.initialize(thread, warp_index, tma)
        call = Call(tma, buffers, sizes, order)
        # The warpgroups are two consumers, the one that computes dq, and the producer's.
        if warp_index >= self.config.consumer_threads // 32:
            if warp_index >= self.common.first_producer:
                self._produce(shared, call, warp_index)
            else:
                self._add_dq(shared, call, thread)
        else:
            self.common.compute(DkdvDqConsumer.start, shared, call, thread, warp_index)
        # This waits for the previous kernel, which runs concurrently: what is launched next relies on both.
        cute.arch.griddepcontrol_wait()

    # The methods below emit the roles.

    def _produce(self, shared: BackwardShared, call: Call, warp_index: Int32) -> None:
        """Emits the producer's warpgroup: one warp loads, the others prepare sums of dq and count its tiles."""

        def begin(work: KeyTile, phase: Int32) -> None:
            self.dq_reduce.wait(work, call.buffers.head_ready)
            wgmma.wait(shared.keys_empty, phase ^ 1)

        def prepare_and_count(work: KeyTile, _: Int32) -> None:
            self.dq_reduce.prepare(work, call.buffers, warp.stage)
            self.dq_reduce.count(shared, work, call.buffers.dq_semaphore, warp)

        load_all = self.common.loader(shared, call, begin)
        warp = CountingWarp.start(warp_index - (self.common.first_producer + 1))
        cutlass.if_generate(
            warp.stage >= 0, lambda: self.common.schedule.each(shared, call, prepare_and_count), load_all
        )

    def _add_dq(self, shared: BackwardShared, call: Call, thread: Int32) -> None:
        """Emits the warpgroup that computes dq."""
        cute.arch.setmaxregister_decrease(self.config.registers.dq)
        thread = thread - self.config.consumer_threads
        state = DqWarpgroup.start(self.spec, shared, call.buffers, thread, call.sizes.scale)

        def add(work: KeyTile, phase: Int32) -> None:
            self.dq_reduce.accumulate(state, work, phase)
            self.dq_reduce.finish(state, work)

        self.common.schedule.each(shared, call, add)
