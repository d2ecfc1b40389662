# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The buffers of a launch by name, with their order, dtypes, presence and roles; `scalars.py` has its numbers.

Only the prepass has its own (`prepass.py`). `present.py` says which of them a compile key
has. Custom calls, host functions, kernels and emulators read it, so that none of them counts positions. The members of
these tuples are `cute.Pointer` while a kernel is traced and addresses in an emulator. A buffer that a compile key lacks
is None. Imports no DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple


@dataclass(frozen=True)
class Buffer:
    """One array of a launch.

    Attributes:
        role: "operand" is read only; a "result" is written in full; "scratch" is written and read, and then dropped.
        dtype: its name; None is `KernelSpec.operand_dtype` for an operand, `result_dtype` for a result.
        needs: the attribute of `KernelSpec`, or of what it holds, that says whether the launch has the buffer, such as
            "config.adds_dq"; None if it always has.
        dtype_of: the attribute of `KernelSpec` that names its dtype, where it is another one.
    """

    role: Literal["operand", "result", "scratch"]
    dtype: str | None = None
    needs: str | None = None
    dtype_of: str | None = None


class ForwardBuffers(NamedTuple):
    """Buffers of a forward launch. All are contiguous and aligned to 16 bytes.

    Attributes:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`, K = N // group.
        value: `[B, S, K, D]`.
        query_seq_lengths: `[B]`.
        key_value_seq_lengths: `[B]`.
        query_offset: `[B]`.
        query_tiles: `[slots, 8]`, records of tiles of packed sequences, see `tiles/records.py`.
        key_lists, key_bits: of tiles of queries, see `tiles/lists.py`.
        query_records, key_ids: what edge tiles compare in the place of bits, see `visits/compared.py`.
        bias: `[terms, planes, T, bias_pitch]`, see `bias_shapes.py`; the terms add up to it. Columns past S are finite.
        key_bias: `[planes, bias_pitch]`, times log2(e).
        key_bias_parts: `[planes, bias_pitch, 8]`, over the scale: three columns add up to it, others are 0.
        row_bias: `[planes, bias_pitch]`, times log2(e).
        added: a named tuple with the operands that features add, such as sinks `[b, N]`; None if there are none.
        out: `[B, T, N, D]`.
        lse: `[B, T, N]`.
        tile_counter: `[1]`, how many tiles CTAs have fetched.
    """

    query: Annotated[Any, Buffer("operand")]
    key: Annotated[Any, Buffer("operand")]
    value: Annotated[Any, Buffer("operand")]
    query_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="query_seq_lengths")]
    key_value_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="key_value_seq_lengths")]
    query_offset: Annotated[Any, Buffer("operand", "int32", needs="offset_operand")]
    query_tiles: Annotated[Any, Buffer("operand", "int32", needs="packed")]
    key_lists: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    key_bits: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    query_records: Annotated[Any, Buffer("operand", "int32", needs="compared")]
    key_ids: Annotated[Any, Buffer("operand", "int32", needs="compared")]
    bias: Annotated[Any, Buffer("operand", needs="matrix_bias", dtype_of="bias_storage")]
    key_bias: Annotated[Any, Buffer("operand", "float32", needs="key_bias")]
    key_bias_parts: Annotated[Any, Buffer("operand", "bfloat16", needs="key_bias_parts")]
    row_bias: Annotated[Any, Buffer("operand", "float32", needs="row_bias")]
    added: Any
    out: Annotated[Any, Buffer("result")]
    lse: Annotated[Any, Buffer("result", "float32")]
    tile_counter: Annotated[Any, Buffer("scratch", "int32", needs="has_tile_counter")]


class DecodeBuffers(NamedTuple):
    """Buffers of a decoding launch, which splits the keys of few queries, see `decode/split.py`.

    Attributes:
        query, query_seq_lengths, key_value_seq_lengths, query_offset, added, out, lse: see `ForwardBuffers`.
        key, value: `[B, S, K, H or D]`, or with `spec.page` pages `[P, page, K, H or D]`.
        page_table: `[B, S / page]`, the page of so many keys; entries past the last key are not read.
        row_bits: `[planes, rows, ceil(S / 32)]`, the keys that each row sees, see `ops/cuda/row_bits.py`.
        partial_out: `[2 CTAs, T * group, D]`, outputs of segments.
        partial_lse: `[2 CTAs, T * group]`, their log-sum-exps, in base 2 and without sinks.
        begun: `[CTAs, 4]`: the unit that a CTA begins and does not end, numbered in `[B, K]`, -1 if there is none; its
            tiles past the CTA's share; where that share ends; and tiles of the line.
    """

    query: Annotated[Any, Buffer("operand")]
    key: Annotated[Any, Buffer("operand")]
    value: Annotated[Any, Buffer("operand")]
    page_table: Annotated[Any, Buffer("operand", "int32", needs="page")]
    query_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="query_seq_lengths")]
    key_value_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="key_value_seq_lengths")]
    query_offset: Annotated[Any, Buffer("operand", "int32", needs="offset_operand")]
    row_bits: Annotated[Any, Buffer("operand", "int32", needs="row_bits")]
    added: Any
    out: Annotated[Any, Buffer("result")]
    lse: Annotated[Any, Buffer("result", "float32")]
    partial_out: Annotated[Any, Buffer("scratch", "float32", needs="config.splits")]
    partial_lse: Annotated[Any, Buffer("scratch", "float32", needs="config.splits")]
    begun: Annotated[Any, Buffer("scratch", "int32", needs="config.splits")]


class BackwardBuffers(NamedTuple):
    """Buffers of a backward launch of the Hopper family.

    Attributes:
        query: `[B, T, N, H]`; this and the other operands are those of the forward pass, or have the shapes of those.
        key: `[B, S, K, H]`.
        value: `[B, S, K, D]`.
        query_seq_lengths: `[B]`.
        key_value_seq_lengths: `[B]`.
        query_offset: `[B]`.
        query_tiles, key_tiles: `[slots, 8]`, records of tiles of packed sequences, see `tiles/records.py`. A slot of
            queries has `ROW_ALIGNMENT` rows. The padded rows of a head are the rows of its slots.
        query_lists, query_bits, key_tile_counts: of tiles of keys, see `tiles/lists.py`.
        key_records, query_ids: what their edge tiles compare in the place of bits, see `visits/compared.py`.
        key_lists, key_bits, query_records, key_ids: of the tiles of queries of a kernel of dq alone, or of dbias.
        key_classes: of the tiles of keys that the latter visits, see `tile_lists.shapes`.
        sinks: `[b, N]`.
        bias, key_bias, row_bias: see `ForwardBuffers`.
        out: `[B, T, N, D]`, from the forward pass.
        lse: `[B, T, N]`, from the forward pass.
        dout: `[B, T, N, D]`.
        dlse: `[B, T, N]`.
        added: see `ForwardBuffers`.
        dq: `[B, T, N, H]`.
        dk: `[B, S, K, H]`.
        dv: `[B, S, K, D]`.
        dsinks_terms: `[B, N, T]`, what each row adds to the gradient of its sink.
        dbias: `[parts, planes, T, bias_pitch]`, see `Scalars.bias_parts`. Of a bias of rows
            `[parts, B, N, column warps, ROW_SUMS, T]`, see `dbias_sum.RowSums`.
        dkey_bias: `[B, N, S]`, what heads add to the gradient of a bias of keys. Portable: `[B, N column_warps, S]`.
        stats: `[B, N, 2, padded_rows(T)]`, see `sm90/backward/gradient.py`.
        dq_accum: `[B, N, padded_rows(T), padded H]` in an order of its own, see `sm90/backward/dkdv_dq/dq_atomic.py`.
        tile_counter: `[1]`, how many tiles of keys CTAs have fetched.
        head_ready: `[B, K]`, how many warps have prepared statistics and zeros of a key/value head. Of packed sequences
            `[slots]`: at a sequence's first slot, how many of its slots have statistics from the background launch.
        dq_semaphore: `[B, N, padded_rows(T) / queries of a tile]`, how many key tiles have still to add to each query
            tile, or with `spec.ordered` how many have added.
    """

    query: Annotated[Any, Buffer("operand")]
    key: Annotated[Any, Buffer("operand")]
    value: Annotated[Any, Buffer("operand")]
    query_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="query_seq_lengths")]
    key_value_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="key_value_seq_lengths")]
    query_offset: Annotated[Any, Buffer("operand", "int32", needs="offset_operand")]
    query_tiles: Annotated[Any, Buffer("operand", "int32", needs="packed")]
    key_tiles: Annotated[Any, Buffer("operand", "int32", needs="packed")]
    query_lists: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    query_bits: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    key_tile_counts: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    key_records: Annotated[Any, Buffer("operand", "int32", needs="compared")]
    query_ids: Annotated[Any, Buffer("operand", "int32", needs="compared")]
    key_lists: Annotated[Any, Buffer("operand", "int32", needs="lists_keys")]
    key_bits: Annotated[Any, Buffer("operand", "int32", needs="lists_keys")]
    key_classes: Annotated[Any, Buffer("operand", "int32", needs="classifies_keys")]
    query_records: Annotated[Any, Buffer("operand", "int32", needs="compares_keys")]
    key_ids: Annotated[Any, Buffer("operand", "int32", needs="compares_keys")]
    sinks: Annotated[Any, Buffer("operand", "float32", needs="dsinks")]
    bias: Annotated[Any, Buffer("operand", needs="matrix_bias", dtype_of="bias_storage")]
    key_bias: Annotated[Any, Buffer("operand", "float32", needs="key_bias")]
    row_bias: Annotated[Any, Buffer("operand", "float32", needs="row_bias")]
    out: Annotated[Any, Buffer("operand")]
    lse: Annotated[Any, Buffer("operand", "float32")]
    dout: Annotated[Any, Buffer("operand")]
    dlse: Annotated[Any, Buffer("operand", "float32", needs="dlse")]
    added: Any
    dq: Annotated[Any, Buffer("result")]
    dk: Annotated[Any, Buffer("result")]
    dv: Annotated[Any, Buffer("result")]
    dsinks_terms: Annotated[Any, Buffer("result", "float32", needs="dsinks")]
    dbias: Annotated[Any, Buffer("result", needs="sums_dbias", dtype_of="dbias_dtype")]
    dkey_bias: Annotated[Any, Buffer("result", "float32", needs="dkey_bias")]
    stats: Annotated[Any, Buffer("scratch", "float32")]
    dq_accum: Annotated[Any, Buffer("scratch", "float32", needs="config.adds_dq")]
    tile_counter: Annotated[Any, Buffer("scratch", "int32", needs="config.adds_dq")]
    head_ready: Annotated[Any, Buffer("scratch", "int32", needs="config.adds_dq")]
    dq_semaphore: Annotated[Any, Buffer("scratch", "int32", needs="config.adds_dq")]


class PortableBackwardBuffers(NamedTuple):
    """Buffers of a backward launch of the portable family: as `BackwardBuffers`, with other scratch arrays.

    Attributes:
        query, key, value, query_seq_lengths, key_value_seq_lengths, query_offset: see `BackwardBuffers`.
        query_tiles, key_tiles: `[slots, 8]`, records of tiles of packed sequences, see `tiles/records.py`.
        query_lists, query_bits, key_records, query_ids: see `BackwardBuffers`.
        key_tile_counts: the same; these kernels do not read it.
        key_lists, key_bits, key_classes, query_records, key_ids: see `BackwardBuffers`; for the kernel of dbias.
        sinks, bias, key_bias, row_bias, out, lse, dout, dlse, added: see `BackwardBuffers`.
        dq, dk, dv, dsinks_terms, dbias, dkey_bias: see `BackwardBuffers`.
        stats, dq_accum, tile_counter, dq_semaphore: see `sm80/backward/config.backward_scratch`.
    """

    query: Annotated[Any, Buffer("operand")]
    key: Annotated[Any, Buffer("operand")]
    value: Annotated[Any, Buffer("operand")]
    query_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="query_seq_lengths")]
    key_value_seq_lengths: Annotated[Any, Buffer("operand", "int32", needs="key_value_seq_lengths")]
    query_offset: Annotated[Any, Buffer("operand", "int32", needs="offset_operand")]
    query_tiles: Annotated[Any, Buffer("operand", "int32", needs="packed")]
    key_tiles: Annotated[Any, Buffer("operand", "int32", needs="packed")]
    query_lists: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    query_bits: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    key_tile_counts: Annotated[Any, Buffer("operand", "int32", needs="listed")]
    key_records: Annotated[Any, Buffer("operand", "int32", needs="compared")]
    query_ids: Annotated[Any, Buffer("operand", "int32", needs="compared")]
    key_lists: Annotated[Any, Buffer("operand", "int32", needs="lists_keys")]
    key_bits: Annotated[Any, Buffer("operand", "int32", needs="lists_keys")]
    key_classes: Annotated[Any, Buffer("operand", "int32", needs="classifies_keys")]
    query_records: Annotated[Any, Buffer("operand", "int32", needs="compares_keys")]
    key_ids: Annotated[Any, Buffer("operand", "int32", needs="compares_keys")]
    sinks: Annotated[Any, Buffer("operand", "float32", needs="dsinks")]
    bias: Annotated[Any, Buffer("operand", needs="matrix_bias", dtype_of="bias_storage")]
    key_bias: Annotated[Any, Buffer("operand", "float32", needs="key_bias")]
    row_bias: Annotated[Any, Buffer("operand", "float32", needs="row_bias")]
    out: Annotated[Any, Buffer("operand")]
    lse: Annotated[Any, Buffer("operand", "float32")]
    dout: Annotated[Any, Buffer("operand")]
    dlse: Annotated[Any, Buffer("operand", "float32", needs="dlse")]
    added: Any
    dq: Annotated[Any, Buffer("result")]
    dk: Annotated[Any, Buffer("result")]
    dv: Annotated[Any, Buffer("result")]
    dsinks_terms: Annotated[Any, Buffer("result", "float32", needs="dsinks")]
    dbias: Annotated[Any, Buffer("result", needs="sums_dbias", dtype_of="dbias_dtype")]
    dkey_bias: Annotated[Any, Buffer("result", "float32", needs="dkey_bias")]
    stats: Annotated[Any, Buffer("scratch", "float32")]
    dq_accum: Annotated[Any, Buffer("scratch", "float32")]
    tile_counter: Annotated[Any, Buffer("scratch", "int32", needs="ordered")]
    dq_semaphore: Annotated[Any, Buffer("scratch", "int32", needs="ordered")]


Buffers = ForwardBuffers | BackwardBuffers | PortableBackwardBuffers
