# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a CTA of the dq kernel works on: a tile of queries, and the tiles of keys that it sees."""

from dataclasses import dataclass

from cutlass import Int32

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Sizes
from jax_fastattn.kernels.device.sequences import Span, first_rows
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.dq_config import DqConfig
from jax_fastattn.kernels.sm90.backward.gradient import load_units
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.sums.units import Units
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.query_tile_list import QueryTileList
from jax_fastattn.kernels.visits.visit import Edges, Visit


@dataclass(frozen=True)
class DqTile:
    """Describes a tile of queries.

    Attributes:
        index: which tile of its sequence it is.
        row: its first row, counted from the first one of the sequence.
        queries: rows of the queries of its sequence.
        keys: rows of the keys of its sequence.
        head: query head of its batch entry.
        head_index: the query head, counted over all batch entries.
        kv_head: key/value head of its batch entry.
        num_heads: query heads of a batch entry.
        group: query heads of a key/value head.
        bounds: what its rows may see, see `plan.Bounds`.
        visit: the key tiles that some row sees.
        listed: what lists say of it; None without lists.
    """

    config: DqConfig
    index: Int32
    row: Int32
    queries: Span
    keys: Span
    head: Int32
    head_index: Int32
    kv_head: Int32
    num_heads: Int32
    group: int
    bounds: plan.Bounds
    visit: Visit
    listed: QueryTileList | None

    @classmethod
    def of(cls, spec: KernelSpec, config: DqConfig, work: Work, buffers: Buffers, sizes: Sizes) -> "DqTile":
        """Returns a tile of the schedule with what its rows see."""
        row = work.tile * config.rows
        bounds = work.sequence.bounds()
        listed = QueryTileList.of(spec.tiles_of(config), work, buffers, sizes) if spec.listed else None
        if listed is not None:
            visit = listed.visit
        else:
            tiles, kind = bounds.key_tiles(row, config.rows, config.keys), bounds.kind
            # The last keys are in the tile that is visited first, apart from the loops.
            visit = Visit.of_range(tiles, Edges(kind.left, True), masks_high=kind.right or kind.rules).uniform()
        return cls(
            config=config,
            index=work.tile,
            row=row,
            queries=work.sequence.queries,
            keys=work.sequence.keys,
            head=work.head,
            head_index=work.head_index,
            kv_head=work.kv_head,
            num_heads=sizes.num_heads,
            group=spec.group,
            bounds=bounds,
            visit=visit,
            listed=listed,
        )

    def units(self, spec: KernelSpec, buffers: Buffers) -> Units:
        """Loads the units of the head, where they are needed: nothing keeps them in registers."""
        return load_units(spec, buffers, self.queries, self.num_heads // self.group, self.kv_head)

    @property
    def score_head(self) -> Head:
        """Returns which scores its rows have."""
        return Head(self.queries.batch, self.head, first_rows(self.queries, self.keys))
