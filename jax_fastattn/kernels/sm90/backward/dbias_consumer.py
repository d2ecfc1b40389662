# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of `dbias.py`: the sum of dS of 64 queries and a tile of keys.

The warpgroups never wait for each other: the exponentials of one run concurrently with the products of the other.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments import BackwardBuffers, Sizes
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.features.bits import Bits
from jax_fastattn.kernels.features.bounds import Visibility
from jax_fastattn.kernels.features.places import Head, ScoreTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.plan import Limits
from jax_fastattn.kernels.score import Edge, Score
from jax_fastattn.kernels.sm90.backward.dbias_config import KEYS, ROWS, key_list_tiles
from jax_fastattn.kernels.sm90.backward.dbias_schedule import FULL, DbiasSchedule, DbiasTile, ItemList
from jax_fastattn.kernels.sm90.backward.dbias_shared import DbiasShared, Item, Items
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS, padded_head_dim
from jax_fastattn.spec import UNBOUNDED


class Lane(NamedTuple):
    """Where a consumer thread is.

    Attributes:
        thread: its index in the CTA.
        row: the first of its two accumulator rows, counted from the CTA's first one; the other one is 8 further.
        column: its first accumulator column.
    """

    thread: Int32
    row: Int32
    column: Int32


def _read_lane() -> Lane:
    """Returns the lane, read anew: registers for it would live through the loops, which have none to spare."""
    thread = ptx.thread_index() & (2 * ROWS - 1)
    row, column = accumulator_lane(thread & 31)
    return Lane(thread, (thread >> 5) * 16 + row, column)


@dataclass(frozen=True, eq=False)
class DbiasProducts:
    """The products of a warpgroup.

    Attributes:
        mma: S and dP, both factors from shared memory.
        query, dout: descriptors of the left factors.
        key, value: descriptors of the right factors.
        score, dscore, total: accumulators `[64, KEYS]` of S, of dP, and of the sum.
    """

    mma: cute.TiledMma
    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    score: cute.Tensor
    dscore: cute.Tensor
    total: cute.Tensor

    @classmethod
    def start(cls, shared: DbiasShared) -> "DbiasProducts":
        """Returns the products with their registers."""
        mma = wgmma.product(shared.query.element_type, KEYS, a_in_registers=False, b_transposed=False)
        shape = (WARPGROUP_ROWS, KEYS)
        return cls(
            mma=mma,
            query=wgmma.operand_a(mma, shared.query),
            dout=wgmma.operand_a(mma, shared.dout),
            key=wgmma.operand_b(mma, shared.key),
            value=wgmma.operand_b(mma, shared.value),
            score=wgmma.accumulator(mma, shape),
            dscore=wgmma.accumulator(mma, shape),
            total=wgmma.accumulator(mma, shape),
        )


@dataclass(frozen=True, eq=False)
class DbiasConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        spec: the compile key.
        shared: tiles and barriers.
        schedule: the tiles of the CTA.
        score: from products to probabilities.
        buffers, sizes: of the launch.
        group: the warpgroup.
        ring: its position in the ring.
        items: its position among the items.
        bias_phase: of the barrier of the bias.
        products: S, dP and the sum.
    """

    spec: KernelSpec
    shared: DbiasShared
    schedule: DbiasSchedule
    score: Score
    buffers: BackwardBuffers
    sizes: Sizes
    group: Int32
    ring: wgmma.Ring
    items: Items
    bias_phase: wgmma.Uniform
    products: DbiasProducts

    @classmethod
    def start(
        cls,
        spec: KernelSpec,
        shared: DbiasShared,
        schedule: DbiasSchedule,
        score: Score,
        launch: tuple[BackwardBuffers, Sizes],
        warp_index: Int32,
    ) -> "DbiasConsumer":
        """Returns the role with its registers."""
        # Elsewhere registers would spill.
        joins_lse = spec.bias_terms == 1 and not spec.listed and spec.head_dim <= 128
        return cls(
            spec=spec,
            shared=shared,
            schedule=schedule,
            score=replace(score, joins_lse=joins_lse),
            buffers=launch[0],
            sizes=launch[1],
            group=warp_index // 4,
            ring=shared.ring(),
            items=shared.items(),
            bias_phase=wgmma.Uniform(Int32(0)),
            products=DbiasProducts.start(shared),
        )

    def run(self) -> None:
        """Computes all tiles of the CTA."""
        self.schedule.each(self.sizes, self._tile)

    def _tile(self, tile: DbiasTile) -> None:
        """Computes one tile, and stores it: zeros if no item sees anything."""
        self.products.total.fill(0.0)
        first = self.items.get()
        some, bias = first.kind >= 0, self.shared.barrier("bias_full")
        cutlass.if_generate(some, lambda: wgmma.wait(bias, self.bias_phase[0]))
        with while_generate([*first], lambda stage, kind: Boolean(kind >= 0)) as (stage, kind):
            self._item(tile, Item(stage, kind))
            yield_out([*self.items.get()])
        self.items.release(self.items.last())

        def give_back() -> None:
            wgmma.release(self.shared.barrier("bias_empty"))
            self.bias_phase[0] = self.bias_phase[0] ^ 1

        cutlass.if_generate(some, give_back)
        self._store(tile)

    # One item.

    def _item(self, tile: DbiasTile, item: Item) -> None:
        """Adds the dS of an item."""
        products, memory = self.products, self.shared.memory
        chunks = padded_head_dim(self.spec.head_dim) // memory.head_dim
        v_chunks = padded_head_dim(self.spec.v_head_dim) // memory.v_head_dim
        scores = [self._multiply(products.score, products.query, products.key, i) for i in range(chunks)]
        # The ring may have no room for more than S, or the first columns of dP.
        started = int(chunks < memory.config.stages)
        dscores = [self._multiply(products.dscore, products.dout, products.value, i) for i in range(started)]
        warpgroup.wait_group(started)
        for stage in scores:
            self.ring.consumer_release(stage)
        dscores += [self._multiply(products.dscore, products.dout, products.value, i) for i in range(started, v_chunks)]
        head = self.items.head(item.stage)
        lse2 = self._weights(tile, head, item.stage)
        deltas = [self._statistic(item.stage, 1, i) for i in range(2)]
        warpgroup.wait_group(0)
        for stage in dscores:
            self.ring.consumer_release(stage)
        cutlass.if_generate(
            item.kind == FULL,
            lambda: self._add(tile, deltas, None),
            lambda: self._add(tile, deltas, self._edge(tile, head, item, lse2)),
        )
        self.items.release(item.stage)

    def _multiply(self, acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor, chunk: int) -> Int32:
        """Starts some columns of a product; returns their stage."""
        stage = self.ring.consumer_wait()
        factors = left[None, None, None, 4 * stage + self.group], right[None, None, None, stage]
        wgmma.gemm(self.products.mma, acc, *factors, accumulate=chunk > 0)
        return stage

    def _score_tile(self, tile: DbiasTile) -> ScoreTile:
        """Returns where the lane's scores lie."""
        lane = _read_lane()
        return ScoreTile(tile.row * ROWS + lane.row, tile.column, KEYS, lane.column, n_blocks=KEYS // 8)

    def _weights(self, tile: DbiasTile, head: Head, stage: Int32) -> list[Float32]:
        """Turns S into weights, see `score.py`; returns the log-sum-exps of the lane's rows."""
        weights, scores = self.products.score, self._score_tile(tile)
        lse2 = [self._statistic(stage, 0, i) for i in range(2)]
        score = self.score.start(head).load(tile.scores(head), self.shared.bias).read(scores)
        for i in range(cute.size(weights)):
            at = scores.at(i)
            _, weights[i] = score.gradient(weights[i], lse2[at.i], at)
        return lse2

    def _statistic(self, stage: Int32, which: int, i: int) -> Float32:
        """Returns the log-sum-exp in base 2 (0) or delta (1) of one of the lane's rows."""
        nbytes = self.shared.memory.stats_row_nbytes
        address = self.shared.stats(stage, which) + (_read_lane().row + 8 * i) * nbytes
        if not self.spec.config.adds_dq:
            return ptx.from_bits(ptx.load_shared(address))
        (a, b), (c, _) = (ptx.unpack(ptx.load_shared(address + 4 * k)) for k in range(2))
        minus = a + b + c
        return -(minus * self.score.factor if which == 0 and self.spec.folds_lse else minus)

    def _add(self, tile: DbiasTile, deltas: list[Float32], edge: Edge | None) -> None:
        """Adds dS, 0 where a query does not see the key: what is there may be no number."""
        products, scores = self.products, self._score_tile(tile)
        for i in range(cute.size(products.total)):
            at = scores.at(i)
            change = products.dscore[i] - deltas[at.i]
            if edge is None:
                products.total[i] = ptx.fma(products.score[i], change, products.total[i])
            else:
                products.total[i] = products.total[i] + edge.select(products.score[i] * change, at)

    def _edge(self, tile: DbiasTile, head: Head, item: Item, lse2: list[Float32]) -> Edge:
        """Returns what is hidden in a tile."""
        lane = _read_lane()
        if self.spec.listed:
            place = self.items.place(item.stage)
            items = ItemList(key_list_tiles(self.spec), tile, self.buffers, self.sizes, place)
            words = items.words(item.kind, lane.thread >> 5, lane.thread & 31)
            # A query that sees nothing, such as padding, may be in a full tile.
            dead = [x == Float32(float("inf")) for x in lse2]
            rows = [[ptx.where(x, Int32(0), word) for word in words] for x in dead]
            return self.score.edges([Bits([words]).rows()[i] for i, words in enumerate(rows)])
        bounds = self.schedule.bounds(head, self.buffers, self.sizes)
        first, column = tile.row * ROWS + lane.row, tile.column * KEYS + lane.column
        rows = []
        for i in range(2):
            row = first + 8 * i
            limits = bounds.key_limits(row)
            if bounds.kind.query_end:
                limits = Limits(limits.low, ptx.where(row < bounds.query_end, limits.high, Int32(-UNBOUNDED)))
            rows.append(Visibility.of(limits, column, bounds.kind.left))
        return self.score.edges(rows)

    # The result.

    def _store(self, tile: DbiasTile) -> None:
        """Stores the sum."""
        lane = _read_lane()
        for i in range(2):
            row = tile.row * ROWS + lane.row + 8 * i
            first = (Int64(tile.target) * self.sizes.query_length + row) * self.sizes.bias_pitch
            store = self._store_wide if self.spec.dbias_dtype == "float32" else self._store_rounded
            store(tile, lane, first, i, Boolean(row < self.sizes.query_length))

    def _store_wide(self, tile: DbiasTile, lane: Lane, first: Int64, i: int, exists: Boolean) -> None:
        """Stores a row of the lane in float32."""
        total = self.products.total
        for block in range(KEYS // 8):
            column = tile.column * KEYS + 8 * block + lane.column
            address = self.buffers.dbias.toint() + (first + column) * 4
            pair = [total[4 * block + 2 * i + e] for e in range(2)]

            def store(address: Int64 = address, pair: list[Float32] = pair) -> None:
                ptx.store_global_pair(address, *pair)

            cutlass.if_generate(Boolean(exists & (column < self.sizes.bias_pitch)), store)

    def _store_rounded(self, tile: DbiasTile, lane: Lane, first: Int64, i: int, exists: Boolean) -> None:
        """Stores a row of the lane in 16 bits: 16 bytes a lane, 64 neighboring bytes of a row the quad."""
        total, quad_lane = self.products.total, lane.thread & 3
        for block in range(0, KEYS // 8, 4):
            pairs = [
                ptx.pack(*[total[4 * j + 2 * i + e] for e in range(2)], dtype=ptx.MMA_DTYPE[self.spec.dbias_dtype])
                for j in range(block, block + 4)
            ]
            chunk = ptx.transpose_quad(pairs, quad_lane)
            column = tile.column * KEYS + 8 * (block + quad_lane)
            address = self.buffers.dbias.toint() + (first + column) * 2

            def store(address: Int64 = address, chunk: list[Int32] = chunk) -> None:
                ptx.store_global_chunk(address, chunk)

            cutlass.if_generate(Boolean(exists & (column < self.sizes.bias_pitch)), store)
