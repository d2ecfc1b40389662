# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The products of a consumer warpgroup of the dq kernel.

    S = Q K^T    dP = dO V^T    dQ += dS K

dS goes from accumulator to A operand inside registers, and K is read twice from one stage.

Tensor cores truncate their sums. Of products of float32 that would be most of the error of dQ over many keys, so
threads add the product of each tile of keys to dQ, and round.
"""

from dataclasses import dataclass, replace
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
        q_in_regs: how many fragments of the first term of Q stay in registers.
        score_mma: S and dP, both factors from shared memory.
        fragment_mma: S with Q from registers.
        query: descriptors of this warpgroup's Q, of each term.
        query_fragments: fragments of its first term that stay in registers; None before they are there.
        dout: descriptors of this warpgroup's dO, of each term.
        key: descriptors of the ring as tiles of K, of each term.
        value: descriptors of the ring as tiles of V, of each term.
        key_t: descriptors of the ring as right factor of dQ, of each term.
        score: accumulator `[64, keys]` of S, then P times the slope of a soft cap if there is one.
        dscore: accumulator `[64, keys]` of dP.
        factor: dS as left factor of dQ.
        dq: accumulator `[64, columns of Q]`.
        tile_dq: accumulator like `dq` for one tile of keys; None if tensor cores add to dQ.
    """

    words: WarpgroupWords
    q_in_regs: int
    score_mma: cute.TiledMma
    fragment_mma: cute.TiledMma
    query: list[cute.Tensor]
    query_fragments: cute.Tensor | None
    dout: list[cute.Tensor]
    key: list[cute.Tensor]
    value: list[cute.Tensor]
    key_t: list[cute.Tensor]
    score: Accumulator
    dscore: Accumulator
    factor: LeftFactor
    dq: Accumulator
    tile_dq: Accumulator | None

    @classmethod
    def start(cls, words: WarpgroupWords, shared: DqShared, group: Int32) -> "DqProducts":
        """Returns the products of a warpgroup with their registers."""
        dtype: Any = shared.query[0].element_type
        memory, config = shared.memory, shared.memory.config
        score_mma = wgmma.product(dtype, config.keys, a_in_registers=False, b_transposed=False)
        dq_mma = wgmma.product(dtype, memory.head_dim, a_in_registers=True, b_transposed=True)
        scores = (WARPGROUP_ROWS, config.keys)
        return cls(
            words=words,
            q_in_regs=config.q_in_regs,
            score_mma=score_mma,
            fragment_mma=wgmma.product(dtype, config.keys, a_in_registers=True, b_transposed=False),
            query=[wgmma.operand_a(score_mma, x)[None, None, None, group] for x in shared.query],
            query_fragments=None,
            dout=[wgmma.operand_a(score_mma, x)[None, None, None, group] for x in shared.dout],
            key=[wgmma.operand_b(score_mma, x) for x in shared.key],
            value=[wgmma.operand_b(score_mma, x) for x in shared.value],
            key_t=[wgmma.operand_b(dq_mma, wgmma.transposed(x)) for x in shared.key],
            score=wgmma.accumulator(score_mma, scores),
            dscore=wgmma.accumulator(score_mma, scores),
            factor=words.left_factor(dq_mma, scores),
            dq=wgmma.accumulator(dq_mma, (WARPGROUP_ROWS, memory.head_dim)),
            tile_dq=wgmma.accumulator(dq_mma, (WARPGROUP_ROWS, memory.head_dim)) if memory.terms > 1 else None,
        )

    def with_query(self, shared: DqShared, group: Int32, thread: Int32) -> "DqProducts":
        """Returns the products with the fragments of Q that stay in registers; Q has to be there."""
        if not self.q_in_regs:
            return self
        fragments = wgmma.load_a(self.fragment_mma, shared.query[0], group, self.q_in_regs, thread)
        return replace(self, query_fragments=fragments)

    def start_scores(self, stage: Int32) -> None:
        """Starts S = Q K^T."""
        self._start(self.score, self.query, self.key, stage, self.query_fragments)

    def start_dp(self, stage: Int32) -> None:
        """Starts dP = dO V^T."""
        self._start(self.dscore, self.dout, self.value, stage)

    def start_dq(self, stage: Int32) -> None:
        """Starts dQ += dS K."""
        key = [x[None, None, None, stage] for x in self.key_t]
        if self.tile_dq is None:
            self.factor.multiply(self.dq, key)
        else:
            self.factor.multiply(self.tile_dq, key, accumulate=False)

    def finish_dq(self) -> None:
        """Adds what tensor cores do not add to dQ, when the product is there."""
        if self.tile_dq is not None:
            for i in range(cute.size(self.dq)):
                self.dq[i] = self.dq[i] + self.tile_dq[i]

    def _start(
        self,
        acc: Accumulator,
        left: list[cute.Tensor],
        right: list[cute.Tensor],
        stage: Int32,
        fragments: cute.Tensor | None = None,
    ) -> None:
        """Starts a product of rows of queries with a stage of the ring, given `fragments` of the first term of rows."""
        keys: list[Any] = [x[None, None, None, stage] for x in right]

        def step(i: int, j: int, k: int) -> wgmma.Step:
            mma, rows = self.score_mma, left[i]
            if fragments is not None and i == 0 and k < self.q_in_regs:
                mma, rows = self.fragment_mma, fragments
            return mma, rows[None, None, k], keys[j][None, None, k]

        count = cute.size(left[0], mode=[2])
        wgmma.gemm_steps(acc, (step(i, j, k) for i, j in self.words.terms for k in range(count)), accumulate=False)
