# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions, a file for each layout of sequences; `jax_fastattn` hands them on."""

from jax_fastattn.api.batched import attention
from jax_fastattn.api.block_mask import block_mask
from jax_fastattn.api.dropout import dropout_mask
from jax_fastattn.api.explain import explain
from jax_fastattn.api.masks import and_masks, causal, or_masks
from jax_fastattn.api.packed import attention_varlen
from jax_fastattn.api.paged import paged_attention
from jax_fastattn.api.ring import all_to_all_attention, positions, ring_attention, unzigzag, zigzag

__all__ = [
    "all_to_all_attention",
    "and_masks",
    "attention",
    "attention_varlen",
    "block_mask",
    "causal",
    "dropout_mask",
    "explain",
    "or_masks",
    "paged_attention",
    "positions",
    "ring_attention",
    "unzigzag",
    "zigzag",
]
