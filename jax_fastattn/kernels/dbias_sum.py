# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The sum of dS that a warp of `dbias.py` of either family keeps in registers: what it adds, and the result.

For the gradient of a matrix that is an element for each score. For a bias of rows it is a term for each `ROW_TERM_KEYS`
keys of a row, and XLA adds up the terms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments import Scalars, Sizes
from jax_fastattn.kernels.dbias_schedule import Buffers, DbiasSchedule, DbiasTile, ItemList
from jax_fastattn.kernels.dbias_tiles import KEYS, ROW_TERM_KEYS, ROWS, key_list_tiles
from jax_fastattn.kernels.device import copies, ptx, softmax
from jax_fastattn.kernels.features.bits import Bits, LiveColumns
from jax_fastattn.kernels.features.bounds import Visibility
from jax_fastattn.kernels.features.places import Element, Head, ScoreTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.plan import Limits
from jax_fastattn.kernels.score import Edge, Score
from jax_fastattn.spec import UNBOUNDED


class Lane(NamedTuple):
    """Where a thread's part of a tile lies.

    Attributes:
        thread: its index in the CTA.
        fragment: the first 16 rows of the warp, counted in blocks of 16 from the first row of the tile.
        row: the lane's first accumulator row, counted from the first one of the tile; others follow 8 apart.
        column: its first accumulator column, counted likewise.
        warp_column: the first column of the warp; 0 if warps have all of them.
    """

    thread: Int32
    fragment: Int32
    row: Int32
    column: Int32
    warp_column: Int32 | int = 0


class Hidden(NamedTuple):
    """What is known of an item whose tile may have hidden pairs.

    Attributes:
        kind: see `dbias_schedule.HIDDEN`.
        head: its batch entry and query head.
        told: returns what tells hidden pairs, see `DbiasSchedule.look`.
        lse2: the log-sum-exps of the lane's rows, infinite where a query sees nothing.
    """

    kind: Int32
    head: Head
    told: Callable[[], list[Int32]]
    lse2: list[Float32]


@dataclass(frozen=True, eq=False)
class DbiasSum:
    """The sum of a warp.

    Attributes:
        spec: the compile key.
        schedule: the tiles of the CTA.
        buffers, sizes: of the launch.
        lane_rows: how many accumulator rows a lane has.
        n_blocks: blocks of 8 columns of its scores.
        total: the sum.
    """

    spec: KernelSpec
    schedule: DbiasSchedule
    buffers: Buffers
    sizes: Scalars | Sizes
    lane_rows: int
    n_blocks: int
    total: cute.Tensor

    @classmethod
    def start(
        cls, schedule: DbiasSchedule, launch: tuple[Buffers, Scalars | Sizes], lane_rows: int, n_blocks: int
    ) -> "DbiasSum":
        """Returns a sum of 0."""
        columns = n_blocks * 8 // ROW_TERM_KEYS if schedule.spec.drow_bias else 2 * n_blocks
        total = cute.make_rmem_tensor((lane_rows * columns,), Float32)
        total.fill(0.0)
        return cls(schedule.spec, schedule, *launch, lane_rows, n_blocks, total)

    @property
    def count(self) -> int:
        """How many scores a lane has."""
        return self.lane_rows * 2 * self.n_blocks

    def scores(self, tile: DbiasTile, lane: Lane) -> ScoreTile:
        """Returns where the lane's scores lie."""
        return ScoreTile(tile.row * ROWS + lane.row, tile.column, KEYS, lane.column, self.n_blocks)

    def add(
        self,
        scores: ScoreTile,
        weight: Callable[[int], Float32],
        change: Callable[[int, Element], Float32],
        edge: Edge | None,
    ) -> None:
        """Adds dS, 0 where a query does not see the key: what is there may be no number.

        Args:
            scores: where the lane's scores lie.
            weight: the weight of an element, see `score.py`.
            change: dP - delta of an element.
            edge: what is hidden.
        """
        for i in range(self.count):
            at = scores.at(i)
            difference = change(i, at)
            place = self._term(at.i, at.column) if self.spec.drow_bias else i
            if edge is None:
                self.total[place] = ptx.fma(weight(i), difference, self.total[place])
            else:
                self.total[place] = self.total[place] + edge.select(weight(i) * difference, at)

    def edge(self, score: Score, tile: DbiasTile, lane: Lane, hidden: Hidden) -> Edge:
        """Returns what is hidden in a tile."""
        if self.spec.alike:
            return score.edges([LiveColumns([word >> lane.column for word in hidden.told()])] * self.lane_rows)
        if self.spec.listed:
            return score.edges(self._bits(tile, lane, hidden))
        bounds = self.schedule.bounds(hidden.head, self.buffers, self.sizes)
        first, column = tile.row * ROWS + lane.row, tile.column * KEYS + lane.column
        rows = []
        for i in range(self.lane_rows):
            row = first + 8 * i
            limits = bounds.key_limits(row)
            if bounds.kind.query_end:
                limits = Limits(limits.low, ptx.where(row < bounds.query_end, limits.high, Int32(-UNBOUNDED)))
            rows.append(Visibility.of(limits, column, bounds.kind.left))
        return score.edges(rows)

    def _bits(self, tile: DbiasTile, lane: Lane, hidden: Hidden) -> list:
        """Returns which scores of each of the lane's rows count, by lists."""
        items = ItemList(key_list_tiles(self.spec), tile, self.buffers, self.sizes, *hidden.told())
        rows = []
        for block in range(self.lane_rows // 2):
            words = items.words(hidden.kind, lane.fragment + block if block else lane.fragment, lane.thread & 31)
            if self.n_blocks * 8 < KEYS:
                words = [ptx.where(lane.warp_column == 0, *words)]
            # A query that sees nothing, such as padding, may be in a full tile.
            dead = [x == Float32(float("inf")) for x in hidden.lse2[2 * block : 2 * block + 2]]
            found = [[ptx.where(x, Int32(0), word) for word in words] for x in dead]
            rows += [Bits([words]).rows()[i] for i, words in enumerate(found)]
        return rows

    # The result.

    def store(self, tile: DbiasTile, lane: Lane) -> None:
        """Stores the sum."""
        for i in range(self.lane_rows):
            row = tile.row * ROWS + lane.row + 8 * i
            exists = Boolean(row < self.sizes.query_length)
            if self.spec.drow_bias:
                self._store_terms(tile, lane, row, i, exists)
                continue
            first = (Int64(tile.target) * self.sizes.query_length + row) * self.sizes.bias_pitch
            store = self._store_wide if self.spec.dbias_dtype == "float32" else self._store_rounded
            store(tile, lane, first, i, exists)

    def _pair(self, i: int, block: int) -> list[Float32]:
        """Returns two neighbors of one of the lane's rows."""
        m, half = divmod(i, 2)
        total: Any = self.total
        return [total[4 * (m * self.n_blocks + block) + 2 * half + e] for e in range(2)]

    def _term(self, i: int, column: int) -> int:
        """Returns the index of the term of a bias of rows that has a column of one of the lane's rows."""
        return i * (self.n_blocks * 8 // ROW_TERM_KEYS) + column // ROW_TERM_KEYS

    def _store_terms(self, tile: DbiasTile, lane: Lane, row: Int32, i: int, exists: Boolean) -> None:
        """Stores the terms of a row of the lane: one lane of the quad stores their sums over the quad."""
        sizes, first = self.sizes, (tile.column * KEYS + lane.warp_column) // ROW_TERM_KEYS
        count = copies.count(sizes.key_length, ROW_TERM_KEYS)
        for column in range(0, self.n_blocks * 8, ROW_TERM_KEYS):
            total, term = softmax.quad_sum(self.total[self._term(i, column)]), first + column // ROW_TERM_KEYS
            place = (Int64(tile.target) * count + term) * sizes.query_length + row
            address = self.buffers.dbias.toint() + place * 4
            stores = Boolean(exists & Boolean(Boolean(term < count) & Boolean((lane.thread & 3) == 0)))

            def store(address: Int64 = address, total: Float32 = total) -> None:
                ptx.store_global(address, total)

            cutlass.if_generate(stores, store)

    def _store_wide(self, tile: DbiasTile, lane: Lane, first: Int64, i: int, exists: Boolean) -> None:
        """Stores a row of the lane in float32."""
        for block in range(self.n_blocks):
            column = tile.column * KEYS + 8 * block + lane.column
            address = self.buffers.dbias.toint() + (first + column) * 4
            pair = self._pair(i, block)

            def store(address: Int64 = address, pair: list[Float32] = pair) -> None:
                ptx.store_global_pair(address, *pair)

            cutlass.if_generate(Boolean(exists & (column < self.sizes.bias_pitch)), store)

    def _store_rounded(self, tile: DbiasTile, lane: Lane, first: Int64, i: int, exists: Boolean) -> None:
        """Stores a row of the lane in 16 bits: 16 bytes a lane, 64 neighboring bytes of a row the quad."""
        quad_lane = lane.thread & 3
        for block in range(0, self.n_blocks, 4):
            pairs = [
                ptx.pack(*self._pair(i, j), dtype=ptx.MMA_DTYPE[self.spec.dbias_dtype]) for j in range(block, block + 4)
            ]
            chunk = ptx.transpose_quad(pairs, quad_lane)
            column = tile.column * KEYS + 8 * (block + quad_lane) + lane.warp_column
            address = self.buffers.dbias.toint() + (first + column) * 2

            def store(address: Int64 = address, chunk: list[Int32] = chunk) -> None:
                ptx.store_global_chunk(address, chunk)

            cutlass.if_generate(Boolean(exists & (column < self.sizes.bias_pitch)), store)
