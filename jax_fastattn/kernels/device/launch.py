# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""One launch of a kernel, of which host functions make lists.

Host functions make it from device integers, and start it. An emulator makes it from Python numbers and addresses, and
reads the grid, the shared memory and the arguments from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda

from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device.tma import Tma, TmaMemory
from jax_fastattn.kernels.key import KernelSpec


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments.

    Attributes:
        kernel: a method that is a `cute.kernel`.
        arguments: NamedTuples, in the order in which the kernel takes them, after `tma` if it takes that.
        grid: number of CTAs.
        block: threads of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
        tma: boxes that the kernel loads.
        min_blocks: CTAs that must fit on an SM together; 0 leaves the registers of a thread to ptxas.
        begins_early: whether CTAs may begin when the CTAs of the launch before allow it, else when these have ended.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    grid: Any
    block: int
    shared_bytes: int = 0
    tma: Tma | None = None
    min_blocks: int = 1
    begins_early: bool = False

    @classmethod
    def of_tma(
        cls,
        kernel: Callable[..., Any],
        spec: KernelSpec,
        memory: TmaMemory,
        arguments: tuple[Any, ...],
        scalars: Scalars,
        *,
        grid: Any,
        begins_early: bool,
        min_blocks: int = 1,
    ) -> "Launch":
        """Returns the launch of a kernel whose operands TMA loads.

        Args:
            kernel: a method that is a `cute.kernel`.
            memory: shared memory of a CTA.
            arguments: see the attribute; the first one is the buffers.
            grid: number of CTAs.
            begins_early: see the attribute.
            min_blocks: see the attribute.
        """
        return cls(
            kernel,
            arguments,
            grid=grid,
            block=memory.config.threads,
            shared_bytes=memory.nbytes,
            tma=Tma.boxes(spec, memory, arguments[0], scalars),
            min_blocks=min_blocks,
            begins_early=begins_early,
        )

    def start(self, stream: cuda.CUstream) -> None:
        """Emits the launch; to be called from a `cute.jit` function."""
        arguments = self.arguments if self.tma is None else (self.tma.operands(), *self.arguments)
        options: dict[str, Any] = {"use_pdl": True} if self.begins_early else {}
        if self.shared_bytes:
            options |= {"smem": self.shared_bytes, "preferred_smem_carveout": 100}
        self.kernel(*arguments).launch(
            grid=(self.grid, 1, 1),
            block=(self.block, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            **options,
        )


def start_all(launches: list[Launch], stream: cuda.CUstream) -> None:
    """Emits launches, one after the other."""
    for launch in launches:
        launch.start(stream)
