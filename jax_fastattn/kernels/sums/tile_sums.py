# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The sums that a warp of the dbias kernel of either family keeps in registers: what it adds, and the result.

Both kinds are `Sums` of the items of a tile, of which a launch has one.

The gradient of a matrix is a sum of dS for each score. The gradient of a bias of rows comes from three sums for each
row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import ptx, softmax
from jax_fastattn.kernels.device.products import Native
from jax_fastattn.kernels.features.places import Element, ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits, LiveColumns
from jax_fastattn.kernels.features.visible.bounds import Visibility
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sums.schedule import DbiasItem, DbiasSchedule, DbiasTile, ItemList, MatrixTile
from jax_fastattn.kernels.sums.tiles import KEYS, ROW_SUMS, ROWS, key_list_tiles
from jax_fastattn.kernels.tiles.plan import Limits
from jax_fastattn.limits import UNBOUNDED


class Lane(NamedTuple):
    """Where a thread's part of a tile lies.

    Attributes:
        thread: its index in the CTA.
        fragment: the first 16 rows of the warp, counted in blocks of 16 from the first row of the tile.
        row: the lane's first accumulator row, counted from the first one of the tile; others follow 8 apart.
        column: its first accumulator column, counted from the first one of the tile.
        warp_column: the first column of the warp; 0 if warps have all of them.
    """

    thread: Int32
    fragment: Int32
    row: Int32
    column: Int32
    warp_column: Int32 | int = 0


class ItemPart(NamedTuple):
    """What an item adds.

    Attributes:
        scores: where the lane's scores lie.
        weight: returns the weight of an element, see `score.py`.
        change: returns dP of an element, less delta if the sums are `centered`.
        edge: what is hidden; None if nothing is.
    """

    scores: ScoreTile
    weight: Callable[[int], Float32]
    change: Callable[[int, Element], Float32]
    edge: Edge | None


class TilePlace(NamedTuple):
    """Where a thread's sums are stored.

    Attributes:
        tile: the tile of the CTA.
        lane: the thread's part of it.
    """

    tile: DbiasTile
    lane: Lane


class Hidden(NamedTuple):
    """What is known of an item that may have hidden pairs.

    Attributes:
        kind: see `sums.schedule.HIDDEN`.
        told: returns what tells hidden pairs, see `DbiasSchedule.look`.
        lse2: the log-sum-exps of the lane's rows, infinite where a query sees nothing.
    """

    kind: Int32
    told: Callable[[], list[Int32]]
    lse2: list[Float32]


@dataclass(frozen=True, eq=False)
class DbiasSum:
    """The sums of a warp.

    Attributes:
        schedule: the tiles of the CTA.
        lane_rows: how many accumulator rows a lane has.
        n_blocks: blocks of 8 columns of its scores.
        total: the sums.
    """

    spec: KernelSpec
    schedule: DbiasSchedule
    buffers: Buffers
    sizes: Scalars | Sizes
    lane_rows: int
    n_blocks: int
    total: cute.Tensor

    @property
    def count(self) -> int:
        """How many scores a lane has."""
        return self.lane_rows * 2 * self.n_blocks

    def scores(self, item: DbiasItem, lane: Lane) -> ScoreTile:
        """Returns where the lane's scores lie."""
        return ScoreTile(item.row * ROWS + lane.row, item.column, KEYS, lane.column, self.n_blocks)

    def edge(self, score: Score, item: DbiasItem, lane: Lane, hidden: Hidden) -> Edge:
        """Returns what is hidden in an item."""
        score = score.start(item.head) if score.rules else score
        if self.spec.alike:
            return score.edges([LiveColumns([word >> lane.column for word in hidden.told()])] * self.lane_rows)
        if self.spec.listed:
            return score.edges(self._bits(item, lane, hidden))
        bounds = self.schedule.bounds(item.head, self.buffers, self.sizes)
        first, column = item.row * ROWS + lane.row, item.column * KEYS + lane.column
        rows = []
        for i in range(self.lane_rows):
            row = first + 8 * i
            limits = bounds.key_limits(row)
            if bounds.kind.query_end or self.spec.sums_diagonals:
                limits = Limits(limits.low, ptx.where(row < bounds.query_end, limits.high, Int32(-UNBOUNDED)))
            rows.append(Visibility.of(limits, column, bounds.kind.left))
        return score.edges(rows)

    def _bits(self, item: DbiasItem, lane: Lane, hidden: Hidden) -> list:
        """Returns which scores of each of the lane's rows count, by lists."""
        items = ItemList(key_list_tiles(self.spec), item, self.buffers, self.sizes, *hidden.told())
        rows = []
        for block in range(self.lane_rows // 2):
            words = items.words(hidden.kind, lane.fragment + block if block else lane.fragment, lane.thread & 31)
            if self.n_blocks * 8 < KEYS:
                words = [ptx.where(lane.warp_column == 0, *words)]
            # A query that sees nothing, such as padding, may be in a full tile.
            dead = [x == Float32(float("inf")) for x in hidden.lse2[2 * block : 2 * block + 2]]
            if self.spec.sums_diagonals:
                first = item.row * ROWS + lane.row + 16 * block
                dead = [Boolean(x | Boolean(first + 8 * i >= self.sizes.query_length)) for i, x in enumerate(dead)]
            found = [[ptx.where(x, Int32(0), word) for word in words] for x in dead]
            rows += [Bits([words]).rows()[i] for i, words in enumerate(found)]
        return rows

    def _add(self, place: int, x: Float32, y: Float32, at: Element, edge: Edge | None) -> None:
        """Adds a product to a sum; adds 0 where an element is hidden, since a hidden value may be no number."""
        if edge is None:
            self.total[place] = ptx.fma(x, y, self.total[place])
        else:
            self.total[place] = self.total[place] + edge.select(x * y, at)

    def _row(self, tile: DbiasTile, lane: Lane, i: int) -> tuple[Int32, Boolean]:
        """Returns one of the lane's rows, and whether it exists."""
        row = tile.row * ROWS + lane.row + 8 * i
        return row, Boolean(row < self.sizes.query_length)

    def clear(self) -> None:
        """Begins with a tile."""
        self.total.fill(0.0)


@dataclass(frozen=True, eq=False)
class _ScoreSum(DbiasSum):
    """A sum for each score of a tile."""

    # This says whether delta is subtracted from dP before dP is added.
    centered = True

    @classmethod
    def start(
        cls, schedule: DbiasSchedule, launch: tuple[Buffers, Scalars | Sizes], lane_rows: int, n_blocks: int
    ) -> Self:
        """Returns the registers."""
        total = _registers(lane_rows * 2 * n_blocks)
        return cls(schedule.spec, schedule, *launch, lane_rows, n_blocks, total)

    def keep(self, i: int, probability: Float32) -> None:
        """Takes P of an element, of which it needs the weight alone."""

    def add(self, part: ItemPart) -> None:
        """Adds an item."""
        for i in range(self.count):
            at = part.scores.at(i)
            self._add(i, part.weight(i), part.change(i, at), at, part.edge)

    def _pair(self, i: int, block: int) -> list[Float32]:
        """Returns two neighbors of one of the lane's rows."""
        m, half = divmod(i, 2)
        total: Any = self.total
        return [total[4 * (m * self.n_blocks + block) + 2 * half + e] for e in range(2)]


@final
@dataclass(frozen=True, eq=False)
class MatrixSum(_ScoreSum):
    """The sum of dS = P (dP - delta) for each score of a tile of a matrix."""

    def store(self, place: TilePlace) -> None:
        """Stores the sum."""
        tile, lane = place
        assert isinstance(tile, MatrixTile)
        for i in range(self.lane_rows):
            row, exists = self._row(tile, lane, i)
            first = (Int64(tile.target) * self.sizes.query_length + row) * self.sizes.bias_pitch
            store = self._store_wide if self.spec.dbias_dtype == "float32" else self._store_rounded
            store(tile, lane, first, i, exists)

    def _store_wide(self, tile: MatrixTile, lane: Lane, first: Int64, i: int, exists: Boolean) -> None:
        """Stores a row of the lane in float32."""
        for block in range(self.n_blocks):
            column = tile.column * KEYS + 8 * block + lane.column
            address = self.buffers.dbias.toint() + (first + column) * 4
            pair = self._pair(i, block)

            def store(address: Int64 = address, pair: list[Float32] = pair) -> None:
                ptx.store_global_pair(address, *pair)

            cutlass.if_generate(Boolean(exists & (column < self.sizes.bias_pitch)), store)

    def _store_rounded(self, tile: MatrixTile, lane: Lane, first: Int64, i: int, exists: Boolean) -> None:
        """Stores a row of the lane in 16 bits: 16 bytes a lane, 64 neighboring bytes of a row the quad."""
        quad_lane, words = lane.thread & 3, Native(self.spec.dbias_dtype)
        for block in range(0, self.n_blocks, 4):
            pairs = [words.pair(*self._pair(i, j)) for j in range(block, block + 4)]
            chunk = ptx.transpose_quad(pairs, quad_lane)
            column = tile.column * KEYS + 8 * (block + quad_lane) + lane.warp_column
            address = self.buffers.dbias.toint() + (first + column) * 2

            def store(address: Int64 = address, chunk: list[Int32] = chunk) -> None:
                ptx.store_global_chunk(address, chunk)

            cutlass.if_generate(Boolean(exists & (column < self.sizes.bias_pitch)), store)


@final
@dataclass(frozen=True, eq=False)
class DiagonalSum(_ScoreSum):
    """The sum of P' (dP - delta) for each score of a tile, over the tiles of a diagonal, where P' is the weight."""

    def store(self, place: TilePlace) -> None:
        """Stores the sum, `[128, 128]`. XLA adds up its diagonals."""
        tile, lane = place
        for i in range(self.lane_rows):
            first = (Int64(tile.target) * ROWS + (lane.row + 8 * i)) * KEYS
            for block in range(self.n_blocks):
                address = self.buffers.dbias.toint() + (first + (8 * block + lane.column)) * 4
                ptx.store_global_pair(address, *self._pair(i, block))


@final
@dataclass(frozen=True, eq=False)
class RowSums(DbiasSum):
    """Three sums over the keys of each query: of P' dP, of P' and of P dP, where P' is the weight.

    The gradient of a bias of rows is

        sum_j P'_j (dP_j - delta) = sum_j P'_j dP_j - (sum_j P'_j) delta

    where delta is the third sum less dlse. Other kernels read a delta that comes from a rounded output. Far below the
    soft cap, where P' is nearly P, its error is larger than the gradient. XLA computes the right side, see
    `ops/cuda/bias_gradient.py`.

    Attributes:
        probabilities: P of each score.
    """

    probabilities: cute.Tensor

    centered = False

    @classmethod
    def start(
        cls, schedule: DbiasSchedule, launch: tuple[Buffers, Scalars | Sizes], lane_rows: int, n_blocks: int
    ) -> "RowSums":
        """Returns the registers."""
        total, probabilities = (_registers(lane_rows * count) for count in (ROW_SUMS, 2 * n_blocks))
        return cls(schedule.spec, schedule, *launch, lane_rows, n_blocks, total, probabilities)

    def keep(self, i: int, probability: Float32) -> None:
        """Takes P of an element."""
        self.probabilities[i] = probability

    def add(self, part: ItemPart) -> None:
        """Adds an item."""
        for i in range(self.count):
            at = part.scores.at(i)
            first, dprobability, weight = ROW_SUMS * at.i, part.change(i, at), part.weight(i)
            self._add(first, weight, dprobability, at, part.edge)
            self._add(first + 1, weight, Float32(1.0), at, part.edge)
            self._add(first + 2, self.probabilities[i], dprobability, at, part.edge)

    def store(self, place: TilePlace) -> None:
        """Stores the sums of the warp's columns: one lane of the quad stores those over the quad."""
        tile, lane = place
        columns = 8 * self.n_blocks
        warp = Int64(tile.target) * (KEYS // columns) + lane.warp_column // columns
        for i in range(self.lane_rows):
            row, exists = self._row(tile, lane, i)
            sums = [softmax.quad_sum(self.total[ROW_SUMS * i + which]) for which in range(ROW_SUMS)]
            first = self.buffers.dbias.toint() + (warp * ROW_SUMS * self.sizes.query_length + row) * 4

            def store(first: Int64 = first, sums: list[Float32] = sums) -> None:
                for which, total in enumerate(sums):
                    ptx.store_global(first + Int64(self.sizes.query_length) * (4 * which), total)

            cutlass.if_generate(Boolean(exists & Boolean((lane.thread & 3) == 0)), store)


def _registers(count: int) -> cute.Tensor:
    return cute.make_rmem_tensor((count,), Float32)


def start_sum(
    schedule: DbiasSchedule, launch: tuple[Buffers, Scalars | Sizes], lane_rows: int, n_blocks: int
) -> MatrixSum | DiagonalSum | RowSums:
    """Returns the sums of a warp, before `clear`; see `DbiasSum`."""
    kind = RowSums if schedule.spec.sums_rows else DiagonalSum if schedule.spec.sums_diagonals else MatrixSum
    return kind.start(schedule, launch, lane_rows, n_blocks)
