# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of pairs, a matrix that is added to the logits, from global memory: each lane loads its pairs."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.features.bias.pairs import PairBias, total
from jax_fastattn.kernels.features.bias.planes import Planes
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.places import Element, Head, ScoreTile


@dataclass(frozen=True)
class GlobalBias(PairBias):
    """Adds a matrix from global memory. Any kernel can have it.

    Attributes:
        operand: see `Buffers.bias`.
        dtype: the dtype of a term.
        terms: their number.
        first: address of the plane of the head, of the first term.
        registers: registers of the lane, by term, row and the two columns that they belong to, since `read`.
    """

    operand: cute.Pointer
    dtype: str
    terms: int
    planes: Planes
    first: Any = None
    registers: Any = None

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> Feature:
        """Returns the bias of a launch: what the kernel copies, else what lanes load from global memory."""
        del code
        if arguments.copied_bias is not None:
            return arguments.copied_bias
        spec, planes = arguments.spec, Planes.of(arguments)
        return cls(arguments.buffers.bias, spec.bias_storage, spec.bias_terms, planes)

    def start(self, head: Head) -> "GlobalBias":
        """Returns the feature with the plane of a query head."""
        return replace(self, first=self.operand.toint() + Int64(self.planes.of_head(head)) * self._plane_nbytes)

    def read(self, tile: ScoreTile) -> "GlobalBias":
        """Returns the feature for one pass over the scores of a tile."""
        del tile
        return replace(self, registers={})

    def value(self, at: Element) -> Float32:
        """Returns the bias of a pair, the sum of its terms."""
        return total([self._term(at, term) for term in range(self.terms)])

    @property
    def _plane_nbytes(self) -> Int64:
        scalars = self.planes.scalars
        return Int64(scalars.query_length) * (scalars.bias_pitch * 2)

    def _term(self, at: Element, term: int) -> Float32:
        """Returns an element of a term. Elements past the end are replaced by others that exist."""
        transposed = at.tile.transposed
        which = (term, at.i, at.column // (8 if transposed else 2))
        if which not in self.registers:
            word = self._load_transposed(at, term) if transposed else self._load(at.query, at.key, term)
            self.registers[which] = ptx.unpack(word, dtype=ptx.MMA_DTYPE[self.dtype])
        return self.registers[which][at.column % 2]

    def _load_transposed(self, at: Element, term: int) -> Int32:
        """Returns a lane's pair of queries, from the transpose of a block of 8 queries, in which lanes load keys."""
        lane_row, lane_column = accumulator_lane(ptx.thread_index() & 31)
        first_query = at.tile.index * at.tile.columns + at.column // 8 * 8
        first_key = at.tile.row - lane_row + 8 * at.i
        return ptx.transpose_matrix(self._load(first_query + lane_row, first_key + lane_column, term))

    def _load(self, query: Int32, key: Int32, term: int) -> Int32:
        """Loads two keys of a query, of which the first is even."""
        scalars = self.planes.scalars
        query = Int32(cutlass.min(query, scalars.query_length - 1))
        key = Int32(cutlass.min(key, scalars.bias_pitch - 2))
        first = self.first + Int64(scalars.bias_planes) * term * self._plane_nbytes
        return ptx.load_constant_int(first + Int64(query) * (scalars.bias_pitch * 2) + Int64(key) * 2)
