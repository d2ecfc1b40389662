# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What kernels of tangents keep of query rows: weights of keys, tangents of scores, and what becomes of their sums.

With P the weight of a key by the saved log-sum-exp, ds the tangent of its logit, u the tangent of its value, and c any
number of the row:

    W = P (ds - c)    mean = (sum(W) - c P_sink) / total    total = sum(P) + P_sink
    dlse = mean + c   dout = sum(W v + P u) / total - mean out

The saved log-sum-exp is rounded, so weights of a row add up to nearly 1: hence `total`. Output and log-sum-exp do not
depend on c in exact arithmetic. But `out` is rounded, and where all logits of a row move alike, dout is a small
difference of large products. So c is the mean of ds over the keys of the first tile in which the row sees a key. With a
soft cap, c is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import ptx, softmax
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import result_words
from jax_fastattn.kernels.device.row_store import ResultRow, RowStore, strided
from jax_fastattn.kernels.device.sequences import Span
from jax_fastattn.kernels.features.places import Head, ScoreTile
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score

# A lane has this many rows, 8 apart.
ROWS = 2


class RowPlace(NamedTuple):
    """Says where a lane's rows lie.

    Attributes:
        queries: the rows of the sequence.
        query_end: rows from there on are padding.
        head: the query head.
        heads: query heads of a batch entry.
        row: the lane's first row.
        quad_lane: index of the lane among the four that share its rows.
    """

    queries: Span
    query_end: Int32
    head: Int32
    heads: Int32
    row: Int32
    quad_lane: Int32

    def element(self, i: int) -> Int64:
        """Returns the index of a row in an array `[batch, rows, heads]`."""
        return self.queries.row_head(self.row + 8 * i, self.heads, self.head)

    def exists(self, i: int) -> Boolean:
        """Returns whether a row is in the array."""
        return Boolean(self.row + 8 * i < self.queries.length)

    def is_inside(self, i: int) -> Boolean:
        """Returns whether a row is not padding."""
        return Boolean(self.row + 8 * i < self.query_end)


class RowEnd(NamedTuple):
    """Says how the sums of a row become its tangents.

    Attributes:
        live: whether it sees a key.
        factor: a factor on the sums of products.
        mean: a factor on the output, whose product is subtracted.
        dlse: the tangent of its log-sum-exp.
    """

    live: Boolean
    factor: Float32
    mean: Float32
    dlse: Float32


@dataclass(frozen=True, eq=False)
class TangentRows:
    """Holds the rows of a lane.

    Attributes:
        place: where they lie.
        lse2: saved log-sum-exps in base 2; +inf where a row has no weight.
        totals: the lane's part of sums of P.
        means: the lane's part of sums of W.
        shifts: c of each row.
        waits: whether a row has weights, but has seen no key so far, so that it has no c: 1 or 0.
    """

    spec: KernelSpec
    buffers: Buffers
    place: RowPlace
    lse2: list[Float32]
    totals: cute.Tensor
    means: cute.Tensor
    shifts: cute.Tensor
    waits: cute.Tensor

    @classmethod
    def start(cls, spec: KernelSpec, buffers: Buffers, place: RowPlace) -> "TangentRows":
        """Returns rows that have seen no key."""
        registers = [cute.make_rmem_tensor((ROWS,), Float32) for _ in range(3)]
        for x in registers:
            x.fill(0.0)
        lse2, waits, saved = [], cute.make_rmem_tensor((ROWS,), Int32), cute.make_rmem_tensor((ROWS,), Float32)
        saved.fill(softmax.NEVER)

        def load(i: int) -> None:
            saved[i] = ptx.load_global(buffers.lse.toint() + place.element(i) * 4) * softmax.LOG2_E

        for i in range(ROWS):
            cutlass.if_generate(place.is_inside(i), lambda i=i: load(i))
            has_weights = Boolean(saved[i] != Float32(softmax.NEVER))
            lse2.append(ptx.where(has_weights, Float32(saved[i]), Float32(float("inf"))))
            waits[i] = Int32(has_weights)
        return cls(spec, buffers, place, lse2, *registers, waits)

    def weigh(self, score: Score, tile: ScoreTile, scores: Accumulator, edge: Edge | None) -> list[Float32] | None:
        """Turns products S into P, in place, and adds them to the sums of rows.

        Args:
            score: maps products to probabilities of the head.
            tile: where the scores lie.
            edge: what an edge tile hides.

        Returns:
            P times the derivative of each logit; None where that is 1, or where no score moves.
        """
        score, weights = score.read(tile), []
        for i in range(_size(scores)):
            at = tile.at(i)
            scores[i], weight = score.gradient(scores[i], self.lse2[at.i], at, edge)
            weights.append(weight)
        for row in range(ROWS):
            self.totals[row] = self.totals[row] + softmax.tree_sum([scores[i] for i in _of_row(scores, tile, row)])
        return weights if score.steps and self.spec.moves_scores else None

    def move(
        self,
        tile: ScoreTile,
        products: tuple[Accumulator, Accumulator],
        weights: list[Float32] | None,
        scale: Float32,
        edge: Edge | None,
    ) -> None:
        """Turns tangents of products into W, in place, and adds them to the sums of rows.

        Args:
            tile: where the scores lie.
            products: P, and the tangents of S.
            weights: what `weigh` returned.
            scale: the factor on products.
            edge: what an edge tile hides; tangents of hidden scores may be NaN.
        """
        scores, moves = products
        if weights is None:
            self._shift(tile, lambda i: _seen(edge, scores[i] * moves[i], tile.at(i)), scores, scale)
        for i in range(_size(scores)):
            at = tile.at(i)
            if weights is None:
                moves[i] = scores[i] * ptx.fma(moves[i], scale, -Float32(self.shifts[at.i]))
            else:
                moves[i] = weights[i] * (moves[i] * scale)
            moves[i] = _seen(edge, moves[i], at)
        for row in range(ROWS):
            self.means[row] = self.means[row] + softmax.tree_sum([moves[i] for i in _of_row(moves, tile, row)])

    def _shift(self, tile: ScoreTile, weighed: Callable[[int], Float32], scores: Accumulator, scale: Float32) -> None:
        """Sets c of rows that have none, and that see a key of this tile.

        Args:
            weighed: returns P of an element times the tangent of its product.
            scores: P.
        """

        def set_shifts() -> None:
            for row in range(ROWS):
                indices = _of_row(scores, tile, row)
                total = softmax.quad_sum(softmax.tree_sum([scores[i] for i in indices]))
                moved = softmax.quad_sum(softmax.tree_sum([weighed(i) for i in indices]))
                sets = Boolean((self.waits[row] != 0) & (total > Float32(0.0)))
                self.shifts[row] = ptx.where(sets, moved * scale * ptx.reciprocal(total), Float32(self.shifts[row]))
                self.waits[row] = ptx.where(sets, Int32(0), Int32(self.waits[row]))

        waits = Boolean((Int32(self.waits[0]) | Int32(self.waits[1])) != 0)
        cutlass.if_generate(cute.arch.vote_any_sync(waits), set_shifts)

    def store(self, score: Score, head: Head, acc: Accumulator) -> None:
        """Stores both tangents, given the accumulator of `W v + P u`, which changes."""
        place, spec = self.place, self.spec
        score = score.finish(head)
        ends = [self._end(score, i) for i in range(ROWS)]
        for i, end in enumerate(ends):
            cutlass.if_generate(end.live, lambda i=i, end=end: self._finish(acc, i, end))
            address = self.buffers.lse_tangent.toint() + place.element(i) * 4
            stores = Boolean(place.exists(i) & (place.quad_lane == 0))
            cutlass.if_generate(stores, lambda address=address, x=end.dlse: ptx.store_global(address, x))
        nbytes = spec.result_nbytes * spec.v_head_dim
        first = self.buffers.out_tangent.toint() + place.queries.row_head(Int32(0), place.heads, place.head) * nbytes
        rows = RowStore(
            address=strided(first, Int64(place.heads) * nbytes),
            columns=spec.v_head_dim,
            row=place.row,
            end=place.queries.length,
            quad_lane=place.quad_lane,
            words=result_words(spec),
        )
        rows.store(acc, [ResultRow(end.live) for end in ends])

    def _end(self, score: Score, i: int) -> RowEnd:
        """Returns what becomes of a row, given a score with what ends rows."""
        seen, mean = softmax.quad_sum(self.totals[i]), softmax.quad_sum(self.means[i])
        inside, shift = self.place.is_inside(i), Float32(self.shifts[i])
        _, total, weight = score.finish_row(self.lse2[i], seen)
        factor = ptx.where(total == Float32(0.0), Float32(0.0), ptx.reciprocal(total))
        mean = mean * weight
        if codes.SINKS in self.spec.features:
            mean = ptx.fma(-shift, total - seen * weight, mean)
        mean, live = mean * factor, Boolean(inside & (seen != Float32(0.0)))
        return RowEnd(live, weight * factor, mean, ptx.where(live, mean + shift, Float32(0.0)))

    def _finish(self, acc: Accumulator, i: int, end: RowEnd) -> None:
        """Scales a row of the accumulator, and takes off what the mean adds."""
        nbytes, columns = self.spec.result_nbytes, self.spec.v_head_dim
        first = self.buffers.out.toint() + self.place.element(i) * (nbytes * columns)
        first = first + Int64(self.place.quad_lane * (2 * nbytes))
        for block in range(columns // 8):
            out = self._load_pair(first + 8 * nbytes * block) if self.spec.moves_scores else [Float32(0.0)] * 2
            for half in range(2):
                index = 4 * block + 2 * i + half
                x = acc[index] * end.factor
                acc[index] = ptx.fma(-end.mean, out[half], x) if self.spec.moves_scores else x

    def _load_pair(self, address: Int64) -> list[Float32]:
        """Loads two neighbors of the output."""
        if self.spec.result_nbytes == 4:
            return [ptx.from_bits(x) for x in ptx.load_constant_pair(address)]
        return result_words(self.spec).numbers(ptx.load_constant_int(address))


def _size(acc: Accumulator) -> int:
    return len(acc) if isinstance(acc, list) else cute.size(acc)


def _of_row(acc: Accumulator, tile: ScoreTile, row: int) -> list[int]:
    """Returns the indices of the elements of one of the lane's rows."""
    return [i for i in range(_size(acc)) if tile.at(i).i == row]


def _seen(edge: Edge | None, x: Float32, at: Any) -> Float32:
    return x if edge is None else edge.select(x, at)
