# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the warps of a forward CTA work on: the arguments of the launch, and one tile of queries after the other."""

from collections.abc import Callable
from dataclasses import dataclass

from cutlass import Int32

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.sequences import Span, first_rows
from jax_fastattn.kernels.device.tma import Tma
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig, SharedMemory
from jax_fastattn.kernels.sm90.forward.schedule import ForwardSchedule, PersistentPackedTiles
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.query_tile_list import QueryTileList
from jax_fastattn.kernels.visits.visit import Edges, Visit


@dataclass(frozen=True)
class QueryTile:
    """Describes a tile of queries.

    Attributes:
        index: which tile of its sequence it is.
        row: its first row.
        queries: rows of the queries of its sequence.
        keys: rows of the keys of its sequence.
        head: query head.
        kv_head: key/value head.
        bounds: what its rows may see, see `plan.Bounds`.
        visit: the key tiles that some row sees.
        bits: which scores of edge tiles count; None without lists.
    """

    config: ForwardConfig
    index: Int32
    row: Int32
    queries: Span
    keys: Span
    head: Int32
    kv_head: Int32
    bounds: plan.Bounds
    visit: Visit
    bits: TileBits | None

    @classmethod
    def of(cls, call: "Call", work: Work) -> "QueryTile":
        """Returns a tile of the schedule with what its rows see."""
        config, bits = call.config, None
        row = work.tile * config.rows
        bounds = work.sequence.bounds()
        if call.spec.listed:
            visit, bits = call.listed(work)
        else:
            tiles = bounds.key_tiles(row, config.rows, config.keys)
            visit = Visit.of_range(tiles, Edges(bounds.kind.left, True)).uniform()
        queries, keys = work.sequence.queries, work.sequence.keys
        return cls(config, work.tile, row, queries, keys, work.head, work.kv_head, bounds, visit, bits)

    @property
    def score_head(self) -> Head:
        """Returns which scores the rows of the tile have."""
        return Head(self.queries.batch, self.head, first_rows(self.queries, self.keys))


@dataclass(frozen=True)
class Call:
    """Holds what the roles of a CTA share.

    Attributes:
        memory: offsets in shared memory.
        schedule: which tiles of queries the CTA works on.
        tma: the operands that TMA loads.
        score: turns products into logits.
    """

    spec: KernelSpec
    memory: SharedMemory
    schedule: ForwardSchedule
    tma: Tma
    buffers: Buffers
    scalars: Scalars
    score: Score

    @property
    def config(self) -> ForwardConfig:
        """Returns the variant."""
        return self.memory.config

    @property
    def mma_dtype(self) -> str:
        """Returns the dtype of products as PTX names it."""
        return ptx.MMA_DTYPE[self.spec.product_dtype]

    def each_tile(self, visit: Callable[[QueryTile], None]) -> None:
        """Calls `visit` for each tile of queries of the CTA; the producer and the consumers visit the same ones."""
        self.schedule.each(self.buffers, self.scalars, lambda work: visit(QueryTile.of(self, work)))

    def listed(self, work: Work) -> tuple[Visit, TileBits]:
        """Returns the key tiles that a tile of queries visits by its list, and its bits."""
        listed = QueryTileList.of(self.spec.tiles_of(self.config), work, self.buffers, self.scalars)
        return listed.visit.uniform(), listed.bits

    def fetch_tiles(self) -> None:
        """Fetches tiles for the CTA by the tile counter. One lane calls it."""
        assert isinstance(self.schedule, PersistentPackedTiles)
        self.schedule.fetch_each(self.buffers, self.scalars)


@dataclass(frozen=True)
class Lane:
    """Says where a consumer thread is.

    Attributes:
        group: its warpgroup.
        warp: index of its warp in the warpgroup.
        thread: its own index in the warpgroup.
        row: the first of its two accumulator rows, counted from the CTA's first row; the other one is 8 rows below.
        column: its first accumulator column.
    """

    group: Int32
    warp: Int32
    thread: Int32
    row: Int32
    column: Int32

    @classmethod
    def of(cls, config: ForwardConfig, thread: Int32, warp_index: Int32) -> "Lane":
        """Returns the lane of a thread of the CTA."""
        group = warp_index // 4 if config.warpgroups > 1 else Int32(0)
        row, column = accumulator_lane(thread % 32)
        return cls(group, thread=thread % 128, warp=warp_index % 4, row=warp_index * 16 + row, column=column)
