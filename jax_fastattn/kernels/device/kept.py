# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout of numbers of an accumulator: masks on words, and the signs by which one warp tells another what it dropped.

The mask of a pair has 16 ones for each number that is kept, the first one in the lower half; see `Feature.keep`. A pair
is what `device/products.py` makes of two numbers.
"""

from collections.abc import Sequence

from cutlass import Float32, Int32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.products import Pair

# The signs of two 16-bit numbers.
_SIGNS = -0x7FFF8000
_SIGN = -0x80000000
# Selectors of `ptx.permute`: a half of a word twice, and the sign of a half in all bits.
_HALVES = 0x1010, 0x3232
_HALF_SIGNS = 0x9999, 0xBBBB


def keep_pair(pair: Pair, mask: Int32) -> Pair:
    """Returns a pair with zeros for what is dropped; each word of it has a part of both numbers."""
    return tuple(word & mask for word in pair) if isinstance(pair, tuple) else pair & mask


def keep_marked(pair: Int32, mask: Int32) -> Int32:
    """Returns a pair of 16-bit numbers with -0 for what is dropped, which `unmark` tells from what is kept.

    No number of the pair is negative.
    """
    return (pair & mask) | (~mask & _SIGNS)


def number_masks(mask: Int32) -> list[Int32]:
    """Returns the mask of each number of a pair, 32 bits long."""
    return [ptx.permute(mask, mask, half) for half in _HALVES]


def keep_number(x: Float32, mask: Int32) -> Float32:
    """Returns x, or 0 if it is dropped, whatever it is: the mask is no factor."""
    return ptx.from_bits(ptx.bits(x) & mask)


def mark_number(x: Float32, mask: Int32) -> Float32:
    """Returns a number that is not negative, with a sign if it is dropped."""
    return ptx.from_bits(ptx.bits(x) | (~mask & _SIGN))


def unmark_number(x: Float32) -> tuple[Float32, Int32]:
    """Returns a number without its sign, and its mask."""
    return ptx.from_bits(ptx.bits(x) & ~_SIGN), ~(ptx.bits(x) >> 31)


def mark(pair: Pair, mask: Int32) -> Pair:
    """Returns a pair of numbers that are not negative, with the signs of what is dropped.

    The words of a pair are one for both numbers, or a float32 for each.
    """
    if not isinstance(pair, tuple):
        return pair | (~mask & _SIGNS)
    return pair[0] | (~(mask << 16) & _SIGN), pair[1] | (~mask & _SIGN)


def unmark(pair: Pair) -> tuple[Pair, Sequence[Int32]]:
    """Returns a pair without signs, and the mask of each of its numbers, 32 bits long."""
    if not isinstance(pair, tuple):
        return pair & ~_SIGNS, [~ptx.permute(pair, pair, sign) for sign in _HALF_SIGNS]
    return tuple(word & ~_SIGN for word in pair), [~(word >> 31) for word in pair]
