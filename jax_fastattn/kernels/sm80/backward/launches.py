# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Backward attention with mma.sync and cp.async: preprocess, one kernel for dk, dv and sums of dq, conversion to dq.

If the gradient of a bias of pairs is asked for, a last kernel computes it.
"""

import cuda.bindings.driver as cuda
from cutlass import cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import ORDERED_NBYTES, DkdvDqConfig
from jax_fastattn.kernels.sm80.backward.convert import ConvertKernel
from jax_fastattn.kernels.sm80.backward.dbias import DbiasKernel
from jax_fastattn.kernels.sm80.backward.dkdv_dq import DkdvDqKernel, HeadOrder
from jax_fastattn.kernels.sm80.backward.preprocess import PreprocessKernel
from jax_fastattn.kernels.tiles import plan


class BackwardKernel:
    """The backward kernels of one compile key."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        self.config: DkdvDqConfig = spec.config
        self.preprocess = PreprocessKernel(spec)
        self.dkdv_dq = DkdvDqKernel(spec)
        self.convert = ConvertKernel(spec)
        if spec.sums_dbias:
            self.dbias = DbiasKernel(spec)

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernels."""
        start_all(self.launches(buffers, scalars, self.order(scalars)), stream)

    def launches(self, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> list[Launch]:
        """Returns what is launched, in order."""
        query_tiles = self.preprocess.schedule.blocks(scalars.query_length, scalars.batch, scalars.num_heads)
        launches = [
            self.preprocess.launch(buffers, scalars, query_tiles),
            self.dkdv_dq.launch(buffers, scalars, order),
            self.convert.launch(buffers, scalars, query_tiles),
        ]
        return [*launches, self.dbias.launch(buffers, scalars)] if self.spec.sums_dbias else launches

    def order(self, scalars: Scalars) -> HeadOrder:
        """Returns the order in which CTAs take key tiles."""
        spec, key_tiles = self.spec, copies.count(scalars.key_length, self.config.keys)
        most_rows = plan.section_rows(ORDERED_NBYTES, spec.head_dim, spec.v_head_dim)
        running = scalars.multiprocessors * self.config.blocks
        one_sided, rows = spec.bounds_kind.one_sided_window, scalars.query_length
        return HeadOrder(copies.key_section(spec, scalars, key_tiles, running, most_rows, rows, one_sided=one_sided))
