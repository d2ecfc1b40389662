# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Backward attention with mma.sync and cp.async: a query-stationary dq kernel, then a key-stationary dkdv kernel.

Both recompute the probabilities from the log-sum-exp: seven products instead of a fused kernel's five, but no atomics,
no float32 buffer and no order that a scheduler could change, so that results are bitwise reproducible.
"""

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.sm80.config import SplitConfig, split_config
from jax_fastattn.kernels.sm80.dkdv import DkdvKernel
from jax_fastattn.kernels.sm80.dq import DqKernel
from jax_fastattn.kernels.spec import KernelSpec


class SplitBackwardKernel:
    """The backward kernels of one compile key.

    Args:
        spec: what is compiled in.
        config: the tilings; by default those of the table in `config.py`.
    """

    def __init__(self, spec: KernelSpec, config: SplitConfig | None = None):
        self.spec = spec
        self.config = config or split_config(spec)
        self.dq = DqKernel(spec, self.config.dq)
        self.dkdv = DkdvKernel(spec, self.config.dkdv)

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
        """Launches both kernels.

        Args:
            query: `[B, T, N, H]`; it and every other 16-bit array are contiguous, aligned to 16 bytes, of the spec's
                dtype.
            key: `[B, S, K, H]`, K = N // group.
            value: `[B, S, K, D]`.
            query_seq_lengths: int32 `[B]`; None, like the next two, when the spec lacks the operand.
            key_value_seq_lengths: int32 `[B]`.
            query_offset: int32 `[B]`.
            out: `[B, T, N, D]`, the forward result.
            lse: float32 `[B, T, N]`, natural log, as the forward kernel wrote it (sinks included).
            dout: `[B, T, N, D]`, cotangent of out.
            dlse: float32 `[B, T, N]`, cotangent of lse; None when the spec lacks it.
            dq: `[B, T, N, H]`; every element of it, of dk and of dv is written.
            dk: `[B, S, K, H]`.
            dv: `[B, S, K, D]`.
            stats: float32 `[B, N, T, 2]`, written for every row: log2(e) * lse and delta = rowsum(out * dout) - dlse;
                inf and 0 for rows that see no key.
            batch: B; it and the lengths are positive.
            query_length: T.
            key_length: S.
            num_heads: N.
            window_left: keys to the left of its own position that a query sees; read if the spec has the bound.
            window_right: the same to the right.
            sinks_stride: not read, nor the next; every kernel takes the same scalars.
            multiprocessors: of the GPU.
            scale: factor on q . k, of any sign.
            logits_soft_cap: the cap; read if the spec has one.
            stream: CUDA stream.
        """
        scalars = (batch, query_length, key_length, num_heads, window_left, window_right, scale, logits_soft_cap)
        operands = (query, key, value, query_seq_lengths, key_value_seq_lengths, query_offset)
        kv_heads = num_heads // self.spec.group
        query_tiles = (query_length + (self.config.dq.rows - 1)) // self.config.dq.rows
        key_tiles = (key_length + (self.config.dkdv.keys - 1)) // self.config.dkdv.keys
        self.dq.kernel(*operands, out, lse, dout, dlse, dq, stats, *scalars).launch(
            grid=(query_tiles * batch * num_heads, 1, 1),
            block=(self.config.dq.threads, 1, 1),
            smem=self.dq.shared_nbytes,
            stream=stream,
            min_blocks_per_mp=self.config.dq.blocks,
            preferred_smem_carveout=100,
        )
        self.dkdv.kernel(*operands, dout, stats, dk, dv, *scalars).launch(
            grid=(key_tiles * batch * kv_heads, 1, 1),
            block=(self.config.dkdv.threads, 1, 1),
            smem=self.dkdv.shared_nbytes,
            stream=stream,
            min_blocks_per_mp=self.config.dkdv.blocks,
            preferred_smem_carveout=100,
        )
