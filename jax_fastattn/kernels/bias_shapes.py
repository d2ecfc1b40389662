# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kinds of a bias by its shape, and the layouts in which kernels read them. docs/kernels/bias.md describes both.

Pure Python, no import of the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BiasKind = Literal["rows", "keys", "matrix"]
BiasDtype = Literal["bfloat16", "float16", "float32"]

# The columns of a matrix are padded to a multiple of this: TMA takes rows that are a multiple of 16 bytes apart.
MATRIX_COLUMNS = 8
# The largest tile has this many keys. A plane of a bias of keys has as many past the last key, since tiles are loaded
# whole.
TILE_KEYS = 128
# From this size on, a finite log-sum-exp says too little of its row. It is rounded, as logits are, to more than a tenth
# in base 2; at 1e9, as where -1e9 is added to all that a row sees, weights could be 2^128.
VAGUE_LSE = 2.0**20
# A bias of keys as a factor of a product has this many columns, of which three hold the bias.
KEY_PARTS = 8


def bias_kind(shape: tuple[int, ...]) -> BiasKind:
    """Returns the kind of a bias `[b, n, t, s]`.

    rows: one number for each query. It changes no weight, unless there are sinks or a soft cap.
    keys: one number for each key.
    matrix: one number for each pair.
    """
    _, _, queries, keys = shape
    if keys == 1:
        return "rows"
    return "keys" if queries == 1 else "matrix"


@dataclass(frozen=True)
class BiasPlanes:
    """How far the planes of a bias lie apart, in planes: 0 where all share one.

    Attributes:
        batch: from one batch entry to the next.
        head: from one query head to the next.
        kv_head: from one key/value head to the next.
        count: all of them.
    """

    batch: int
    head: int
    kv_head: int
    count: int

    @classmethod
    def of(cls, shape: tuple[int, ...], num_heads: int) -> BiasPlanes:
        """Returns the planes of a bias `[b, n, t, s]`, where n may also be the number of key/value heads."""
        batch, heads, _, _ = shape
        per_query_head = heads == num_heads and heads > 1
        return cls(heads if batch > 1 else 0, int(per_query_head), int(heads > 1 and not per_query_head), batch * heads)


def bias_pitch(shape: tuple[int, ...], key_length: int) -> int:
    """Returns the scalar `bias_pitch` of a bias `[b, n, t, s]`, see `arguments.Scalars`."""
    kind = bias_kind(shape)
    if kind == "rows":
        return shape[2]
    if kind == "matrix":
        return -(-key_length // MATRIX_COLUMNS) * MATRIX_COLUMNS
    return (-(-key_length // TILE_KEYS) + 1) * TILE_KEYS


def stored_dtype(dtype: str) -> BiasDtype:
    """Returns the dtype in which a matrix of some dtype is stored, see `KernelSpec.bias_dtype`."""
    return dtype if dtype in ("bfloat16", "float16") else "float32"
