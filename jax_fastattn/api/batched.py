# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of dense arrays: its signature, its contract, and four steps: check, canonicalize, attend, restore."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_fastattn.api import eager
from jax_fastattn.api.options import BatchedOptions, MaskMod, ScoreMod, SegmentIds, Window
from jax_fastattn.canonical import validation
from jax_fastattn.canonical.arguments import is_batched, restore
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.keywords import explained
from jax_fastattn.ops import call_sites, vjp
from jax_fastattn.ops.block_mask import BlockMask
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


@explained
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
    precise_gradients: bool = False,
    dropout_rate: float | jax.Array = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | BlockMask | None = None,
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
        deterministic: whether gradients must be bitwise equal from run to run, and the bits of a row must not depend on
            the other entries of the batch, see docs/numerics.md. Holds in kernels. Default: False.
        precise_gradients: whether dq and dk of peaked weights get the errors of ordinary weights, see
            docs/numerics.md. If the call is differentiated, kernels in bfloat16 and float16 then keep a byte for each
            element of the output from the forward to the backward pass, which reads it once. The output does not
            change. Elsewhere the argument changes nothing. Default: False.
        dropout_rate: the probability with which an attention weight becomes 0; the others are divided by one minus it.
            A Python or NumPy number from 0 to 1, rounded to a multiple of 2^-15, or a `jax.Array` of shape `()`, traced
            or not, which is run-time data. The log-sum-exp does not change. Default: 0, no dropout.
        dropout_key: a key of `jax.random`, typed or legacy, which the call uses up. Together with the rate and the
            indices of batch entry, head, query and key it says which weights are kept (`dropout_mask`), on every
            platform and mesh. Inside `jax.shard_map` these are indices of the share: fold the axis index into the key.
            Default: None; a rate needs a key.
        broadcast_dropout: whether all batch entries and heads share one mask `[T, S]`, as is Flax's default. Default:
            False.
        score_mod: `score_mod(score, b, h, q, k)`, a JAX function of scalars that returns what becomes of a scaled,
            biased logit before the soft cap. All of its floats are float32 (float64 for float64 input), and b, h, q, k
            are int32 indices of `query` and `key`. Arrays that it captures are data, and differentiable;
            docs/programs.md has recipes. Default: None.
        mask_mod: `mask_mod(b, h, q, k)`, a JAX function of scalars that returns whether a pair counts, besides all
            other conditions; see `and_masks`, `or_masks` and `causal`. Or what `block_mask` returns, which holds all
            that hides pairs. Default: None.

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
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "scale": scale,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "segment_ids": segment_ids,
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
    return eager.call(_attention, operands, options)


def _attention(*, query: Any, return_residual: Any, **arguments: Any) -> Any:
    spec, operands = canonicalize(query, **arguments)
    call_sites.note(spec, operands)
    results = vjp.attend(spec, operands, validation.check_flag("return_residual", return_residual))
    return restore(results, batched=is_batched(query))
