# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The two products of a consumer warpgroup of the forward kernel, with their factors and accumulators.

S = Q K^T reads K, and the part of Q that does not stay in registers, from shared memory. P feeds O += P V from
registers.

Tensor cores truncate their sums. Of products of float32 that would be most of the error of O over many keys, so threads
add the product of each key tile to O, and round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import LeftFactor, WarpgroupWords, warpgroup_words
from jax_fastattn.kernels.sm90.forward.key_bias import KeyBiasStep
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.state import Call, Lane
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.weights import Weights


@dataclass(frozen=True, eq=False)
class ForwardProducts:
    """Emits the products of one warpgroup.

    Attributes:
        words: what P becomes.
        shared_query: the first term of Q of all warpgroups, `[rows, columns, warpgroup]`.
        score_mma: S = Q K^T, both factors from shared memory.
        fragment_mma: S = Q K^T with Q from registers.
        query: descriptors of this warpgroup's Q, of each term.
        key: descriptors of the stages as K, of each term.
        value: descriptors of the stages as V, of each term.
        scores: accumulator `[64, keys]` of S.
        probabilities: P `[64, keys]` as left factor of O.
        out: accumulator `[64, columns of V]` of O.
        tile_out: accumulator like `out` for one key tile; None if tensor cores add to O.
        key_bias: one more step of S; None without a bias of keys.
    """

    call: Call
    lane: Lane
    words: WarpgroupWords
    shared_query: cute.Tensor
    score_mma: cute.TiledMma
    fragment_mma: cute.TiledMma
    query: list[cute.Tensor]
    key: list[cute.Tensor]
    value: list[cute.Tensor]
    scores: Accumulator
    probabilities: LeftFactor
    out: Accumulator
    tile_out: Accumulator | None
    key_bias: KeyBiasStep | None

    @classmethod
    def start(cls, call: Call, shared: ForwardShared, lane: Lane) -> "ForwardProducts":
        """Returns the products with their registers."""
        dtype, keys, v_head_dim = shared.query[0].element_type, call.config.keys, call.memory.v_head_dim
        score_mma = wgmma.product(dtype, keys, a_in_registers=False, b_transposed=False)
        out_mma = wgmma.product(dtype, v_head_dim, a_in_registers=True, b_transposed=True)
        words = warpgroup_words(call.spec)
        tile_out = wgmma.accumulator(out_mma, (WARPGROUP_ROWS, v_head_dim)) if len(shared.value) > 1 else None
        return cls(
            call=call,
            lane=lane,
            words=words,
            shared_query=shared.query[0],
            score_mma=score_mma,
            fragment_mma=wgmma.product(dtype, keys, a_in_registers=True, b_transposed=False),
            query=[wgmma.operand_a(score_mma, x)[None, None, None, lane.group] for x in shared.query],
            key=[wgmma.operand_b(score_mma, x) for x in shared.key],
            value=[wgmma.operand_b(out_mma, wgmma.transposed(x)) for x in shared.value],
            scores=wgmma.accumulator(score_mma, (WARPGROUP_ROWS, keys)),
            probabilities=words.left_factor(out_mma, (WARPGROUP_ROWS, keys)),
            out=wgmma.accumulator(out_mma, (WARPGROUP_ROWS, v_head_dim)),
            tile_out=tile_out,
            key_bias=KeyBiasStep.start(call, shared, lane),
        )

    @property
    def _fragment_count(self) -> int:
        """Returns how many fragments of Q stay in registers."""
        return min(self.call.config.q_in_regs, self.call.memory.head_dim // 16)

    def load_query_fragments(self) -> cute.Tensor:
        """Loads the fragments of Q that stay in registers, when Q is there."""
        return wgmma.load_a(
            self.fragment_mma, self.shared_query, self.lane.group, self._fragment_count, self.lane.thread
        )

    def start_scores(self, query_fragments: cute.Tensor, stage: Int32) -> None:
        """Starts S = Q K^T, given what `load_query_fragments` returned and the stage of K."""
        steps = self._score_steps(query_fragments, [x[None, None, None, stage] for x in self.key])
        if self.key_bias is not None:
            steps = [self.key_bias.of_stage(stage), *steps]
        wgmma.gemm_steps(self.scores, steps, accumulate=False)

    def _score_steps(self, query_fragments: cute.Tensor, key: list[cute.Tensor]) -> Iterator[wgmma.Step]:
        for left, right in self.words.terms:
            for k in range(self.call.memory.head_dim // 16):
                in_registers = left == 0 and k < self._fragment_count
                mma, query = (
                    (self.fragment_mma, query_fragments) if in_registers else (self.score_mma, self.query[left])
                )
                yield mma, query[None, None, k], key[right][None, None, k]

    def start_values(self, stage: Int32) -> None:
        """Starts O += P V, by which tensor cores add."""
        assert self.tile_out is None, "products in flight have no registers for sums of key tiles"
        self.probabilities.multiply(self.out, [x[None, None, None, stage] for x in self.value])

    def add_values(self, stage: Int32) -> None:
        """Adds P V to O, and awaits it."""
        if self.tile_out is None:
            self.start_values(stage)
            warpgroup.wait_group(0)
            return
        value = [x[None, None, None, stage] for x in self.value]
        self.probabilities.multiply(self.tile_out, value, accumulate=False)
        warpgroup.wait_group(0)
        for i in range(cute.size(self.out)):
            self.out[i] = self.out[i] + self.tile_out[i]

    def round_probabilities(self, weights: Weights, *, floor: bool = False) -> None:
        """Makes P, which is where S was, the left factor of O. With a `floor` negative numbers become 0."""
        weights.round(self.words, self.probabilities, floor=floor)

    def rescale_out(self, factors: Accumulator, grown: Boolean) -> None:
        """Multiplies the two rows of O of a lane by their factors, if a row of the warp has a larger maximum now."""

        def rescale() -> None:
            of_rows = [factors[i] for i in range(2)]
            for i in range(self.call.memory.v_head_dim // 2):
                self.out[i] = self.out[i] * of_rows[i // 2 % 2]

        cutlass.if_generate(grown, rescale)
