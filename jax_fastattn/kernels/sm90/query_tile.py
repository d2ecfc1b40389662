# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a CTA works on in kernels of dq and of tangents: a tile of queries, and the tiles of keys that it sees."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device.sequences import Span, first_rows
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.work import Work
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.visits.query_tile_list import QueryTileList
from jax_fastattn.kernels.visits.visit import Edges, Visit


class QueryTiles(Protocol):
    """Sizes of tiles, by the config of a kernel."""

    @property
    def rows(self) -> int:
        """Returns how many query rows a CTA has."""
        ...

    @property
    def keys(self) -> int:
        """Returns how many keys a tile of keys has."""
        ...

    @property
    def prepass(self) -> PrepassConfig:
        """Returns the tiles of the prepass for the lists of the kernel."""
        ...


class ListedEdge(NamedTuple):
    """Holds what is known of a masked tile of a list before its scores are.

    Attributes:
        entry: the tile's entry in its list.
        bits: which of the lane's scores count.
    """

    entry: Int32
    bits: Bits


@dataclass(frozen=True)
class RowTile:
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
    def of(
        cls, spec: KernelSpec, config: QueryTiles, work: Work, buffers: Buffers, sizes: Scalars | Sizes
    ) -> "RowTile":
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

    @property
    def score_head(self) -> Head:
        """Returns which scores its rows have."""
        return Head(self.queries.batch, self.head, first_rows(self.queries, self.keys))

    def load_bits(self, index: Int32, fragment: Int32, lane: Int32, *, first: bool) -> ListedEdge | None:
        """Loads the bits of an edge tile of a list, long before they are used; None without lists.

        The first tile counts as masked, and has no bits if it is full.

        Args:
            index: position of the tile.
            fragment: which rows of 16 the warp has.
            lane: index of the lane in the warp.
            first: whether it is the first tile.
        """
        if self.listed is None:
            return None
        bits = self.listed.bits
        entry = cute.arch.make_warp_uniform(self.visit.entry(index))
        tile = self.visit.tile_of(entry)
        if not first:
            return ListedEdge(entry, Bits([bits.fragment(tile, fragment, lane)]))
        words = cute.make_rmem_tensor((bits.config.words,), Int32)
        words.fill(-1)

        def load() -> None:
            for i, word in enumerate(bits.fragment(tile, fragment, lane)):
                words[i] = word

        cutlass.if_generate(Boolean(self.visit.is_edge(index)), load)
        return ListedEdge(entry, Bits([[words[i] for i in range(bits.config.words)]]))
