# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Backward attention with mma.sync and cp.async: preprocess, one kernel for dk, dv and sums of dq, conversion to dq."""

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.device import tiles
from jax_fastattn.kernels.sm80 import launch
from jax_fastattn.kernels.sm80.backward_config import ORDERED_NBYTES, DkdvDqConfig, dkdv_dq_config
from jax_fastattn.kernels.sm80.convert import ConvertKernel
from jax_fastattn.kernels.sm80.dkdv_dq import DkdvDqKernel
from jax_fastattn.kernels.sm80.preprocess import PreprocessKernel
from jax_fastattn.kernels.spec import KernelSpec


class BackwardKernel:
    """The backward kernels of one compile key.

    Args:
        spec: what is compiled in.
        config: the tiling; by default that of the table in `backward_config.py`.
    """

    def __init__(self, spec: KernelSpec, config: DkdvDqConfig | None = None):
        self.spec = spec
        self.config = config or dkdv_dq_config(spec)
        self.preprocess = PreprocessKernel(spec, self.config)
        self.dkdv_dq = DkdvDqKernel(spec, self.config)
        self.convert = ConvertKernel(spec, self.config)

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
        dq_accum: cute.Pointer,
        dq_semaphore: cute.Pointer | None,
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
        """Launches the three kernels.

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
            stats: float32 `[B, N, T, 2]`, written for every row: log2(e) * lse, less the binary logarithm of a factor
                on P, and delta = rowsum(out * dout) - dlse; inf and 0 for rows that see no key.
            dq_accum: float32, see `backward_scratch`, as the next one.
            dq_semaphore: int32; None unless CTAs add in semaphore order.
            batch: B; it and the lengths are positive.
            query_length: T.
            key_length: S.
            num_heads: N.
            window_left: keys to the left of its own position that a query sees; read if the spec has the bound.
            window_right: the same to the right.
            sinks_stride: not read; every kernel takes the same scalars.
            multiprocessors: of the GPU.
            scale: factor on q . k, of any sign.
            logits_soft_cap: the cap; read if the spec has one.
            stream: CUDA stream.
        """
        config = self.config
        buffers = launch.Buffers(
            query,
            key,
            value,
            query_seq_lengths,
            key_value_seq_lengths,
            query_offset,
            out,
            lse,
            dout,
            dlse,
            dq,
            dk,
            dv,
            stats,
            dq_accum,
            dq_semaphore,
        )
        kv_heads = num_heads // self.spec.group
        query_tiles = launch.tile_count(query_length, config.queries)
        key_tiles = launch.tile_count(key_length, config.keys)
        head_group = self._head_group(query_length, key_tiles, batch * kv_heads, multiprocessors)
        sizes = (batch, query_length, key_length, num_heads, window_left, window_right)
        scalars = launch.Scalars(*sizes, scale, logits_soft_cap, head_group)
        self.preprocess.kernel(buffers, scalars).launch(
            grid=(query_tiles * batch * num_heads, 1, 1), block=(self.preprocess.threads, 1, 1), stream=stream
        )
        self.dkdv_dq.kernel(buffers, scalars).launch(
            grid=(key_tiles * batch * kv_heads, 1, 1),
            block=(config.threads, 1, 1),
            smem=self.dkdv_dq.shared_nbytes,
            stream=stream,
            min_blocks_per_mp=config.blocks,
            preferred_smem_carveout=100,
        )
        self.convert.kernel(buffers, scalars).launch(
            grid=(query_tiles * batch * num_heads, 1, 1),
            block=(self.convert.threads, 1, 1),
            smem=self.convert.shared_nbytes,
            stream=stream,
        )

    def _head_group(self, query_length: Int32, key_tiles: Int32, heads: Int32, multiprocessors: Int32) -> Int32:
        """Returns how many key/value heads are visited together: first all first key tiles, then all second ones."""
        spec = self.spec
        if spec.ordered:
            row_nbytes = 2 * (spec.head_dim + spec.v_head_dim) + 4 * spec.head_dim
            rows = query_length * spec.group
            return Int32(tiles.alike_section(ORDERED_NBYTES // row_nbytes, rows, heads))
        return Int32(tiles.section(multiprocessors * self.config.blocks, key_tiles, heads, int(spec.uneven)))
