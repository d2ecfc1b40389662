# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dense calls of `testing.cases` as calls of `paged_attention`, whose pages lie at random places."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_fastattn.cases.case import Case
from jax_fastattn.spec import Operands
from testing import draws
from testing.poison import full

# Calls over pages have no argument for these fields of cases.
_DENSE = ("mask", "bias", "segments", "documents", "packed", "query_seq_lengths")


def can_be_paged(case: Case) -> bool:
    """Returns whether `paged_attention` has an argument for all that a case asks for."""
    return all(getattr(case, name) in (None, 0) for name in _DENSE)


def in_pages(
    key: np.ndarray, value: np.ndarray, lengths: np.ndarray, page: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the same keys and values in pages at random places, and their table.

    Equal pages are one page. Free pages hold poison. Entries past a length are out of range, and so are the ids of the
    first and of the last page, which are clamped.

    Args:
        key: `[B, S, K, H]`; `page` divides S.
        value: `[B, S, K, D]`.
        lengths: `[B]`.
        page: rows of a page.

    Returns:
        Pages of keys `[P, page, K, H]` and of values `[P, page, K, D]`, and the table, int32 `[B, S / page]`.
    """
    random = np.random.default_rng(3)
    batch, keys = key.shape[:2]
    assert keys % page == 0
    entries = keys // page
    counts = -(-np.clip(lengths, 0, keys) // page)
    tiles = [x.reshape(batch, entries, page, *x.shape[2:]) for x in (key, value)]
    used = [(b, j) for b in range(batch) for j in range(counts[b])]
    contents = {at: b"".join(x[at].tobytes() for x in tiles) for at in used}
    pages = len(set(contents.values())) + 3
    ids = dict(zip(dict.fromkeys(contents.values()), random.permutation(pages), strict=False))
    table = random.choice([-5, 1 << 30, -(1 << 31), pages], (batch, entries)).astype(np.int32)
    key_pages, value_pages = (full((pages, *x.shape[2:]), x.dtype) for x in tiles)
    for at in used:
        index = ids[contents[at]]
        table[at] = {0: -7, pages - 1: pages + 9}.get(index, index)
        key_pages[index], value_pages[index] = (tile[at] for tile in tiles)
    return key_pages, value_pages, table


def paged_arguments(case: Case, operands: Operands, page: int) -> dict[str, Any]:
    """Returns the arguments of `paged_attention` that stand for a dense call.

    Args:
        case: one that `can_be_paged`.
        operands: its operands. Poison in keys and values that no query sees stays where it is.
        page: rows of a page. Rows that fill the last page hold poison.
    """
    key, value = (np.asarray(x) for x in (operands.key, operands.value))
    more = -key.shape[1] % page
    key, value = (np.append(x, full((len(x), more, *x.shape[2:]), x.dtype), axis=1) for x in (key, value))
    given = case.key_value_seq_lengths or (case.key_length,) * case.batch
    lengths = np.clip(given, 0, case.key_length).astype(np.int32)
    key_pages, value_pages, table = in_pages(key, value, lengths, page)
    offset = np.array(case.query_offset or (0,) * case.batch, np.int32)
    is_default = case.spec().bounds == (None, None) or np.array_equal(offset, lengths - case.query_length)
    return {
        "query": operands.query,
        "key_pages": key_pages,
        "value_pages": value_pages,
        "page_table": table,
        "lengths": lengths,
        "query_offset": None if is_default else offset,
        "sinks": None if operands.sinks is None else operands.sinks[0],
        **draws.static_options(case.spec()),
    }
