# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What rounding to 16 bits has taken from a number: the next 8 bits, as a signed byte.

Both the float32 and its rounding are read as integers. In that order neighbors of the 16-bit dtype are 2^16 or 2^13
apart, and the rounding is at most half of that away. The byte has the distance in 256ths of it, rounded to nearest.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.device import ptx

# By how many bits a byte is shifted where it is added to the bits of a number.
SHIFTS = {"bfloat16": 8, "float16": 5}

# These make the signed 16 bits of byte i of a word, with zeros below it.
_SIGNED = [0x4 | i << 4 | (i | 8) << 8 | (i | 8) << 12 for i in range(4)]


def transpose_quad_bytes(low: Int32, high: Int32, lane: Int32) -> list[Int32]:
    """Returns the eight bytes of the lane's own block of columns, from the four lanes of a quad.

    Args:
        low: two bytes of block 0, then two of block 2, of the columns that the lane has of each.
        high: the same of blocks 1 and 3.
        lane: the lane in its quad, which is the block that it gets.
    """
    words = [low, high]
    for bit in (1, 2):
        upper = (lane & bit) != 0
        received = cute.arch.shuffle_sync_bfly(ptx.where(upper, *words), offset=bit)
        words = [ptx.where(upper, received, words[0]), ptx.where(upper, words[1], received)]
        if bit == 1:
            words = [ptx.permute(*words, half) for half in (0x5410, 0x7632)]
    return words


@dataclass(frozen=True)
class Rests:
    """Makes bytes, and adds them.

    Attributes:
        dtype: the dtype to which numbers are rounded, as the compile key names it.
    """

    dtype: str

    def word(self, numbers: list[Float32], near: list[Float32]) -> Int32:
        """Returns the bytes of four numbers, the first one in the lowest byte, given what they are rounded to."""
        scaled = [self._scaled(ptx.bits(x) - ptx.bits(y)) for x, y in zip(numbers, near, strict=True)]
        low, high = (ptx.permute(scaled[i], scaled[i + 1], 0x0051) for i in (0, 2))
        return ptx.permute(low, high, 0x5410)

    def _scaled(self, distance: Int32) -> Int32:
        """Returns a word whose second byte is the byte of a number, rounded and at most 127."""
        missing = 8 - SHIFTS[self.dtype]
        if missing:
            # A number that rounds to an infinity, or to few bits, is farther from it. It has no rest.
            half = 1 << 15 - missing
            is_near = Boolean((distance >= -half) & (distance <= half))
            distance = ptx.where(is_near, distance, Int32(0)) << missing
        return Int32(cutlass.min(distance + 0x80, Int32(0x7FFF)))

    def add(self, numbers: list[Float32], words: list[Int32], first: int) -> list[Float32]:
        """Returns numbers with their bytes added.

        Args:
            numbers: rounded numbers.
            words: bytes, four to a word.
            first: which byte is the one of the first number.
        """
        found = []
        for i, x in enumerate(numbers, first):
            rest = ptx.permute(words[i // 4], Int32(0), _SIGNED[i % 4])
            found.append(ptx.from_bits(ptx.bits(x) + (rest >> 8 - SHIFTS[self.dtype])))
        return found
