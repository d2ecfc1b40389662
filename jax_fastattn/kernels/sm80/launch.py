# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of the three kernels of a backward launch, and a row of a batch entry's operands as an address."""

from typing import NamedTuple

from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.device import tiles
from jax_fastattn.kernels.spec import KernelSpec


class Buffers(NamedTuple):
    """Buffers in the order of `launch_buffers`; None where the spec leaves one out."""

    query: cute.Pointer
    key: cute.Pointer
    value: cute.Pointer
    query_seq_lengths: cute.Pointer | None
    key_value_seq_lengths: cute.Pointer | None
    query_offset: cute.Pointer | None
    out: cute.Pointer
    lse: cute.Pointer
    dout: cute.Pointer
    dlse: cute.Pointer | None
    dq: cute.Pointer
    dk: cute.Pointer
    dv: cute.Pointer
    stats: cute.Pointer
    dq_accum: cute.Pointer
    dq_semaphore: cute.Pointer | None


class Scalars(NamedTuple):
    """Sizes and factors; `head_group` is how many key/value heads are visited together."""

    batch: Int32
    query_length: Int32
    key_length: Int32
    num_heads: Int32
    window_left: Int32
    window_right: Int32
    scale: Float32
    logits_soft_cap: Float32
    head_group: Int32


def load_bounds(spec: KernelSpec, entry: Int32, buffers: Buffers, scalars: Scalars) -> dict[str, Int32]:
    """Loads the keyword arguments of the tile plan for one batch entry."""
    return tiles.load_bounds(
        spec,
        entry,
        (scalars.query_length, scalars.key_length),
        (buffers.query_seq_lengths, buffers.key_value_seq_lengths, buffers.query_offset),
        (scalars.window_left, scalars.window_right),
    )


def tile_count(length: Int32, rows: int) -> Int32:
    """Returns how many tiles of `rows` rows cover a length."""
    return (length + (rows - 1)) // rows


def row_head(entry: Int32, length: Int32, row: Int32, heads: Int32, head: Int32) -> Int64:
    """Returns the index of a row and head in an array `[batch, length, heads]`."""
    return (Int64(entry) * length + row) * heads + head
