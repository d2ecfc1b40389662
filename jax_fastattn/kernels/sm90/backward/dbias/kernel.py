# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias `[b, n, T, S]` on Hopper: a CTA owns a tile of it, and sums over what broadcasts.

Two consumer warpgroups of 64 queries each keep a float32 sum of dS in registers (`consumer.py`); one warp loads.
For each item, which is a pair of a batch entry and a query head that reads the tile:

    S = Q K^T    dP = dO V^T    sum += P (dP - delta)

The bias of the tile is loaded once. Q and K, and then dO and V, pass through one ring some columns at a time, so that
any head dim fits. Items whose tile is hidden are left out. There are no atomics and no sums in memory, so that every
run gives the same bits. CTAs walk through tiles, and the loads for the next tile run while this one is stored.

For a bias of rows, which kernels differentiate under a soft cap alone, a tile is 128 queries of a head, and its items
are the tiles of their keys. A row has three sums (`tile_sums.RowSums`).

Rows that see nothing need no zeros: what they hold reaches their own pairs only, which are selected away. The kernel
reads the statistics that are described in `gradient.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.bias.staged import StagedBias
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.backward.config import ROW_ALIGNMENT
from jax_fastattn.kernels.sm90.backward.dbias.config import DbiasMemory
from jax_fastattn.kernels.sm90.backward.dbias.consumer import DbiasConsumer
from jax_fastattn.kernels.sm90.backward.dbias.shared import DbiasShared, product_parts
from jax_fastattn.kernels.sums.row_preprocess import nonzero
from jax_fastattn.kernels.sums.schedule import HIDDEN, LAST, DbiasItem, DbiasSchedule, DbiasTile
from jax_fastattn.kernels.sums.tiles import KEYS, ROWS


class DbiasKernel:
    """Writes dbias, or float32 parts or sums of it."""

    def __init__(self, spec: KernelSpec):
        stages.refuse(spec.features, "the kernel of a bias's gradient")
        self.spec = spec
        self.memory = DbiasMemory.of(spec)
        self.config = self.memory.config
        self.schedule = DbiasSchedule(spec)
        self.dtype = wgmma.OPERAND_DTYPE[spec.product_dtype]

    def launch(self, buffers: Buffers, scalars: Scalars) -> Launch:
        """Returns the launch of the kernel."""
        arguments, grid = (buffers, Sizes.of(scalars)), self.schedule.blocks(scalars)
        return Launch.of_tma(self.kernel, self.spec, self.memory, arguments, scalars, grid=grid, begins_early=True)

    @cute.kernel
    def kernel(self, tma: Tma, buffers: Buffers, sizes: Sizes):
        warp_index = cute.arch.make_warp_uniform(wgmma.thread_index() // 32)
        shared = DbiasShared.of(self.memory, self.dtype)
        shared.regions.initialize(warp_index, tma)
        cute.arch.griddepcontrol_wait()
        producer = self.config.consumer_threads // 32
        if warp_index >= producer:
            cute.arch.setmaxregister_decrease(self.config.registers.producer)
            loader = DbiasLoader(
                self.spec, shared, self.schedule, self._score(tma, buffers, sizes), tma, buffers, sizes
            )
            cutlass.if_generate(warp_index == producer, loader.run)
        else:
            cute.arch.setmaxregister_increase(self.config.registers.consumer)
            score = self._score(tma, buffers, sizes)
            launch = buffers, sizes
            DbiasConsumer.start(self.spec, shared, self.schedule, score, launch, warp_index).run()

    def _score(self, tma: Tma, buffers: Buffers, sizes: Sizes) -> Score:
        """Returns the map from products to probabilities."""
        folds_lse = self.spec.config.adds_dq and self.spec.folds_lse
        scale = nonzero(sizes.scale) if folds_lse else sizes.scale
        return Score.backward(self.spec, buffers, sizes, scale, StagedBias.of_stages(self.spec, sizes, tma.bias))


@dataclass(frozen=True, eq=False)
class DbiasLoader:
    """Emits the code of the warp that loads, and that names the items that see something of a tile.

    Attributes:
        schedule: the tiles of the CTA.
        score: what is loaded for a tile.
        tma: what TMA loads.
    """

    spec: KernelSpec
    shared: DbiasShared
    schedule: DbiasSchedule
    score: Score
    tma: Tma
    buffers: Buffers
    sizes: Sizes

    def run(self) -> None:
        """Loads everything for all tiles of the CTA."""
        # The fence is for bulk copies: they load statistics, which earlier kernels have stored.
        cute.arch.fence_proxy("async.global")
        ring, items, bias_phase = self.shared.ring(), self.shared.items(), wgmma.Uniform(Int32(1))

        def load_tile(tile: DbiasTile) -> None:
            bias_here = wgmma.Uniform(Int32(0))

            def load_bias() -> None:
                self._load_bias(tile, bias_phase[0])
                bias_phase[0] = bias_phase[0] ^ 1
                bias_here[0] = Int32(1)

            def load(index: Int32, kind: Int32, *told: Int32) -> None:
                item = tile.item(index)
                cutlass.if_generate(bias_here[0] == 0, load_bias)
                nbytes = 2 * self.shared.memory.stats_nbytes
                items.put((kind, *tile.names(item), *told), nbytes, self._stats_copy(item))
                self._load_operands(ring, item)

            def has_some(left: Int32) -> Boolean:
                return Boolean(left != 0)

            def visit_some(i: Int32) -> None:
                # Each lane looks at one item for the others.
                first = tile.begin + 32 * i
                index = first + (ptx.thread_index() & 31)
                looks = self._look(tile, index)
                bits = cute.arch.vote_ballot_sync(Boolean(Boolean(index < tile.end) & Boolean(looks[0] != HIDDEN)))
                with while_generate([cute.arch.make_warp_uniform(bits)], has_some) as loop:
                    left = Int32(loop[0])
                    lane = cute.arch.popc((left & -left) - 1)
                    load(first + lane, *(cute.arch.make_warp_uniform(cute.arch.shuffle_sync(x, lane)) for x in looks))
                    yield_out([left & (left - 1)])

            wgmma.loop((tile.end - tile.begin + 31) // 32, visit_some)
            items.put((Int32(LAST),))

        self.schedule.each(self.sizes, load_tile)

    def _look(self, tile: DbiasTile, index: Int32) -> tuple[Int32, ...]:
        """Returns what is known of an item, or of the last one, see `DbiasSchedule.look`."""
        item = tile.item(Int32(cutlass.min(index, tile.end - 1)))
        return self.schedule.look(item, self.buffers, self.sizes)

    def _load_bias(self, tile: DbiasTile, phase: Int32) -> None:
        """Loads the bias of a tile."""
        full = self.shared.barrier("bias_full")
        wgmma.wait(self.shared.barrier("bias_empty"), phase)
        wgmma.expect(full, self.score.loaded_nbytes(ROWS, KEYS))
        self.score.copy(tile.any_item().scores(), self.shared.bias, full)

    def _stats_copy(self, item: DbiasItem) -> Callable[[Int32, cute.Pointer], None]:
        """Returns a function that starts the copies of an item's statistics."""
        sequence, memory = Sequence.of_entry(self.spec, item.head.batch, self.buffers, self.sizes), self.shared.memory
        queries = sequence.queries
        first = queries.padded_row(queries.head(self.sizes.num_heads, item.head.head), ROW_ALIGNMENT)
        rows = queries.padded_rows(ROW_ALIGNMENT)

        def copy(stage: Int32, barrier: cute.Pointer) -> None:
            source = self.buffers.stats.toint() + (2 * first + item.row * ROWS) * memory.stats_row_nbytes
            with cute.arch.elect_one():
                for which in range(2):
                    start = source + Int64(rows) * (which * memory.stats_row_nbytes)
                    ptx.copy_bulk(self.shared.stats(stage, which), start, memory.stats_nbytes, barrier.toint())

        return copy

    def _load_operands(self, ring: wgmma.Ring, item: DbiasItem) -> None:
        """Loads Q and K, then dO and V, some columns at a time."""
        shared, spec, memory, tma = self.shared, self.spec, self.shared.memory, self.tma
        sequence = Sequence.of_entry(spec, item.head.batch, self.buffers, self.sizes)
        kv_head = item.head.head // spec.group
        scores, dscores = product_parts(spec, memory)
        for rows, keys, in_rows, in_keys, columns, parts in (
            (tma.query, tma.key, shared.query, shared.key, memory.head_dim, scores),
            (tma.dout, tma.value, shared.dout, shared.value, memory.v_head_dim, dscores),
        ):
            copy_rows = rows.copy_matrix(in_rows, sequence.queries.tma_rows(rows.coordinates, item.head.head))
            copy_keys = keys.copy_matrix(in_keys, sequence.keys.tma_rows(keys.coordinates, kv_head))

            def copy(part: tuple[int, int], stage: Int32, barrier: cute.Pointer, both=(copy_rows, copy_keys)) -> None:  # type: ignore[no-untyped-def]
                for group in range(2):
                    both[0](2 * item.row + group, part[0], 4 * stage + group, barrier)
                both[1](item.column, part[1], stage, barrier)

            for part in parts:
                ring.producer_load(copy, part, (ROWS + KEYS) * columns * 2)
