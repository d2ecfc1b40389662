# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A consumer warpgroup of `kernel.py`: the sums of 64 queries and a tile of keys.

The warpgroups never wait for each other: the exponentials of one run concurrently with the products of the other.
"""

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Sizes
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.kept import keep_number, number_masks
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.features.places import Element
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.dbias.shared import DbiasShared, Item, Items, product_parts
from jax_fastattn.kernels.sm90.backward.gradient import load_units
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sums.schedule import FULL, DbiasItem, DbiasSchedule, DbiasTile
from jax_fastattn.kernels.sums.tile_sums import (
    DiagonalSum,
    Hidden,
    ItemPart,
    Lane,
    MatrixSum,
    RowSums,
    TilePlace,
    start_sum,
)
from jax_fastattn.kernels.sums.tiles import KEYS, ROWS
from jax_fastattn.kernels.sums.units import Units


def _read_lane() -> Lane:
    """Returns the lane, read anew: registers for it would live through the loops, which have none to spare."""
    thread = ptx.thread_index() & (2 * ROWS - 1)
    row, column = accumulator_lane(thread & 31)
    return Lane(thread, thread >> 5, (thread >> 5) * 16 + row, column)


@dataclass(frozen=True, eq=False)
class DbiasProducts:
    """Holds the products of a warpgroup.

    Attributes:
        mma: S and dP, both factors from shared memory.
        query, dout: descriptors of the left factors.
        key, value: descriptors of the right factors.
        score, dscore: accumulators `[64, KEYS]` of S and of dP.
    """

    mma: cute.TiledMma
    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    score: cute.Tensor
    dscore: cute.Tensor

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
        )


@dataclass(frozen=True, eq=False)
class DbiasConsumer:
    """Emits the code of a consumer warpgroup.

    Attributes:
        schedule: the tiles of the CTA.
        score: turns products into probabilities.
        group: index of the warpgroup.
        ring: its position in the ring.
        items: its position among the items.
        bias_phase: phase of the barrier of the bias.
        products: S and dP.
        sum: what is added up.
    """

    spec: KernelSpec
    shared: DbiasShared
    schedule: DbiasSchedule
    score: Score
    buffers: Buffers
    sizes: Sizes
    group: Int32
    ring: wgmma.Ring
    items: Items
    bias_phase: wgmma.Uniform
    products: DbiasProducts
    sum: MatrixSum | DiagonalSum | RowSums

    @classmethod
    def start(
        cls,
        spec: KernelSpec,
        shared: DbiasShared,
        schedule: DbiasSchedule,
        score: Score,
        launch: tuple[Buffers, Sizes],
        warp_index: Int32,
    ) -> "DbiasConsumer":
        """Returns the role with its registers."""
        products = DbiasProducts.start(shared)
        # For other compile keys registers would spill.
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
            products=products,
            sum=start_sum(schedule, launch, lane_rows=2, n_blocks=KEYS // 8),
        )

    def run(self) -> None:
        """Computes all tiles of the CTA."""
        self.schedule.each(self.sizes, self._tile)

    def _tile(self, tile: DbiasTile) -> None:
        """Computes one tile, and stores it: zeros if no item sees anything."""
        self.sum.clear()
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
        self.sum.store(TilePlace(tile, _read_lane()))

    # The methods below compute one item.

    def _item(self, tile: DbiasTile, item: Item) -> None:
        """Computes dS of an item, and adds it to the sum."""
        products, memory = self.products, self.shared.memory
        chunks, v_chunks = (len(x) for x in product_parts(self.spec, memory))
        scores = self._multiply_parts(products.score, products.query, products.key, range(chunks))
        # The ring may have no room for more than S, or the first columns of dP.
        started = int(len(scores) < memory.config.stages)
        dscores = self._multiply_parts(products.dscore, products.dout, products.value, range(started))
        warpgroup.wait_group(started)
        for stage in scores:
            self.ring.consumer_release(stage)
        rest = range(started, v_chunks)
        dscores = self._multiply_parts(products.dscore, products.dout, products.value, rest, tuple(dscores))
        place = tile.named(self.items.names(item.stage))
        lse2 = self._weights(place, item.stage)
        deltas = self._deltas(place, item.stage) if self.sum.centered else None
        warpgroup.wait_group(0)
        for stage in dscores:
            self.ring.consumer_release(stage)
        hidden = Hidden(item.kind, lambda: self.items.told(item.stage), lse2)
        cutlass.if_generate(
            item.kind == FULL,
            lambda: self._add(place, deltas, None),
            lambda: self._add(place, deltas, self.sum.edge(self.score, place, _read_lane(), hidden)),
        )
        self.items.release(item.stage)

    def _multiply_parts(
        self, acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor, parts: range, started: tuple[Int32, ...] = ()
    ) -> list[Int32]:
        """Starts some parts of a product; returns their stages, after the ones of parts that are `started`.

        The ring has no room for all parts of products of terms: each one begins before the stage of the one before it
        is given back.
        """
        stages = list(started)
        for part in parts:
            stages.append(self._multiply(acc, left, right, part))
            if self.spec.terms > 1 and len(stages) > 1:
                warpgroup.wait_group(1)
                self.ring.consumer_release(stages.pop(0))
        return stages

    def _multiply(self, acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor, chunk: int) -> Int32:
        """Starts some columns of a product; returns their stage."""
        stage = self.ring.consumer_wait()
        factors = left[None, None, None, 4 * stage + self.group], right[None, None, None, stage]
        wgmma.gemm(self.products.mma, acc, *factors, accumulate=chunk > 0)
        return stage

    def _add(self, place: DbiasItem, deltas: list[Float32] | None, edge: Edge | None) -> None:
        """Adds dS of an item to the sum, given its products."""
        products, scores = self.products, self.sum.scores(place, _read_lane())

        score = self.score.start(place.head) if self.score.drops else self.score
        keep, survival = score.keep(scores), score.survival()

        def change(i: int, at: Element) -> Float32:
            dprobability = Float32(products.dscore[i])
            if keep is not None:
                dprobability = keep_number(dprobability, number_masks(keep(i // 2))[i % 2]) * survival
            return dprobability if deltas is None else dprobability - deltas[at.i]

        self.sum.add(ItemPart(scores, lambda i: products.score[i], change, edge))

    def _weights(self, place: DbiasItem, stage: Int32) -> list[Float32]:
        """Turns S into weights, see `score.py`; returns the log-sum-exps of the lane's rows."""
        weights, scores = self.products.score, self.sum.scores(place, _read_lane())
        lse2, units = [self._statistic(stage, 0, i) for i in range(2)], self._units(place)
        lse2 = [x + units.log2_p for x in lse2]
        started = self.score.start(place.head)
        survival = started.survival()
        # Statistics have the factor of dropout, which this kernel takes off: sums of P have no part in it.
        lse2 = lse2 if survival is None else [x + ptx.log2(survival) for x in lse2]
        score = started.load(place.scores(), self.shared.bias).read(scores)
        for i in range(cute.size(weights)):
            at = scores.at(i)
            probability, weights[i] = score.summed(weights[i], lse2[at.i], at)
            self.sum.keep(i, probability)
        return lse2

    def _deltas(self, place: DbiasItem, stage: Int32) -> list[Float32]:
        """Returns what dS subtracts from dP, of the lane's rows."""
        deltas, units = [self._statistic(stage, 1, i) for i in range(2)], self._units(place)
        deltas = [x * units.over_dp for x in deltas]
        survival = self.score.start(place.head).survival() if self.score.drops else None
        return deltas if survival is None else [x * survival for x in deltas]

    def _units(self, place: DbiasItem) -> Units:
        """Loads the units of an item, which statistics have, and this kernel takes off: it rounds no dS."""
        group, (batch, head, _) = self.spec.group, place.head
        queries = Sequence.of_entry(self.spec, batch, self.buffers, self.sizes).queries
        return load_units(self.spec, self.buffers, queries, self.sizes.num_heads // group, head // group)

    def _statistic(self, stage: Int32, which: int, i: int) -> Float32:
        """Returns the log-sum-exp in base 2 (0) or delta (1) of one of the lane's rows."""
        nbytes = self.shared.memory.stats_row_nbytes
        address = self.shared.stats(stage, which) + (_read_lane().row + 8 * i) * nbytes
        if not self.spec.config.adds_dq:
            return ptx.from_bits(ptx.load_shared(address))
        (a, b), (c, _) = (ptx.unpack(ptx.load_shared(address + 4 * k)) for k in range(2))
        minus = a + b + c
        return -(minus * self.score.factor if which == 0 and self.spec.folds_lse else minus)
