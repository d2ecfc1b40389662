# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What both key-stationary kernels have: the launch, the warp that loads, and the frame of the consumers.

`dkdv_dq/` and `dkdv/` each hold a `KeyStationary` and say which warps take which role.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.features.bias.staged import StagedBias
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig, BackwardMemory
from jax_fastattn.kernels.sm90.backward.key_schedule import Call, KeySchedule, KeyTile, key_schedule
from jax_fastattn.kernels.sm90.backward.loader import BackwardProducer
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.query_order import HeadOrder
from jax_fastattn.kernels.sums.row_preprocess import nonzero


class Consumer(Protocol):
    """Emits the code of a consumer warpgroup, and holds what it keeps from one tile of keys to the next."""

    def run(self, work: KeyTile, phase: Int32, buffers: Buffers, scale: Float32) -> None:
        """Computes all of the warpgroup's part of a tile of keys.

        Args:
            phase: phase of the barriers of K and V.
            buffers: dk and dv, to which it stores.
            scale: factor on dk.
        """


# Returns a consumer warpgroup with its registers, from the key, the CTA's tiles and barriers, the map from products to
# weights, and the thread's and the warp's index in the CTA.
StartConsumer = Callable[[KernelSpec, BackwardShared, Score, Int32, Int32], Consumer]


@dataclass(frozen=True, eq=False)
class KeyStationary:
    """Holds the part of a kernel that does not depend on whether it computes dq.

    Attributes:
        memory: the kernel's shared memory, with its config.
        schedule: which tiles of keys a CTA works on.
        dtype: the dtype of the operands.
    """

    spec: KernelSpec
    memory: BackwardMemory
    schedule: KeySchedule
    dtype: type

    @classmethod
    def of(cls, spec: KernelSpec) -> "KeyStationary":
        """Returns the part of the kernel of a compile key."""
        memory = BackwardMemory.of(spec, spec.config.main)
        return cls(spec, memory, key_schedule(spec, memory), wgmma.OPERAND_DTYPE[spec.product_dtype])

    @property
    def config(self) -> BackwardConfig:
        """Returns the variant."""
        return self.memory.config

    @property
    def first_producer(self) -> int:
        """Returns the index of the first warp of the last warpgroup, which loads."""
        return self.config.threads // 32 - 4

    def launch(self, kernel: Any, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """Returns the launch of a kernel.

        The statistics of the first `order.prologue` heads are written before it begins, and the statistics of the other
        heads once their counter says so.
        """
        arguments, grid = (buffers, Sizes.of(scalars), order), self.schedule.blocks(scalars, order)
        return Launch.of_tma(kernel, self.spec, self.memory, arguments, scalars, grid=grid, begins_early=True)

    def loader(
        self, shared: BackwardShared, call: Call, begin: Callable[[KeyTile, Int32], None] | None = None
    ) -> Callable[[], None]:
        """Gives the producer's warpgroup its registers; returns a function that loads all tiles of keys in one warp.

        Args:
            call: what the kernel computes with.
            begin: called before a tile of keys is loaded, with the tile and the phase of its barriers.
        """
        cute.arch.setmaxregister_decrease(self.config.registers.producer)
        score = Score.backward(self.spec, call.buffers, call.sizes, call.sizes.scale, self._copied_bias(call))
        producer = BackwardProducer.start(self.spec.group, call, shared, score, begin)
        return lambda: self.schedule.each(shared, call, producer.load, fetches=True)

    def compute(
        self, start: StartConsumer, shared: BackwardShared, call: Call, thread: Int32, warp_index: Int32
    ) -> None:
        """Emits the consumers, which `start` makes."""
        buffers, scale = call.buffers, call.sizes.scale
        cute.arch.setmaxregister_increase(self.config.registers.consumer)
        folds_lse = self.config.adds_dq and self.spec.folds_lse
        factor = nonzero(scale) if folds_lse else scale
        score = Score.backward(self.spec, buffers, call.sizes, factor, self._copied_bias(call))
        consumer = start(self.spec, shared, score, thread, warp_index)
        self.schedule.each(shared, call, lambda work, phase: consumer.run(work, phase, buffers, scale))

    def _copied_bias(self, call: Call) -> StagedBias | None:
        """Returns the bias of pairs that TMA loads."""
        tile = self.config.queries, self.config.keys
        return StagedBias.of_stages(self.spec, call.sizes, call.tma.bias, tile if self.config.holds_offset else None)
