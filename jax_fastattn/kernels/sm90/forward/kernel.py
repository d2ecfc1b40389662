# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Forward attention with TMA and WGMMA, warp-specialized: one producer warp, one to three consumer warpgroups.

Each role has a file: `loader.py` loads Q, K and V, a warpgroup of `consumer.py` computes 64 rows of
the output. If CTAs get tiles by the tile counter, one more warp fetches them (`schedule.py`). `shared.py` has the tiles
and the barriers in shared memory.
"""

import dataclasses

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.device.tile_counter import ResetKernel
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.features.bias.staged import StagedBias
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig, SharedMemory
from jax_fastattn.kernels.sm90.forward.consumer import ForwardConsumer
from jax_fastattn.kernels.sm90.forward.loader import ForwardProducer
from jax_fastattn.kernels.sm90.forward.schedule import PersistentPackedTiles, forward_schedule
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.state import Call


class ForwardKernel:
    """Launches the forward kernel of one compile key."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.config: ForwardConfig = spec.config
        self.memory = SharedMemory.of(spec, self.config)
        self.schedule = forward_schedule(spec, self.config)
        self.dtype = wgmma.OPERAND_DTYPE[spec.product_dtype]

    @property
    def begins_early(self) -> bool:
        """Returns whether CTAs may begin before the previous launch ends, one of this call or of the prepass."""
        return self.spec.has_tile_counter or self.spec.listed

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernel."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: Buffers, scalars: Scalars) -> list[Launch]:
        """Returns the launches of a call, in order."""
        spec = self.spec
        launch = Launch.of_tma(
            self.kernel,
            spec,
            self.memory,
            (buffers, scalars),
            scalars,
            grid=self.schedule.blocks(scalars),
            begins_early=self.begins_early,
            min_blocks=self.config.blocks,
        )
        return [ResetKernel().launch(buffers), launch] if spec.has_tile_counter else [launch]

    @cute.kernel
    def kernel(self, tma: Tma, buffers: Buffers, scalars: Scalars):
        spec, config = self.spec, self.config
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        shared = ForwardShared.of(self.memory, self.dtype)
        shared.initialize(warp_index, tma)
        if cutlass.const_expr(self.begins_early):
            # The previous launch resets the counter, or is the prepass.
            cute.arch.griddepcontrol_wait()
        call = self._call(shared, tma, buffers, scalars)
        if warp_index >= config.consumer_threads // 32:
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_decrease(config.registers.producer)
            if warp_index == config.consumer_threads // 32:
                ForwardProducer.start(call, shared).run()
            if cutlass.const_expr(spec.has_tile_counter):  # noqa: SIM102, of the two conditions only this one is static
                if thread == config.consumer_threads + 32:
                    call.fetch_tiles()
        else:
            if cutlass.const_expr(config.moves_registers):
                cute.arch.setmaxregister_increase(config.registers.consumer)
            ForwardConsumer.start(call, shared, thread, warp_index).run()

    def _call(self, shared: ForwardShared, tma: Tma, buffers: Buffers, scalars: Scalars) -> Call:
        """Returns what the roles share."""
        schedule = self.schedule
        if isinstance(schedule, PersistentPackedTiles):
            schedule = dataclasses.replace(schedule, next_tile=shared.next_tile)
        score = Score.forward(self.spec, buffers, scalars, StagedBias.of_stages(self.spec, scalars, tma.bias))
        score = dataclasses.replace(score, hides_keys=self.spec.key_bias_parts)
        return Call(self.spec, self.memory, schedule, tma, buffers, scalars, score)
