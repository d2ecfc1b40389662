# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The products of a consumer warpgroup of the dq kernel.

    S = Q K^T    dP = dO V^T    dQ += dS K

dS goes from accumulator to A operand inside registers, and K is read twice from one stage.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import LeftFactor, WarpgroupWords
from jax_fastattn.kernels.sm90.backward.dq.shared import DqShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


@dataclass(frozen=True, eq=False)
class DqProducts:
    """Emits the products of one warpgroup.

    Attributes:
        words: what dS becomes.
        score_mma: S and dP, both factors from shared memory.
        query: descriptors of this warpgroup's Q.
        dout: descriptors of this warpgroup's dO.
        key: descriptors of the ring as tiles of K.
        value: descriptors of the ring as tiles of V.
        key_t: descriptors of the ring as right factor of dQ.
        score: accumulator `[64, keys]` of S, then P times the slope of a soft cap if there is one.
        dscore: accumulator `[64, keys]` of dP.
        factor: dS as left factor of dQ.
        dq: accumulator `[64, columns of Q]`.
    """

    words: WarpgroupWords
    score_mma: cute.TiledMma
    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    key_t: cute.Tensor
    score: Accumulator
    dscore: Accumulator
    factor: LeftFactor
    dq: Accumulator

    @classmethod
    def start(cls, words: WarpgroupWords, shared: DqShared, group: Int32) -> "DqProducts":
        """Returns the products of a warpgroup with their registers."""
        dtype: Any = shared.query.element_type
        memory, config = shared.memory, shared.memory.config
        score_mma = wgmma.product(dtype, config.keys, a_in_registers=False, b_transposed=False)
        dq_mma = wgmma.product(dtype, memory.head_dim, a_in_registers=True, b_transposed=True)
        scores = (WARPGROUP_ROWS, config.keys)
        return cls(
            words=words,
            score_mma=score_mma,
            query=wgmma.operand_a(score_mma, shared.query)[None, None, None, group],
            dout=wgmma.operand_a(score_mma, shared.dout)[None, None, None, group],
            key=wgmma.operand_b(score_mma, shared.key),
            value=wgmma.operand_b(score_mma, shared.value),
            key_t=wgmma.operand_b(dq_mma, wgmma.transposed(shared.key)),
            score=wgmma.accumulator(score_mma, scores),
            dscore=wgmma.accumulator(score_mma, scores),
            factor=words.left_factor(dq_mma, scores),
            dq=wgmma.accumulator(dq_mma, (WARPGROUP_ROWS, memory.head_dim)),
        )

    def start_scores(self, stage: Int32) -> None:
        """Starts S = Q K^T."""
        wgmma.gemm(self.score_mma, self.score, self.query, self.key[None, None, None, stage], accumulate=False)

    def start_dp(self, stage: Int32) -> None:
        """Starts dP = dO V^T."""
        wgmma.gemm(self.score_mma, self.dscore, self.dout, self.value[None, None, None, stage], accumulate=False)

    def start_dq(self, stage: Int32) -> None:
        """Starts dQ += dS K."""
        self.factor.multiply(self.dq, self.key_t[None, None, None, stage])
