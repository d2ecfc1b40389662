# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which queries the rows of a key-stationary kernel's accumulators see: rows are keys there, columns queries."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits, LiveRow
from jax_fastattn.kernels.features.visible.bounds import Visibility
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile, QueryHead
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.visit import Edges
from jax_fastattn.limits import UNBOUNDED


class Lane(NamedTuple):
    """Says where a consumer thread is.

    Attributes:
        thread: its index in the CTA.
        row: the first of its two accumulator rows, counted from the CTA's first key; the other one is 8 rows below.
        column: its first accumulator column.
    """

    thread: Int32
    row: Int32
    column: Int32


def read_lane(config: BackwardConfig) -> Lane:
    """Returns the lane of a consumer thread, read anew."""
    thread = ptx.thread_index() % config.consumer_threads
    row, column = accumulator_lane(thread % 32)
    return Lane(thread, thread // 32 * 16 + row, column)


@dataclass(frozen=True)
class QueryMask:
    """Emits the limits of a lane.

    Attributes:
        row: the lane's first row, counted from the CTA's first key.
        column: the lane's first column.
    """

    spec: KernelSpec
    shared: BackwardShared
    row: Int32
    column: Int32

    @property
    def config(self) -> BackwardConfig:
        """Returns the variant."""
        return self.shared.memory.config

    def tile(self, work: KeyTile, index: Int32) -> ScoreTile:
        """Returns where the lane's scores of the tile of queries at a position lie."""
        queries, tile = self.config.queries, work.visit.tile(index)
        return ScoreTile(work.row + self.row, tile, queries, self.column, n_blocks=queries // 8, transposed=True)

    def listed_edge(self, head: QueryHead, index: Int32, stage: Int32, *, first: bool = False) -> Edge:
        """Returns what the bits of a tile of a list hide, or which keys are dead if these say everything.

        Args:
            index: position of the tile.
            stage: the stage of Q with which the bits came.
            first: whether the tile, the first one of the visit, may be full. It has no bits then.
        """
        if self.spec.alike:
            assert head.work.listed is not None
            return head.score.edges([LiveRow(x) for x in head.work.listed.entries.are_live(read_lane(self.config).row)])
        # The index is read anew, see `edge`.
        thread, bits = ptx.thread_index(), self.shared.bits(self.spec, stage)
        fragment, lane = thread // 32 % (self.config.keys // 16), thread % 32

        def loaded() -> list[Int32]:
            if not self.spec.compared:
                return bits.load(fragment, lane)
            return head.bits().fragment(head.work.visit.tile(index), fragment, lane)

        if not first:
            return head.score.edges(Bits([loaded()]).rows())
        words = cute.make_rmem_tensor((bits.config.words,), Int32)
        words.fill(-1)

        def load() -> None:
            for i, word in enumerate(loaded()):
                words[i] = word

        cutlass.if_generate(Boolean(head.work.visit.is_edge(index)), load)
        return head.score.edges(Bits([[words[i] for i in range(bits.config.words)]]).rows())

    def edge(self, head: QueryHead, index: Int32, edges: Edges) -> Edge:
        """Returns what is hidden in the tile of queries at a position.

        What depends on the lane is added last: one register lives through the loops instead of four limits.
        """
        work, bounds = head.work, head.work.bounds
        tile = work.visit.tile(index)
        end = bounds.query_end - tile * self.config.queries if bounds.kind.query_end else Int32(UNBOUNDED)
        window = replace(bounds, query_end=Int32(UNBOUNDED))
        first = window.query_limits(work.row - tile * self.config.queries)
        row, column = self.row, self.column
        if not head.score.is_affine or self.config.adds_dq:
            # Registers would spill here, so a masked tile reads the thread's index anew.
            lane = read_lane(self.config)
            row, column = lane.row, lane.column
        result = []
        for i in range(2):
            shift = row + 8 * i - column
            low, high = first.low + shift, first.high + shift
            if bounds.kind.query_end:
                high = Int32(cutlass.min(high, end - column))
            if self.config.adds_dq:
                # No query sees a key past the end.
                low = ptx.where(row + 8 * i < bounds.key_end - work.row, low, Int32(UNBOUNDED))
            result.append(Visibility(plan.Limits(low, high), edges.low, edges.high))
        return head.score.edges(result)
