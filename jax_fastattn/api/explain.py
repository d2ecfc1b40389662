# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Explains which implementation a call would run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jax_fastattn import ffi, keywords
from jax_fastattn.api.batched import attention
from jax_fastattn.api.packed import attention_varlen
from jax_fastattn.api.paged import paged_attention
from jax_fastattn.canonical import batched, packed, paged, validation
from jax_fastattn.canonical.shapes import shapes_of
from jax_fastattn.keywords import explained
from jax_fastattn.layouts.paged import PagedOperands
from jax_fastattn.ops import dispatch
from jax_fastattn.ops.ring import describe
from jax_fastattn.programs.function import words
from jax_fastattn.spec import AttentionSpec, Operands

# For each function, this makes operands of its arguments.
_CANONICALIZE: Mapping[Callable[..., Any], Callable[..., tuple[AttentionSpec, Operands | PagedOperands]]] = {
    attention: batched.canonicalize,
    attention_varlen: packed.canonicalize,
    paged_attention: paged.canonicalize,
}


@explained
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
        cu_seqlens_q, cu_seqlens_k: as for `attention_varlen`. If they are given, all arguments are as for
            `attention_varlen`. Default: None, for a call of `attention`.
        page_table: as for `paged_attention`. If it is given, all arguments are as for `paged_attention`, whose pages
            are `key` and `value` here; its `lengths` are an option. Default: None.
        arch: the GPU to lower for, such as `"sm_90a"`; see `target_arch`. Default: the GPU of an enclosing
            `target_arch`, else the local devices.

    Returns:
        A readable record. It has the implementation, kernels, tiles and how dq is added up, or the reasons against the
        kernels and what to do instead.

    Raises:
        ValueError, TypeError: the call itself would raise the same error, or `arch` is no architecture.
    """
    given = {"bias": bias, "mask": mask, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options |= {name: x for name, x in (given | {"page_table": page_table}).items() if x is not None}
    function = attention
    if "cu_seqlens_q" in options or "cu_seqlens_k" in options:
        function = attention_varlen
    if "page_table" in options:
        function = paged_attention
    if text := keywords.unknown("explain", options, of=function.__name__):
        raise TypeError(text)
    parameters = inspect.signature(function).parameters
    return_residual = options.pop("return_residual", False)
    # The first three parameters are query, key and value, or pages of the latter two.
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    arguments = dict.fromkeys(required) | dict(zip(parameters, (query, key, value), strict=False)) | options
    spec, operands = shapes_of(_CANONICALIZE[function], **arguments)
    if isinstance(operands, PagedOperands):
        problem, note = operands.problem(spec), ""
    else:
        problem, note = describe.call(spec, operands, split_of=(query, key))
        note = "; ".join(filter(None, (note, words("score_mod", spec.score_mod), words("mask_mod", spec.mask_mod))))
    validation.check_flag("return_residual", return_residual)
    with ffi.target_arch(ffi.named_arch() if arch is None else arch):
        return dispatch.with_note(dispatch.explain(problem), note)
