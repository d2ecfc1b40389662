# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Work items of the Hopper family: a tile of queries and where its rows lie. The schedules of both passes make them."""

from typing import Any, NamedTuple

from cutlass import Int32

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.key import KernelSpec


class Work(NamedTuple):
    """Describes a tile of queries of a head.

    Attributes:
        tile: its index within its sequence.
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

    @classmethod
    def of_head(cls, spec: KernelSpec, tile: Int32, index: Int32, buffers: Buffers, scalars: Scalars | Sizes) -> "Work":
        """Returns a tile of a head, which is counted over all batch entries.

        Args:
            tile: index of the tile within the head.
            index: index of the head.
        """
        batch, head = index // scalars.num_heads, index % scalars.num_heads
        sequence = Sequence.of_entry(spec, batch, buffers, scalars)
        return cls(tile, head, head // spec.group, sequence, index)
