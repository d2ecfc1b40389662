# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What rounding to 16 bits has taken from a number: the next 8 bits, as a signed byte.

Both the float32 and its rounding are read as integers. In that order neighbors of the 16-bit dtype are 2^16 or 2^13
apart, and the rounding is at most half of that away. The byte is the distance in 256ths of it, rounded down. As the
rounding ends in zeros, the byte is a part of the float32, and to make it is to move it.

Two things are left to the reader. Where the byte is -128 and the rounding is even, the number may have been a tie of
two neighbors, rounded down or up. And float16 has fewer bits where numbers are subnormal, and none where they are
infinite. In these cases the byte is not added.
"""

from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.device import ptx

# By how many bits a byte is shifted where it is added to the bits of a number.
SHIFTS = {"bfloat16": 8, "float16": 5}

# The bits of the least and the greatest float16 that have all bits of the dtype.
_LEAST, _MOST = 0x38800000, 0x477FE000

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

    def word(self, numbers: list[Float32]) -> Int32:
        """Returns the bytes of four numbers, the first one in the lowest byte."""
        scaled = [ptx.bits(x) << 8 - SHIFTS[self.dtype] for x in numbers]
        low, high = (ptx.permute(scaled[i], scaled[i + 1], 0x0051) for i in (0, 2))
        return ptx.permute(low, high, 0x5410)

    def add(self, numbers: list[Float32], words: list[Int32], first: int) -> list[Float32]:
        """Returns numbers with their bytes added.

        Args:
            numbers: rounded numbers.
            words: bytes, four to a word.
            first: which byte is the one of the first number.
        """
        found = []
        for i, x in enumerate(numbers, first):
            rest = ptx.permute(words[i // 4], Int32(0), _SIGNED[i % 4]) >> 8 - SHIFTS[self.dtype]
            found.append(ptx.from_bits(ptx.bits(x) + ptx.where(self._is_known(x, rest), rest, Int32(0))))
        return found

    def _is_known(self, number: Float32, rest: Int32) -> Boolean:
        """Returns whether a number that is rounded to this one has this rest, next to no other."""
        last = 8 + SHIFTS[self.dtype]  # which bit is the last one of the rounding
        is_tie = Boolean((rest == -(1 << last - 1)) & ((ptx.bits(number) & 1 << last) == 0))
        if self.dtype == "bfloat16":
            return ~is_tie
        size = ptx.bits(number) & 0x7FFFFFFF
        return Boolean((size >= _LEAST) & (size <= _MOST) & ~is_tie)
