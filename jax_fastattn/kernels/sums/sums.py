# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a kernel that has dS does for a gradient that is a sum of dS. The other files of this folder say which sums."""

from typing import NamedTuple, Protocol, TypeVar

from cutlass import Boolean, Float32, Int32, Int64

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.features.places import ScoreTile

Part = TypeVar("Part", contravariant=True)
Place = TypeVar("Place", contravariant=True)


class Sums(Protocol[Part, Place]):
    """The sums of a lane, in registers. It adds parts, dS or what dS is made of, and stores the sums to a place."""

    def clear(self) -> None:
        """Begins anew, with sums of 0."""
        ...

    def add(self, part: Part) -> None:
        """Adds a part."""
        ...

    def store(self, place: Place) -> None:
        """Stores the sums."""
        ...


class DscorePair(NamedTuple):
    """Two neighbors of an accumulator `[keys, queries]` of dS.

    Attributes:
        pair: its index in the accumulator.
        values: dS of both.
    """

    pair: int
    values: list[Float32]


class LaneKeys(NamedTuple):
    """The keys of a lane in a query head. They are accumulator rows 8 apart.

    Attributes:
        head: index of their plane in the result.
        length: keys of a plane.
        first: the first one of them.
        column: first accumulator column of the lane.
        live: whether some query sees each key: the sums of others may be no numbers. None if all sums are numbers.
        factor: multiplies sums; None for 1.
    """

    buffers: Buffers
    head: Int64
    length: Int32
    first: Int32
    column: Int32
    live: list[Boolean] | None = None
    factor: Float32 | float | None = None


class SummedTile(NamedTuple):
    """A tile of scores whose dS is added.

    Attributes:
        scores: where the lane's scores lie; rows are keys.
        means: address of the mean key of the lane's first query in shared memory; a query has 16 bytes. See
            `KernelSpec.mean_plane`.
    """

    scores: ScoreTile
    means: Int32


class HeadSums(Sums[DscorePair, LaneKeys], Protocol):
    """Sums over the queries of one head after the other, in kernels that compute dk."""

    def at_tile(self, tile: SummedTile) -> "HeadSums":
        """Returns the sums for the scores of a tile."""
        ...
