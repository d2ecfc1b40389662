# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a warp of `dkdv_dq.py` does for each query tile if there is one role: everything. `roles.py` has two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import cutlass
from cutlass import Int32, cute

from jax_fastattn.kernels.device import mma, ptx
from jax_fastattn.kernels.device.kept import keep_number, number_masks
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import pairs
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.dq_reduce import DqReduce
from jax_fastattn.kernels.sm80.backward.products import DOUT, QUERY, Products
from jax_fastattn.kernels.sm80.backward.state import DkdvDqState
from jax_fastattn.kernels.sm80.backward.warp import QueryHead, Warp
from jax_fastattn.kernels.tiles.plan import Order
from jax_fastattn.kernels.visits.visit import Phase
from jax_fastattn.kernels.weights import Weights


@final
@dataclass(frozen=True, eq=False)
class SingleRole:
    """Emits the code of a warp that computes everything.

    Attributes:
        warp: its registers, and what any role does with them.
    """

    warp: Warp

    @classmethod
    def start(cls, products: Products, reduce: DqReduce, state: DkdvDqState) -> "SingleRole":
        """Returns the role with its registers, for dV and dK."""
        return cls(Warp.start(products, reduce, state, DOUT, QUERY))

    def phases(self) -> list[Phase]:
        """Returns the loops over the query tiles of a head."""
        return self.warp.state.visit.phases(Order.UP)

    def visit(self, step: Int32, head: QueryHead, index: Int32, *, masked: bool) -> None:
        """Computes dV, dK and dQ of one query tile, with the copies of the next part in flight; see `Role.visit`."""
        warp, products, state, config = self.warp, self.warp.products, self.warp.state, self.warp.products.config
        for part in range(config.parts):
            stage: Any = part if config.parts == 2 else step % config.stages
            first = warp.first_row(index) + part * config.part
            bits = warp.load_bits(head, index, part * config.part) if masked else None
            cute.arch.cp_async_wait_group(0)
            if masked:
                warp.zero_dead_queries(head, index, stage, (QUERY, DOUT), part)
            cute.arch.sync_threads()
            self._load_next_part(stage, part, head.member, index)
            weights, dscores = self._differentiated(head.score, stage, first, bits, masked=masked)
            if state.bias is not None:
                self._load_next_bias(part, head.member, index)
            for i in range(0, len(dscores), 2):
                warp.add_to_sums(i // 2, dscores[i : i + 2])
            words, start = products.words, products.memory.table.offset("dscore")
            packed = weights.pairs(words), pairs(words, dscores)
            products.store_scores(state, start, words, packed[1], part * config.part)
            warp.add_to_plane(packed[1], stage)
            for factor, which in zip(packed, (DOUT, QUERY), strict=True):
                products.accumulate(state, warp.grads[which], products.packed_loader(factor), which, stage)
        cute.arch.sync_threads()
        warp.add_dq(head.member, index)

    def _load_next_part(self, stage: Any, part: int, member: Int32, index: Int32) -> None:
        """Starts the copies of the part after this one, which may belong to the next tile."""
        products, config, target = self.warp.products, self.warp.products.config, 1 - stage

        def load(member: Int32, first: Int32) -> None:
            for which in (QUERY, DOUT):
                products.load_queries(self.warp.state, which, config.threads, member, first, target)
            products.load_statistics(self.warp.state, self.warp.state.at.thread, member, first, target, 0)

        self._load_for_next(part, member, index, load)

    def _load_next_bias(self, part: int, member: Int32, index: Int32) -> None:
        """Starts the copies of the matrix for the part after this one, over what the warp has read."""
        products, state = self.warp.products, self.warp.state
        cute.arch.sync_warp()
        self._load_for_next(part, member, index, lambda member, first: products.load_bias(state, member, first))

    def _load_for_next(self, part: int, member: Int32, index: Int32, load: Callable[[Int32, Int32], None]) -> None:
        """Calls `load` with head and first query of the part after this one, if there is one."""
        config = self.warp.products.config
        is_last = part + 1 == config.parts
        if is_last:
            member, index = self.warp.after(member, index)
        first = self.warp.first_row(index) + (0 if is_last else config.part)
        if is_last:
            cutlass.if_generate(self.warp.exists(member, index), lambda: load(member, first))
        else:
            load(member, first)
        cute.arch.cp_async_commit_group()

    def _differentiated(
        self, score: Score, stage: Any, first: Int32, bits: Bits | None, *, masked: bool
    ) -> tuple[Weights, mma.Accumulator]:
        """Returns what is kept of P^T, and dS^T, of the part from query `first` on."""
        products, state, tile = self.warp.products, self.warp.state, self.warp.score_tile(first)
        scores, dscores = (products.scores(state, which, stage) for which in (QUERY, DOUT))
        m_blocks, n_blocks = products.score_blocks
        reading, keep, survival = score.read(tile), score.keep(tile), score.survival()
        masks: list[Int32] | None = None
        stats = products.statistics(state, stage, 0) + accumulator_lane(state.at.lane)[1] * 8
        for n in range(n_blocks):
            rows = ptx.load_shared_pairs(stats + 64 * n)
            for m in range(m_blocks):
                for e in range(4):
                    i = (m * n_blocks + n) * 4 + e
                    lse2, delta = rows[:2] if e % 2 == 0 else rows[2:]
                    if keep is not None and e % 2 == 0:
                        masks = number_masks(keep(i // 2))
                    change = gradient.change(dscores[i], delta, masks and masks[e % 2], survival)
                    scores[i], dscores[i] = reading.differentiate(scores[i], lse2, change, tile.at(i))
                    if masks is not None:
                        scores[i] = keep_number(scores[i], masks[e % 2])
        if masked:
            self.warp.mask(score, scores, tile, bits)
            self.warp.mask(score, dscores, tile, bits)
        return Weights(score, tile, scores), dscores
