# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_fastattn.api import eager
from jax_fastattn.api.options import MaskMod, PackedOptions, ScoreMod, Window
from jax_fastattn.canonical import validation
from jax_fastattn.canonical.arguments import restore
from jax_fastattn.canonical.packed import canonicalize
from jax_fastattn.keywords import explained
from jax_fastattn.ops import call_sites, vjp
from jax_fastattn.spec import Implementation


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[PackedOptions],
) -> jax.Array: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_residual: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_residual: bool,
    **options: Unpack[PackedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explained
def attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    query_offset: int | ArrayLike | Literal["bottom_right"] = 0,
    deterministic: bool = False,
    precise_gradients: bool = False,
    dropout_rate: float | jax.Array = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention over packed sequences: tokens attend inside their own sequence only.

    It has the layout of `flash_attn_varlen_func` (https://github.com/Dao-AILab/flash-attention). docs/packed.md shows
    where boundaries come from.

    Sizes: as for `attention`; total_q and total_k rows of all sequences and of padding.

    Args:
        query: `[total_q, N, H]`: the sequences' rows, one after the other; bfloat16, float16, float32, or float64 under
            x64.
        key: `[total_k, K, H]`, dtype of `query`.
        value: `[total_k, K, D]`, dtype of `query`.
        cu_seqlens_q: integers `[sequences + 1]`, not decreasing. Sequence b holds the rows
            `cu_seqlens_q[b] : cu_seqlens_q[b + 1]` and may be empty. Rows before the first boundary and past the last
            one are padding. A boundary that decreases counts as the largest one before it.
        cu_seqlens_k: integers `[sequences + 1]`, the same for keys and values; lengths may differ from the queries'.
        query_offset: int or integers `[sequences]`, within each sequence. "bottom_right" makes the last query of each
            sequence stand at its last key. Default: 0, top-left.
        scale, is_causal, local_window_size, implementation, return_residual, logits_soft_cap, sinks, deterministic:
            as for `attention`; positions count from the start of each sequence.
        precise_gradients: as for `attention`.
        dropout_rate, dropout_key, broadcast_dropout: as for `attention`, with one batch entry. The mask also depends
            on where each sequence begins; `dropout_mask` takes the boundaries.
        score_mod, mask_mod: as for `attention`; q and k count from the start of each sequence, and b is its number.

    Returns:
        The output `[total_q, N, D]` in the dtype of `query`; with `return_residual` also the log-sum-exp
        `[total_q, N]` in float32 (float64 for float64 input). Padding rows have output 0 and log-sum-exp -inf. Rows
        with no visible key have output 0, and as log-sum-exp the sink, or -inf without sinks.

    Raises:
        ValueError, TypeError, NotImplementedError: as for `attention`.
    """
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "scale": scale,
        "sinks": sinks,
        "query_offset": query_offset,
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
    }
    options = {
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "implementation": implementation,
        "return_residual": return_residual,
        "logits_soft_cap": logits_soft_cap,
        "deterministic": deterministic,
        "precise_gradients": precise_gradients,
        "broadcast_dropout": broadcast_dropout,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
    }
    return eager.call(_attention_varlen, operands, options)


def _attention_varlen(*, return_residual: Any, **arguments: Any) -> Any:
    spec, operands = canonicalize(**arguments)
    call_sites.note(spec, operands)
    results = vjp.attend(spec, operands, validation.check_flag("return_residual", return_residual))
    return restore(results, batched=False)  # pyright: ignore (untyped in jax 0.10)
