# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Backward attention with TMA and WGMMA, behind a pass over memory for the statistics of the rows.

Where `spec.fused` holds one key-stationary kernel computes dk, dv and dq. The five products run once: dq is added up in
float32 by all CTAs, in no fixed order, so that its last bits differ from run to run, and rounded by a last pass. Else
dq has a query-stationary kernel: seven products, no sums in memory, the same bits in every run.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.sm90.backward_config import BackwardConfig, DqConfig, backward_config
from jax_fastattn.kernels.sm90.dq import DqKernel
from jax_fastattn.kernels.sm90.dq_sum import THREADS, RoundKernel, StatisticsKernel
from jax_fastattn.kernels.sm90.fused import FusedKernel
from jax_fastattn.kernels.sm90.wide import WideKernel
from jax_fastattn.kernels.spec import FUSED_HEAD_DIM, KernelSpec


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
        self.statistics = StatisticsKernel(spec, FUSED_HEAD_DIM if spec.fused else None)
        if spec.fused:
            self.round = RoundKernel(spec, FUSED_HEAD_DIM)
        else:
            self.dq = DqKernel(spec, dq)

    @cute.jit
    def __call__(
        self,
        query: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        query_seq_lengths: cute.Pointer | None,
        key_value_seq_lengths: cute.Pointer | None,
        query_offset: cute.Pointer | None,
        out: cute.Pointer,
        lse: cute.Pointer,
        dout: cute.Pointer,
        dlse: cute.Pointer | None,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        stats: cute.Pointer,
        dq_sum: cute.Pointer | None,
        batch: Int32,
        query_length: Int32,
        key_length: Int32,
        num_heads: Int32,
        window_left: Int32,
        window_right: Int32,
        sinks_stride: Int32,
        multiprocessors: Int32,
        scale: Float32,
        logits_soft_cap: Float32,
        stream: cuda.CUstream,
    ):
        """Launches the kernels.

        Args:
            query: `[B, T, N, H]`; the arguments are those of the portable `BackwardKernel`, but for two scratch arrays:
            key: `[B, S, K, H]`.
            value: `[B, S, K, D]`.
            query_seq_lengths: int32 `[B]` or None.
            key_value_seq_lengths: int32 `[B]` or None.
            query_offset: int32 `[B]` or None.
            out: `[B, T, N, D]`.
            lse: float32 `[B, T, N]`.
            dout: `[B, T, N, D]`.
            dlse: float32 `[B, T, N]` or None.
            dq: `[B, T, N, H]`.
            dk: `[B, S, K, H]`.
            dv: `[B, S, K, D]`.
            stats: float32 `[B, N, 2, padded_rows(T)]`, see `gradient.py`.
            dq_sum: float32 `[B, N, padded_rows(T), columns]`, its rows in the order of `gradient.dq_sum_offset`;
                None unless `spec.fused`.
            batch: B.
            query_length: T.
            key_length: S.
            num_heads: N.
            window_left: keys to the left of its own position that a query sees.
            window_right: the same to the right.
            sinks_stride: not read.
            multiprocessors: of the GPU.
            scale: factor on q . k.
            logits_soft_cap: the cap.
            stream: CUDA stream.
        """
        sizes = (batch, query_length, num_heads)
        self.statistics.kernel(query_seq_lengths, out, lse, dout, dlse, stats, dq_sum, *sizes).launch(
            grid=(self.statistics.blocks(*sizes), 1, 1), block=(THREADS, 1, 1), stream=stream
        )
        operands = (query, key, value, query_seq_lengths, key_value_seq_lengths, query_offset, dout, stats)
        scalars = (batch, query_length, key_length, num_heads, window_left, window_right, multiprocessors)
        if cutlass.const_expr(not self.spec.fused):
            self.dq.launch(*operands, dq, *scalars, scale, logits_soft_cap, stream)
        self.main.launch(*operands, dk, dv, dq_sum, *scalars, scale, logits_soft_cap, stream)
        if cutlass.const_expr(self.spec.fused):
            self.round.kernel(query_seq_lengths, dq_sum, dq, *sizes, scale).launch(
                grid=(self.round.blocks(*sizes), 1, 1), block=(THREADS, 1, 1), stream=stream
            )
