# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Planes of a score function in global memory: where those of a head begin, and their numbers.

`ops/cuda/score_planes.py` has put zeros around them, so that no index of a tile lies outside. Pairs of a lane on one
diagonal share the load of a distance. Of packed sequences, queries and keys have a number for each row of the packed
array, and a head's numbers begin at the first row of the sequence.
"""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Int32, Int64

from jax_fastattn.kernels.codes import PLANE_PADDING, ScoreParts
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.features.program.forms import Index
from jax_fastattn.programs.code import Place


@dataclass(frozen=True)
class PlaneReader:
    """The planes of a launch.

    Attributes:
        parts: what is compiled in.
        operands: the operands by name.
        scalars: numbers of the launch.
        first: address of the first number of each plane of a head; empty before `start`.
    """

    parts: ScoreParts
    operands: Any
    scalars: Any
    first: tuple[Int64, ...] = ()

    def start(self, head: Head) -> "PlaneReader":
        """Returns the planes of a query head."""
        return replace(self, first=tuple(self._address(place, head) for place in self.parts.places))

    def _length(self, kind: str) -> Any:
        queries, keys = self.scalars.query_length, self.scalars.key_length
        if kind == "head":
            return 1
        if kind == "distance":
            return queries + keys + 2 * PLANE_PADDING
        return (queries if kind == "query" else keys) + PLANE_PADDING

    def _address(self, place: Place, head: Head) -> Int64:
        operand = self.parts.operands[place.operand]
        row = Int32(0)
        if operand.per_batch:
            row = head.batch * self.scalars.num_heads if operand.per_head else head.batch
        if operand.per_head:
            row = row + head.head
        index = (Int64(row) * operand.planes + place.start) * self._length(place.plane.kind)
        side = {"query": 0, "key": 1}.get(place.plane.kind)
        if head.starts is not None and side is not None:
            index = index + head.starts[side]
        return getattr(self.operands, place.operand).toint() + index * 4

    def load(self, plane: int, at: Index | None, memo: dict[Any, Any]) -> Any:
        """Loads a number.

        Args:
            plane: which plane.
            at: query, key, or key - query; None for a number of the head.
            memo: what the pass has loaded.
        """
        place = self.parts.places[plane]
        if at is None:
            return self._typed(place, ptx.load_constant_int(self.first[plane]))
        key = ("load", plane, at.step)
        if key not in memo:
            base = ("address", plane)
            if base not in memo:
                first = at.base
                if place.plane.kind == "distance":
                    first = first + (self.scalars.query_length + PLANE_PADDING)
                memo[base] = self.first[plane] + Int64(first) * 4
            memo[key] = self._typed(place, ptx.load_constant_int(memo[base] + Int64(4 * at.step)))
        return memo[key]

    @staticmethod
    def _typed(place: Place, word: Int32) -> Any:
        return ptx.from_bits(word) if place.plane.dtype == "f" else word
