# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Implementations of attention, ours and others', behind one signature. Others are imported when they are asked for.

An implementation is a function of a case and its operands (canonical, see `jax_fastattn.spec`) to the output
`[B, T, N, D]`. `Unsupported` says that its API cannot express a case; whatever else it raises is its own error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from refusals import Unsupported, refuse, refuse_alignment

import jax_fastattn
from jax_fastattn.cases.case import Case
from jax_fastattn.spec import Operands

Attend = Callable[[Case, Operands], jax.Array]


@dataclass(frozen=True)
class Implementation:
    """An implementation, with the module and the distribution that it comes in."""

    module: str
    distribution: str
    attend: Attend
    # Of what is no function of JAX: a case, its operands, dout and the mode to what is timed and its arguments.
    compiled: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]] | None = None

    def version(self) -> str | None:
        """Its version; None where it is not installed."""
        if importlib.util.find_spec(self.module) is None:
            return None
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "from source"


def boundaries(lengths: tuple[int, ...]) -> jax.Array:
    """Cumulative lengths from 0, as varlen functions take them."""
    return jnp.array([0, *itertools.accumulate(lengths)], jnp.int32)


def ours(case: Case, operands: Operands, **more: Any) -> jax.Array:
    """`jax_fastattn`, by its public functions, with more options than those of the case."""
    options: dict[str, Any] = {
        "scale": case.scale,
        "is_causal": case.is_causal,
        "local_window_size": case.window,
        "logits_soft_cap": case.logits_soft_cap,
        "sinks": None if operands.sinks is None else operands.sinks[0],
        "deterministic": case.deterministic,
        **more,
    }
    if case.packed is not None:
        packed = jax_fastattn.attention_varlen(
            *(x[0] for x in operands[:3]), boundaries(case.packed[0]), boundaries(case.packed[1]), **options
        )
        return packed[None]
    if operands.query_segment_ids is not None:
        options["segment_ids"] = operands.query_segment_ids, operands.key_value_segment_ids
    return jax_fastattn.attention(
        *operands[:5],
        query_seq_lengths=operands.query_seq_lengths,
        key_value_seq_lengths=operands.key_value_seq_lengths,
        query_offset=0 if operands.query_offset is None else operands.query_offset,
        **options,
    )


def jax_nn(case: Case, operands: Operands, implementation: Any) -> jax.Array:
    """`jax.nn.dot_product_attention`."""
    refuse(
        case,
        "logits_soft_cap",
        "sinks",
        "segments",
        "documents",
        "packed",
        "query_offset",
        "v_head_dim",
        "deterministic",
    )
    return jax.nn.dot_product_attention(
        *operands[:5],
        scale=case.scale,
        is_causal=case.is_causal,
        query_seq_lengths=operands.query_seq_lengths,
        key_value_seq_lengths=operands.key_value_seq_lengths,
        local_window_size=closed_window(case),
        implementation=implementation,
    )


def closed_window(case: Case) -> tuple[int, int] | None:
    """The window for functions that take numbers only."""
    if case.window == (None, None):
        return None
    left, right = case.spec().bounds
    return case.key_length if left is None else left, case.key_length if right is None else right


def fa4_jax(case: Case, operands: Operands) -> jax.Array:
    """FlashAttention-4's kernels. Causal masks are aligned to the last key, ours to the first."""
    refuse(case, "bias", "mask", "logits_soft_cap", "sinks", "segments", "documents", "query_offset")
    refuse(case, "query_seq_lengths", "key_value_seq_lengths", "deterministic")
    refuse_alignment(case)
    from fa4_jax import flash_attn, flash_attn_varlen

    options = {"causal": case.is_causal, "scale": case.scale}
    if case.window != (None, None):
        options["window_size"] = case.window
    if case.packed is not None:
        query, key, value = (x[0] for x in operands[:3])
        return flash_attn_varlen(query, key, value, *map(boundaries, case.packed), **options)[None]
    return flash_attn(*operands[:3], **options)


def dew_flash_attn(case: Case, operands: Operands) -> jax.Array:
    """FlashAttention-3's kernels on Hopper, -2's elsewhere. Causal masks are aligned to the last key."""
    refuse(case, "bias", "mask", "logits_soft_cap", "segments", "documents", "query_offset")
    refuse(case, "query_seq_lengths", "key_value_seq_lengths", "deterministic")
    refuse_alignment(case)
    from dew_flash_attn import flash_mha, flash_mha_varlen

    sides = (None, None) if case.window == (None, None) else case.spec().bounds
    options = {
        "softmax_scale": case.scale,
        "is_causal": case.is_causal,
        "window_size": tuple(-1 if side is None else side for side in sides),
        "sinks": None if operands.sinks is None else operands.sinks[0],
    }
    if case.packed is not None:
        (query_starts, key_starts), longest = map(boundaries, case.packed), [max(x) for x in case.packed]
        options |= {"key_cu_seqlens": key_starts, "key_max_seqlen": longest[1]}
        return flash_mha_varlen(*(x[0] for x in operands[:3]), query_starts, longest[0], **options)[None]
    return flash_mha(*operands[:3], **options)


def tokamax(case: Case, operands: Operands) -> jax.Array:
    """tokamax's GPU kernels: Mosaic, else Triton; never its XLA path."""
    refuse(case, "sinks", "segments", "documents", "packed", "query_offset")
    from tokamax import dot_product_attention

    return dot_product_attention(
        *operands[:5],
        scale=case.scale,
        is_causal=case.is_causal,
        query_seq_lengths=operands.query_seq_lengths,
        key_value_seq_lengths=operands.key_value_seq_lengths,
        local_window_size=closed_window(case),
        logits_soft_cap=case.logits_soft_cap,
        implementation=("mosaic", "triton"),
    )


def fa2_torch(case: Case, operands: Operands) -> jax.Array:
    """Not a function of JAX: see `torch_peer.py`."""
    raise Unsupported("it runs by torch alone")


def compiled_fa2(*arguments: Any) -> Any:
    """As `run.compiled`, by `torch_peer.py`, which is imported when it is asked for."""
    import torch_peer

    return torch_peer.compiled(*arguments)


# The order of columns in tables.
IMPLEMENTATIONS = {
    "jax_fastattn": Implementation("jax_fastattn", "jax_fastattn", ours),
    "jax_fastattn-deterministic": Implementation("jax_fastattn", "jax_fastattn", partial(ours, deterministic=True)),
    "jax_fastattn-precise": Implementation("jax_fastattn", "jax_fastattn", partial(ours, precise_gradients=True)),
    "jax_fastattn-xla": Implementation("jax_fastattn", "jax_fastattn", partial(ours, implementation="xla")),
    "jax.nn-cudnn": Implementation("jax", "jax", partial(jax_nn, implementation="cudnn")),
    "jax.nn-xla": Implementation("jax", "jax", partial(jax_nn, implementation="xla")),
    "fa4-jax": Implementation("fa4_jax", "fa4-jax", fa4_jax),
    "dew-flash-attn": Implementation("dew_flash_attn", "dew-flash-attn-cu13", dew_flash_attn),
    "tokamax": Implementation("tokamax", "tokamax", tokamax),
    "fa2-torch": Implementation("torch", "torch", fa2_torch, compiled_fa2),
}
