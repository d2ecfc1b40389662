# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The turns in which the consumer warpgroups of the forward kernel issue their products."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.sm90.forward.config import ForwardBarrier, ForwardConfig


@dataclass(frozen=True)
class PingPong:
    """Emits the turns in which the warpgroups issue their products; emits nothing if there are no turns.

    Attributes:
        group: index of the warpgroup.
    """

    config: ForwardConfig
    group: Int32

    @property
    def _exists(self) -> bool:
        return self.config.ping_pong and self.config.warpgroups > 1

    def start(self) -> None:
        """Makes the last warpgroup give the first turn to the first one."""
        if self._exists:
            cutlass.if_generate(self.group == self.config.warpgroups - 1, self.pass_on)

    def wait(self) -> None:
        """Waits for this warpgroup's turn."""
        if self._exists:
            cute.arch.barrier(barrier_id=ForwardBarrier.PING_PONG.at(self.group), number_of_threads=256)

    def pass_on(self) -> None:
        """Gives the turn to the next warpgroup."""
        if self._exists:
            following = self.group + 1
            following = ptx.where(following == self.config.warpgroups, Int32(0), following)
            cute.arch.barrier_arrive(barrier_id=ForwardBarrier.PING_PONG.at(following), number_of_threads=256)
