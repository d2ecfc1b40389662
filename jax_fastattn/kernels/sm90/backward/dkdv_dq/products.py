# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The products of a consumer warpgroup of `kernel.py`, and what happens to their results in registers.

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

P^T and dS^T go from accumulator to A operand inside registers. Scores and dP pass through the same registers, to leave
enough.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.kept import keep_marked, keep_number, keep_pair, mark, unmark
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import (
    LeftFactor,
    WarpgroupWords,
    Words,
    crossing_words,
    pairs,
    warpgroup_words,
)
from jax_fastattn.kernels.features.places import Element, ScoreTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Edge, Keep, Score
from jax_fastattn.kernels.sm90.backward.shared import STEP, BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sums.sums import DscorePair, HeadSums
from jax_fastattn.kernels.weights import Weights


@dataclass(frozen=True, eq=False)
class DkdvDqProducts:
    """Emits the products of one warpgroup.

    Attributes:
        words: what P^T and dS^T become.
        weight_words: what weights become, the factors of dP - delta in dS, and slopes.
        score_mma: S^T and dP^T, both factors from shared memory.
        stats_mma: the step that adds statistics.
        key: descriptors of this warpgroup's K.
        value: descriptors of this warpgroup's V.
        query: descriptors of the ring of Q.
        dout: descriptors of the ring of dO.
        query_t: descriptors of the ring of Q as right factor of dK.
        dout_t: descriptors of the ring of dO as right factor of dV.
        stats: descriptors of the ring of statistics.
        ones: left factor of the step that adds statistics.
        scores: accumulator `[64, queries]` of S^T, then of dP^T.
        p_factor: P^T as left factor of dV.
        ds_factor: dS^T as left factor of dK.
        dk: accumulator `[64, columns of K]`.
        dv: accumulator `[64, columns of V]`.
    """

    words: WarpgroupWords
    weight_words: Words
    score_mma: cute.TiledMma
    stats_mma: cute.TiledMma
    key: cute.Tensor
    value: cute.Tensor
    query: cute.Tensor
    dout: cute.Tensor
    query_t: cute.Tensor
    dout_t: cute.Tensor
    stats: cute.Tensor
    ones: Any
    scores: Accumulator
    p_factor: LeftFactor
    ds_factor: LeftFactor
    dk: Accumulator
    dv: Accumulator

    @classmethod
    def start(cls, spec: KernelSpec, shared: BackwardShared, thread: Int32, group: Int32) -> "DkdvDqProducts":
        """Returns the products with their registers.

        Args:
            thread: index of this thread in the CTA.
            group: index of the warpgroup.
        """
        memory, config = shared.memory, shared.memory.config
        (key,), (value,), (query,), (dout,) = shared.key, shared.value, shared.query, shared.dout
        dtype = query.element_type
        score_mma = wgmma.product(dtype, config.queries, a_in_registers=False, b_transposed=False)
        dk_mma = wgmma.product(dtype, memory.head_dim, a_in_registers=True, b_transposed=True)
        dv_mma = wgmma.product(dtype, memory.v_head_dim, a_in_registers=True, b_transposed=True)
        stats_mma = wgmma.product(
            cutlass.BFloat16, config.queries, a_in_registers=not config.shared_ones, b_transposed=False
        )
        shape, words = (WARPGROUP_ROWS, config.queries), warpgroup_words(spec)
        return cls(
            words=words,
            weight_words=crossing_words(spec) if config.float16_weights else words,
            score_mma=score_mma,
            stats_mma=stats_mma,
            stats=wgmma.operand_b(stats_mma, shared.stats),
            key=wgmma.operand_a(score_mma, key)[None, None, None, group],
            value=wgmma.operand_a(score_mma, value)[None, None, None, group],
            query=wgmma.operand_b(score_mma, query),
            dout=wgmma.operand_b(score_mma, dout),
            query_t=wgmma.operand_b(dk_mma, wgmma.transposed(query)),
            dout_t=wgmma.operand_b(dv_mma, wgmma.transposed(dout)),
            scores=wgmma.accumulator(score_mma, shape),
            p_factor=words.left_factor(dv_mma, shape),
            ds_factor=words.left_factor(dk_mma, shape),
            dk=wgmma.accumulator(dk_mma, (WARPGROUP_ROWS, memory.head_dim)),
            dv=wgmma.accumulator(dv_mma, (WARPGROUP_ROWS, memory.v_head_dim)),
            ones=_ones(stats_mma, shared.ones, thread),
        )

    def clear(self) -> None:
        """Zeroes dK and dV."""
        self.dk.fill(0.0)
        self.dv.fill(0.0)

    # The methods below compute the products of a tile of queries, in order.

    def compute_scores(self, score: Score, stage: Int32, tile: ScoreTile) -> tuple[Score, list[Int32], Keep | None]:
        """Computes logits less log-sum-exps; returns pairs of their slopes, empty where slopes are 1.

        Logits are over `score.factor` where they are products times a factor, maybe plus a bias, which is not yet
        added: their log-sum-exps are then part of the product. Else they are in base 2, and the product with the
        log-sum-exps is one of its own. It always comes last: q . k is then rounded as in the forward pass, and its
        difference to a log-sum-exp close to it is exact.

        Returns:
            the composition for the rest of the pass, the slopes, and which weights dropout keeps; None for all.
        """
        query = self.query[None, None, None, stage]
        steps, minus, slopes = wgmma.steps_of(self.score_mma, self.key, query), self._minus(stage, 0), []
        if score.folds_lse:
            wgmma.gemm_steps(self.scores, [*steps, minus], accumulate=False)
            keep = self._draw(score, tile)
            # What a bias loads comes while the product runs, and so does dropout.
            score = score.preload(tile)
        else:
            wgmma.gemm_steps(self.scores, steps, accumulate=False)
            warpgroup.wait_group(0)
            slopes = self._change_logits(score, tile)
            wgmma.gemm_steps(self.scores, [minus], accumulate=True)
            # Masks next to slopes would spill.
            keep = score.keep(tile)
        warpgroup.wait_group(0)
        return score, slopes, keep

    def _draw(self, score: Score, tile: ScoreTile) -> Keep | None:
        """Draws which weights dropout keeps, and returns them; None for all."""
        keep = score.keep(tile)
        if keep is None:
            return None
        return [ptx.move(keep(i)) for i in range(cute.size(self.scores) // 2)].__getitem__

    def probabilities(
        self, score: Score, slopes: list[Int32], keep: Keep | None, tile: ScoreTile, edge: Edge | None
    ) -> tuple[list[Int32], list[Int32]]:
        """Turns S into P, the left factor of dV.

        Returns:
            pairs of weights, see `score.py`, and pairs whose signs say which of them dropout drops. These are the
            weights, or P if weights have signs of their own.
        """
        probabilities, weights = Weights(score, tile, self.scores).weighed_pairs(
            self.words, self.weight_words, lambda i, at: self._weighed(score, i, slopes, at, edge)
        )
        if keep is not None:
            masks = [keep(i) for i in range(len(probabilities))]
            kept = [(keep_pair if score.marks else keep_marked)(*x) for x in zip(probabilities, masks, strict=True)]
            for i, pair in enumerate(kept):
                self.p_factor.put(i, pair)
            if not score.marks:
                return weights, kept
            marked = [mark(*x) for x in zip(weights if slopes else probabilities, masks, strict=True)]
            return marked, marked
        for i, pair in enumerate(probabilities):
            self.p_factor.put(i, pair)
        # Weights are P itself where slopes are 1 and words are the same; a product in flight reads its registers.
        return weights if slopes or self.weight_words != self.words else self.p_factor.copied(), []

    def _weighed(
        self, score: Score, i: int, slopes: list[Int32], at: Element, edge: Edge | None
    ) -> tuple[Float32, Float32]:
        """Returns P and weight of an element of S."""
        logit = self.scores[i]
        if score.folds_lse:
            logit = logit * score.factor if score.is_affine else score.logit(logit, at).value
        weight = probability = ptx.exp2(logit)
        if slopes:
            weight = score.sloped(probability, probability, self.weight_words.numbers(slopes[i // 2])[i % 2])
        return (probability, weight) if edge is None else edge.weigh(probability, weight, at)

    def start_dp(self, stage: Int32) -> None:
        """Starts dP - delta, in the registers of the scores."""
        steps = wgmma.steps_of(self.score_mma, self.value, self.dout[None, None, None, stage])
        wgmma.gemm_steps(self.scores, [self._minus(stage, 1), *steps], accumulate=False)

    def start_dropped_dp(self, stage: Int32, marked: list[Int32]) -> None:
        """Computes dP, and starts to subtract delta from what is kept of it; see `probabilities` for marked pairs."""
        steps = wgmma.steps_of(self.score_mma, self.value, self.dout[None, None, None, stage])
        wgmma.gemm_steps(self.scores, steps, accumulate=False)
        warpgroup.wait_group(0)
        for i, pair in enumerate(marked):
            for e, mask in enumerate(unmark(pair)[1]):
                self.scores[2 * i + e] = keep_number(self.scores[2 * i + e], mask)
        wgmma.gemm_steps(self.scores, [self._minus(stage, 1)], accumulate=True)

    def add_dv(self, stage: Int32) -> None:
        """Starts dV += P^T dO."""
        self.p_factor.multiply(self.dv, [self.dout_t[None, None, None, stage]])

    def dscores(self, weights: list[Int32], sums: tuple[HeadSums, ...], *, marked: bool) -> list[Int32]:
        """Turns dP - delta into dS, the left factor of dK, which it adds to sums; returns its pairs.

        Weights are pairs, too, so that half as many registers wait. If they are marked, their signs do not count.
        """
        for i, pair in enumerate(weights):
            factors = self.weight_words.numbers(unmark(pair)[0] if marked else pair)
            values = [factors[e] * self.scores[2 * i + e] for e in range(2)]
            for kind in sums:
                kind.add(DscorePair(i, values))
            self.ds_factor.put(i, self.words.pair(*values))
        return self.ds_factor.copied()

    def add_dk(self, stage: Int32) -> None:
        """Starts dK += dS^T Q."""
        self.ds_factor.multiply(self.dk, [self.query_t[None, None, None, stage]])

    # The methods below are parts of these products.

    def _minus(self, stage: Int32, which: int) -> wgmma.Step:
        """Returns a step of a product that adds minus the log-sum-exps (0) or delta (1) of its queries."""
        return self.stats_mma, self.ones, self.stats[None, None, 0, 2 * stage + which]

    def _change_logits(self, score: Score, tile: ScoreTile) -> list[Int32]:
        """Turns S into logits in base 2; returns pairs of slopes, none where they are 1."""
        slopes, reading = [], score.read(tile)
        for i in range(cute.size(self.scores)):
            logit = reading.logit(self.scores[i], tile.at(i))
            self.scores[i] = logit.value if logit.factor is None else logit.value * logit.factor
            if logit.slopes:
                slopes.append(logit.slope())
        return pairs(self.weight_words, slopes)


def _ones(stats_mma: cute.TiledMma, shared_ones: cute.Tensor | None, thread: Int32) -> Any:
    """Returns the left factor that adds statistics: [1, 1, 1, 0, ...] in all rows, see `gradient.split_bf16x3`."""
    if shared_ones is not None:
        return wgmma.operand_a(stats_mma, shared_ones)[None, None, 0, 0]
    return wgmma.ones(stats_mma, (WARPGROUP_ROWS, STEP), thread)
