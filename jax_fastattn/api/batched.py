# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions: their signatures, their contracts, and four steps: check, canonicalize, attend, restore."""

from __future__ import annotations

import inspect
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastattn import ffi
from jax_fastattn.api.options import BatchedOptions, PackedOptions, SegmentIds, Window
from jax_fastattn.api.paged import paged_attention, paged_problem
from jax_fastattn.canonical import batched as canonical
from jax_fastattn.canonical import validation
from jax_fastattn.ops import dispatch, vjp
from jax_fastattn.ops.ring import describe
from jax_fastattn.spec import Implementation


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[BatchedOptions],
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[BatchedOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[BatchedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
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
    """Computes exact scaled dot-product attention, as `jax.nn.dot_product_attention` does, with more features.

    For every batch entry and head, with sums over the visible keys j, the output is

        out[i] = sum_j exp(x[i, j] - lse[i]) v[j], x = scale * q k^T + bias, lse[i] = log(sum_j exp(x[i, j]))

    as in FlashAttention (https://arxiv.org/abs/2205.14135). Keys, values and rows that are invisible never reach a
    result, even if they are NaN.

    First and second derivatives work in forward and reverse mode; a third one raises `NotImplementedError`. On a GPU,
    XLA computes tangents and second derivatives; kernels compute outputs and gradients.

    Three things differ from `jax.nn`. A query with no visible key gets output 0, log-sum-exp -inf and zero gradients;
    `jax.nn` returns the mean of `value`. The log-sum-exp is float32 and differentiable; `jax.nn` returns it in the
    dtype of `query` and stops its gradient. `implementation` may be None, "cuda" or "xla"; `jax.nn` takes "xla" or
    "cudnn". docs/semantics.md has a table of these and of smaller differences.

    Sizes: B batch, T query length, S key length, N query heads, K key/value heads (N a multiple of K: grouped-query
    attention), H head dim, D head dim of `value`.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`; bfloat16, float16, float32, or float64 under x64. Products of float32
            follow `jax.default_matmul_precision`.
        key: `[B, S, K, H]` or `[S, K, H]`, dtype of `query`.
        value: `[B, S, K, D]` or `[S, K, D]`, dtype of `query`; D may differ from H.
        bias: any floating dtype, broadcastable to `[B, N, T, S]`, or with K heads as `mask`; added to the scaled
            logits. At or below -2.36e38 it counts as -inf. Differentiable; its gradient has its shape and dtype.
            Default: None, no bias.
        mask: bool, broadcastable to `[B, N, T, S]`; True where the query may attend. A mask with K heads,
            `[b, K, t, s]`, has a row for each key/value head, which the query heads of its group share. Default: None,
            all True.
        scale: factor on `query . key`; default 1 / sqrt(H). A Python or NumPy number is fixed when the call is traced.
            A `jax.Array` of shape `()`, traced or not, is run-time data and differentiable.
        is_causal: whether a query sees only the keys at its own position and before; see `query_offset`. Default:
            False.
        query_seq_lengths: integers `[B]`; rows from there on are padding and have output 0 and zero gradients. Default:
            None, no padding.
        key_value_seq_lengths: integers `[B]`; keys from there on are invisible. Default: None, no padding.
        local_window_size: `(left, right)` keys around the query's position, None for an unlimited side; an int means
            both sides. Default: unlimited.
        implementation: None takes the CUDA kernels where they apply and the XLA path elsewhere; on a GPU, a warning
            then names the reasons. "cuda" raises instead of falling back. "xla" is the XLA path. It computes up to
            4 GiB of logits at once on a GPU, and 8 MiB on a CPU; beyond that, its memory is linear in T and S. Default:
            None.
        return_residual: whether to return the log-sum-exp too. Default: False.
        logits_soft_cap: `cap * tanh(x / cap)` on the biased logits, before masks (Gemma 2,
            https://arxiv.org/abs/2408.00118). Default: off.
        segment_ids: integers `[B, T]` (with T = S), or a pair `([B, T], [B, S])`; tokens attend inside equal ids.
            Default: None.
        sinks: any floating dtype, `[N]`: one learned logit per head that joins the softmax denominator, with no value
            (https://arxiv.org/abs/2309.17453). Differentiable. Default: None.
        query_offset: int or integers `[B]`: query i stands at key position i + query_offset for `is_causal` and
            windows. Default: 0, `jax.nn`'s top-left alignment; S - T is FlashAttention's bottom-right. Run-time data.
        deterministic: whether gradients must be bitwise equal from run to run. Default: False.

    Returns:
        The output `[B, T, N, D]` (`[T, N, D]` for unbatched input) in the dtype of `query`; with `return_residual`,
        a pair of the output and the log-sum-exp of the logits `[B, T, N]`: the natural logarithm, in float32 (float64
        for float64 input), including the sink. Both are differentiable.

    Raises:
        ValueError: a shape or value does not fit.
        TypeError: a dtype or kind does not fit.
        NotImplementedError: `implementation` is "cuda" and no kernel applies; the message lists every reason. Or a
            third derivative with respect to the operands is taken.
    """
    spec, operands = canonical.canonicalize(
        query,
        key,
        value,
        bias,
        mask,
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


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    page_table: Any = None,
    arch: str | None = None,
    **options: Any,
) -> dispatch.Explanation:
    """Returns which implementation a call with these arguments would run, and why.

    It knows the call alone, not how it is differentiated: tangents and second derivatives take the XLA path always. It
    knows of a mesh what the shardings of `query` and `key` say, which are `NamedSharding`s; if rows are split, it
    describes the ring attention that runs under `jax.jit`.

    Args:
        query, key, value, bias, mask, **options: as for `attention`; `jax.ShapeDtypeStruct`s are enough, since nothing
            runs.
        cu_seqlens_q, cu_seqlens_k: as for `attention_varlen`. If they are given, all arguments are those of
            `attention_varlen`. Default: None, for a call of `attention`.
        page_table: as for `paged_attention`. If it is given, all arguments are those of `paged_attention`, whose pages
            are `key` and `value` here; its `lengths` are an option. Default: None.
        arch: the GPU to lower for, such as `"sm_90a"`; see `target_arch`. Default: that of an enclosing `target_arch`,
            else the local devices.

    Returns:
        A readable record. It has the implementation, kernels, tiles and how dq is added up, or the reasons against the
        kernels and what to do instead.

    Raises:
        ValueError, TypeError: the call itself would raise the same error, or `arch` is no architecture.
    """
    options |= {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    function, canonicalize = attention, canonical.canonicalize
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        function, canonicalize = attention_varlen, canonical.canonicalize_packed
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if page_table is not None:
        function = paged_attention
        options = {"lengths": None} | options | {"page_table": page_table}
    if unknown := [name for name in options if name not in inspect.signature(function).parameters]:
        remedy = "; pass `page_table` too for `paged_attention`" if unknown == ["lengths"] else ""
        raise TypeError(
            f"explain() got an unexpected keyword argument '{unknown[0]}'; {function.__name__}() has none{remedy}"
        )
    return_residual = options.pop("return_residual", False)
    if page_table is not None:
        problem, note = paged_problem(query=query, key=key, value=value, **options), ""
    else:
        problem, note = describe.call(
            *canonical.shapes_of(canonicalize, query=query, key=key, value=value, **options), split_of=(query, key)
        )
    validation.check_flag("return_residual", return_residual)
    with ffi.target_arch(ffi.named_arch() if arch is None else arch):
        return dispatch.with_note(dispatch.explain(problem), note)


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

    Returns:
        The output `[total_q, N, D]` in the dtype of `query`; with `return_residual` also the log-sum-exp
        `[total_q, N]` in float32 (float64 for float64 input). Padding rows have output 0 and log-sum-exp -inf. Rows
        with no visible key have output 0, and as log-sum-exp the sink, or -inf without sinks.

    Raises:
        ValueError, TypeError, NotImplementedError: as for `attention`.
    """
    spec, operands = canonical.canonicalize_packed(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        implementation=implementation,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
    )
    dispatch.note_call_site(spec, operands)
    results = vjp.attend(spec, operands, validation.check_flag("return_residual", return_residual))
    return canonical.restore(results, batched=False)  # pyright: ignore (untyped in jax 0.10)
