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
from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels import plan
from jax_fastattn.kernels.device import mma, ptx
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.features.places import Head, ScoreTile
from jax_fastattn.kernels.plan import Order
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.config import RoleBarrier
from jax_fastattn.kernels.sm80.backward.dq_reduce import DqReduce
from jax_fastattn.kernels.sm80.backward.products import DOUT, QUERY, Products
from jax_fastattn.kernels.sm80.backward.state import DkdvDqState
from jax_fastattn.kernels.visits import Phase


def wait(barrier: RoleBarrier, threads: int, index: Any = 0) -> None:
    """Arrives at a barrier of `threads` threads and waits for the others; `index` picks one of several barriers."""
    cute.arch.barrier(barrier_id=barrier.at(index), number_of_threads=threads)


def arrive(barrier: RoleBarrier, threads: int, index: Any = 0) -> None:
    """Arrives at a barrier."""
    cute.arch.barrier_arrive(barrier_id=barrier.at(index), number_of_threads=threads)


@dataclass(frozen=True, eq=False)
class Warp:
    """What a warp of any role has, and does.

    Attributes:
        products: copies and products.
        reduce: what dQ is added by.
        state: device values of the kernel.
        grads: registers of the gradients that the role sums up: dV (`DOUT`), dK (`QUERY`).
        due: what `reduce` keeps from tile to tile.
    """

    products: Products
    reduce: DqReduce
    state: DkdvDqState
    grads: dict[str, cute.Tensor]
    due: cute.Tensor | None

    @classmethod
    def start(cls, products: Products, reduce: DqReduce, state: DkdvDqState, *computed: str) -> "Warp":
        """Returns the warp with its registers, given the gradients that its role sums up."""
        grads = {which: products.zeros(which) for which in computed}
        return cls(products, reduce, state, grads, reduce.start())

    def finish(self, scale: Float32) -> None:
        """Stores the role's gradients to shared memory, when no warp of the CTA reads K and V anymore."""
        self.reduce.count(self.state, self.due)
        back = 2.0 ** -gradient.log2_probability_factor(self.products.spec, self.products.config)
        cute.arch.cp_async_wait_group(0)
        if self.products.config.roles == 1:
            cute.arch.sync_threads()
        else:
            ptx.sync_apart()
        for which, acc in self.grads.items():
            factor = Float32(back) if which == DOUT else scale * back
            self.products.finish(self.state, acc, which, factor)

    def add_dq(self, member: Int32, index: Int32) -> None:
        """Computes the warp's part of dQ of a tile and adds it up."""
        tile = self.state.visit.tile(index)
        is_first = self.reduce.wait(self.state, self.due, member, tile)
        self.reduce.accumulate(self.state, member, tile, self.products.dq(self.state), is_first)

    def first_row(self, index: Int32) -> Int32:
        """Returns the first query of the tile at a position."""
        return self.state.visit.tile(index) * self.products.config.queries

    def after(self, member: Int32, index: Int32) -> tuple[Int32, Int32]:
        """Returns head and position of the tile after this one."""
        if self.products.spec.group == 1:
            return member, index + 1
        wraps = index + 1 == self.state.visit.end
        return ptx.where(wraps, member + 1, member), ptx.where(wraps, self.state.visit.begin, index + 1)

    def exists(self, member: Int32, index: Int32) -> Boolean:
        """Returns whether there is the tile that `after` returned."""
        group = self.products.spec.group
        return index < self.state.visit.end if group == 1 else member < group

    def score_tile(self, first: Int32) -> ScoreTile:
        """Returns where the lane's scores lie, given the warp's first query."""
        state, n_blocks = self.state, self.products.score_blocks[1]
        lane_row, lane_column = accumulator_lane(state.at.lane)
        row = state.at.row + state.at.warp_row + lane_row
        return ScoreTile(row, first, 1, lane_column, n_blocks, transposed=True)

    def mask(self, score: Score, acc: mma.Accumulator, tile: ScoreTile) -> None:
        """Zeroes what belongs to queries that do not see a key, or to keys past the end.

        Keys past the end have no gradients, but an infinite P of theirs times a K of zero would get into dQ.

        Args:
            score: that of the head.
            acc: P or weights, changed in place.
            tile: where they lie.
        """
        products, state, limits = self.products, self.state, []
        for i in range(2 * products.row_blocks):
            row = tile.row + 8 * i
            limit = state.bounds.query_limits(row)
            limits.append(plan.Limits(limit.low, ptx.where(row < state.bounds.key_end, limit.high, Int32(0))))
        score.hide(acc, tile, limits, Float32(0.0), check_low=state.visit.edges.low)

    def head(self, member: Int32) -> "QueryHead":
        """Returns a query head of the group."""
        at, group = self.state.at, self.products.spec.group
        head = Head(at.sequence.queries.batch, at.kv_head * group + member)
        return QueryHead(member, self.state.score.start(head))

    # What both of two roles do.

    def first_query(self) -> Int32:
        """Returns the warp's first query in the tile."""
        return self.state.at.column_warp * self.products.score_columns

    def begin(self, step: Int32, barrier: RoleBarrier) -> Any:
        """Waits for a tile's copies, and for the role to have left the tile before; returns the stage."""
        config = self.products.config
        cute.arch.cp_async_wait_group(0)
        if config.lagged:
            # All threads have copied the first tile, and K and V.
            role_threads = 32 * config.role_warps
            cutlass.if_generate(step == 0, ptx.sync_apart, lambda: wait(barrier, role_threads))
            return step % 2
        ptx.sync_apart()
        return 0

    def load_next(self, which: str, role: int, stage: Any, member: Int32, index: Int32) -> None:
        """Starts the copies of Q or dO, and of the role's statistics, of the tile after this one."""
        products, config, state = self.products, self.products.config, self.state
        member, index = self.after(member, index)

        def load() -> None:
            target, first = (1 - stage if config.stages == 2 else 0), self.first_row(index)
            products.load_queries(state, which, 32 * config.role_warps, member, first, target)
            products.load_statistics(state, state.at.role_thread, member, first, target, role)

        cutlass.if_generate(self.exists(member, index), load)
        cute.arch.cp_async_commit_group()


@dataclass(frozen=True)
class QueryHead:
    """A query head whose tiles of queries visit the tile of keys.

    Attributes:
        member: which head of the group it is.
        score: from products to probabilities of the head.
    """

    member: Int32
    score: Score


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
            head: the query head.
            index: position of the query tile.
            masked: whether some of its queries do not see some of the keys.
        """
        ...


@final
@dataclass(frozen=True, eq=False)
class QueryLoop:
    """Visits the query tiles of a CTA's keys.

    Attributes:
        role: what is done for each.
    """

    role: Role

    @cute.jit
    def run(self):
        """Visits all query tiles of all heads of the group."""
        step = Int32(0)
        if cutlass.const_expr(self.role.warp.products.spec.group == 1):
            self.run_head(step, Int32(0))
        else:
            for member in cutlass.range(self.role.warp.products.spec.group, unroll=1):
                step = self.run_head(step, member)

    @cute.jit
    def run_head(self, step: Int32, member: Int32):
        """Visits the query tiles of one head; returns the tiles visited so far."""
        head = self.role.warp.head(member)
        for phase in self.role.phases():
            for index in cutlass.range(phase.begin, phase.end, unroll=1):
                self.role.visit(step, head, index, masked=phase.masked)
                step = step + 1
        return step


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
        """Returns the role with its registers, those of dV."""
        return cls(Warp.start(products, reduce, state, DOUT))

    def phases(self) -> list[Phase]:
        """Returns the loops over the query tiles of a head."""
        return self.warp.state.visit.phases(Order.UP)

    def visit(self, step: Int32, head: QueryHead, index: Int32, *, masked: bool) -> None:
        """Computes the role's share of a tile."""
        warp, products, state = self.warp, self.warp.products, self.warp.state
        config, memory = products.config, products.memory
        stage = warp.begin(step, RoleBarrier.FIRST)
        packed, crossing = self._probabilities(head.score, stage, warp.first_row(index), masked=masked)
        if config.lagged:
            wait(RoleBarrier.READY, config.threads)
        products.store_scores(state, memory.table.offset("dscore"), crossing, warp.first_query())
        if config.exchanges:
            products.store_scores(state, memory.table.offset("exchange"), packed, warp.first_query())
        arrive(RoleBarrier.PAIR, 64, state.at.role_warp)
        if config.lagged:
            warp.load_next(QUERY, 0, stage, head.member, index)
        load_p = products.packed_loader(packed)
        if config.exchanges:
            wait(RoleBarrier.EXCHANGE_P, 32 * config.column_warps, state.at.key_warp)
            load_p = products.exchanged_loader(state, memory.table.offset("exchange"))
        products.accumulate(state, warp.grads[DOUT], load_p, DOUT, stage)
        if config.dq_roles == 2 or not config.lagged:
            wait(RoleBarrier.DONE, config.threads)
        if not config.lagged:
            # DONE: the second role has left dP, and all of this one dV.
            warp.load_next(DOUT, 0, stage, head.member, index)
        if config.dq_roles == 2:
            warp.add_dq(head.member, index)

    def _probabilities(
        self, score: Score, stage: Any, first: Int32, *, masked: bool
    ) -> tuple[list[Int32], list[Int32]]:
        """Returns pairs of P^T, and of what dP - delta has to be multiplied by in float16."""
        products = self.warp.products
        scores = products.scores(self.warp.state, QUERY, stage)
        tile = self.warp.score_tile(first + self.warp.first_query())
        weights = self._weigh(score, scores, tile, stage)
        if masked:
            self.warp.mask(score, scores, tile)
        packed = products.pack(scores)
        if weights is None:
            return packed, packed if products.mma_dtype == "f16" else products.pack(scores, "f16")
        if masked:
            self.warp.mask(score, weights, tile)
        return packed, products.pack(weights, "f16")

    def _weigh(self, score: Score, scores: mma.Accumulator, tile: ScoreTile, stage: Any) -> mma.Accumulator | None:
        """Turns S^T into P^T in place; returns weights, see `score.py`, or None where they are P."""
        products = self.warp.products
        m_blocks, n_blocks = products.score_blocks
        weights = None if score.is_affine else list(scores)
        _, lane_column = accumulator_lane(self.warp.state.at.lane)
        stats = products.statistics(self.warp.state, stage, 0) + (self.warp.first_query() + lane_column) * 8
        for n in range(n_blocks):
            pairs = ptx.load_shared_pairs(stats + 64 * n)
            for m in range(m_blocks):
                for e in range(4):
                    i, lse2 = (m * n_blocks + n) * 4 + e, pairs[0 if e % 2 == 0 else 2]
                    scores[i], weight = score.gradient(scores[i], lse2, tile.at(i))
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
        """Returns the role with its registers, those of dK."""
        return cls(Warp.start(products, reduce, state, QUERY))

    def phases(self) -> list[Phase]:
        """Returns one loop over all query tiles of a head: there is nothing to mask."""
        return [self.warp.state.visit.whole(Order.UP)]

    def visit(self, step: Int32, head: QueryHead, index: Int32, *, masked: bool) -> None:
        """Computes the role's share of a tile."""
        del masked
        warp, products, state = self.warp, self.warp.products, self.warp.state
        config, memory = products.config, products.memory
        stage = warp.begin(step, RoleBarrier.SECOND)
        if config.lagged:
            arrive(RoleBarrier.READY, config.threads)
        dscore = products.scores(state, DOUT, stage)
        wait(RoleBarrier.PAIR, 64, state.at.role_warp)
        packed = self._gradients(dscore, stage)
        if config.dq_roles == 2 or not config.lagged:
            arrive(RoleBarrier.DONE, config.threads)
        if config.lagged:
            warp.load_next(DOUT, 1, stage, head.member, index)
        load_ds = products.packed_loader(packed)
        if config.exchanges:
            wait(RoleBarrier.EXCHANGE_DS, 32 * config.column_warps, state.at.key_warp)
            load_ds = products.exchanged_loader(state, memory.table.offset("dscore"))
        products.accumulate(state, warp.grads[QUERY], load_ds, QUERY, stage)
        wait(RoleBarrier.SECOND, 32 * config.role_warps)
        if not config.lagged:
            # DONE and SECOND: the first role has left S, and all of this one dK.
            warp.load_next(QUERY, 1, stage, head.member, index)
        warp.add_dq(head.member, index)

    def _gradients(self, dscore: mma.Accumulator, stage: Any) -> list[Int32]:
        """Returns pairs of dS^T, and stores them in place of P, which the first role has left there."""
        products, n_blocks = self.warp.products, self.warp.products.score_blocks[1]
        _, lane_column = accumulator_lane(self.warp.state.at.lane)
        stats = products.statistics(self.warp.state, stage, 1) + (self.warp.first_query() + lane_column) * 8
        start = products.memory.table.offset("dscore")
        address = products.score_address(self.warp.state, start, self.warp.first_query())
        packed: list[Any] = [None] * (len(dscore) // 2)
        pairs: dict[int, list[Float32]] = {}
        for i, offset in products.pair_offsets():
            n = i // 2 % n_blocks
            if n not in pairs:
                pairs[n] = ptx.load_shared_pairs(stats + 64 * n)
            p = ptx.unpack(ptx.load_shared(address + offset), dtype="f16")
            ds = [p[e] * (dscore[2 * i + e] - pairs[n][1 + 2 * e]) for e in range(2)]
            packed[i] = ptx.pack(*ds, dtype=products.mma_dtype)
            ptx.store_shared(address + offset, packed[i])
        return packed
