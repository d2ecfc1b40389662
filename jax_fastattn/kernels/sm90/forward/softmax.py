# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The online softmax of the Hopper forward kernel, optimistic on full tiles.

Masked tiles take part in the running maximum. Full tiles assume that their scores do not lie far above it: no maximum,
no shuffles, no rescaling. Where that turns out wrong, the warp computes the scores of the tile again, by mma.sync.
docs/kernels/sm90.md says why any maximum gives the same result, and what the limit on the sums is for.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels import plan
from jax_fastattn.kernels.device import ptx, softmax, warp_scores, wgmma
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.sm90.forward.products import ForwardProducts
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.work import Call, Lane

# Upper limit on a lane's sum of unnormalized probabilities in a full tile. P has to fit its 16 bits, O and the sums
# float32.
_SUM_LIMITS = {"bfloat16": 2.0**24, "float16": 2.0**14}
# The running maximum of a row that has seen no key.
NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class OnlineSoftmax:
    """Emits the softmax of one warpgroup's scores.

    Attributes:
        call: what the roles share.
        shared: tiles and barriers.
        lane: the thread.
        ring: the warpgroup's position in the ring.
        products: the warpgroup's products.
        maxima: running maxima of the lane's two rows, in units of scores.
        sums: the lane's running sums of its two rows, relative to the maxima.
        factors: by which raised maxima change the output, of both rows.
    """

    call: Call
    shared: ForwardShared
    lane: Lane
    ring: wgmma.Ring
    products: ForwardProducts
    maxima: Accumulator
    sums: Accumulator
    factors: Accumulator

    @classmethod
    def start(
        cls, call: Call, shared: ForwardShared, lane: Lane, ring: wgmma.Ring, products: ForwardProducts
    ) -> "OnlineSoftmax":
        """Returns the softmax with its registers."""
        maxima, sums, factors = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        return cls(call, shared, lane, ring, products, maxima, sums, factors)

    def clear(self) -> None:
        """Forgets all keys, before the first key tile of a tile of queries."""
        self.maxima.fill(NEVER)
        self.sums.fill(0.0)

    def first_tile(self, index: Int32, limits: list[plan.Limits]) -> None:
        """Turns the scores of the first key tile, which counts as masked, into P. There is no output to rescale.

        Args:
            index: of the key tile.
            limits: columns that the lane's two rows see.
        """
        self._mask(index, limits)
        self._raise_maxima()
        self.products.round_probabilities()

    def masked_tile(self, index: Int32, slot: Int32, limits: list[plan.Limits]) -> None:
        """Turns the scores of a masked tile into P, with products in flight that it then awaits; rescales O.

        Args:
            index: of the key tile.
            slot: of K, which is released.
            limits: columns that the lane's two rows see.
        """
        self.ring.release(slot)
        self._mask(index, limits)
        grown = self._raise_maxima()
        warpgroup.wait_group(0)
        self.products.round_probabilities()
        self.products.rescale_out(self.factors, grown)

    def full_tile(self, slot: Int32) -> None:
        """Turns the scores of a tile without a mask into P, with products in flight that it then awaits; rescales O.

        Args:
            slot: of K, which is released.
        """
        sums, failed = self._attempt()
        late = self.call.config.waits_late

        def wait() -> None:
            # All warps of a warpgroup have to wait in the same place: not on the two sides of a warp's branch.
            warpgroup.wait_group(0)
            self.products.round_probabilities()

        def recompute() -> None:
            self._recompute(slot)
            if not late:
                self.products.round_probabilities()

        if not late:
            wait()
        cutlass.if_generate(failed, recompute, lambda: self._commit(slot, sums))
        if late:
            wait()
        self.products.rescale_out(self.factors, failed)

    # The usual softmax.

    def _mask(self, index: Int32, limits: list[plan.Limits]) -> None:
        """Caps the scores of a key tile, and hides those of keys outside of the limits."""
        scores = self.products.scores
        self._cap()
        column = index * self.call.config.keys + self.lane.column
        softmax.mask_columns(scores, *self._blocks, column, limits, check_low=self.call.spec.window_left)

    def _raise_maxima(self) -> Boolean:
        """Turns scores into probabilities relative to the running maxima, which it raises first, in place.

        Returns:
            whether the warp has to rescale its output by `factors`.
        """
        factor, scores = self.call.scaling.factor, self.products.scores
        shifts, grown = [], Boolean(False)
        for i, x in enumerate(softmax.row_maxima(scores, *self._blocks)):
            old = self.maxima[i]
            grown = Boolean(grown | (x > old))
            self.maxima[i] = ptx.maximum(old, x)
            # A row that has seen no key yet: 2^(-inf - 0) is 0, while -inf minus -inf is not a number.
            shift = ptx.where(self.maxima[i] == Float32(NEVER), Float32(0.0), self.maxima[i])
            self.factors[i] = ptx.exp2((old - shift) * factor)
            shifts.append(shift * factor)
        sums = softmax.exponentials(scores, *self._blocks, factor, shifts)
        for i, total in enumerate(sums):
            self.sums[i] = ptx.fma(self.sums[i], self.factors[i], total)
        return cute.arch.vote_any_sync(grown)

    # The optimistic one.

    def _attempt(self) -> tuple[list[Float32], Boolean]:
        """Turns the scores of a full tile into probabilities, assuming that they lie not far above the maxima.

        No maximum, no exchange between lanes: the probabilities may exceed 1, which costs nothing in floating point.
        A sum over the limit, infinite or not a number says that the assumption is wrong, or that the row has not seen a
        key yet.

        Returns:
            sums of the lane's two rows, and whether the assumption is wrong for a row of the warp.
        """
        factor, scores = self.call.scaling.factor, self.products.scores
        self._cap()
        sums = softmax.exponentials(scores, *self._blocks, factor, [self.maxima[i] * factor for i in range(2)])
        limit = Float32(_SUM_LIMITS[self.call.spec.dtype])
        holds = Boolean((sums[0] < limit) & (sums[1] < limit))
        return sums, cute.arch.vote_any_sync(Boolean(holds == Boolean(False)))

    def _commit(self, slot: Int32, sums: list[Float32]) -> None:
        """Adds the sums of a full tile whose assumption was right."""
        self.ring.release(slot)
        for i, total in enumerate(sums):
            self.sums[i] = self.sums[i] + total

    def _recompute(self, slot: Int32) -> None:
        """Repeats the softmax of a full tile as usual: the scores are gone, the tiles still in shared memory."""
        memory = self.call.memory
        warp_scores.warp_scores(
            self.products.scores,
            self.shared.query_address(self.lane.group),
            self.shared.slot_address(slot),
            warp=self.lane.warp,
            lane=self.lane.thread % 32,
            keys=self.call.config.keys,
            head_dim=memory.head_dim,
            mma_dtype=self.call.mma_dtype,
        )
        self.ring.release(slot)
        self._cap()
        self._raise_maxima()

    @property
    def _blocks(self) -> tuple[int, int]:
        """Block rows and block columns of the scores."""
        return 1, cute.size(self.products.scores) // 4

    def _cap(self) -> None:
        """Applies the soft cap, except for the factor."""
        if not self.call.spec.logits_soft_cap:
            return
        scores = self.products.scores
        cap = softmax.cap_score if self.call.spec.exact_cap else softmax.cap_score_roughly
        for i in range(cute.size(scores)):
            scores[i] = cap(scores[i], self.call.scaling.inner)
