# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of a head's number by the portable backward kernel: a product of dS with the mean keys of rows.

`sums/row_means.py` says why the gradient is a slope times the sum of dS (key - mean key). A warp has dS^T of a tile in
registers, as the left factor of dK. One more block of 8 columns of the right factor gives two sums for each key, of dS
and of dS times the mean key. A tile's sums start at 0 and join the sums of a head in float32, since tensor cores
truncate their sums. XLA adds up the keys: the same bits in every run.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.device import mma, ptx
from jax_fastattn.kernels.device.products import Native, Pair, Words
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.key_sums import KeySums
from jax_fastattn.kernels.sums.row_means import MEAN_NBYTES
from jax_fastattn.kernels.sums.sums import LaneKeys

# Keys are counted in this unit there: float16 holds no number over 65504.
_UNIT = 1024.0


def factor_row(words: Words, mean: Float32) -> list[Int32]:
    """Returns the right factor's row of a query: 1, the mean key's first term, 0, its second term, and zeros.

    Both terms are negative. With one term, means of 16k keys would be off by 32.
    """
    scaled = mean * Float32(-1.0 / _UNIT)
    first = words.pair(Float32(1.0), scaled)
    return [first, words.pair(Float32(0.0), scaled - words.numbers(first)[1]), Int32(0), Int32(0)]


class DscoreTile(NamedTuple):
    """A warp's part of a tile of dS^T.

    Attributes:
        pairs: its pairs, see `device/products.py`.
        means: address of the first query's `factor_row` in shared memory.
        lane: index of the lane in its warp.
        key: the lane's first key; the others follow 8 apart.
    """

    pairs: list[Pair]
    means: Int32
    lane: Int32
    key: Int32


@final
@dataclass(frozen=True, eq=False)
class PlaneProducts:
    """The sums of dS (key - mean key) of a lane's keys.

    Attributes:
        keys: the sums, and how they are stored. The lanes of a quad hold parts of each.
        words: what both factors of the product are.
        slope: the derivative of scores by the number is this times the key, plus what a row has in common.
    """

    keys: KeySums
    words: Native
    slope: float

    @classmethod
    def start(cls, spec: KernelSpec, m_blocks: int, n_blocks: int) -> "PlaneProducts":
        """Returns the sums with their registers, given the blocks of dS^T."""
        return cls(KeySums.start(m_blocks, n_blocks), Native(spec.product_dtype), spec.mean_slope)

    def clear(self) -> None:
        """Clears the sums for the next query head."""
        self.keys.clear()

    def add(self, part: DscoreTile) -> None:
        """Adds a part of a tile."""
        sums, n_blocks = self.keys.sums, self.keys.n_blocks
        m_blocks, steps = cute.size(sums) // 2, n_blocks // 2
        acc = [mma.zeros(1, 1) for _ in range(m_blocks)]
        for first in range(0, steps, 2):
            # An ldmatrix loads two steps; if there is one left, both are that one.
            count = min(2, steps - first)
            right = ptx.ldmatrix(
                part.means + (16 * first + (part.lane & (16 * count - 1))) * MEAN_NBYTES, transpose=True
            )
            for k in range(count):
                for m in range(m_blocks):
                    left = self.words.fragment(lambda i: part.pairs[i], n_blocks, m, first + k)
                    acc[m] = ptx.mma(left, right[2 * k : 2 * k + 2], acc[m], dtype=self.words.mma_dtype)
        key = Float32(part.key) * Float32(1.0 / _UNIT)
        for i in range(2 * m_blocks):
            total, moment = acc[i // 2][i % 2 * 2 :][:2]
            sums[i] = sums[i] + ptx.fma(total, key + Float32(8 * i / _UNIT), moment)

    def store(self, place: LaneKeys) -> None:
        """Stores the sums of a query head to `dkey_bias`."""
        sums = self.keys.sums
        for i in range(cute.size(sums)):
            sums[i] = sums[i] * Float32(self.slope * _UNIT)
        self.keys.store(place)
