# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout: which weights have a part in the output. `jax_fastattn/dropout.py` defines the draws.

A word of 64 bits decides for queries r and r + 8 and keys c and c + 8. One lane of a warp has these four scores,
whether rows of its accumulator are queries or keys. So no lane asks another one, and both passes draw alike.

The denominator and the log-sum-exp do not know of it. With P before dropout and f the factor on what is kept:

    O = f (keep P) V        dV = f (keep P)^T dO        dS = P (f keep dP - delta)
"""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.dropout import FACTOR_OFFSET, NBYTES, DropoutNumbers
from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.instructions import shifted
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.places import Element, Head, ScoreTile
from jax_fastattn.limits import DROPOUT_MULTIPLIERS

# Selectors of `ptx.permute`: the signs of the lower or the upper halves of two words, each in 16 bits.
_SIGNS = 0xDD99, 0xFFBB
# These bits of a word count. A number that is added to them sets the sign of each half.
_FIFTEEN_BITS = 0x7FFF7FFF


def load_factor(buffers: Any, num_heads: Int32, head: Head) -> Float32 | None:
    """Loads the factor on the weights of a head that are kept; None without dropout."""
    operand = getattr(buffers.added, "dropout", None)
    if operand is None:
        return None
    return ptx.load_global(_address(operand, num_heads, head) + FACTOR_OFFSET)


def _address(operand: cute.Pointer, num_heads: Int32, head: Head) -> Int64:
    return operand.toint() + Int64(head.batch * num_heads + head.head) * NBYTES


@dataclass(frozen=True)
class Dropout(Feature):
    """Says which weights are kept.

    Attributes:
        operand: `[B, N]` of `DropoutNumbers`.
        num_heads: N.
        numbers: the numbers of the head, since `start`.
        factor: the factor of the head, since `end`.
        counter: the lane's first words of the counters of queries and keys, since `read`.
        tile: where the scores lie, since `read`.
        words: what was drawn in this pass, by its place in the tile, since `read`.
    """

    operand: cute.Pointer
    num_heads: Int32
    numbers: DropoutNumbers | None = None
    factor: Any = None
    counter: Any = None
    tile: ScoreTile | None = None
    words: Any = None

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "Dropout":
        """Returns the feature of a launch."""
        del code
        return cls(arguments.buffers.added.dropout, arguments.scalars.num_heads)

    def start(self, head: Head) -> "Dropout":
        """Returns the feature with the numbers of a head."""
        loaded = ptx.load_global_chunk(_address(self.operand, self.num_heads, head))
        numbers = DropoutNumbers(*[cute.arch.make_warp_uniform(x) for x in loaded])
        if head.starts is not None:
            query, key = head.starts
            numbers = numbers._replace(query=numbers.query + query, key=numbers.key + key)
        return replace(self, numbers=numbers)

    def end(self, head: Head) -> "Dropout":
        """Returns the feature with the factor of a head."""
        return replace(self, factor=ptx.load_global(_address(self.operand, self.num_heads, head) + FACTOR_OFFSET))

    def finish_row(self, maximum: Float32, total: Float32) -> tuple[Float32, Float32, Float32]:
        """Returns maximum and denominator as they are, and the factor on the output."""
        return maximum, total, self.factor

    def survival(self) -> Float32:
        """Returns the factor on weights that are kept."""
        assert self.numbers is not None
        return ptx.from_bits(self.numbers.factor)

    def read(self, tile: ScoreTile) -> "Dropout":
        """Returns the feature for one pass over the scores of a tile."""
        assert self.numbers is not None
        # The lane's first row and column are in the first half of a block of 16.
        row, column = (((x & Int32(-16)) >> 1) + (x & Int32(7)) for x in (tile.row, tile.column))
        query, key = (column, row) if tile.transposed else (row, column)
        counter = query + self.numbers.query, key + self.numbers.key
        return replace(self, counter=counter, tile=tile, words={})

    def keep(self, at: Element) -> Int32:
        """Returns 16 ones for each of two neighbors in a row, of which `at` is the first, that is kept."""
        assert self.tile is not None
        row_half, (block, column_half) = at.i % 2, divmod(at.column // 8, 2)
        query_half, key_half = (column_half, row_half) if self.tile.transposed else (row_half, column_half)
        words = [self._word(at.i // 2, block, at.column % 8 + e)[query_half] for e in range(2)]
        return ptx.permute(*words, _SIGNS[key_half])

    def _word(self, row_block: int, column_block: int, column: int) -> list[Int32]:
        """Returns what is drawn for queries r and r + 8, each with two keys: a half is negative if its pair is kept."""
        assert self.tile is not None and self.numbers is not None
        place = row_block, column_block, column
        if place not in self.words:
            row, column = 8 * row_block, 8 * column_block + column
            query, key = (column, row) if self.tile.transposed else (row, column)
            word = _word(self.counter[0] + query, self.counter[1] + key)
            self.words[place] = [(z & Int32(_FIFTEEN_BITS)) + self.numbers.compared for z in word]
        return self.words[place]


def _word(x: Int32, y: Int32) -> tuple[Int32, Int32]:
    """Returns the two halves of the word at a counter.

    Products have 32 bits: next to products of tensor cores, each of 64 bits takes 20 cycles (notebook/dropout.md).
    """
    m = [Int32(x - (x >> 31 << 32)) for x in DROPOUT_MULTIPLIERS]
    a = _mix(m[0] * x + y, 16)
    a = _mix(m[1] * a + y, 15)
    a = _mix(m[2] * a + x, 15)
    b = _mix(m[3] * a + y, 16)
    return b, m[4] * b + a


def _mix(x: Int32, count: int) -> Int32:
    return x ^ shifted(x, count)
