# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The online softmax of the Hopper forward kernel, optimistic on full tiles.

Masked tiles take part in the running maximum. Full tiles assume that none of their weights outweighs what the row has
seen: they take no maximum, no shuffles and no rescaling. Where that turns out wrong, the warp raises the maximum and
rescales P. If P is infinite, it computes the scores of the tile again, by mma.sync. docs/kernels/sm90.md says why any
maximum gives the same result, and what the limits on the sums are for.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import ptx, softmax, warp_scores, wgmma
from jax_fastattn.kernels.device.mma import Accumulator, accumulator_row
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.forward.config import ForwardBarrier
from jax_fastattn.kernels.sm90.forward.products import ForwardProducts
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.state import Call, Lane
from jax_fastattn.kernels.sums.plane_means import row_moments
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.weights import Weights

# A lane's sum of unnormalized probabilities in a full tile has this upper limit. P has to fit its 16 bits, and O and
# the sums have to fit float32.
_SUM_LIMITS = {"bfloat16": 2.0**24, "float16": 2.0**14}

# It is also at most so many times what the lane has of the row so far, or 1: else one of the weights may be most of the
# row. Rounding a weight that is no power of two would then change the output as much as rounding the output does.
_GROWTH = 4.0

# P below it can be rescaled by a normal number.
_RESCALABLE = 2.0**64

# A row whose maximum is below it, in base 2, counts as blind. Rounding a larger one changes no weight by 2^-9.
_BLIND = -(2.0**15)


@dataclass(frozen=True)
class ScoreRows:
    """Says what becomes of the scores of a lane's two rows.

    Attributes:
        score: turns products into logits.
        first: the first of the rows; the other one is 8 rows below.
        seen: the limits of the keys that each of them sees, or the bits of an edge tile.
        check_low: whether the lower limit can lie inside of a tile.
    """

    score: Score
    first: Int32
    seen: list[plan.Limits] | Bits
    check_low: bool


@dataclass(frozen=True, eq=False)
class OnlineSoftmax:
    """Emits the softmax of one warpgroup's scores.

    Attributes:
        ring: the warpgroup's position in the ring.
        products: the warpgroup's products.
        maxima: running maxima of the lane's two rows, in units of scores.
        sums: the lane's running sums of its two rows, relative to the maxima.
        factors: factors by which raised maxima change the output, one for each row.
        moments: the lane's running sums of P times keys, like `sums`; None without means of rows.
    """

    call: Call
    shared: ForwardShared
    lane: Lane
    ring: wgmma.Ring
    products: ForwardProducts
    maxima: Accumulator
    sums: Accumulator
    factors: Accumulator
    moments: Any

    @classmethod
    def start(
        cls, call: Call, shared: ForwardShared, lane: Lane, ring: wgmma.Ring, products: ForwardProducts
    ) -> "OnlineSoftmax":
        """Returns the softmax with its registers."""
        maxima, sums, factors = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        moments = cute.make_rmem_tensor((2,), Float32) if call.spec.has_row_means else None
        return cls(call, shared, lane, ring, products, maxima, sums, factors, moments)

    def clear(self) -> None:
        """Forgets all keys, before the first key tile of a tile of queries."""
        self.maxima.fill(softmax.NEVER)
        self.sums.fill(0.0)
        if self.moments is not None:
            self.moments.fill(0.0)

    def first_tile(self, index: Int32, rows: ScoreRows, is_edge: Boolean | None) -> None:
        """Turns the scores of the first key tile into P, by the usual softmax. There is no output to rescale.

        Args:
            index: index of the key tile.
            rows: what becomes of the scores of the lane's two rows.
            is_edge: whether the tile needs a mask; None if it counts as masked in any case.
        """
        weights = self._weights(index, rows)
        self._hide(weights, rows, is_edge)
        self._raise_maxima(weights)
        self.products.round_probabilities(weights)

    def masked_tile(self, index: Int32, stage: Int32, rows: ScoreRows) -> None:
        """Turns the scores of a masked tile into P, with products in flight that it then awaits; rescales O.

        Args:
            index: index of the key tile.
            stage: the stage of K, which is released.
            rows: what becomes of the scores of the lane's two rows.
        """
        weights = self._weights(index, rows)
        self.ring.consumer_release(stage)
        self._hide(weights, rows)
        grown = self._raise_maxima(weights)
        warpgroup.wait_group(0)
        self.products.round_probabilities(weights)
        self.products.rescale_out(self.factors, grown)

    def listed_tile(self, index: Int32, stage: Int32, rows: ScoreRows) -> None:
        """Does what `full_tile` does where the warpgroup sees all of an edge tile, else what `masked_tile` does.

        A range is cut for each warpgroup, a list for the CTA. So a list gives the bits of the range that it spells.

        Args:
            index: index of the key tile.
            stage: the stage of K, which is released.
            rows: what becomes of the scores of the lane's two rows.
        """
        weights, grown = self._weights(index, rows), cute.make_rmem_tensor((1,), Int32)

        def full() -> None:
            sums, failed = self._attempt(weights)
            moments = self._moments(weights, sums)
            grown[0] = ptx.where(failed, Int32(1), Int32(0))
            repair = functools.partial(self._repair, stage, weights, sums, moments)
            cutlass.if_generate(failed, repair, lambda: self._commit(stage, sums, moments))

        def masked() -> None:
            self.ring.consumer_release(stage)
            self._hide(weights, rows)
            grown[0] = ptx.where(self._raise_maxima(weights), Int32(1), Int32(0))

        cutlass.if_generate(self._sees_all(rows.seen), full, masked)
        warpgroup.wait_group(0)
        self.products.round_probabilities(weights.anew())
        self.products.rescale_out(self.factors, Boolean(grown[0] != 0))

    def full_tile(self, index: Int32, stage: Int32, rows: ScoreRows) -> None:
        """Turns the scores of a tile without a mask into P, with products in flight that it then awaits; rescales O.

        Args:
            index: index of the key tile.
            stage: the stage of K, which is released.
            rows: what becomes of the scores of the lane's two rows.
        """
        weights = self._weights(index, rows)
        sums, failed = self._attempt(weights)
        moments = self._moments(weights, sums)
        late = self.call.config.pv_wait_after_exp

        def wait() -> None:
            # All warps of a warpgroup have to wait in the same place: not on the two sides of a warp's branch.
            warpgroup.wait_group(0)
            self.products.round_probabilities(weights)

        def repair() -> None:
            self._repair(stage, weights, sums, moments)
            if not late:
                self.products.round_probabilities(weights.anew())

        if not late:
            wait()
        cutlass.if_generate(failed, repair, lambda: self._commit(stage, sums, moments))
        if late:
            wait()
        self.products.rescale_out(self.factors, failed)

    # The methods below serve tiles that need no mask, while a feature may have hidden all that a row has seen.

    def is_blind(self) -> Boolean:
        """Returns whether a row of the warpgroup has seen no key yet, or none of weight; its warps meet for that.

        The first maximum of such a row would fail the assumption. From far negative logits a full tile subtracts
        rounded maxima, which would show with masks such as -1e9.
        """
        return self._any_lane(self._lane_is_blind())

    def blind_tile(self, index: Int32, stage: Int32, rows: ScoreRows) -> None:
        """Does what `full_tile` does, by the usual softmax.

        Args:
            index: index of the key tile.
            stage: the stage of K, which is released.
            rows: what becomes of the scores of the lane's two rows.
        """
        weights, grown = self._weights(index, rows), cute.make_rmem_tensor((1,), Int32)
        self.ring.consumer_release(stage)
        weights.full()
        found = softmax.row_maxima(self.products.scores, *self._blocks, keep_nan=True)
        grown[0] = Int32(0)

        def see() -> None:
            grown[0] = ptx.where(self._raise_to(weights, found), Int32(1), Int32(0))

        # If a mask is written as a bias, most of these tiles are hidden to all rows. Their logits of -inf become
        # probabilities of 0 when they are rounded. A NaN among them is seen: it reaches the sums.
        hidden = Boolean((found[0] == Float32(softmax.NEVER)) & (found[1] == Float32(softmax.NEVER)))
        cutlass.if_generate(cute.arch.vote_any_sync(Boolean(hidden == Boolean(False))), see)
        warpgroup.wait_group(0)
        self.products.round_probabilities(weights, floor=True)
        self.products.rescale_out(self.factors, Boolean(grown[0] != 0))

    def _lane_is_blind(self) -> Boolean:
        """Returns whether one of the lane's rows is blind, see `is_blind`."""
        unit, (first, second) = self.call.score.unit, (self.maxima[i] for i in range(2))
        return Boolean((first * unit < Float32(_BLIND)) | (second * unit < Float32(_BLIND)))

    def _any_lane(self, x: Boolean) -> Boolean:
        """Returns whether x is true in a lane of the warpgroup, whose warps meet for that."""
        return ptx.any_of(ForwardBarrier.WARPGROUP.at(self.lane.group), 128, x)

    def _sees_all(self, bits: Bits) -> Boolean:
        """Returns whether the warpgroup sees all of a tile, and its rows have seen keys; its warps meet for that.

        A range begins with a tile by the usual softmax, and has no tile ahead of it that is hidden.
        """
        first, second = (Boolean(self.maxima[i] == Float32(softmax.NEVER)) for i in range(2))
        blind = self._lane_is_blind() if self.call.score.hides_in_full else first | second
        return Boolean(self._any_lane(Boolean(bits.hides(self.call.config.keys) | blind)) == Boolean(False))

    # The methods below compute the usual softmax.

    def _weights(self, index: Int32, rows: ScoreRows) -> Weights:
        """Returns the lane's weights of a key tile, given its scores."""
        tile = ScoreTile(rows.first, index, self.call.config.keys, self.lane.column, self._blocks[1])
        return Weights(rows.score, tile, self.products.scores)

    def _hide(self, weights: Weights, rows: ScoreRows, is_edge: Boolean | None = None) -> None:
        """Turns the scores of a key tile into logits, and hides those that do not count."""
        weights.full()

        def hide() -> None:
            weights.hide(rows.seen, Float32(softmax.NEVER), check_low=rows.check_low)

        if is_edge is None:
            hide()
        else:
            cutlass.if_generate(is_edge, hide)

    def _raise_maxima(self, weights: Weights) -> Boolean:
        """Turns scores into probabilities relative to the running maxima, which it raises first, in place.

        Returns:
            whether the warp has to rescale its output by `factors`.
        """
        return self._raise_to(weights, softmax.row_maxima(self.products.scores, *self._blocks))

    def _raise_to(self, weights: Weights, found: list[Float32]) -> Boolean:
        """Turns scores into probabilities as `_raise_maxima` does, given the maxima of the scores."""
        factor, scores = self.call.score.unit, self.products.scores
        shifts, grown = [], Boolean(False)
        for i, x in enumerate(found):
            old = self.maxima[i]
            grown = Boolean(grown | (x > old))
            self.maxima[i] = ptx.maximum(old, x)
            # If a row has seen no key yet, 2^(-inf - 0) is 0, while -inf minus -inf is not a number.
            shift = ptx.where(self.maxima[i] == Float32(softmax.NEVER), Float32(0.0), self.maxima[i])
            self.factors[i] = ptx.exp2((old - shift) * factor)
            shifts.append(shift)
        if self.call.spec.key_bias_parts:
            # Far from 0, where a mask of -1e9 is, maxima times a factor are too coarse.
            for i in range(cute.size(scores)):
                scores[i] = scores[i] - shifts[accumulator_row(0, i % 4)]
            shifts = [Float32(0.0)] * 2
        score = self.call.score
        sums = softmax.exponentials(scores, *self._blocks, factor, [score.shift(x) for x in shifts], score.rounds)
        for i, total in enumerate(sums):
            self.sums[i] = ptx.fma(self.sums[i], self.factors[i], total)
        for i, moment in enumerate(self._moments(weights, sums)):
            self.moments[i] = ptx.fma(self.moments[i], self.factors[i], moment)
        return cute.arch.vote_any_sync(grown)

    def _moments(self, weights: Weights, sums: list[Float32]) -> list[Float32]:
        """Returns the sums of P times keys of a tile, given the sums of P; none without means of rows."""
        if self.moments is None:
            return []
        return row_moments(weights.tile, self.products.scores, sums)

    # The methods below compute the optimistic softmax.

    def _attempt(self, weights: Weights) -> tuple[list[Float32], Boolean]:
        """Turns the scores of a full tile into probabilities, assuming that none outweighs what the rows have seen.

        It takes no maximum and no exchange between lanes: the probabilities may exceed 1, which costs nothing in
        floating point. A sum over its limit, infinite or not a number says that the assumption is wrong, or that the
        row has not seen a key yet.

        Returns:
            sums of the lane's two rows, and whether the assumption is wrong for a row of the warp.
        """
        sums, holds = weights.exponentials(self.maxima), Boolean(True)
        largest = Float32(_SUM_LIMITS[self.call.spec.product_dtype])
        for i, total in enumerate(sums):
            if self._limits_growth:
                limit = cutlass.min(ptx.maximum(self.sums[i] * Float32(_GROWTH), Float32(1.0)), largest)
                holds = Boolean(holds & (total <= limit))
            else:
                holds = Boolean(holds & (total < largest))
        return sums, cute.arch.vote_any_sync(Boolean(holds == Boolean(False)))

    def _commit(self, stage: Int32, sums: list[Float32], moments: list[Float32]) -> None:
        """Adds the sums of a full tile whose assumption was right."""
        self.ring.consumer_release(stage)
        for i, total in enumerate(sums):
            self.sums[i] = self.sums[i] + total
        for i, moment in enumerate(moments):
            self.moments[i] = self.moments[i] + moment

    def _repair(self, stage: Int32, weights: Weights, sums: list[Float32], moments: list[Float32]) -> None:
        """Turns the scores of a full tile into P where the assumption was wrong, given its sums."""
        if not self._limits_growth:
            self._recompute(stage, weights)
            return
        small = Boolean((sums[0] < Float32(_RESCALABLE)) & (sums[1] < Float32(_RESCALABLE)))
        lost = cute.arch.vote_any_sync(Boolean(small == Boolean(False)))
        rescale = functools.partial(self._raise_late, stage, sums, moments)
        cutlass.if_generate(lost, lambda: self._recompute(stage, weights), rescale)

    def _raise_late(self, stage: Int32, sums: list[Float32], moments: list[Float32]) -> None:
        """Raises the maxima of rows by the logarithm of their greatest P, and rescales P, given its sums."""
        self.ring.consumer_release(stage)
        scores, unit = self.products.scores, self.call.score.unit
        for i, greatest in enumerate(softmax.row_maxima(scores, *self._blocks)):
            old = self.maxima[i]
            # The maximum is rounded before the factor is computed, so that both agree.
            new = old + ptx.log2(ptx.maximum(greatest, Float32(1.0))) * ptx.reciprocal(unit)
            self.maxima[i], self.factors[i] = new, ptx.exp2((old - new) * unit)
            self.sums[i] = (self.sums[i] + sums[i]) * self.factors[i]
        for i, moment in enumerate(moments):
            self.moments[i] = (self.moments[i] + moment) * self.factors[i]
        factors = [self.factors[i] for i in range(2)]
        for i in range(cute.size(scores)):
            scores[i] = scores[i] * factors[accumulator_row(0, i % 4)]

    def _recompute(self, stage: Int32, weights: Weights) -> None:
        """Repeats the softmax of a full tile as usual: the scores are gone, the tiles still in shared memory."""
        memory, shared = self.call.memory, self.shared
        query, key = shared.query_addresses(self.lane.group), shared.stage_addresses(stage, memory.head_dim)
        warp_scores.warp_scores(
            self.products.scores,
            [(query[i], key[j]) for i, j in self.products.words.terms],
            warp=self.lane.warp,
            lane=self.lane.thread % 32,
            keys=self.call.config.keys,
            head_dim=memory.head_dim,
            mma_dtype=self.call.mma_dtype,
        )
        if self.products.key_bias is not None:
            self.products.key_bias.add(self.products.scores, stage)
        self.ring.consumer_release(stage)
        weights.full()
        self._raise_maxima(weights)

    @property
    def _limits_growth(self) -> bool:
        """Whether `_GROWTH` is a limit, too. Next to dropout it would spill 32 bytes at head dim 64."""
        return self.call.spec.products == "native" and not self.call.spec.drops

    @property
    def _blocks(self) -> tuple[int, int]:
        """Returns how many block rows and block columns the scores have."""
        return 1, cute.size(self.products.scores) // 4
