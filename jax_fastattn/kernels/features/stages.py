# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Shared memory that features own: what they load for each tile of scores.

The features of a launch share one region. In each stage their parts follow each other, each aligned to 1024 bytes,
as swizzled tiles need it.

This module does not import the DSL, so that tables of shared memory can be made on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device.layout import padded
from jax_fastattn.kernels.device.regions import Barriers, Region, Row

# The region has this name; its barriers have the name with `_full` and `_empty` after it.
NAME = "features"
_ALIGNMENT = 1024
# A ring that features own has this many stages.
RING_STAGES = 2
# A warpgroup has this many warps.
_WARPS = 4


def parts(codes: Sequence[Code], queries: int, keys: int) -> Iterator[tuple[int, int, int]]:
    """Yields which features load, with offset and bytes of their parts of a stage, for tiles `[queries, keys]`."""
    offset = 0
    for index, code in enumerate(codes):
        if code.score_nbytes:
            nbytes = code.score_nbytes * queries * keys
            yield index, offset, nbytes
            offset += padded(nbytes, _ALIGNMENT)


def refuse(codes: Sequence[Code], kernel: str) -> None:
    """Raises if a feature loads, in a kernel that has no stages for it."""
    for code in codes:
        if code.score_nbytes:
            raise NotImplementedError(
                f"{kernel} has no stages for what {code.name} loads; only Hopper's forward has, and "
                "its backward up to head dim 128"
            )


def loaded_nbytes(codes: Sequence[Code], queries: int, keys: int) -> int:
    """Returns how many bytes are loaded for a tile."""
    return sum(nbytes for _, _, nbytes in parts(codes, queries, keys))


def ring_rows(codes: Sequence[Code], queries: int, keys: int, warpgroups: int) -> tuple[Row, ...]:
    """Returns the rows of rings, one for each warpgroup, whose stages its warps release."""
    count = RING_STAGES * warpgroups
    return tuple(
        row
        for region in stage_rows(codes, queries, keys, count)
        for row in (region, Barriers(f"{NAME}_full", count, 1), Barriers(f"{NAME}_empty", count, _WARPS))
    )


def stage_rows(codes: Sequence[Code], queries: int, keys: int, stages: int) -> tuple[Row, ...]:
    """Returns the region of stages that are filled and released with another ring's; none if no feature loads."""
    ends = [offset + nbytes for _, offset, nbytes in parts(codes, queries, keys)]
    return (Region(NAME, ends[-1], stages, _ALIGNMENT),) if ends else ()
