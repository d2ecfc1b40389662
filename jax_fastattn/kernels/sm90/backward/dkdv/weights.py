# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""P and dS of the warpgroups of `kernel.py`, and the weights that pass from one warpgroup to the other.

Weights are the factors of dP - delta in dS, see `score.py`. Their pairs lie in shared memory in the order of the
registers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.kept import keep_number, keep_pair, mark, number_masks, unmark
from jax_fastattn.kernels.device.products import Pair, WarpgroupWords, Words
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import DkdvBarrier
from jax_fastattn.kernels.sm90.backward.key_schedule import QueryHead
from jax_fastattn.kernels.sm90.backward.mask import QueryMask
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sums.sums import DscorePair, HeadSums
from jax_fastattn.kernels.visits.visit import Edges
from jax_fastattn.kernels.weights import Weights

# Returns the fragment of a product of a tile of queries. Arguments: the tile of keys, the position of the tile of
# queries, its edges or None if it is full, how many products may stay in flight, and whether it is the first tile.
Differentiate = Callable[[QueryHead, Int32, Edges | None, int, bool], list[Pair]]


@dataclass(frozen=True, eq=False)
class WeightExchange:
    """Emits the code that turns the product of a warpgroup into pairs.

    Attributes:
        words: what P and dS become.
        crossing: what weights become.
        thread: index of this thread in the CTA.
        lane_column: the lane's first column of the product.
        mask: what the lane's rows see.
        stage: stage of the rings of Q and dO, and the parity of its lap.
        product: the accumulator `[64, queries]` of S^T or dP^T.
        sums: gradients that are sums of dS over the queries of a head.
    """

    spec: KernelSpec
    words: WarpgroupWords
    crossing: Words
    shared: BackwardShared
    thread: Int32
    lane_column: Int32
    mask: QueryMask
    stage: wgmma.Uniform
    product: cute.Tensor
    sums: tuple[HeadSums, ...]

    def give(self, head: QueryHead, index: Int32, edges: Edges | None, flying: int, first: bool) -> list[Pair]:
        """Returns what is kept of P of S, and gives the weights to the other warpgroup; see `Differentiate`.

        With dropout the signs of weights say which are dropped, unless weights have signs of their own.
        """
        stage, config = self.stage[0], self.shared.memory.config
        lse2 = self._stats(stage, 0)
        masks = self._draw(head, index) if head.score.drops else None
        warpgroup.wait_group(flying)
        head = head.load(self.shared, index, stage)
        edge = self._edge(head, index, edges, first=first)
        tile = self.mask.tile(head.work, index)
        reading = head.score.read(tile)
        # Of each 8 queries the lane has two columns.
        lses = [lse2[i // 4 * 2 + i % 2] for i in range(cute.size(self.product))]
        pairs, weights = Weights(head.score, tile, self.product).weighed_pairs(
            self.words, self.crossing, lambda i, at: reading.gradient(self.product[i], lses[i], at, edge)
        )
        if masks is not None:
            pairs = [keep_pair(*x) for x in zip(pairs, masks, strict=True)]
            if head.score.marks:
                weights = [mark(*x) for x in zip(weights, masks, strict=True)]
        stored = [word for pair in weights for word in (pair if isinstance(pair, tuple) else (pair,))]
        for i in range(0, len(stored), 4):
            ptx.store_shared_chunk(self._address(stage, i), stored[i : i + 4])
        cute.arch.barrier_arrive(barrier_id=DkdvBarrier.WEIGHTS.at(stage), number_of_threads=config.consumer_threads)
        return pairs

    def take(self, head: QueryHead, index: Int32, edges: Edges | None, flying: int, first: bool) -> list[Pair]:
        """Returns dS of dP with the weights of the other warpgroup, 0 where hidden; see `Differentiate`."""
        del edges, first
        stage, config = self.stage[0], self.shared.memory.config
        delta = self._stats(stage, 1)
        drawn = self._draw(head, index) if head.score.draws_again else None
        warpgroup.wait_group(flying)
        cute.arch.barrier(barrier_id=DkdvBarrier.WEIGHTS.at(stage), number_of_threads=config.consumer_threads)
        pairs, count = [], 4 // self.crossing.columns(1)
        for i in range(0, config.queries // 4, count):
            for j, kept in enumerate(self._load(stage, i, count), i):
                dprobabilities = [Float32(self.product[2 * j + e]) for e in range(2)]
                masks = None if drawn is None else number_masks(drawn[j])
                if head.score.marks:
                    kept, masks = unmark(kept)
                if masks is not None:
                    dprobabilities = [keep_number(*x) for x in zip(dprobabilities, masks, strict=True)]
                weights = self.crossing.numbers(kept)
                values = [weights[e] * (dprobabilities[e] - delta[j // 2 * 2 + e]) for e in range(2)]
                for kind in self.sums:
                    kind.add(DscorePair(j, values))
                pairs.append(self.words.pair(*values))
        return pairs

    def _draw(self, head: QueryHead, index: Int32) -> list[Int32]:
        """Returns the masks of dropout, drawn while the product runs."""
        keep = head.score.keep(self.mask.tile(head.work, index))
        assert keep is not None
        return [ptx.move(keep(i)) for i in range(cute.size(self.product) // 2)]

    def _edge(self, head: QueryHead, index: Int32, edges: Edges | None, *, first: bool) -> Edge | None:
        """Returns what is hidden in a tile of queries; None if it is full."""
        if edges is None:
            return None
        if self.spec.listed:
            return self.mask.listed_edge(head, index, self.stage[0], first=first)
        return self.mask.edge(head, index, edges)

    def _stats(self, stage: Int32, which: int) -> list[Float32]:
        """Returns the log-sum-exps (0) or delta (1) of the queries of the lane's columns, two of each 8 queries."""
        memory = self.shared.memory
        address = self.shared.regions.stage("stats", 2 * stage + which) + self.lane_column * 4
        blocks = range(memory.config.queries // 8)
        return [x for block in blocks for x in ptx.load_shared_pair(address + 32 * block)]

    def _load(self, stage: Int32, first: int, count: int) -> list[Pair]:
        """Loads 16 bytes of the lane's weights: `count` pairs, each of which has one word or two."""
        size = 4 // count
        words = ptx.load_shared_chunk(self._address(stage, first * size))
        return words if size == 1 else list(zip(words[::2], words[1::2], strict=True))

    def _address(self, stage: Int32, word: int) -> Int32:
        """Returns the address of four words of the lane's pairs of weights; the next thread's four words follow."""
        return self.shared.regions.stage("weights", stage) + self.thread % 128 * 16 + word // 4 * 2048
