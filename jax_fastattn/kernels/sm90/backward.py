# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Backward attention with TMA and WGMMA, behind a pass over memory for the statistics of the rows.

Where `spec.fused` holds one key-stationary kernel computes dk, dv and dq. The five products run once. All CTAs add to
float32 sums of dq, and the last CTA to add rounds them. With `spec.ordered` they add in one order; without it in any,
so that the last bits differ from run to run. Over head dim 128 dq has a query-stationary kernel: seven products, no
sums in memory, the same bits in every run.

Each kernel lets the next one begin before it ends (programmatic dependent launch), as soon as what that one cannot wait
for by itself is written: CTAs of the next one take the SMs that have nothing left to do. The last kernel ends after the
one before it, so that whoever comes next waits for both.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from jax_fastattn.kernels.arguments import BackwardBuffers, Scalars
from jax_fastattn.kernels.sm90.backward_config import BackwardConfig, DqConfig, backward_config
from jax_fastattn.kernels.sm90.dq import DqKernel
from jax_fastattn.kernels.sm90.fused import FusedKernel
from jax_fastattn.kernels.sm90.statistics import LATER_THREADS, THREADS, StatisticsKernel
from jax_fastattn.kernels.sm90.wide import WideKernel
from jax_fastattn.kernels.spec import KernelSpec


class BackwardKernel:
    """The backward kernels of one compile key.

    Args:
        spec: what is compiled in.
        config: the variant of the key-stationary kernel; by default the one of the table in `backward_config.py`.
        dq: that of the dq kernel.
    """

    def __init__(self, spec: KernelSpec, config: BackwardConfig | None = None, dq: DqConfig | None = None):
        self.spec = spec
        config = config or backward_config(spec)
        self.main = (WideKernel if config.wide else FusedKernel)(spec, config)
        self.statistics = StatisticsKernel(spec, config)
        if not spec.fused:
            self.dq = DqKernel(spec, dq)

    @cute.jit
    def __call__(self, buffers: BackwardBuffers, given: Scalars, stream: cuda.CUstream):
        """Launches the kernels."""
        query, key, value, query_seq_lengths, key_value_seq_lengths, query_offset, out, lse, dout, dlse = buffers[:10]
        dq, dk, dv, stats, dq_sum, arrivals = buffers[10:]
        batch, query_length, key_length, num_heads = given[:4]
        window_left, window_right, _, multiprocessors, scale, logits_soft_cap = given[4:]
        fused = cutlass.const_expr(self.spec.fused)
        operands = (query_seq_lengths, key_value_seq_lengths, query_offset)
        scalars = (batch, query_length, key_length, num_heads, window_left, window_right)
        kv_heads = batch * (num_heads // self.spec.group)
        section, ahead = self.main.key_tiles.sections(query_length, key_length, kv_heads, multiprocessors)
        prepared = self.statistics.prepared(key_length, window_left, window_right, ahead, kv_heads)
        residuals = (out, lse, dout, dlse, dq if fused else None, stats)
        # Asked for one CTA on an SM, ptxas gives all loads of a lane registers of their own.
        self.statistics.kernel(
            *operands,
            *residuals,
            None if cutlass.const_expr(self.spec.ordered) else dq_sum,
            arrivals,
            *scalars,
            ahead,
            prepared,
            scale,
        ).launch(
            grid=(self.statistics.blocks(batch, query_length, num_heads, prepared), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(self.statistics.leaves):
            self.statistics.later(*operands, *residuals, arrivals, *scalars, prepared, scale).launch(
                grid=(self.statistics.later_blocks(kv_heads, prepared), 1, 1),
                block=(LATER_THREADS, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
                use_pdl=True,
            )
        products = (query, key, value, *operands, dout, stats)
        rest = (scale, logits_soft_cap, stream)
        if cutlass.const_expr(not self.spec.fused):
            self.dq.launch(buffers, given, self.dq.order(given)).start(stream)
        order = (section, ahead, multiprocessors)
        sums = (dq if fused else None, dq_sum, arrivals)
        self.main.launch(*products, dk, dv, *sums, *scalars, *order, *rest)
