# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Explains keywords that a public function lacks: other libraries' names of arguments, and the names here.

`PEERS` is the one table of these names. Errors read it, and docs/migration.md shows it. A feature that takes over an
argument of a peer changes its row.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

_Public = TypeVar("_Public", bound=Callable[..., Any])

# Below this ratio of `difflib`, two names have nothing to do with each other.
_LEAST_LIKENESS = 0.6


class Row(NamedTuple):
    """An argument of other libraries.

    Attributes:
        names: what they call it.
        libraries: which ones do.
        remedy: what to do here, as the end of a sentence; names of arguments are in backticks.
    """

    names: tuple[str, ...]
    libraries: str
    remedy: str


_ALIBI = (
    "pass `bias=slopes[:, None, None] * jnp.arange(S, dtype=jnp.float32)` with float32 slopes `[N]` and "
    "`is_causal=True`: slopes or positions in bfloat16 are silently wrong, since it has no odd integers above 256; the "
    "log-sum-exp is shifted by the slope times the position of the query"
)

PEERS = (
    Row(("q",), "flash-attn, cuDNN", "pass `query`"),
    Row(("k",), "flash-attn, cuDNN", "pass `key`"),
    Row(("v",), "flash-attn, cuDNN", "pass `value`"),
    Row(("query_layer",), "TransformerEngine", "pass `query`"),
    Row(("key_layer",), "TransformerEngine", "pass `key`"),
    Row(("value_layer",), "TransformerEngine", "pass `value`"),
    Row(("qkv", "kv"), "flash-attn, TransformerEngine", "pass three arrays: `query`, `key` and `value`"),
    Row(
        ("softmax_scale", "scale_factor", "scaling_factor", "attn_scale", "sm_scale"),
        "flash-attn, TransformerEngine, cuDNN, Pallas",
        "pass `scale`",
    ),
    Row(
        ("causal", "use_causal_mask"),
        "flash-attn, fa4-jax, Pallas, cuDNN",
        "pass `is_causal=True`; for flash-attn's bottom-right alignment also `query_offset=S - T`, or "
        '`query_offset="bottom_right"` in `attention_varlen`',
    ),
    Row(
        ("use_causal_mask_bottom_right",),
        "cuDNN",
        'pass `is_causal=True` and `query_offset=S - T`, or `query_offset="bottom_right"` in `attention_varlen`',
    ),
    Row(
        ("attn_mask_type", "mask_type"),
        "TransformerEngine, cuDNN",
        "pass `is_causal=True` for a causal type, and `key_value_seq_lengths` for a padding type",
    ),
    Row(
        ("window_size",),
        "flash-attn, fa4-jax, TransformerEngine",
        "pass `local_window_size=(left, right)`, with None in place of -1, and "
        "`query_offset=S - T` for flash-attn's alignment",
    ),
    Row(
        ("sliding_window", "sliding_window_length"),
        "cuDNN, models' configurations",
        "pass `local_window_size=(length - 1, 0)`, since the length counts the query's own position",
    ),
    Row(
        ("softcap", "soft_cap", "logit_cap", "attn_logits_soft_cap"),
        "flash-attn, Pallas",
        "pass `logits_soft_cap`, with None in place of 0.0",
    ),
    Row(
        ("attn_mask", "attention_mask"),
        "PyTorch, TransformerEngine",
        "pass a bool array, True where the query may attend, as `mask`, and one to add as `bias`; flags, lengths and "
        "`segment_ids` are faster where they say it",
    ),
    Row(("block_mask",), "FlexAttention", "pass its function as `mask_mod`, or what `block_mask` returns"),
    Row(("attn_bias", "core_attention_bias", "ab"), "TransformerEngine, xFormers, Pallas", "pass `bias`"),
    Row(("alibi_slopes", "use_alibi_mask"), "flash-attn, TransformerEngine, cuDNN", _ALIBI),
    Row(
        ("key_padding_mask", "use_padding_mask", "kv_mask"),
        "PyTorch, cuDNN",
        "pass `key_value_seq_lengths`, or `mask=~padding[:, None, None, :]`",
    ),
    Row(("seqused_q", "seq_len_q", "q_seqlen"), "flash-attn, fa4-jax, cuDNN", "pass `query_seq_lengths`"),
    Row(
        ("seqused_k", "cache_seqlens", "context_lens", "seq_len_kv", "kv_seqlen"),
        "flash-attn, fa4-jax, vLLM, cuDNN",
        "pass `key_value_seq_lengths`, and `lengths` to `paged_attention`",
    ),
    Row(
        ("cu_seqlens", "cu_seqlens_kv", "cu_seq_q", "cu_seq_k"),
        "flash-attn, TransformerEngine, PyTorch",
        "pass `cu_seqlens_q` and `cu_seqlens_k` to `attention_varlen`",
    ),
    Row(("cu_seqlens_q", "cu_seqlens_k"), "flash-attn, fa4-jax", "call `attention_varlen`, which has both"),
    Row(
        ("max_seqlen_q", "max_seqlen_k", "max_seqlen_kv", "max_segments_per_seq", "max_q", "max_k"),
        "flash-attn, TransformerEngine, PyTorch",
        "leave it out: no bound on lengths is needed",
    ),
    Row(
        ("sequence_descriptor",),
        "TransformerEngine",
        "pass `query_seq_lengths` and `key_value_seq_lengths`, or `segment_ids`",
    ),
    Row(
        ("block_table", "block_tables", "page_indices", "page_table_k", "page_table_v"),
        "flash-attn, vLLM, Pallas, cuDNN",
        "pass `page_table` to `paged_attention`",
    ),
    Row(("page_table",), "flash-attn", "call `paged_attention`, which has it"),
    Row(
        ("k_cache", "v_cache"),
        "flash-attn",
        "pass the cache as `key` and `value` with `key_value_seq_lengths`, or its pages to `paged_attention`",
    ),
    Row(("learnable_sink", "sink", "s_aux", "softmax_offset"), "flash-attn, TransformerEngine, models", "pass `sinks`"),
    Row(
        ("return_lse", "return_softmax_lse", "return_residuals", "save_residuals", "return_aux"),
        "FlexAttention, flash-attn, fa4-jax, tokamax, Pallas",
        "pass `return_residual=True`",
    ),
    Row(
        ("return_attn_probs", "need_weights", "return_weights"),
        "flash-attn, PyTorch",
        "pass `return_residual=True` for the log-sum-exp; the weights never exist in memory",
    ),
    Row(
        ("enable_gqa", "num_gqa_groups"),
        "PyTorch, FlexAttention, TransformerEngine",
        "leave it out: the heads of `key` say it",
    ),
    Row(
        ("dropout_p", "dropout", "dropout_probability", "attention_dropout"),
        "flash-attn, PyTorch, TransformerEngine, cuDNN",
        "pass `dropout_rate`, and a key as `dropout_key`",
    ),
    Row(
        ("dropout_rng", "seed", "rng_state"),
        "Flax, cuDNN, TransformerEngine, flash-attn",
        "pass a key of `jax.random` as `dropout_key`, such as `jax.random.key(seed)`",
    ),
    Row(
        ("dropout_mask",),
        "tokamax",
        "pass `dropout_rate` and `dropout_key`; `dropout_mask` returns the mask that they make",
    ),
    Row(
        ("precision",),
        "tokamax, Flax",
        "leave it out, and set `jax.default_matmul_precision` around the call",
    ),
    Row(
        ("lengths", "seq_lengths"),
        "Pallas",
        "pass `query_seq_lengths` and `key_value_seq_lengths`; `paged_attention` has `lengths`, and so has "
        "`explain` with `page_table`",
    ),
    Row(("q_sharding",), "tokamax", "leave it out: calls follow the sharding of their operands"),
    Row(
        ("context_parallel_axis",),
        "TransformerEngine",
        "leave it out under `jax.jit`, or pass `axis_name` to `ring_attention`",
    ),
    Row(
        ("backend", "kernel_options", "block_sizes", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"),
        "FlexAttention, flash-attn, Pallas",
        'leave it out: kernels and tiles follow the call; `implementation` takes "cuda" or "xla"',
    ),
    Row(("qkv_layout", "qkv_format", "tensor_layout"), "TransformerEngine", "leave it out: `query` is `[B, T, N, H]`"),
    Row(
        ("rotary_cos", "rotary_sin", "rotary_interleaved"),
        "flash-attn",
        "rotate `query` and `key` before the call",
    ),
    Row(
        ("q_descale", "k_descale", "v_descale", "use_fp8"),
        "flash-attn, cuDNN",
        "leave it out: there is no fp8",
    ),
    Row(("deterministic_backward",), "cuDNN", "pass `deterministic=True`"),
)

# It holds the keywords of each public function, in the order of their definitions.
_KNOWN: dict[str, tuple[str, ...]] = {}
_ROWS = {name: row for row in PEERS for name in row.names}


def explained(function: _Public) -> _Public:
    """Returns a public function or class whose error for an unknown keyword says what to pass instead.

    Python raises that error before the function runs. The signature that `inspect` shows stays. A function with
    `**options` takes the keywords of `attention`, and checks them itself by `unknown`.
    """
    if isinstance(function, type):
        function.__init__ = explained(function.__init__)
        return cast(_Public, function)
    name, parameters = function.__qualname__, inspect.signature(function).parameters.values()
    _KNOWN[name] = tuple(x.name for x in parameters if x.kind != x.VAR_KEYWORD and x.name != "self")
    if len(_KNOWN[name]) < len([x for x in parameters if x.name != "self"]):
        _KNOWN[name] = (*dict.fromkeys((*_KNOWN[name], *_KNOWN["attention"])),)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # An error from inside of the function has more frames.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            text = unknown(name, kwargs)
            if not text:
                raise
        raise TypeError(text)

    return cast(_Public, call)


def unknown(function: str, given: Iterable[str], of: str | None = None) -> str:
    """Returns the error for the first keyword that a public function lacks; empty if it has all.

    Args:
        function: its name, which the error begins with.
        given: the keywords of a call.
        of: the function whose keywords it takes; default: itself.
    """
    known = _KNOWN[of or function]
    for name in given:
        if name not in known:
            return f"{function}() got an unexpected keyword argument '{name}'; {_remedy(name, known)}"
    return ""


def _remedy(name: str, known: tuple[str, ...]) -> str:
    """Returns what to do about a keyword that is not among the known ones."""
    if not known:
        return "leave it out: there are no arguments"
    row = _ROWS.get(name)
    if row is None:
        is_word = any(name in keyword.split("_") for keyword in known)
        return _where([name], "it") if _functions_with([name]) and not is_word else _nearest(name, known)
    named = re.findall(r"`(\w+)", row.remedy)
    # Neither this function nor one that the remedy names has the absent ones.
    there = {*known, *(keyword for function in named for keyword in _KNOWN.get(function, ()))}
    absent = [x for x in dict.fromkeys(named) if x not in there and _functions_with([x])]
    return f"{row.remedy}; {_where(absent, _listed(absent))}" if absent else row.remedy


def _functions_with(names: list[str]) -> list[str]:
    """Returns the public functions that have all of these keywords; `attention` alone if it is one of them."""
    found = [function for function, known in _KNOWN.items() if {*names} <= {*known}]
    return ["attention"] if "attention" in found else found


def _where(names: list[str], what: str) -> str:
    found = _functions_with(names)
    return f"{_listed(found)} {'has' if len(found) == 1 else 'have'} {what}"


def _listed(names: list[str]) -> str:
    """Returns names as `a`, `b` and `c`."""
    *others, last = (f"`{x}`" for x in names)
    return f"{', '.join(others)} and {last}" if others else last


def _nearest(name: str, known: tuple[str, ...]) -> str:
    """Returns the keywords that a name is most like, whole or one of their words; all of them if it is like none."""

    def likeness(keyword: str) -> float:
        return max(difflib.SequenceMatcher(None, name, word).ratio() for word in (keyword, *keyword.split("_")))

    scores = {keyword: likeness(keyword) for keyword in known}
    best = max(scores.values())
    if best < _LEAST_LIKENESS:
        return f"pass one of {', '.join(f'`{x}`' for x in known)}"
    return f"pass {' or '.join(f'`{x}`' for x in known if scores[x] == best)}"
