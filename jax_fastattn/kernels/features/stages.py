# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Shared memory that features own: what they load for each tile of scores.

The features of a launch share one region. Of each stage they have one part after the other, each aligned to 128 bytes.

This module does not import the DSL, so that tables of shared memory can be made on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax_fastattn.kernels.device.layout import padded
from jax_fastattn.kernels.device.regions import Barriers, Region, Row

# Name of the region; with `_full` and `_empty` after it that of its barriers.
NAME = "features"
_ALIGNMENT = 128
# Stages of a ring of their own.
_STAGES = 2


def parts(features: tuple[Any, ...], queries: int, keys: int) -> Iterator[tuple[Any, int, int]]:
    """Yields each feature that loads, with offset and bytes of its part of a stage, for tiles `[queries, keys]`."""
    offset = 0
    for feature in features:
        if feature.defines("stage_nbytes"):
            nbytes = feature.stage_nbytes(queries, keys)
            yield feature, offset, nbytes
            offset += padded(nbytes, _ALIGNMENT)


def refuse(features: tuple[Any, ...], kernel: str) -> None:
    """Raises if a feature loads, in a kernel that has no stages for it."""
    for feature in features:
        if feature.defines("stage_nbytes"):
            raise NotImplementedError(
                f"{kernel} has no stages for what {feature} loads; only Hopper's forward has, and "
                "its backward up to head dim 128"
            )


def loaded_nbytes(features: tuple[Any, ...], queries: int, keys: int) -> int:
    """Returns how many bytes are loaded for a tile."""
    return sum(nbytes for _, _, nbytes in parts(features, queries, keys))


def ring_rows(features: tuple[Any, ...], queries: int, keys: int, warps: int) -> tuple[Row, ...]:
    """Returns the rows of a ring of its own, whose stages that `warps` consumer warps release."""
    return tuple(
        row
        for region in stage_rows(features, queries, keys, _STAGES)
        for row in (region, Barriers(f"{NAME}_full", _STAGES, 1), Barriers(f"{NAME}_empty", _STAGES, warps))
    )


def stage_rows(features: tuple[Any, ...], queries: int, keys: int, stages: int) -> tuple[Row, ...]:
    """Returns the region of stages that come and go with those of another ring; none if no feature loads."""
    ends = [offset + nbytes for _, offset, nbytes in parts(features, queries, keys)]
    return (Region(NAME, ends[-1], stages, _ALIGNMENT),) if ends else ()
