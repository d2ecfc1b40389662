# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The buffers of a launch by name, with their order, dtypes, presence and roles; `scalars.py` has its numbers.

All passes of both families share one list, in which each buffer has one row. Only the prepass has its own
(`prepass.py`). `present.py` says which of them a compile key has. Custom calls, host functions, kernels and emulators
read it, so that none of them counts positions. The members of these tuples are `cute.Pointer` while a kernel is traced
and addresses in an emulator. A buffer that a launch lacks is None. Imports no DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

# These are the launches that have a buffer, by `KernelSpec.op`.
_FORWARD, _DECODE, _BACKWARD, _TANGENT = ("forward",), ("decode",), ("backward",), ("tangent",)
_ANSWER, _VISITING, _DERIVED = (*_FORWARD, *_DECODE), (*_FORWARD, *_TANGENT), (*_BACKWARD, *_TANGENT)
_TILED = (*_VISITING, *_BACKWARD)


@dataclass(frozen=True)
class Buffer:
    """One array of a launch.

    Attributes:
        role: "operand" is read only; a "result" is written in full; "scratch" is written and read, and then dropped.
        dtype: its name; None is `KernelSpec.operand_dtype` for an operand, `result_dtype` for a result.
        needs: the attribute of `KernelSpec`, or of what it holds, that says whether the launch has the buffer, such as
            "config.adds_dq"; None if it always has.
        dtype_of: the attribute of `KernelSpec` that names its dtype, where it is another one.
        ops: the launches that have it, by `KernelSpec.op`; None for all that have the tuple.
        family: the family whose launches have it; None for both.
    """

    role: Literal["operand", "result", "scratch"]
    dtype: str | None = None
    needs: str | None = None
    dtype_of: str | None = None
    ops: tuple[str, ...] | None = None
    family: str | None = None

    def is_of(self, op: str, family: str) -> bool:
        """Returns whether launches of an op of a family have it, unless their compile key lacks what it needs."""
        return (self.ops is None or op in self.ops) and self.family in (None, family)


class Buffers(NamedTuple):
    """Buffers of a launch with products. All are contiguous and aligned to 16 bytes.

    A launch has the rows of its op, in this order: operands, results, scratch. A row with two definitions has another
    role, or another condition, in another pass.

    Attributes:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`, K = N // group; in decoding with `spec.page`, pages `[P, page, K, H]`.
        value: `[B, S, K, D]`, or pages `[P, page, K, D]`.
        page_table: `[B, S / page]`, the page of each `page` keys; entries past the last key are not read.
        query_seq_lengths: `[B]`.
        key_value_seq_lengths: `[B]`.
        query_offset: `[B]`.
        query_tiles, key_tiles: `[slots, 8]`, records of tiles of packed sequences, see `tiles/records.py`. In Hopper's
            backward pass a slot of queries has `ROW_ALIGNMENT` rows, and slots have the padded rows of a head.
        query_lists, query_bits, key_tile_counts: of tiles of keys, see `tiles/lists.py`. Portable kernels do not read
            the counts.
        key_records, query_ids: what edge tiles of these lists compare in the place of bits, see `visits/compared.py`.
        key_lists, key_bits: of tiles of queries; in a backward pass for a kernel of dq alone, or of dbias.
        key_classes: classes of the tiles of keys that the latter visits, see `tiles.lists.shapes`.
        query_records, key_ids: what edge tiles of these lists compare in the place of bits.
        row_bits: `[planes, rows, ceil(S / 32)]`, the keys that each row sees, see `ops/cuda/row_bits.py`.
        sinks: `[b, N]`, where their gradient is computed.
        bias: `[terms, planes, T, bias_pitch]`, see `bias_shapes.py`; the terms add up to it. Columns past S are finite.
        key_bias: `[planes, bias_pitch]`, times log2(e).
        key_bias_parts: `[planes, bias_pitch, 8]`, over the scale: three columns add up to it, others are 0.
        row_bias: `[planes, bias_pitch]`, times log2(e).
        added: a named tuple with the operands that features add, such as sinks `[b, N]`; None if there are none.
        out: `[B, T, N, D]`; in a backward pass and for tangents from the forward pass, as is `lse`.
        lse: `[B, T, N]`.
        row_means: `[B, T, N]`, the mean key of each row, see `KernelSpec.mean_plane`.
        out_rests: `[B, T, N, D]`, what rounding has taken from the output, see `device/rests.py`.
        query_tangent, key_tangent, value_tangent: in the shapes of their operands, of those that move.
        dout: `[B, T, N, D]`.
        dlse: `[B, T, N]`.
        delta: `[B, T, N]`, rowsum(out * dout) - dlse, in the unit of dP.
        gradient_units: `[B, K, 4]`, of packed sequences `[1, K, 4]`, see `sums/units.py`.
        out_tangent: `[B, T, N, D]`.
        lse_tangent: `[B, T, N]`.
        dq: `[B, T, N, H]`.
        dk: `[B, S, K, H]`.
        dv: `[B, S, K, D]`.
        dsinks_terms: `[B, N, T]`, what each row adds to the gradient of its sink.
        dbias: `[parts, planes, T, bias_pitch]`, see `Scalars.bias_parts`. For a bias of rows
            `[parts, B, N, column warps, ROW_SUMS, T]`, see `tile_sums.RowSums`, and so for a plane of heads or of
            queries. For a plane of distances `[parts, planes, diagonals, 128, 128]`, see `tile_sums.DiagonalSum`.
        dkey_bias: `[B, N, S]`, what heads add to the gradient of a bias or plane of keys, or what keys add to the
            gradient of a plane of heads. Portable: `[B, N column_warps, S]`.
        stats: `[B, N, 2, padded_rows(T)]`, see `sm90/backward/gradient.py`. Shapes of this and the next four rows are
            for Hopper; `sm80/backward/config.backward_scratch` has the shapes for portable kernels.
        dq_accum: `[B, N, padded_rows(T), padded H]` in an order of its own, see `sm90/backward/dkdv_dq/dq_atomic.py`.
        tile_counter: `[1]`, how many tiles CTAs have fetched: of queries forward, of keys backward.
        head_ready: `[B, K]`, how many warps have prepared statistics and zeros of a key/value head. Of packed sequences
            `[slots]`: at a sequence's first slot, how many of its slots have statistics from the background launch.
        dq_semaphore: `[B, N, padded_rows(T) / queries of a tile]`, how many key tiles have still to add to each query
            tile, or with `spec.ordered` how many have added.
        partial_out: `[slots, T * group, D]`, outputs of segments, see `decode/split.py`.
        partial_lse: `[slots, T * group]`, their log-sum-exps, in base 2 and without sinks.
        begun: `[CTAs, 4]`: the unit that a CTA begins and does not end, numbered in `[B, K]`, -1 if there is none; its
            tiles past the CTA's share; where that share ends; and tiles of the line.
    """

    query: Annotated[Any, Buffer("operand")]
    key: Annotated[Any, Buffer("operand")]
    value: Annotated[Any, Buffer("operand")]
    page_table: Annotated[Any, Buffer("operand", "int32", needs="page", ops=_DECODE)]
    query_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="query_seq_lengths")]
    key_value_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="key_value_seq_lengths")]
    query_offset: Annotated[Any, Buffer("operand", "int32", needs="offset_operand")]
    query_tiles: Annotated[Any, Buffer("operand", "int32", needs="packed", ops=_TILED)]
    key_tiles: Annotated[Any, Buffer("operand", "int32", needs="packed", ops=_BACKWARD)]
    query_lists: Annotated[Any, Buffer("operand", "int32", needs="listed", ops=_BACKWARD)]
    query_bits: Annotated[Any, Buffer("operand", "int32", needs="listed", ops=_BACKWARD)]
    key_tile_counts: Annotated[Any, Buffer("operand", "int32", needs="listed", ops=_BACKWARD)]
    key_records: Annotated[Any, Buffer("operand", "int32", needs="compared", ops=_BACKWARD)]
    query_ids: Annotated[Any, Buffer("operand", "int32", needs="compared", ops=_BACKWARD)]
    key_lists: Annotated[
        Any,
        Buffer("operand", "int32", needs="listed", ops=_VISITING),
        Buffer("operand", "int32", needs="lists_keys", ops=_BACKWARD),
    ]
    key_bits: Annotated[
        Any,
        Buffer("operand", "int32", needs="listed", ops=_VISITING),
        Buffer("operand", "int32", needs="lists_keys", ops=_BACKWARD),
    ]
    key_classes: Annotated[Any, Buffer("operand", "int32", needs="classifies_keys", ops=_BACKWARD)]
    query_records: Annotated[
        Any,
        Buffer("operand", "int32", needs="compared", ops=_VISITING),
        Buffer("operand", "int32", needs="compares_keys", ops=_BACKWARD),
    ]
    key_ids: Annotated[
        Any,
        Buffer("operand", "int32", needs="compared", ops=_VISITING),
        Buffer("operand", "int32", needs="compares_keys", ops=_BACKWARD),
    ]
    row_bits: Annotated[Any, Buffer("operand", "int32", needs="row_bits", ops=_DECODE)]
    sinks: Annotated[Any, Buffer("operand", "float32", needs="dsinks", ops=_BACKWARD)]
    bias: Annotated[Any, Buffer("operand", needs="matrix_bias", dtype_of="bias_storage", ops=_TILED)]
    key_bias: Annotated[Any, Buffer("operand", "float32", needs="key_bias", ops=_TILED)]
    key_bias_parts: Annotated[Any, Buffer("operand", "bfloat16", needs="key_bias_parts", ops=_FORWARD)]
    row_bias: Annotated[Any, Buffer("operand", "float32", needs="row_bias", ops=_TILED)]
    added: Any
    out: Annotated[
        Any,
        Buffer("result", ops=_ANSWER),
        Buffer("operand", needs="takes_out", dtype_of="result_dtype", ops=_DERIVED),
    ]
    lse: Annotated[Any, Buffer("result", "float32", ops=_ANSWER), Buffer("operand", "float32", ops=_DERIVED)]
    row_means: Annotated[
        Any,
        Buffer("result", "float32", needs="has_row_means", ops=_FORWARD),
        Buffer("operand", "float32", needs="has_row_means", ops=_BACKWARD),
    ]
    out_rests: Annotated[
        Any,
        Buffer("result", "int8", needs="out_rests", ops=_FORWARD),
        Buffer("operand", "int8", needs="out_rests", ops=_BACKWARD),
    ]
    query_tangent: Annotated[Any, Buffer("operand", needs="moves_query", ops=_TANGENT)]
    key_tangent: Annotated[Any, Buffer("operand", needs="moves_key", ops=_TANGENT)]
    value_tangent: Annotated[Any, Buffer("operand", needs="moves_value", ops=_TANGENT)]
    dout: Annotated[Any, Buffer("operand", ops=_BACKWARD)]
    dlse: Annotated[Any, Buffer("operand", "float32", needs="dlse", ops=_BACKWARD)]
    delta: Annotated[Any, Buffer("operand", "float32", needs="takes_delta", ops=_BACKWARD)]
    gradient_units: Annotated[Any, Buffer("operand", "float32", needs="has_gradient_units", ops=_BACKWARD)]
    out_tangent: Annotated[Any, Buffer("result", ops=_TANGENT)]
    lse_tangent: Annotated[Any, Buffer("result", "float32", ops=_TANGENT)]
    dq: Annotated[Any, Buffer("result", ops=_BACKWARD)]
    dk: Annotated[Any, Buffer("result", ops=_BACKWARD)]
    dv: Annotated[Any, Buffer("result", ops=_BACKWARD)]
    dsinks_terms: Annotated[Any, Buffer("result", "float32", needs="dsinks", ops=_BACKWARD)]
    dbias: Annotated[Any, Buffer("result", needs="sums_dbias", dtype_of="dbias_dtype", ops=_BACKWARD)]
    dkey_bias: Annotated[Any, Buffer("result", "float32", needs="dkey_bias", ops=_BACKWARD)]
    stats: Annotated[Any, Buffer("scratch", "float32", ops=_BACKWARD)]
    dq_accum: Annotated[Any, Buffer("scratch", "float32", needs="config.adds_dq", ops=_BACKWARD)]
    tile_counter: Annotated[
        Any,
        Buffer("scratch", "int32", needs="has_tile_counter", ops=_FORWARD),
        Buffer("scratch", "int32", needs="counts_dq", ops=_BACKWARD),
    ]
    head_ready: Annotated[Any, Buffer("scratch", "int32", needs="config.adds_dq", ops=_BACKWARD, family="sm90")]
    dq_semaphore: Annotated[Any, Buffer("scratch", "int32", needs="counts_dq", ops=_BACKWARD)]
    partial_out: Annotated[Any, Buffer("scratch", "float32", needs="config.splits", ops=_DECODE)]
    partial_lse: Annotated[Any, Buffer("scratch", "float32", needs="config.splits", ops=_DECODE)]
    begun: Annotated[Any, Buffer("scratch", "int32", needs="config.records", ops=_DECODE)]
