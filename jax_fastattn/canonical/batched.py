# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of `attention` to canonical operands."""

from __future__ import annotations

from typing import Any

import jax

from jax_fastattn.canonical import arguments, dropout, validation
from jax_fastattn.canonical.programs import programs
from jax_fastattn.ops.block_mask import BlockMask
from jax_fastattn.spec import OPERANDS, AttentionSpec, Operands


def canonicalize(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    sinks: Any = None,
    query_offset: Any = 0,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    broadcast_dropout: Any = False,
    score_mod: Any = None,
    mask_mod: Any = None,
    **static: Any,
) -> tuple[AttentionSpec, Operands]:
    """Checks the arguments of `api.attention` and gives them canonical shapes."""
    axes, (q, k, v) = arguments.check_qkv(query, key, value, packed=False)
    hiding = {
        "mask": mask,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "segment_ids": segment_ids,
        "query_offset": query_offset,
    }
    batched = arguments.is_batched(query)
    in_order = validation.check_flag("deterministic", static.get("deterministic", False))
    found, planes = programs(axes, q.dtype, score_mod, mask_mod, in_order=in_order)
    if isinstance(mask_mod, BlockMask):
        predicate, static = _of_block_mask(mask_mod, axes, hiding, static)
        found["kept"] = mask_mod.kept
    else:
        predicate, static = _predicate(axes, batched, hiding, static)
    operands = Operands(
        query=q,
        key=k,
        value=v,
        bias=arguments.plane(axes, "bias", bias, batched),
        sinks=None if sinks is None else arguments.check_sinks(axes, sinks, q.dtype),
        dropout=dropout.operand(dropout_rate, dropout_key, broadcast_dropout, (axes["B"], axes["N"])),
        **predicate,
        **planes,
    )
    return arguments.resolve(operands, **static, **found)


def _predicate(
    axes: validation.Axes, batched: bool, hiding: dict[str, Any], static: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the operands that hide pairs, by name, and the static arguments of the call."""

    def per_batch(name: str) -> jax.Array | None:
        if hiding[name] is None:
            return None
        x = arguments.to_int32(validation.as_integers(name, hiding[name]))
        x = x if batched or x.ndim else x[None]
        axes.bind(name, x, OPERANDS[name].letters)
        return x

    query_ids, key_ids = _check_segment_ids(axes, hiding["segment_ids"], batched)
    offset = arguments.offset_per_batch(hiding["query_offset"], axes["B"])
    offset, static = arguments.near_offset(axes, offset, static)
    found = {
        "mask": arguments.plane(axes, "mask", hiding["mask"], batched),
        "query_seq_lengths": per_batch("query_seq_lengths"),
        "key_value_seq_lengths": per_batch("key_value_seq_lengths"),
        "query_offset": offset,
        "query_segment_ids": query_ids,
        "key_value_segment_ids": key_ids,
    }
    return found, static


def _of_block_mask(
    mask: BlockMask, axes: validation.Axes, hiding: dict[str, Any], static: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what `_predicate` does, of a block mask, which holds all that hides pairs."""
    window = validation.check_window(static.get("local_window_size"))
    given = {name for name, x in hiding.items() if x is not None and not (name == "query_offset" and _is_zero(x))}
    given |= {"local_window_size"} if window != (None, None) else set()
    given |= {"is_causal"} if validation.check_flag("is_causal", static.get("is_causal", False)) else set()
    if given:
        name = min(given)
        raise ValueError(
            f"`{name}` is given with a BlockMask, which holds all that hides pairs; pass it to `block_mask`"
        )
    sizes = axes["B"], axes["N"], axes["T"], axes["S"]
    if mask.sizes != sizes:
        raise ValueError(
            f"`mask_mod` is a BlockMask for {_in_words(mask.sizes)}, and the call has {_in_words(sizes)}; make one for "
            "these sizes with `block_mask`"
        )
    return {**mask.operands, **mask.lists}, static | {"is_causal": mask.is_causal, "local_window_size": mask.window}


def _is_zero(x: Any) -> bool:
    return isinstance(x, int) and x == 0


def _in_words(sizes: tuple[int, ...]) -> str:
    return "B = {}, N = {}, T = {}, S = {}".format(*sizes)


def _check_segment_ids(
    axes: validation.Axes, ids: Any, batched: bool
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    if ids is None:
        return None, None
    is_pair = isinstance(ids, (tuple, list)) and len(ids) == 2
    query_ids, key_ids = ids if is_pair else (ids, ids)
    if not is_pair:
        validation.check_one_length("segment_ids", axes)
    arrays = []
    for name, x in (("query_segment_ids", query_ids), ("key_value_segment_ids", key_ids)):
        x = validation.as_integers("segment_ids", x)
        axes.bind("segment_ids", x, arguments.letters(name, batched))
        arrays.append(arguments.add_batch(x, 2))
    # Only their equality matters, and any dtype has it.
    query_ids, key_ids = arrays if arrays[0].dtype == arrays[1].dtype else map(arguments.to_int32, arrays)
    return query_ids, key_ids
