# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions for sequences that are split over a mesh axis, for use inside `jax.shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastattn import canonical, validation
from jax_fastattn.api import SegmentIds, Window, attention, attention_varlen
from jax_fastattn.canonical_ring import canonicalize_ring, check_packed_alone
from jax_fastattn.ops import dispatch, vjp
from jax_fastattn.ops.ring.layout import Layout, chunk_starts, inverse, reorder, zigzag_order
from jax_fastattn.spec import QKV, Implementation, Ring

AxisNames = str | Sequence[str]


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention of a sequence whose rows are split over the devices of a mesh axis, inside `jax.shard_map`.

    Each device keeps its queries. Keys and values visit it, one device's at a time, while it computes. Outputs and
    gradients are those of `attention` on whole arrays, and memory is linear in the rows of one device.

    Sizes: n devices along the axis; L and M rows of queries and keys on each; other letters as for `attention`.
    Lengths, boundaries, offsets, and the columns of `bias` and `mask` count from the start of the whole sequence, and
    are the same on all devices of the axis.

    Args:
        query, key, value: this device's rows, `[B, L, N, H]`, `[B, M, K, H]` and `[B, M, K, D]`.
        bias, mask: broadcastable to `[B, N, L, n M]`: this device's rows, in the order of its queries, and all columns,
            in the order of the whole sequence.
        axis_name: the mesh axis, or several of them, major first.
        layout: the order of rows over the devices. "contiguous": device i has part i of n. "zigzag": it has the chunks
            i and 2 n - 1 - i of 2 n chunks, see `zigzag`.
        balance: whether contiguous rows are exchanged into zigzag order and back inside, where this balances the work
            of devices: L is even, L = M, the call is causal with no window and no offset, and neither `bias` nor `mask`
            has rows. Default: True.
        boundaries: integers `[B, C]`, not decreasing: packed sequences, each a run of rows of the whole sequence, as
            `cu_seqlens_q` and `cu_seqlens_k` of `attention_varlen`. Sequences may cross devices. Rows outside of all
            are padding. Cannot be combined with lengths, ids, offsets, bias or mask.
        segment_ids: integers `[B, L]` (with L = M), or a pair `([B, L], [B, M])`, of this device's rows.
        query_seq_lengths, key_value_seq_lengths: integers `[B]`.
        query_offset: int or integers `[B]`. With an offset that is not 0 every device visits all others.
        scale, is_causal, local_window_size, implementation, return_residual, logits_soft_cap, sinks, deterministic: as
            for `attention`. With a window, only the devices whose keys some query sees are visited.

    Returns:
        This device's rows of the output `[B, L, N, D]`; with `return_residual` also of the log-sum-exp `[B, L, N]`.

    Raises:
        ValueError, TypeError: as for `attention`; and if a shape does not fit the layout.
        NotImplementedError: as for `attention`; and for second derivatives.
    """
    ring = _ring(axis_name, layout, validation.check_flag("balance", balance))
    spec, operands = canonicalize_ring(
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
    )
    dispatch.note_call_site(spec, operands)
    results = vjp.attend(spec, operands, validation.check_flag("return_residual", return_residual))
    return canonical.restore(results, batched=jnp.ndim(query) == 4)  # pyright: ignore (untyped in jax 0.10)


def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: AxisNames,
    segment_ids: SegmentIds = None,
    sinks: ArrayLike | None = None,
    boundaries: ArrayLike | None = None,
    **options: Any,
) -> Any:
    """Computes what `ring_attention` does for contiguous rows, with heads in place of rows split during the call.

    One exchange gives each device whole sequences of its share of the heads, `attention` runs on them, and one exchange
    returns the rows. Second derivatives work.

    Args:
        query, key, value: as for `ring_attention`. n divides N. If n does not divide K, K divides n, and key/value
            heads are repeated.
        bias, mask: as for `ring_attention`, except that the head axis is of size 1 or N.
        axis_name: the mesh axis, or several of them, major first.
        segment_ids: as for `ring_attention`.
        sinks: floating `[N]`, all heads.
        boundaries: as for `ring_attention`.
        **options: as for `attention`. Lengths, offsets and boundaries count from the start of the whole sequence.

    Returns:
        As `ring_attention`.
    """
    ring = _ring(axis_name, "contiguous", balance=False)
    arrays = [validation.as_array(name, x) for name, x in zip(QKV, (query, key, value), strict=True)]
    batched, axes = arrays[0].ndim == 4, validation.Axes()
    for name, x, letters in zip(QKV, arrays, ("BTNH", "BSKH", "BSKD"), strict=True):
        axes.bind(name, x, letters if batched else letters[1:])
    check_packed_alone(boundaries, options | {"bias": bias, "mask": mask, "segment_ids": segment_ids})
    q, k, v = (canonical.add_batch(x, 4) for x in arrays)
    k, v = _repeat_heads(ring, q.shape[2], k, v)
    planes = {
        name: _spread_plane(ring, name, x, *q.shape[1:3])
        for name, x in (("bias", bias), ("mask", mask))
        if x is not None
    }
    if segment_ids is not None:
        ids = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
        ids = (canonical.add_batch(validation.as_integers("segment_ids", x), 2) for x in ids)
        options["segment_ids"] = tuple(jax.lax.all_gather(x, ring.axes, axis=1, tiled=True) for x in ids)
    if sinks is not None:
        sinks = validation.as_array("sinks", sinks)
        axes.bind("sinks", sinks, "N")
        options["sinks"] = _own_heads(ring, sinks, 0)
    q, k, v = (_exchange(ring, x, split=2, concat=1) for x in (q, k, v))
    if boundaries is None:
        found = attention(q, k, v, **planes, **options)
    else:
        packed = functools.partial(attention_varlen, **options)
        ends = canonical.add_batch(validation.as_integers("boundaries", boundaries), 2)
        found = jax.vmap(packed)(q, k, v, ends, ends)
    found = jax.tree.map(lambda x: _exchange(ring, x, split=1, concat=2), found)
    return found if batched else jax.tree.map(canonical.drop_batch, found)


def _exchange(ring: Ring, x: jax.Array, *, split: int, concat: int) -> jax.Array:
    """Splits one axis over the devices and gathers another one."""
    return jax.lax.all_to_all(x, ring.axes, split_axis=split, concat_axis=concat, tiled=True)


def _repeat_heads(ring: Ring, heads: int, *arrays: jax.Array) -> list[jax.Array]:
    """Returns keys and values with heads that the devices divide evenly."""
    size, kv_heads = ring.size, arrays[0].shape[2]
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"`query` has {heads} heads and `key` has {kv_heads} on {size} devices of {ring.axes}, expected multiples "
            f"of {size}, or key heads that divide {size}; call `ring_attention`, which takes any heads"
        )
    return list(arrays) if kv_heads % size == 0 else [jnp.repeat(x, size // kv_heads, axis=2) for x in arrays]


def _own_heads(ring: Ring, x: jax.Array, axis: int) -> jax.Array:
    """Returns this device's part of an axis of all heads."""
    count = x.shape[axis] // ring.size
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(ring.axes) * count, count, axis)


def _spread_plane(ring: Ring, name: str, x: ArrayLike, rows: int, heads: int) -> jax.Array:
    """Returns all rows of a bias or a mask `[b, n, t, s]`, of this device's heads.

    If each device has one row, that row may be its own, so it does not stand for all of them.
    """
    x = canonical.expand_to_bnts(validation.as_array(name, x))
    if x.shape[1] not in (1, heads):
        raise ValueError(
            f"`{name}` has shape {x.shape} with {x.shape[1]} heads, expected 1 or {heads}; repeat those of key heads"
        )
    if x.shape[2] == 1 and rows != 1:
        return x if x.shape[1] == 1 else _own_heads(ring, x, 1)
    if x.shape[1] == 1:
        return jax.lax.all_gather(x, ring.axes, axis=2, tiled=True)
    return _exchange(ring, x, split=1, concat=2)


def zigzag(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Returns a whole array with its rows in zigzag order: device i of `size` gets the chunks i and 2 * size - 1 - i.

    Under a causal mask the devices then have equal work. Pass `positions` to rotary embeddings.
    """
    _check_chunks(x, size, axis)
    return reorder(x, zigzag_order(size), axis)


def unzigzag(x: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Inverts `zigzag`."""
    _check_chunks(x, size, axis)
    return reorder(x, list(inverse(size)), axis)


def positions(axis_name: AxisNames, length: int, layout: Layout = "contiguous") -> jax.Array:
    """Returns where this device's rows stand in the whole sequence, int32 `[length]`, inside `jax.shard_map`."""
    ring = _ring(axis_name, layout, balance=False)
    validation.check_chunks(layout, length=length)
    starts = chunk_starts(ring, jax.lax.axis_index(ring.axes).astype(jnp.int32), length)
    rows = jnp.arange(length // len(starts), dtype=jnp.int32)
    return jnp.concatenate([start + rows for start in starts])


def _ring(axis_name: AxisNames, layout: Layout, balance: bool) -> Ring:
    """Returns the devices along a mesh axis of the enclosing `shard_map`."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'`layout` is {layout!r}, expected "contiguous" or "zigzag"')
    try:
        size = jax.lax.axis_size(axes)
    except NameError as error:
        raise ValueError(
            f"`axis_name` is {axis_name!r}, expected axes of the mesh of an enclosing `jax.shard_map`; call inside "
            "one, or call `jax_fastattn.attention` under `jax.jit`"
        ) from error
    mesh = jax.sharding.get_abstract_mesh()
    sizes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return Ring(axes, size, layout, balance and layout == "contiguous", mesh=sizes)


def _check_chunks(x: jax.Array, size: int, axis: int) -> None:
    """Raises ValueError unless an axis can be cut into two chunks for each device."""
    if x.shape[axis] % (2 * size):
        raise ValueError(
            f"`x` has shape {x.shape} with {x.shape[axis]} rows, expected a multiple of {2 * size}, twice the devices; "
            "pad the rows and pass `key_value_seq_lengths` and `query_seq_lengths`"
        )
