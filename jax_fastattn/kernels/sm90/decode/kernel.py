# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Few queries over long keys on Hopper: a CTA on each SM, all with the same number of key tiles (`decode/split.py`).

One warp loads tiles of K and V into a ring (`loader.py`), the others compute (`kernels/decode/rows.py`). Then
`kernels/decode/combine.py` adds up the partial results of a row. It begins when the first kernel allows that, and waits
for the end of that kernel.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.decode.combine import decode_launches
from jax_fastattn.kernels.decode.config import DecodeConfig
from jax_fastattn.kernels.decode.line import Line
from jax_fastattn.kernels.decode.rows import DecodeRows, refuse_placed
from jax_fastattn.kernels.decode.walk import each
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.device.tma import Box, Tma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.decode.config import REGISTERS, DecodeMemory
from jax_fastattn.kernels.sm90.decode.loader import DenseLoader, PagedLoader
from jax_fastattn.kernels.sm90.decode.shared import DecodeShared, TmaSource


class DecodeKernel:
    """Launches the decoding kernels of one compile key."""

    def __init__(self, spec: KernelSpec):
        refuse_placed(spec)
        self.spec = spec
        self.config: DecodeConfig = spec.config
        self.memory = DecodeMemory.of(spec, self.config)
        self.dtype = wgmma.OPERAND_DTYPE[spec.product_dtype]

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernels."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: Buffers, scalars: Scalars) -> list[Launch]:
        """Returns the launches of a call, in order."""
        options = {"shared_bytes": self.memory.nbytes, "tma": self._boxes(buffers, scalars)}
        return decode_launches(self.kernel, self.spec, buffers, scalars, **options)

    def _boxes(self, buffers: Buffers, scalars: Scalars) -> Tma:
        """Returns what is loaded by TMA; queries come by ordinary loads."""
        spec, memory, rows = self.spec, self.memory, self.memory.box_rows
        kv_heads = scalars.num_heads // spec.group
        if spec.page:
            sizes = scalars.pages, Int32(spec.page), kv_heads
        else:
            sizes = scalars.batch, scalars.key_length, kv_heads
        return Tma(
            query=None,
            key=Box(buffers.key, *sizes, spec.head_dim, rows, memory.head_dim),
            value=Box(buffers.value, *sizes, spec.v_head_dim, rows, memory.v_head_dim),
            dout=None,
        )

    @cute.kernel
    def kernel(self, tma: Tma, buffers: Buffers, scalars: Scalars):
        thread = wgmma.thread_index()
        warp = cute.arch.make_warp_uniform(thread // 32)
        cute.arch.griddepcontrol_launch_dependents()
        shared = DecodeShared.of(self.memory, self.dtype)
        shared.regions.initialize(warp, tma)
        if warp >= self.config.consumer_warps:
            if cutlass.const_expr(self.memory.moves_registers):
                cute.arch.setmaxregister_decrease(REGISTERS.producer)
            if warp == self.config.consumer_warps:
                self._load(self._line(buffers, scalars), shared, tma)
        else:
            if cutlass.const_expr(self.memory.moves_registers):
                cute.arch.setmaxregister_increase(REGISTERS.consumer)
            self._compute(self._line(buffers, scalars), shared, thread, warp)

    def _line(self, buffers: Buffers, scalars: Scalars) -> Line:
        """Returns the lines for a role, which computes its lane itself: else ptxas stores it for later."""
        return Line.of(self.spec, buffers, scalars, wgmma.thread_index() % 32)

    def _load(self, line: Line, shared: DecodeShared, tma: Tma) -> None:
        loader = PagedLoader if self.spec.page else DenseLoader
        each(line, loader.start(line, shared, tma).load)

    def _compute(self, line: Line, shared: DecodeShared, thread: Int32, warp: Int32) -> None:
        source = TmaSource(shared, shared.ring(), line.lane, warp % self.config.parts)
        rows = DecodeRows.start(line, shared.merge, source, thread, warp)
        each(line, rows.visit, rows.begin)
