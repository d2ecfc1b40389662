# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The public function for keys and values in pages; `explain.py` explains its calls."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_fastattn.api import eager
from jax_fastattn.canonical import validation
from jax_fastattn.canonical.arguments import restore
from jax_fastattn.canonical.paged import canonicalize
from jax_fastattn.keywords import explained
from jax_fastattn.ops import call_sites, paged
from jax_fastattn.spec import Implementation


class _Options(TypedDict, total=False):
    """Keyword arguments of `paged_attention`, for its overloads."""

    query_offset: int | ArrayLike | None
    is_causal: bool
    local_window_size: int | tuple[int | None, int | None] | None
    sinks: ArrayLike | None
    logits_soft_cap: float | None
    scale: ArrayLike | None
    implementation: Implementation | None
    deterministic: bool


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explained
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    query_offset: int | ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    sinks: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    scale: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: Implementation | None = None,
    deterministic: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention to a key/value cache that lies in pages, as when sequences are decoded.

    Key and value j of batch entry b are row `j % R` of page `page_table[b, j // R]`, for all `j < lengths[b]`. Batch
    entries may share pages. Nothing else of the pages reaches a result, even if it is NaN.

    On a GPU a kernel reads the pages where they lie if there are at most 64 rows (T * N / K) and both head dims are
    multiples of 8. Any other call, and the XLA path, first gathers the pages into dense keys and values, which takes
    the time and the memory of a copy of `B * M * R` rows. There is no derivative. The layout is from PagedAttention
    (https://arxiv.org/abs/2309.06180). docs/semantics.md has the whole contract.

    Sizes: as for `attention`; P pages, R rows of a page (a multiple of 16), M entries of the table per batch entry.

    Args:
        query: `[B, T, N, H]`; bfloat16, float16, float32, or float64 under x64.
        key_pages: `[P, R, K, H]`, dtype of `query`; P is at least 1.
        value_pages: `[P, R, K, D]`, dtype of `query`.
        page_table: integers `[B, M]`, clamped to `[0, P)`. Entries from `ceil(lengths[b] / R)` on may be anything.
        lengths: integers `[B]`, clamped to `[0, M * R]`: the keys of each batch entry, new ones included.
        query_offset: int or integers `[B]`: query i stands at key position i + query_offset for `is_causal` and
            windows. Default: `lengths - T`, after clamping, so that the last query stands at the last key.
        is_causal, local_window_size, sinks, logits_soft_cap, scale, return_residual, implementation: as for
            `attention`. "cuda" takes the CUDA kernels, after a gather where no kernel reads the pages, or raises.
        deterministic: whether the bits of a row must not depend on the other entries of the batch, see
            docs/numerics.md. Default: False.

    Returns:
        The output `[B, T, N, D]` in the dtype of `query`; with `return_residual` also the log-sum-exp `[B, T, N]`, as
        for `attention`. A query with no visible key has output 0, and as log-sum-exp the sink, or -inf without sinks.

    Raises:
        ValueError: a shape or value does not fit, such as pages of 24 rows, or a mesh splits the pages by another axis
            than K.
        TypeError: a dtype or kind does not fit.
        NotImplementedError: the call is differentiated, or the pages are mapped by `vmap`, or `implementation` is
            "cuda" and no kernel applies; the message lists every reason.
    """
    paged.refuse_split_pages(key_pages=key_pages, value_pages=value_pages)
    operands = {
        "query": query,
        "key_pages": key_pages,
        "value_pages": value_pages,
        "page_table": page_table,
        "lengths": lengths,
        "query_offset": query_offset,
        "sinks": sinks,
        "scale": scale,
    }
    options = {
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "logits_soft_cap": logits_soft_cap,
        "return_residual": return_residual,
        "implementation": implementation,
        "deterministic": deterministic,
    }
    return eager.call(_paged_attention, operands, options)


def _paged_attention(*, return_residual: Any, **arguments: Any) -> Any:
    spec, operands = canonicalize(**arguments)
    call_sites.note(operands.dense_spec(spec), operands.dense_shapes())
    results = paged.attend(spec, operands, validation.check_flag("return_residual", return_residual))
    return restore(results, batched=True)
