# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Work items of the Hopper family: a tile of queries, and where it lies. The schedules of both passes make them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int32

from jax_fastattn.kernels.arguments import Buffers, Scalars, Sizes
from jax_fastattn.kernels.device import copies
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.key import KernelSpec


class Work(NamedTuple):
    """A tile of queries.

    Attributes:
        tile: its index among those of its sequence.
        head: query head.
        kv_head: key/value head.
        sequence: the rows.
        head_index: the query head, counted over all batch entries; None in the forward pass.
    """

    tile: Int32
    head: Int32
    kv_head: Int32
    sequence: Sequence
    head_index: Any = None


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of queries of batch entries of one length.

    Args:
        spec: the compile key.
        rows: of a tile.
    """

    spec: KernelSpec
    rows: int

    def count(self, scalars: Scalars | Sizes) -> Int32:
        """Tiles of a head."""
        return copies.count(scalars.query_length, self.rows)

    def of_head(self, tile: Int32, index: Int32, buffers: Buffers, scalars: Scalars | Sizes) -> Work:
        """A tile of a head, which is counted over all batch entries."""
        batch, head = index // scalars.num_heads, index % scalars.num_heads
        sequence = Sequence.of_entry(self.spec, batch, buffers, scalars)
        return Work(tile, head, head // self.spec.group, sequence, index)
