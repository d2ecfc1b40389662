# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the warps of `dkdv_dq.py` do for each query tile.

With one role (`single_role.py`), every warp computes everything. With two, `ProbabilityRole` computes S^T, P^T and dV,
and `GradientRole` dP^T, dS^T and dK. P crosses over in shared memory, in place of the dS that the second role stores
there: each lane of the second role reads the very words that a lane of the first has stored, and overwrites them.

Barriers of a tile, if the second role runs half a tile after the first one (`lagged`). Each waits for what it names:

    first role                              second role
    FIRST    Q is there, role left tile     SECOND   dO is there, role left tile
    S, P                                    READY    (arrives)
    READY    dO there, dK and dQ left       dP
    stores P; PAIR (arrives)                PAIR     P of this warp's rows; dV left, Q is there
    copies the next Q                       dS; DONE (arrives)
    dV                                      copies the next dO
    DONE     dS is there                    dK
    dQ                                      SECOND   dS is there;  dQ

READY comes after dK and dQ of the tile before, so Q and the scores may be overwritten after it. PAIR comes after FIRST,
so dV of the tile before is done in all of the first role, and its dO may be overwritten. DONE is left out if the second
role computes dQ alone. If there is one stage, both roles meet before each tile, and each copies what the other one does
not read anymore: the first dO after dV, the second Q after dK. Where both roles wait, each does so at an instruction of
its own, which an aligned barrier (`cute.arch.sync_threads`) forbids: `ptx.sync_apart`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, final

import cutlass
from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.device import mma, ptx
from jax_fastattn.kernels.device.kept import keep_pair, mark, number_masks, unmark
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import Pair, pairs
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.config import RoleBarrier
from jax_fastattn.kernels.sm80.backward.dq_reduce import DqReduce
from jax_fastattn.kernels.sm80.backward.products import DOUT, QUERY, Products
from jax_fastattn.kernels.sm80.backward.state import DkdvDqState
from jax_fastattn.kernels.sm80.backward.warp import QueryHead, Warp, arrive, copied_by, wait
from jax_fastattn.kernels.tiles.plan import Order
from jax_fastattn.kernels.visits.visit import Phase
from jax_fastattn.kernels.weights import Weights


class Role(Protocol):
    """What a warp computes of each query tile."""

    @property
    def warp(self) -> Warp:
        """The warp that has the role."""
        ...

    @classmethod
    def start(cls, products: Products, reduce: DqReduce, state: DkdvDqState) -> "Role":
        """Returns the role with its registers."""
        ...

    def phases(self) -> list[Phase]:
        """Returns the loops over the query tiles of a head."""
        ...

    def visit(self, step: Int32, head: QueryHead, index: Int32, *, masked: bool) -> None:
        """Computes the role's share of a query tile.

        Args:
            step: how many tiles were visited before.
            index: position of the query tile.
            masked: whether some of the tile's queries do not see some of the keys.
        """
        ...


@final
@dataclass(frozen=True, eq=False)
class QueryLoop:
    """Visits the query tiles of a CTA's keys.

    Attributes:
        role: what is done for each.
        scale: the factor of a product q . k.
    """

    role: Role
    scale: Float32

    @cute.jit
    def run(self):
        """Visits all query tiles of all heads of the group."""
        step, emptied = Int32(0), Int32(0)
        if cutlass.const_expr(self.role.warp.products.spec.group == 1):
            self.run_head(step, emptied, Int32(0))
        else:
            for member in cutlass.range(self.role.warp.products.spec.group, unroll=1):
                step, emptied = self.run_head(step, emptied, member)

    @cute.jit
    def run_head(self, step: Int32, emptied: Int32, member: Int32):
        """Visits the query tiles of one head; returns the tiles visited so far, and up to when sums were emptied."""
        head = self.role.warp.head(member)
        self.role.warp.begin_head(head.score)
        most = self.role.warp.products.summed_tiles
        for phase in self.role.phases():
            if cutlass.const_expr(most == 0):
                for index in cutlass.range(phase.begin, phase.end, unroll=1):
                    self.role.visit(step, head, index, masked=phase.masked)
                    step = step + 1
            else:
                for begin in cutlass.range(phase.begin, phase.end, most, unroll=1):
                    for index in cutlass.range(begin, cutlass.min(begin + most, phase.end), unroll=1):
                        self.role.visit(step, head, index, masked=phase.masked)
                        step = step + 1
                    if step - emptied >= most:
                        self.role.warp.empty(self.scale)
                        emptied = step
        self.role.warp.end_head(member)
        return step, emptied


@final
@dataclass(frozen=True, eq=False)
class ProbabilityRole:
    """Emits the code of the first role: S^T, P^T, dV, and its part of dQ.

    Attributes:
        warp: its registers, and what any role does with them.
    """

    warp: Warp

    @classmethod
    def start(cls, products: Products, reduce: DqReduce, state: DkdvDqState) -> "ProbabilityRole":
        """Returns the role with its registers, for dV."""
        return cls(Warp.start(products, reduce, state, DOUT))

    def phases(self) -> list[Phase]:
        """Returns the loops over the query tiles of a head."""
        return self.warp.state.visit.phases(Order.UP)

    def visit(self, step: Int32, head: QueryHead, index: Int32, *, masked: bool) -> None:
        """Computes the role's share of a tile."""
        warp, products, state = self.warp, self.warp.products, self.warp.state
        config, memory = products.config, products.memory
        bits = warp.load_bits(head, index, warp.first_query()) if masked else None

        def zero_dead(stage: Any) -> None:
            if masked:
                warp.zero_dead_queries(head, index, stage, [copied_by(0, config)])

        stage = warp.begin(step, RoleBarrier.FIRST, zero_dead)
        packed, crossing = self._probabilities(head.score, stage, warp.first_row(index), bits, masked=masked)
        if config.lagged:
            wait(RoleBarrier.READY, config.threads)
        first_query = warp.first_query()
        products.store_scores(state, memory.table.offset("dscore"), products.crossing, crossing, first_query)
        if config.exchanges:
            products.store_scores(state, memory.table.offset("exchange"), products.words, packed, first_query)
        arrive(RoleBarrier.PAIR, 64, state.at.role_warp)
        if config.lagged:
            warp.load_next(0, stage, head.member, index)
        load_p = products.packed_loader(packed)
        if config.exchanges:
            wait(RoleBarrier.EXCHANGE_P, 32 * config.column_warps, state.at.key_warp)
            load_p = products.exchanged_loader(state, memory.table.offset("exchange"))
        products.accumulate(state, warp.grads[DOUT], load_p, DOUT, stage)
        if config.dq_roles == 2 or not config.lagged:
            wait(RoleBarrier.DONE, config.threads)
        if not config.lagged:
            # At DONE the second role has left dP, and all warps of this one have left dV.
            warp.load_next(0, stage, head.member, index)
        if config.dq_roles == 2:
            warp.add_dq(head.member, index)

    def _probabilities(
        self, score: Score, stage: Any, first: Int32, bits: Bits | None, *, masked: bool
    ) -> tuple[list[Pair], list[Pair]]:
        """Returns pairs of P^T, and of what dP - delta has to be multiplied by, which cross to the other role."""
        products = self.warp.products
        scores = products.scores(self.warp.state, QUERY, stage)
        tile = self.warp.score_tile(first + self.warp.first_query())
        weights = self._weigh(score, scores, tile, stage)
        if masked:
            self.warp.mask(score, scores, tile, bits)
        packed = Weights(score, tile, scores).pairs(products.words)
        if weights is None:
            crossing = packed if products.crosses_as_factor else pairs(products.crossing, scores)
        else:
            if masked:
                self.warp.mask(score, weights, tile, bits)
            crossing = pairs(products.crossing, weights)
        keep = score.keep(tile)
        if keep is None:
            return packed, crossing
        masks = [keep(i) for i in range(len(packed))]
        if score.marks:
            crossing = [mark(*x) for x in zip(crossing, masks, strict=True)]
        return [keep_pair(*x) for x in zip(packed, masks, strict=True)], crossing

    def _weigh(self, score: Score, scores: mma.Accumulator, tile: ScoreTile, stage: Any) -> mma.Accumulator | None:
        """Turns S^T into P^T in place; returns weights, see `score.py`, or None where they are P."""
        products = self.warp.products
        m_blocks, n_blocks = products.score_blocks
        weights = None if score.is_affine else list(scores)
        reading = score.read(tile)
        _, lane_column = accumulator_lane(self.warp.state.at.lane)
        stats = products.statistics(self.warp.state, stage, 0) + (self.warp.first_query() + lane_column) * 8
        for n in range(n_blocks):
            pairs = ptx.load_shared_pairs(stats + 64 * n)
            for m in range(m_blocks):
                for e in range(4):
                    i, lse2 = (m * n_blocks + n) * 4 + e, pairs[0 if e % 2 == 0 else 2]
                    scores[i], weight = reading.gradient(scores[i], lse2, tile.at(i))
                    if weights is not None:
                        weights[i] = weight
        return weights


@final
@dataclass(frozen=True, eq=False)
class GradientRole:
    """Emits the code of the second role: dP^T, dS^T, dK, and its part of dQ. The P that it reads is masked.

    Attributes:
        warp: its registers, and what any role does with them.
    """

    warp: Warp

    @classmethod
    def start(cls, products: Products, reduce: DqReduce, state: DkdvDqState) -> "GradientRole":
        """Returns the role with its registers, for dK."""
        return cls(Warp.start(products, reduce, state, QUERY))

    def phases(self) -> list[Phase]:
        """Returns one loop over all query tiles of a head: there is nothing to mask."""
        return [self.warp.state.visit.whole(Order.UP)]

    def visit(self, step: Int32, head: QueryHead, index: Int32, *, masked: bool) -> None:
        """Computes the role's share of a tile."""
        del masked
        warp, products, state = self.warp, self.warp.products, self.warp.state
        config, memory = products.config, products.memory

        def zero_dead(stage: Any) -> None:
            warp.zero_dead_queries(head, index, stage, [copied_by(1, config)])

        stage = warp.begin(step, RoleBarrier.SECOND, zero_dead)
        if config.lagged:
            arrive(RoleBarrier.READY, config.threads)
        dscore = products.scores(state, DOUT, stage)
        wait(RoleBarrier.PAIR, 64, state.at.role_warp)
        packed = self._gradients(head.score, dscore, stage, index)
        if config.dq_roles == 2 or not config.lagged:
            arrive(RoleBarrier.DONE, config.threads)
        if config.lagged:
            warp.load_next(1, stage, head.member, index)
        load_ds = products.packed_loader(packed)
        if config.exchanges:
            wait(RoleBarrier.EXCHANGE_DS, 32 * config.column_warps, state.at.key_warp)
            load_ds = products.exchanged_loader(state, memory.table.offset("dscore"))
        warp.add_to_plane(packed, stage)
        products.accumulate(state, warp.grads[QUERY], load_ds, QUERY, stage)
        wait(RoleBarrier.SECOND, 32 * config.role_warps)
        if not config.lagged:
            # At DONE and SECOND the first role has left S, and all warps of this one have left dK.
            warp.load_next(1, stage, head.member, index)
        warp.add_dq(head.member, index)

    def _gradients(self, score: Score, dscore: mma.Accumulator, stage: Any, index: Int32) -> list[Pair]:
        """Returns pairs of dS^T, and stores them in place of P, which the first role has left there.

        With dropout, signs of P say what it drops, see `Score.marks`, or it is drawn for the tile at position `index`.
        """
        products, n_blocks = self.warp.products, self.warp.products.score_blocks[1]
        keep, survival = None, score.survival()
        if score.draws_again:
            keep = score.keep(self.warp.score_tile(self.warp.first_row(index) + self.warp.first_query()))
        _, lane_column = accumulator_lane(self.warp.state.at.lane)
        stats = products.statistics(self.warp.state, stage, 1) + (self.warp.first_query() + lane_column) * 8
        start = products.memory.table.offset("dscore")
        address = products.score_address(self.warp.state, start, self.warp.first_query())
        packed: list[Any] = [None] * (len(dscore) // 2)
        statistics: dict[int, list[Float32]] = {}
        for i, offset in products.pair_offsets():
            n = i // 2 % n_blocks
            if n not in statistics:
                statistics[n] = ptx.load_shared_pairs(stats + 64 * n)
            crossed, masks = products.crossing.load(address + offset, products.apart), (None, None)
            if score.marks:
                crossed, masks = unmark(crossed)
            elif keep is not None:
                masks = number_masks(keep(i))
            p, deltas = products.crossing.numbers(crossed), statistics[n][1::2]
            ds = [p[e] * gradient.change(dscore[2 * i + e], deltas[e], masks[e], survival) for e in range(2)]
            self.warp.add_to_sums(i, ds)
            packed[i] = products.words.pair(*ds)
            products.words.store(address + offset, packed[i], products.apart)
        return packed
