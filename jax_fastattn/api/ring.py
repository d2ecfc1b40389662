# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions for sequences that are split over a mesh axis, for use inside `jax.shard_map`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastattn.api.options import MaskMod, ScoreMod, SegmentIds, SplitOptions, Window
from jax_fastattn.canonical import validation
from jax_fastattn.canonical.arguments import is_batched, restore
from jax_fastattn.canonical.ring import canonicalize
from jax_fastattn.keywords import explained
from jax_fastattn.ops import all_to_all, call_sites, vjp
from jax_fastattn.ops.ring.layout import Layout, chunk_starts, inverse, reorder, zigzag_order
from jax_fastattn.ring import Ring
from jax_fastattn.spec import Implementation

AxisNames = str | Sequence[str]


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    layout: Layout = "contiguous",
    balance: bool = True,
    return_residual: Literal[False] = False,
    **options: Unpack[SplitOptions],
) -> jax.Array: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    layout: Layout = "contiguous",
    balance: bool = True,
    return_residual: Literal[True],
    **options: Unpack[SplitOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    layout: Layout = "contiguous",
    balance: bool = True,
    return_residual: bool,
    **options: Unpack[SplitOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explained
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    layout: Layout = "contiguous",
    balance: bool = True,
    boundaries: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    segment_ids: SegmentIds = None,
    sinks: ArrayLike | None = None,
    query_offset: int | ArrayLike = 0,
    deterministic: bool = False,
    dropout_rate: float | jax.Array = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention of a sequence whose rows are split over the devices of a mesh axis, inside `jax.shard_map`.

    Each device keeps its queries. Keys and values visit it, one device's at a time, while it computes, as in Ring
    Attention (https://arxiv.org/abs/2310.01889). If causality leaves devices without work, they help others, see
    `balance`; queries then travel, too. Outputs and gradients equal what `attention` gives for whole arrays,
    and memory is linear in the rows of one device. docs/long_sequences.md says when to use it.

    Sizes: n devices along the axis; L and M rows of queries and keys on each; other letters as for `attention`.
    Lengths, boundaries, offsets, and the columns of `bias` and `mask` count from the start of the whole sequence, and
    are the same on all devices of the axis.

    Args:
        query, key, value: this device's rows, `[B, L, N, H]`, `[B, M, K, H]` and `[B, M, K, D]`, or all three without
            B; dtypes as for `attention`.
        bias, mask: broadcastable to `[B, N, L, n M]`: this device's rows, in the order of its queries, and all columns,
            in the order of the whole sequence. Default: None.
        axis_name: the name of the mesh axis, or several names in any order, major first.
        layout: the order of rows over the devices. "contiguous", the default: device i has part i of n. "zigzag": it
            has the chunks i and 2 n - 1 - i of 2 n chunks, see `zigzag`.
        balance: whether devices of contiguous rows that have no work in a step compute queries of others, where this
            balances the work: L is even, L = M, the call is causal with no window, no offset and no `boundaries`, and
            neither `bias` nor `mask` has rows. Default: True.
        boundaries: integers `[B, C]`, not decreasing: packed sequences, each a run of rows of the whole sequence, as
            `cu_seqlens_q` and `cu_seqlens_k` of `attention_varlen`. Sequences may cross devices. Rows outside of all
            are padding. It needs L = M, and excludes lengths, ids, offsets, bias, mask and functions. Default: None.
        segment_ids: integers `[B, L]` (with L = M), or a pair `([B, L], [B, M])`, of this device's rows. Default: None.
        query_seq_lengths, key_value_seq_lengths: integers `[B]`. Default: None.
        query_offset: int or integers `[B]`. With an offset that is not 0 every device visits all others. Default: 0.
        dropout_rate, dropout_key, broadcast_dropout: as for `attention`. The key is the same on all devices of the
            axis, and rows are those of the whole sequence; batch entries and heads are this device's, so fold the index
            of an axis that splits them into the key. It excludes `boundaries`.
        score_mod, mask_mod: as for `attention`, except that `q` and `k` are rows of the whole sequence, in its own
            order whatever the layout is. Each device of the axis needs the whole of a captured array that `q` or `k`
            indexes; an array with the rows of the share raises. `b` and `h` are indices of this device's share. A
            `BlockMask` is refused. Default: None.
        scale, is_causal, local_window_size, implementation, return_residual, logits_soft_cap, sinks, deterministic: as
            for `attention`. With a window, only the devices whose keys some query sees are visited.

    Returns:
        This device's rows of the output `[B, L, N, D]`; with `return_residual` also of the log-sum-exp `[B, L, N]`.

    Raises:
        ValueError, TypeError: as for `attention`; and if `axis_name` is no axis of an enclosing `jax.shard_map`, or a
            shape does not fit the layout.
        NotImplementedError: as for `attention`; and for second derivatives.
    """
    ring = _ring(axis_name, layout, validation.check_flag("balance", balance))
    spec, operands = canonicalize(
        query,
        key,
        value,
        bias,
        mask,
        ring=ring,
        boundaries=boundaries,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        logits_soft_cap=logits_soft_cap,
        segment_ids=segment_ids,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    if spec.needs_whole_rows:
        raise NotImplementedError(
            "`boundaries` and `dropout_rate` are both given, expected one of them in a ring; pass `segment_ids` in "
            "place of `boundaries`, or call `all_to_all_attention`, which takes both"
        )
    call_sites.note(spec, operands)
    results = vjp.attend(spec, operands, validation.check_flag("return_residual", return_residual))
    return restore(results, batched=is_batched(query))


@overload
def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    return_residual: Literal[False] = False,
    **options: Unpack[SplitOptions],
) -> jax.Array: ...


@overload
def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    return_residual: Literal[True],
    **options: Unpack[SplitOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    return_residual: bool,
    **options: Unpack[SplitOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explained
def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    boundaries: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    segment_ids: SegmentIds = None,
    sinks: ArrayLike | None = None,
    query_offset: int | ArrayLike = 0,
    deterministic: bool = False,
    dropout_rate: float | jax.Array = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes what `ring_attention` does for contiguous rows, with heads in place of rows split during the call.

    One exchange gives each device whole sequences of its share of the heads, `attention` runs on them, and one exchange
    returns the rows, as in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509). Second derivatives work.

    Args:
        query, key, value: as for `ring_attention`. n divides N. If n does not divide K, K divides n, and key/value
            heads are repeated.
        axis_name: the name of the mesh axis, or several names in any order, major first.
        bias, mask, boundaries, segment_ids, query_seq_lengths, key_value_seq_lengths, query_offset: as for
            `ring_attention`.
        scale, is_causal, local_window_size, implementation, return_residual, logits_soft_cap, deterministic: as for
            `attention`.
        sinks: any floating dtype, `[N]`, of all heads. Default: None.
        dropout_rate, dropout_key, broadcast_dropout: as for `ring_attention`, also with `boundaries`.
        score_mod, mask_mod: as for `ring_attention`; `h` is an index of `query`, whose heads are exchanged.

    Returns:
        This device's rows of the output `[B, L, N, D]`; with `return_residual` also of the log-sum-exp `[B, L, N]`.

    Raises:
        ValueError, TypeError, NotImplementedError: as for `ring_attention`, except that second derivatives work; and if
            n does not divide the heads.
    """
    ring = _ring(axis_name, "contiguous", balance=False)
    spec, operands = canonicalize(
        query,
        key,
        value,
        bias,
        mask,
        ring=ring,
        boundaries=boundaries,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        logits_soft_cap=logits_soft_cap,
        segment_ids=segment_ids,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    results = all_to_all.attend(spec, operands, validation.check_flag("return_residual", return_residual))
    return restore(results, batched=is_batched(query))


@explained
def zigzag(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Returns a whole array with its rows in zigzag order: device i of `size` gets the chunks i and 2 * size - 1 - i.

    Under a causal mask the devices then have equal work. Pass `positions` to rotary embeddings.

    Args:
        x: the array of all devices, of any shape and dtype.
        size: the devices that will split the rows.
        axis: the axis of the rows, a multiple of 2 * size. Default: 1, as in `[B, T, ...]`.

    Returns:
        `x` with its rows in another order.

    Raises:
        ValueError: `size` is not positive, `x` has no such axis, or 2 * size does not divide it.
        TypeError: `x` is not an array, or `size` or `axis` is no int.
    """
    x, size, axis = _checked(x, size, axis)
    return reorder(x, zigzag_order(size), axis)


@explained
def unzigzag(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Inverts `zigzag`, whose arguments and errors it has."""
    x, size, axis = _checked(x, size, axis)
    return reorder(x, list(inverse(size)), axis)


@explained
def positions(axis_name: AxisNames, length: int, layout: Layout = "contiguous") -> jax.Array:
    """Returns where this device's rows stand in the whole sequence, inside `jax.shard_map`.

    Args:
        axis_name, layout: as for `ring_attention`.
        length: the rows of this device, an even number in zigzag order.

    Returns:
        int32 `[length]`: the place of each row.

    Raises:
        ValueError: there is no such mesh axis or layout, or `length` is negative, or odd in zigzag order.
        TypeError: `axis_name` is not a string, nor several; or `length` is no int.
    """
    ring = _ring(axis_name, layout, balance=False)
    length = validation.check_rows("length", length)
    validation.check_chunks(layout, length=length)
    starts = chunk_starts(ring, jax.lax.axis_index(ring.axes).astype(jnp.int32), length)
    rows = jnp.arange(length // len(starts), dtype=jnp.int32)
    return jnp.concatenate([start + rows for start in starts])


def _ring(axis_name: AxisNames, layout: Layout, balance: bool) -> Ring:
    """Returns the devices along a mesh axis of the enclosing `shard_map`."""
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"`axis_name` is {axis_name!r}, expected the name of a mesh axis, or several; pass a string or a tuple of "
            "strings"
        )
    axes = tuple(axes)
    validation.check_layout(layout)
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.manual_axes):
        raise ValueError(
            f"`axis_name` is {axis_name!r}, expected axes of the mesh of an enclosing `jax.shard_map`; call inside "
            "one, or call `jax_fastattn.attention` under `jax.jit`"
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"`axis_name` is {axis_name!r}, expected names that differ; pass each mesh axis once")
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    size = math.prod(sizes[axis] for axis in axes)
    return Ring(axes, size, layout, balance and layout == "contiguous", mesh=tuple(sizes.items()))


def _checked(x: jax.Array, size: int, axis: int) -> tuple[jax.Array, int, int]:
    """Returns the arguments; raises unless x is an array whose axis can be cut into two chunks for each device."""
    x = validation.as_array("x", x)
    size, axis = validation.check_integer("size", size), validation.check_integer("axis", axis)
    if size < 1:
        raise ValueError(f"`size` is {size}, expected at least 1; pass the devices along the mesh axis")
    if not -len(x.shape) <= axis < len(x.shape):
        raise ValueError(f"`x` has shape {x.shape}, expected an axis {axis}; pass the axis of the rows as `axis`")
    if x.shape[axis] % (2 * size):
        raise ValueError(
            f"`x` has shape {x.shape} with {x.shape[axis]} rows, expected a multiple of {2 * size}, twice the devices; "
            "pad the rows and pass `key_value_seq_lengths` and `query_seq_lengths`"
        )
    return x, size, axis
