# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The operand of dropout as kernels read it: 16 bytes for each query head. Imports no DSL and no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple


class DropoutNumbers(NamedTuple):
    """The numbers of a head, int32 each; `ops/cuda/dropout.py` makes them.

    Attributes:
        query, key: what is added to the two words of the counter of a pair.
        compared: how many of `limits.DROPOUT_STEPS` values of its bits keep a weight, in both halves. Bits of 15 places
            plus a half have the sign of a 16-bit number if the weight is kept.
        factor: the bits of the factor on weights that are kept, a float32. If none is kept, it is 1.
    """

    query: Any
    key: Any
    compared: Any
    factor: Any


# Bytes from one head to the next.
NBYTES = 4 * len(DropoutNumbers._fields)
FACTOR_OFFSET = 4 * DropoutNumbers._fields.index("factor")
