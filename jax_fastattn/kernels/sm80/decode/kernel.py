# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Few queries over long keys for all architectures: a CTA on each SM, all with the same number of key tiles.

As on Hopper (`sm90/decode/kernel.py`), but warps load the keys that they compute by cp.async.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.decode.combine import decode_launches
from jax_fastattn.kernels.decode.config import DecodeConfig
from jax_fastattn.kernels.decode.line import Line
from jax_fastattn.kernels.decode.merge import MergeMemory
from jax_fastattn.kernels.decode.rows import DecodeRows, refuse_placed
from jax_fastattn.kernels.decode.walk import each
from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.decode.config import DecodeMemory
from jax_fastattn.kernels.sm80.decode.source import CopySource, DenseRows, PagedRows


class DecodeKernel:
    """The decoding kernels of one compile key."""

    def __init__(self, spec: KernelSpec):
        refuse_placed(spec)
        self.spec = spec
        self.config: DecodeConfig = spec.config
        self.memory = DecodeMemory.of(spec, self.config)

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernels."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: Buffers, scalars: Scalars) -> list[Launch]:
        """Returns the launches of a call, in order."""
        return decode_launches(self.kernel, self.spec, buffers, scalars, shared_bytes=self.memory.nbytes)

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars):
        thread = wgmma.thread_index()
        warp = cute.arch.make_warp_uniform(thread // 32)
        line = Line.of(self.spec, buffers, scalars, thread % 32)
        address = cute.arch.get_dyn_smem(cutlass.Int8, alignment=128).toint()
        strips = PagedRows.begin(line) if self.spec.page else DenseRows(line)
        source = CopySource.begin(line, self.memory, strips, address, warp)
        rows = DecodeRows.start(line, self._merge_memory(address), source, thread, warp)
        each(line, rows.visit, rows.begin)

    def _merge_memory(self, address: cutlass.Int32) -> MergeMemory:
        """Returns where the warps merge their results."""
        memory = self.memory
        columns = memory.key.padded_columns, memory.value.padded_columns
        return MergeMemory(self.config, *columns, address + memory.table.offset("merge"))
