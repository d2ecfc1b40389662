# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Shared memory that features own: what they load for each tile of scores.

The features of a launch share one region. Of each stage they have one part after the other, each aligned to 1024 bytes,
as swizzled tiles need it.

This module does not import the DSL, so that tables of shared memory can be made on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_fastattn.kernels.device.layout import padded
from jax_fastattn.kernels.device.regions import Barriers, Region, Row
from jax_fastattn.kernels.key import KernelSpec

# Name of the region; with `_full` and `_empty` after it that of its barriers.
NAME = "features"
_ALIGNMENT = 1024
# Stages of a ring of their own.
RING_STAGES = 2
# Warps of a warpgroup.
_WARPS = 4


@dataclass(frozen=True)
class MatrixStage:
    """What a bias of pairs loads.

    Attributes:
        terms: arrays in 16 bits that add up to it.
    """

    terms: int

    def defines(self, hook: str) -> bool:
        """Returns whether this feature defines a hook; see `Feature.defines`."""
        return hook == "stage_nbytes"

    def stage_nbytes(self, queries: int, keys: int) -> int:
        """Returns the bytes of a tile."""
        return self.terms * self.term_nbytes(queries, keys)

    def term_nbytes(self, queries: int, keys: int) -> int:
        """Returns the bytes of the tile of a term."""
        return queries * keys * 2


def loading(spec: KernelSpec) -> tuple[Any, ...]:
    """Returns what the features of a compile key may load, in the order of `Score.features`."""
    return (*((MatrixStage(spec.bias_terms),) if spec.matrix_bias else ()), *spec.programs)


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


def ring_rows(features: tuple[Any, ...], queries: int, keys: int, warpgroups: int) -> tuple[Row, ...]:
    """Returns the rows of rings, one for each warpgroup, whose stages its warps release."""
    count = RING_STAGES * warpgroups
    return tuple(
        row
        for region in stage_rows(features, queries, keys, count)
        for row in (region, Barriers(f"{NAME}_full", count, 1), Barriers(f"{NAME}_empty", count, _WARPS))
    )


def stage_rows(features: tuple[Any, ...], queries: int, keys: int, stages: int) -> tuple[Row, ...]:
    """Returns the region of stages that come and go with those of another ring; none if no feature loads."""
    ends = [offset + nbytes for _, offset, nbytes in parts(features, queries, keys)]
    return (Region(NAME, ends[-1], stages, _ALIGNMENT),) if ends else ()
