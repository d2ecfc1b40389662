# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a launch of the prepass takes, as `buffers.py` says it of the kernels with products. Imports no DSL."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from jax_fastattn.kernels.arguments.buffers import Buffer


class PrepassBuffers(NamedTuple):
    """Buffers of the prepass, for all kernels of both families; `tiles.lists.shapes` has the shapes of what it writes.

    Attributes:
        mask: `[b, n, t, s]`, True where a query may attend to a key.
        query_segment_ids: `[B, T]`.
        key_value_segment_ids: `[B, S]`.
        query_seq_lengths, key_value_seq_lengths, query_offset: `[B]`.
        added: a named tuple with the planes that a mask function reads, see `spec.Operands`; None without one.
        lists: header and entries of the list of each own tile.
        bits: bits of edge tiles, with the live rows of the visited side.
        counts: how many lists a query tile is in.
        classes: classes of pairs of tiles.
        live: which own rows of a pair see something, or are seen.
        visitors: whether a tile of keys visits a query tile, a byte each.
    """

    mask: Annotated[Any, Buffer("operand", "bool", needs="mask")]
    query_segment_ids: Annotated[Any, Buffer("operand", "int32", needs="segment_ids")]
    key_value_segment_ids: Annotated[Any, Buffer("operand", "int32", needs="segment_ids")]
    query_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="query_seq_lengths")]
    key_value_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="key_value_seq_lengths")]
    query_offset: Annotated[Any, Buffer("operand", "int32", needs="offset_operand")]
    added: Any
    lists: Annotated[Any, Buffer("result", "int32")]
    bits: Annotated[Any, Buffer("result", "int32")]
    counts: Annotated[Any, Buffer("result", "int32", needs="config.transposed")]
    classes: Annotated[Any, Buffer("scratch", "int32")]
    live: Annotated[Any, Buffer("scratch", "int32")]
    visitors: Annotated[Any, Buffer("scratch", "int32", needs="config.transposed")]


class PrepassScalars(NamedTuple):
    """Numbers of a launch of the prepass, int32 each. Those that only a mask function needs are None without one.

    Attributes:
        batch, heads, members, query_length, key_length: see `tiles.lists.Sizes`.
        mask_batch: planes `[t, s]` of the mask from one batch entry to the next; 0 if all entries share them.
        mask_rows, mask_keys: t and s; where they are 1, all queries or all keys share them.
        window_left, window_right: see `Scalars`.
        mask_members: how many heads share a plane of the mask, where a mask function reads the heads.
        plane_batches, plane_heads: bit i says whether operand i of the mask function has numbers for each batch entry,
            or for each head.
    """

    batch: Any
    heads: Any
    members: Any
    query_length: Any
    key_length: Any
    mask_batch: Any
    mask_rows: Any
    mask_keys: Any
    window_left: Any
    window_right: Any
    mask_members: Any = None
    plane_batches: Any = None
    plane_heads: Any = None

    def present(self) -> tuple[int, ...]:
        """Returns the numbers that a launch has, in order."""
        return tuple(x for x in self if x is not None)
