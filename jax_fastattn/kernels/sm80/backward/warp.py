# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a warp of any role of `dkdv_dq.py` has and does; `roles.py` and `single_role.py` say when."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.device import mma, ptx
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import Pair
from jax_fastattn.kernels.features.places import Head, ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig, RoleBarrier
from jax_fastattn.kernels.sm80.backward.dq_reduce import DqReduce
from jax_fastattn.kernels.sm80.backward.products import DOUT, QUERY, Products
from jax_fastattn.kernels.sm80.backward.state import DkdvDqState
from jax_fastattn.kernels.sums.head_sums import head_sums
from jax_fastattn.kernels.sums.plane_products import DscoreTile, PlaneProducts
from jax_fastattn.kernels.sums.row_means import MEAN_NBYTES
from jax_fastattn.kernels.sums.sums import DscorePair, HeadSums, LaneKeys
from jax_fastattn.kernels.sums.units import over_ds
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.lists import TileBits


def wait(barrier: RoleBarrier, threads: int, index: Any = 0) -> None:
    """Arrives at a barrier of `threads` threads and waits for the others; `index` picks one of several barriers."""
    cute.arch.barrier(barrier_id=barrier.at(index), number_of_threads=threads)


def arrive(barrier: RoleBarrier, threads: int, index: Any = 0) -> None:
    """Arrives at a barrier."""
    cute.arch.barrier_arrive(barrier_id=barrier.at(index), number_of_threads=threads)


def copied_by(role: int, config: DkdvDqConfig) -> str:
    """Returns what one of two roles copies: Q or dO, whichever the other one may still read when it copies."""
    return QUERY if (role == 0) == config.lagged else DOUT


@dataclass(frozen=True, eq=False)
class Warp:
    """What a warp of any role has, and does.

    Attributes:
        products: copies and products.
        reduce: what dQ is added by.
        state: device values of the kernel.
        grads: registers of the gradients that the role sums up: dV (`DOUT`), dK (`QUERY`).
        due: what `reduce` keeps from tile to tile.
        sums: gradients that are sums of dS over the queries of a head, if the role has dS.
        plane: such a gradient by products with mean keys of rows; None if there is none.
        survival: the factor that dropout leaves to the sum of dV, the factor of the last head; None without.
    """

    products: Products
    reduce: DqReduce
    state: DkdvDqState
    grads: dict[str, cute.Tensor]
    due: cute.Tensor | None
    sums: tuple[HeadSums, ...]
    plane: PlaneProducts | None
    survival: cute.Tensor | None

    @classmethod
    def start(cls, products: Products, reduce: DqReduce, state: DkdvDqState, *computed: str) -> "Warp":
        """Returns the warp with its registers, given the gradients that its role sums up."""
        grads = {which: products.zeros(which) for which in computed}
        # Only the role that computes dK has dS.
        sums, plane = (), None
        if QUERY in computed and products.spec.has_row_means:
            plane = PlaneProducts.start(products.spec, *products.score_blocks)
        elif QUERY in computed:
            sums = head_sums(products.spec, *products.score_blocks)
        survival = None
        if DOUT in computed and state.score.drops:
            survival = cute.make_rmem_tensor((1,), Float32)
            survival.fill(1.0)
        if products.summed_tiles:
            for which, acc in grads.items():
                products.store_numbers(state, acc, which, add=False)
        return cls(products, reduce, state, grads, reduce.start(), sums, plane, survival)

    def finish(self, scale: Float32) -> None:
        """Stores the role's gradients, when no warp of the CTA reads K and V anymore: their tiles may take them."""
        self.reduce.count(self.state, self.due)
        cute.arch.cp_async_wait_group(0)
        if self.products.config.roles == 1:
            cute.arch.sync_threads()
        else:
            ptx.sync_apart()
        self._finish_gradients(scale)

    def empty(self, scale: Float32) -> None:
        """Adds the role's gradients to global memory, and begins their sums anew; `scale` multiplies q . k."""
        self._finish_gradients(scale)
        for acc in self.grads.values():
            acc.fill(0.0)

    def _finish_gradients(self, scale: Float32) -> None:
        back = 2.0 ** -gradient.log2_probability_factor(self.products.spec, self.products.config)
        units = self.state.units()
        for which, acc in self.grads.items():
            if units is not None:
                factor = Float32(units.over_p) if which == DOUT else over_ds(units, scale)
            else:
                factor = Float32(back) if which == DOUT else scale * back
            if which == DOUT and self.survival is not None:
                factor = factor * self.survival[0]
            self.products.finish(self.state, acc, which, factor)

    def begin_head(self, score: Score) -> None:
        """Begins the sums of a query head."""
        for kind in self._head_sums:
            kind.clear()
        factor = score.survival()
        if self.survival is not None and factor is not None:
            self._change_survival(self.survival, factor)

    def _change_survival(self, survival: cute.Tensor, factor: Float32) -> None:
        """Takes the factor of a head to dV, whose sum has the factor of the head before: `jax.vmap` may map rates."""
        change, dv = survival[0] / factor, self.grads[DOUT]

        def rescale() -> None:
            for i in range(cute.size(dv)):
                dv[i] = dv[i] * change

        if self.products.spec.group > 1:
            cutlass.if_generate(change != Float32(1.0), rescale)
        survival[0] = factor

    def end_head(self, member: Int32) -> None:
        """Stores the sums of a query head of the group."""
        for kind in self._head_sums:
            kind.store(self._keys(member))

    @property
    def _head_sums(self) -> Sequence[HeadSums | PlaneProducts]:
        return self.sums if self.plane is None else (self.plane,)

    def _keys(self, member: Int32) -> LaneKeys:
        """Returns the lane's keys in a query head of the group. Warps that share keys have planes of their own."""
        at, heads, config = self.state.at, self.state.operands.heads, self.products.config
        row, column = accumulator_lane(at.lane)
        head = at.sequence.queries.head(heads, at.kv_head * self.products.spec.group + member)
        plane = head * config.column_warps + at.column_warp
        log2_factor, units = gradient.log2_probability_factor(self.products.spec, config), self.state.units()
        factor = 2.0**-log2_factor if log2_factor else None
        return LaneKeys(
            buffers=self.state.buffers,
            head=plane,
            length=at.sequence.keys.length,
            first=at.row + at.warp_row + row,
            column=column,
            factor=factor if units is None else units.over_ds,
        )

    def add_to_sums(self, pair: int, values: list[Float32]) -> None:
        """Adds a pair of dS^T to the sums, given its index."""
        for kind in self.sums:
            kind.add(DscorePair(pair, values))

    def add_to_plane(self, pairs: list[Pair], stage: Any) -> None:
        """Adds the warp's part of dS^T of a stage to the gradient of a plane, given the pairs of dS^T."""
        if self.plane is None:
            return
        # Read anew, the lane and its first key live in no register until then.
        at, lane = self.state.at, ptx.thread_index() & 31
        means = self.products.means(self.state, stage) + self.first_query() * MEAN_NBYTES
        self.plane.add(DscoreTile(pairs, means, lane, at.row + at.warp_row + (lane >> 2)))

    def add_dq(self, member: Int32, index: Int32) -> None:
        """Computes the warp's part of dQ of a tile and adds it up."""
        entry = self.state.visit.entry(index)
        is_first = self.reduce.wait(self.state, self.due, member, entry)
        tile = self.state.visit.tile_of(entry)
        self.reduce.accumulate(self.state, member, tile, self.products.dq(self.state), is_first)

    def first_row(self, index: Int32) -> Int32:
        """Returns the first query of the tile at a position, or of the last tile if that is past it."""
        visit = self.state.visit
        if visit.entries is not None:  # A full list may end with its array.
            index = Int32(cutlass.min(index, visit.end - 1))
        return visit.tile(index) * self.products.config.queries

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

    def mask(self, score: Score, acc: mma.Accumulator, tile: ScoreTile, bits: Bits | None) -> None:
        """Zeroes what belongs to queries that do not see a key, or to keys past the end.

        Keys past the end have no gradients, but an infinite P of theirs times a K of zero would get into dQ.

        Args:
            score: maps products to probabilities of the head.
            acc: P or weights, changed in place.
            tile: where they lie.
            bits: what `load_bits` returned.
        """
        seen = self._limits(tile) if bits is None else bits
        score.hide(acc, tile, seen, Float32(0.0), check_low=self.state.visit.edges.low)

    def _limits(self, tile: ScoreTile) -> list[plan.Limits]:
        """Returns the queries that each of the lane's keys is seen by."""
        products, state, limits = self.products, self.state, []
        for i in range(2 * products.row_blocks):
            row = tile.row + 8 * i
            limit = state.bounds.query_limits(row)
            limits.append(plan.Limits(limit.low, ptx.where(row < state.bounds.key_end, limit.high, Int32(0))))
        return limits

    def load_bits(self, head: "QueryHead", index: Int32, first_query: Any) -> Bits | None:
        """Loads the bits of an edge tile of a list, of the scores from a query of the tile on; None without lists."""
        if head.bits is None:
            return None
        at, tile = self.state.at, self.state.visit.tile(index)
        assert self.products.config.queries <= 64, "queries of a lane are in one word"
        blocks = range(self.products.row_blocks)
        words = [head.bits.fragment(tile, at.warp_row // 16 + m, at.lane)[0] for m in blocks]
        # A word has two bits for each 8 queries.
        return Bits([[word >> (first_query // 4)] for word in words])

    def zero_dead_queries(
        self, head: "QueryHead", index: Int32, stage: Any, copied: Sequence[str], part: int = 0
    ) -> None:
        """Zeroes what the thread has copied of queries of an edge tile of a list that see no key of it.

        Args:
            index: position of the tile.
            stage: the stage of the copies, which have to be there.
            copied: which operands.
            part: the part of the tile.
        """
        products, visit, bits = self.products, self.state.visit, head.bits
        if bits is None:
            return
        config, entry = products.config, visit.entry(index)
        threads = 32 * (config.role_warps if config.roles == 2 else config.warps)

        def zero() -> None:
            live = bits.live_rows(visit.tile_of(entry))[part * config.part // 32 :]
            for which in copied:
                products.zero_dead_queries(self.state, which, threads, live, stage)

        cutlass.if_generate(Boolean(visit.has_dead_rows(entry)), zero)

    def head(self, member: Int32) -> "QueryHead":
        """Returns a query head of the group."""
        at, group = self.state.at, self.products.spec.group
        head = Head(at.sequence.queries.batch, at.kv_head * group + member, at.sequence.starts)
        bits = None if self.state.bits is None else self.state.bits.of(member)
        return QueryHead(member, self.state.score.start(head), bits)

    # What both of two roles do.

    def first_query(self) -> Int32:
        """Returns the warp's first query in the tile."""
        return self.state.at.column_warp * self.products.score_columns

    def begin(self, step: Int32, barrier: RoleBarrier, zero_dead: Callable[[Any], None]) -> Any:
        """Waits for a tile's copies, and for the role to have left the tile before; returns the stage.

        Args:
            step: how many tiles were visited before.
            barrier: the barrier of the role.
            zero_dead: zeroes what the thread has copied of dead queries, given the stage.
        """
        config = self.products.config
        cute.arch.cp_async_wait_group(0)
        if self.state.bits is not None:
            zero_dead(step % 2 if config.lagged else 0)
        if config.lagged:
            # All threads have copied the first tile, and K and V.
            role_threads = 32 * config.role_warps
            cutlass.if_generate(step == 0, ptx.sync_apart, lambda: wait(barrier, role_threads))
            return step % 2
        ptx.sync_apart()
        return 0

    def load_next(self, role: int, stage: Any, member: Int32, index: Int32) -> None:
        """Starts a role's copies of the tile after this one, and the copies of its statistics."""
        products, config, state = self.products, self.products.config, self.state
        member, index = self.after(member, index)

        def load() -> None:
            target, first = (1 - stage if config.stages == 2 else 0), self.first_row(index)
            products.load_queries(state, copied_by(role, config), 32 * config.role_warps, member, first, target)
            products.load_statistics(state, state.at.role_thread, member, first, target, role)
            if role == 0:
                products.load_bias(state, member, first)

        cutlass.if_generate(self.exists(member, index), load)
        cute.arch.cp_async_commit_group()


@dataclass(frozen=True)
class QueryHead:
    """A query head whose tiles of queries visit the tile of keys.

    Attributes:
        member: which head of the group it is.
        score: maps products to probabilities of the head.
        bits: which scores of edge tiles of a list count; None without lists.
    """

    member: Int32
    score: Score
    bits: TileBits | None
