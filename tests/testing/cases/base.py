# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The cases that tables vary, and the ways to vary them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_fastattn.cases.case import Case


def vary(base: Case, *changes: dict[str, Any]) -> list[Case]:
    """Returns a case with each of the changes."""
    return [dataclasses.replace(base, **change) for change in changes]


def lengths(*pairs: tuple[int, int], **more: Any) -> list[dict[str, Any]]:
    """Returns changes of both lengths, and `more` in each."""
    return [{"query_length": query, "key_length": key, **more} for query, key in pairs]


def on(base: Case, **more: Any) -> Case:
    """Returns a case with one change."""
    return dataclasses.replace(base, **more)


MHA = Case(dtype="bfloat16")
GQA = Case(dtype="bfloat16", num_kv_heads=4, group=2)
FEW = lengths((65, 129), (193, 64), (257, 1000))
# One of them is beyond `SHORT_LENGTH`, the other is around tile sizes; 2112 is a multiple of 192 rows and of 96 keys.
LONG = lengths((2049, 65), (2113, 2305), (63, 2177), (193, 4097))
IDS = {"mask": None, "segments": 4}
