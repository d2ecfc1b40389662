# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The products of a consumer warpgroup of the kernel of tangents; `kernel.py` has their formulas.

W and P go from accumulators to left factors inside registers. Each product is a group of instructions of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int32, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import LeftFactor, WarpgroupWords
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sm90.tangent.shared import TangentShared


class LoadedQuery(NamedTuple):
    """Holds the fragments of Q in registers, and how many are loaded."""

    fragments: cute.Tensor
    loaded: int


@dataclass(frozen=True, eq=False)
class TangentProducts:
    """Emits the products of one warpgroup.

    Attributes:
        words: convert W and P to the dtype of products.
        score_mma: S and its tangent, both factors from shared memory.
        fragment_mma: the same with the left factor in registers.
        queries: descriptors of this warpgroup's Q, and of its tangent.
        shared_query: Q and its tangents in shared memory.
        key: descriptors of the ring as tiles of K.
        value: descriptors of the ring as right factor of O'.
        scores: accumulator `[64, keys]` of S, then P.
        moves: accumulator `[64, keys]` of the tangent of S, then W.
        weights: P as left factor of O'.
        moved: W as left factor of O'.
        out: accumulator `[64, columns of V]` of O'.
    """

    words: WarpgroupWords
    score_mma: cute.TiledMma
    fragment_mma: cute.TiledMma
    queries: list[cute.Tensor]
    shared_query: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    scores: Accumulator
    moves: Accumulator
    weights: LeftFactor
    moved: LeftFactor
    out: Accumulator

    @classmethod
    def start(cls, words: WarpgroupWords, shared: TangentShared, group: Int32) -> "TangentProducts":
        """Returns the products of a warpgroup with their registers."""
        dtype: Any = shared.query.element_type
        memory, keys = shared.memory, shared.memory.config.keys
        score_mma = wgmma.product(dtype, keys, a_in_registers=False, b_transposed=False)
        out_mma = wgmma.product(dtype, memory.v_head_dim, a_in_registers=True, b_transposed=True)
        query, scores = wgmma.operand_a(score_mma, shared.query), (WARPGROUP_ROWS, keys)
        return cls(
            words=words,
            score_mma=score_mma,
            fragment_mma=wgmma.product(dtype, keys, a_in_registers=True, b_transposed=False),
            shared_query=shared.query,
            queries=[query[None, None, None, 2 * which + group] for which in range(2)],
            key=wgmma.operand_b(score_mma, shared.key),
            value=wgmma.operand_b(out_mma, wgmma.transposed(shared.value)),
            scores=wgmma.accumulator(score_mma, scores),
            moves=wgmma.accumulator(score_mma, scores),
            weights=words.left_factor(out_mma, scores),
            moved=words.left_factor(out_mma, scores),
            out=wgmma.accumulator(out_mma, (WARPGROUP_ROWS, memory.v_head_dim)),
        )

    def load_query(self, count: int, group: Int32, thread: Int32) -> LoadedQuery:
        """Loads the first fragments of Q, once Q is there; `thread` is the index of this thread in the warpgroup."""
        return LoadedQuery(wgmma.load_a(self.fragment_mma, self.shared_query, group, count, thread), count)

    def start_scores(self, query: LoadedQuery, stage: Int32) -> None:
        """Starts S = Q K^T."""
        wgmma.gemm_steps(self.scores, self._steps(query, stage), accumulate=False)

    def start_moves_of_query(self, stage: Int32) -> None:
        """Starts the tangent of S, or its first part, as Q' K^T."""
        right = self.key[None, None, None, stage]
        wgmma.gemm(self.score_mma, self.moves, self.queries[1], right, accumulate=False)

    def start_moves_of_key(self, query: LoadedQuery, stage: Int32, *, accumulate: bool) -> None:
        """Starts the tangent of S, or its second part, as Q K'^T."""
        wgmma.gemm_steps(self.moves, self._steps(query, stage), accumulate=accumulate)

    def _steps(self, query: LoadedQuery, stage: Int32) -> Iterator[wgmma.Step]:
        """Returns the steps of a product with Q."""
        for k in range(cute.size(self.queries[0], mode=[2])):
            right = self.key[None, None, k, stage]
            if k < query.loaded:
                yield self.fragment_mma, query.fragments[None, None, k], right
            else:
                yield self.score_mma, self.queries[0][None, None, k], right

    def start_out(self, factor: LeftFactor, acc: Accumulator, stage: Int32) -> None:
        """Starts O' += W V, or P V', given W or P in its accumulator."""
        for i in range(cute.size(acc) // 2):
            factor.put(i, self.words.pair(acc[2 * i], acc[2 * i + 1]))
        factor.multiply(self.out, [self.value[None, None, None, stage]])
