# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias `[b, n, T, S]` with mma.sync: a CTA owns a tile of it, and sums over what broadcasts.

Eight warps of 32 queries and 64 keys each keep a float32 sum of dS in registers (`sums/tile_sums.py`). For each item, a
pair of a batch entry and a query head that reads the tile:

    S = Q K^T    dP = dO V^T    sum += P (dP - delta)

The bias of the tile is copied once, if shared memory has room for it. Q and K, and then dO and V, pass through one ring
some columns at a time, so that any head dim fits. Items whose tile is hidden are left out. There are no atomics and no
sums in memory: the same bits in every run.

For a bias of rows, which kernels differentiate under a soft cap alone, a tile is 128 queries of a head, and its items
are the tiles of their keys. A row has three sums (`tile_sums.RowSums`).

Nothing that is hidden is zeroed: any value there reaches its own pairs only, which are selected away. The kernel reads
the statistics that `preprocess.py` writes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies, mma, ptx
from jax_fastattn.kernels.device.kept import number_masks
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.layout import CHUNK, CopyShape, accumulator_lane, crossed_lane, plain_lane
from jax_fastattn.kernels.device.products import product_words
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.bias.copied import CopiedBias
from jax_fastattn.kernels.features.bias.planes import Planes
from jax_fastattn.kernels.features.places import Element, ScoreTile
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.dbias_config import (
    COLUMN_WARPS,
    THREADS,
    WARP_COLUMNS,
    WARP_ROWS,
    Chunk,
    DbiasMemory,
)
from jax_fastattn.kernels.sm80.backward.visible_items import Item, VisibleItems
from jax_fastattn.kernels.sums.schedule import FULL, HIDDEN, DbiasItem, DbiasSchedule, DbiasTile
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
from jax_fastattn.kernels.sums.units import load_units

# A warp has this many blocks of 16 rows and of 8 columns.
_BLOCKS = WARP_ROWS // 16, WARP_COLUMNS // 8


class DbiasKernel:
    """Writes dbias, or float32 parts or sums of it. It has one CTA for each tile of each part."""

    def __init__(self, spec: KernelSpec):
        stages.refuse(spec.features, "the kernel of a bias's gradient")
        self.spec = spec
        self.memory = DbiasMemory.of(spec)
        self.schedule = DbiasSchedule(spec)

    def launch(self, buffers: Buffers, scalars: Scalars) -> Launch:
        """Returns the launch of the kernel."""
        return Launch(
            self.kernel,
            (buffers, scalars),
            grid=self.schedule.count(scalars),
            block=THREADS,
            shared_bytes=self.memory.nbytes,
        )

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars):
        tile = self.schedule.tile(cute.arch.block_idx()[0], scalars)
        DbiasCta.start(self.spec, self.memory, self.schedule, (buffers, scalars), tile).run()


@dataclass(frozen=True, eq=False)
class DbiasCta:
    """What a thread does for the tile of its CTA.

    Attributes:
        score: maps products to probabilities.
        items: the items that see something.
        sum: what is added up.
        stage: the stage of the next chunk to be read, `[1]`.
    """

    spec: KernelSpec
    memory: DbiasMemory
    tile: DbiasTile
    buffers: Buffers
    scalars: Scalars
    shared: Int32
    score: Score
    items: VisibleItems
    sum: MatrixSum | DiagonalSum | RowSums
    stage: cute.Tensor

    @classmethod
    def start(
        cls,
        spec: KernelSpec,
        memory: DbiasMemory,
        schedule: DbiasSchedule,
        launch: tuple[Buffers, Scalars],
        tile: DbiasTile,
    ) -> "DbiasCta":
        """Returns the CTA with its registers."""
        shared, lane = cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint(), _read_lane()
        stage = cute.make_rmem_tensor((1,), Int32)
        stage.fill(0)
        bias = None
        if memory.config.copies_bias:
            address = shared + memory.table.offset("bias") + memory.bias.offset(lane.row, lane.column)
            bias = CopiedBias(address, memory.bias, spec.bias_storage, spec.bias_terms)
        score = Score.backward(spec, *launch, launch[1].scale, bias)
        return cls(
            spec=spec,
            memory=memory,
            tile=tile,
            buffers=launch[0],
            scalars=launch[1],
            shared=shared,
            # With lists, three times as many registers would spill.
            score=replace(score, joins_lse=not spec.listed),
            items=VisibleItems.of(schedule, tile, *launch),
            sum=start_sum(schedule, launch, 2 * _BLOCKS[0], _BLOCKS[1]),
            stage=stage,
        )

    def run(self) -> None:
        """Computes the tile, and stores it: zeros if no item sees anything."""
        self.sum.clear()
        first = self.items.next()
        cutlass.if_generate(first.kind != HIDDEN, lambda: self._begin(first))
        with while_generate(first.values(), lambda *values: Boolean(Item.of(*values).kind != HIDDEN)) as values:
            following = self.items.next()
            self._item(Item.of(*values), following)
            yield_out(following.values())
        cute.arch.cp_async_wait_group(0)
        self._scale()
        self.sum.store(TilePlace(self.tile, _read_lane()))

    def _scale(self) -> None:
        """Takes the factor on P off the sum."""
        factor, total = gradient.log2_probability_factor(self.spec, self.spec.config), self.sum.total
        for i in range(cute.size(total)) if factor else ():
            total[i] = Float32(total[i]) * 2.0**-factor

    # Copies.

    @property
    def _ahead(self) -> int:
        """How many chunks are on their way while one is read."""
        return self.memory.config.stages - 1

    @property
    def _chunks(self) -> tuple[Chunk, ...]:
        """The chunks of Q and K, then the chunks of dO and V."""
        return self.memory.query_chunks + self.memory.dout_chunks

    def _begin(self, first: Item) -> None:
        """Starts the copies of the bias, and of the first chunks."""
        if self.memory.config.copies_bias:
            for term in range(self.spec.bias_terms):
                self._copy_bias(term)
        for chunk in range(self._ahead):
            self._copy(first, chunk, Int32(chunk))
            cute.arch.cp_async_commit_group()

    def _copy_bias(self, term: int) -> None:
        """Starts the copies of a term of the bias, zeros past the end."""
        tile, scalars, shape = self.tile, self.scalars, self.memory.bias
        place = tile.any_item()
        plane = Planes(scalars, self.spec.group).of_head(place.head) + scalars.bias_planes * term
        source = self.buffers.bias.toint() + Int64(plane) * scalars.query_length * (scalars.bias_pitch * 2)
        target = self.shared + self.memory.table.offset("bias") + term * shape.nbytes
        copy_shape = CopyShape(shape, THREADS)
        row, chunk = copy_shape.thread_chunk(_read_lane().thread)
        for first_row, first_chunk, _, _ in copy_shape.passes():
            at, column = row + first_row, (chunk + first_chunk) * CHUNK
            query, key = place.row * ROWS + at, place.column * KEYS + column
            exists = Boolean(Boolean(query < scalars.query_length) & Boolean(key < scalars.bias_pitch))
            address = source + (Int64(query) * scalars.bias_pitch + key) * 2
            size = ptx.where(exists, Int32(16), Int32(0))
            ptx.copy_async_or_zero(target + shape.offset(at, column), ptx.where(exists, address, source), size)

    def _copy(self, item: Item, which: int, stage: Int32) -> None:
        """Starts the copies of a chunk of an item, zeros for rows past the end."""
        buffers, scalars, spec = self.buffers, self.scalars, self.spec
        # They are read anew: addresses of one chunk would wait in registers for the next one.
        head, row, column = self.tile.named([ptx.move(name) for name in item.names])
        sequence, chunk = Sequence.of_entry(spec, head.batch, buffers, scalars), self._chunks[which]
        of_query = which < len(self.memory.query_chunks)
        head_dim, terms = spec.head_dim if of_query else spec.v_head_dim, spec.terms
        sides = (
            (buffers.query if of_query else buffers.dout, sequence.queries, row * ROWS, 1),
            (buffers.key if of_query else buffers.value, sequence.keys, column * KEYS, spec.group),
        )
        for side, (operand, span, first, group) in enumerate(sides):
            heads = scalars.num_heads // group
            source = operand.toint() + span.row_head(first, heads, head.head // group) * (2 * terms * head_dim)
            stride, rows = gradient.row_stride(heads, terms * head_dim), copies.Rows(None, span.length - first)
            for term in range(terms):
                target, column = self._address(stage, chunk, side, term), chunk.first + term * head_dim
                copies.load_tile(chunk.tile, THREADS, _read_lane().thread, target, source + 2 * column, stride, rows)

    def _address(self, stage: Int32, chunk: Chunk, side: int, term: int = 0) -> Int32:
        """Returns the address of a term of the queries (0) or the keys (1) of a stage."""
        table, tile = self.memory.table, side * self.spec.terms + term
        return self.shared + table.offset("ring") + stage * table["ring"].pitch + tile * chunk.tile.nbytes

    def _stage_after(self, steps: int) -> Int32:
        """Returns the stage that is some steps after the one that is read."""
        stage, count = Int32(self.stage[0]) + steps, self.memory.config.stages
        return ptx.where(stage >= count, stage - count, stage)

    def _copy_ahead(self, item: Item, following: Item, which: int) -> None:
        """Starts the copies of a later chunk, which may be one of the item that follows."""
        which, count = which + self._ahead, len(self._chunks)
        stage = self._stage_after(self._ahead)
        if which < count:
            self._copy(item, which, stage)
        else:
            cutlass.if_generate(following.kind != HIDDEN, lambda: self._copy(following, which - count, stage))
        cute.arch.cp_async_commit_group()

    # One item.

    def _item(self, item: Item, following: Item) -> None:
        """Adds the dS of an item."""
        place = self.tile.named(item.names)
        scores, (lse2, deltas) = self.sum.scores(place, _read_lane()), self._statistics(place)
        weights, change = mma.zeros(*_BLOCKS), mma.zeros(*_BLOCKS)
        if self.sum.centered and not self.score.drops:
            change = [-deltas[scores.at(i).i] for i in range(self.sum.count)]
        for which in range(len(self._chunks)):
            of_query = which < len(self.memory.query_chunks)
            self._multiply(item, following, which, weights if of_query else change)
            if which + 1 == len(self.memory.query_chunks):
                self._weigh(weights, self.score.start(place.head), scores, lse2)

        def edge() -> Edge:
            hidden = Hidden(item.kind, lambda: [item.place], self._statistics(place)[0])
            return self.sum.edge(self.score, place, _read_lane(), hidden)

        def add(edge: Edge | None) -> None:
            self.sum.add(ItemPart(scores, lambda i: weights[i], self._changes(place, scores, change, deltas), edge))

        cutlass.if_generate(item.kind == FULL, lambda: add(None), lambda: add(edge()))

    def _changes(
        self, place: DbiasItem, scores: ScoreTile, change: mma.Accumulator, deltas: list[Float32]
    ) -> Callable[[int, Element], Float32]:
        """Returns what an element adds for a weight, see `ItemPart.change`; dropout is drawn where this is called."""
        if not self.score.drops:
            return lambda i, at: change[i]
        score = self.score.start(place.head)
        keep, survival = score.keep(scores), score.survival()
        assert keep is not None

        def dropped(i: int, at: Element) -> Float32:
            delta = deltas[at.i] if self.sum.centered else Float32(0.0)
            return gradient.change(change[i], delta, number_masks(keep(i // 2))[i % 2], survival)

        return dropped

    def _statistics(self, place: DbiasItem) -> tuple[list[Float32], list[Float32]]:
        """Returns the log-sum-exps in base 2 and delta of the lane's rows; rows past the end get the last query's."""
        scalars, (batch, head, _) = self.scalars, place.head
        queries = Sequence.of_entry(self.spec, batch, self.buffers, scalars).queries
        source = self.buffers.stats.toint() + queries.head_row(scalars.num_heads, head) * 8
        first = place.row * ROWS + _read_lane().row
        rows = [Int32(cutlass.min(first + 8 * i, scalars.query_length - 1)) for i in range(self.sum.lane_rows)]
        pairs = [[ptx.from_bits(x) for x in ptx.load_constant_pair(source + Int64(row) * 8)] for row in rows]
        lses, deltas = [lse2 for lse2, _ in pairs], [delta for _, delta in pairs]
        units = load_units(self.buffers, queries, scalars.num_heads // self.spec.group, head // self.spec.group)
        return (lses, deltas) if units is None else units.taken_off(lses, deltas)

    def _multiply(self, item: Item, following: Item, which: int, acc: mma.Accumulator) -> None:
        """Adds the product of a chunk to S or dP."""
        cute.arch.cp_async_wait_group(self._ahead - 1)
        cute.arch.sync_threads()
        self._copy_ahead(item, following, which)
        chunk, stage, thread_lane = self._chunks[which], Int32(self.stage[0]), _read_lane().thread & 31
        tile, warp_row = chunk.tile, _read_lane().fragment * 16
        row, column = plain_lane(thread_lane)
        load_a = mma.load_a(tile, self._address(stage, chunk, 0) + tile.offset(warp_row + row, column))
        row, column = crossed_lane(thread_lane)
        load_b = mma.load_b(tile, self._address(stage, chunk, 1) + tile.offset(_read_lane().warp_column + row, column))
        # The tile of a second term follows. Zeros fill columns up to the next step.
        words = product_words(self.spec)
        factors = words.factor(load_a, blocks=ROWS // 16), words.factor(load_b, blocks=KEYS // 8)
        words.gemm(acc, (*_BLOCKS, -(-tile.columns // 16)), *factors)
        self.stage[0] = ptx.where(stage + 1 == self.memory.config.stages, Int32(0), stage + 1)

    def _weigh(self, weights: mma.Accumulator, score: Score, scores: ScoreTile, lse2: list[Float32]) -> None:
        """Turns S into weights in place, see `score.py`."""
        score = score.read(scores)
        for i in range(len(weights)):
            at = scores.at(i)
            probability, weights[i] = score.summed(weights[i], lse2[at.i], at)
            self.sum.keep(i, probability)


def _read_lane() -> Lane:
    """Returns where a thread's part of a tile lies, read anew: the loops have no registers to spare for it."""
    thread = ptx.thread_index()
    warp = cute.arch.make_warp_uniform(thread // 32)
    row, column = accumulator_lane(thread % 32)
    warp_row, warp_column = warp // COLUMN_WARPS * WARP_ROWS, warp % COLUMN_WARPS * WARP_COLUMNS
    return Lane(thread, warp_row // 16, warp_row + row, warp_column + column, warp_column)
