# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The types of the keyword arguments that public functions share; their docstrings say what the arguments mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

import jax
from jax.typing import ArrayLike

from jax_fastattn.ops.block_mask import BlockMask
from jax_fastattn.spec import Implementation

Window = int | tuple[int | None, int | None] | None
SegmentIds = ArrayLike | tuple[ArrayLike, ArrayLike] | None
ScoreMod = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], ArrayLike]
MaskMod = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], ArrayLike]


class Options(TypedDict, total=False):
    """Keyword arguments of all functions."""

    scale: ArrayLike | None
    is_causal: bool
    local_window_size: Window
    implementation: Implementation | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    deterministic: bool


class DropoutOptions(Options, total=False):
    """Keyword arguments of functions that have gradients."""

    dropout_rate: float | jax.Array
    dropout_key: jax.Array | None
    broadcast_dropout: bool


class DenseOptions(DropoutOptions, total=False):
    """Keyword arguments of functions of dense arrays."""

    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    segment_ids: SegmentIds
    query_offset: int | ArrayLike


class BatchedOptions(DenseOptions, total=False):
    """Keyword arguments of `attention`."""

    precise_gradients: bool
    score_mod: ScoreMod | None
    mask_mod: MaskMod | BlockMask | None


class BlockMaskOptions(DenseOptions, total=False):
    """Keyword arguments of `block_mask`, which are arguments of the calls that share its result."""

    bias: ArrayLike | None
    mask: ArrayLike | None


class PackedOptions(DropoutOptions, total=False):
    """Keyword arguments of `attention_varlen`."""

    query_offset: int | ArrayLike | Literal["bottom_right"]
    precise_gradients: bool
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None


class SplitOptions(DenseOptions, total=False):
    """Keyword arguments of `ring_attention` and `all_to_all_attention`, except the arguments of the layout."""

    boundaries: ArrayLike | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
