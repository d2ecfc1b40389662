# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The bits of one tile in shared memory, and what is made of them: words of fragments, and live rows.

A matrix has a row of words for each query of the tile, with one bit for each key. Each warp of a CTA writes 32 rows, in
steps: in each step a lane has one word, so that neighboring lanes read what lies next to each other in the mask.
"""

from dataclasses import dataclass

from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.instructions import shifted
from jax_fastattn.kernels.tiles.lists import PrepassConfig

# One warp makes the bits of this many queries of a tile.
WARP_ROWS = 32


@dataclass(frozen=True)
class MatrixShape:
    """How a matrix lies in shared memory.

    Attributes:
        config: sizes of the tiles.
    """

    config: PrepassConfig

    @property
    def words(self) -> int:
        """Words of a row: a power of 2, of which the last ones may be zeros."""
        words = 1
        while 32 * words < self.config.keys:
            words *= 2
        return words

    @property
    def warps(self) -> int:
        """Warps that share a matrix: one for each `WARP_ROWS` queries."""
        return self.config.rows // WARP_ROWS

    @property
    def rows_per_step(self) -> int:
        """Queries of which a warp has words in a step."""
        return 32 // self.words

    @property
    def steps(self) -> int:
        """Steps of a warp for its queries."""
        return WARP_ROWS // self.rows_per_step

    @property
    def nbytes(self) -> int:
        """Bytes of a matrix."""
        return self.config.rows * self.words * 4


@dataclass(frozen=True, eq=False)
class BitMatrix:
    """The matrix of a CTA as one of its warps sees it.

    Attributes:
        shape: how it lies in shared memory.
        address: the address of its first byte.
        warp: index of the warp.
        lane: index of the lane in the warp.
    """

    shape: MatrixShape
    address: Int32
    warp: Int32
    lane: Int32

    @property
    def word(self) -> Int32:
        """Which word of a row the lane has."""
        return self.lane % self.shape.words

    def row(self, step: Int32 | int) -> Int32:
        """Returns the query of which the lane has a word in a step."""
        return self.warp * WARP_ROWS + step * self.shape.rows_per_step + self.lane // self.shape.words

    def store(self, step: Int32, bits: Int32) -> None:
        """Stores the lane's word of a step."""
        first = self.warp * (WARP_ROWS * self.shape.words)
        ptx.store_shared(self.address + (first + step * 32 + self.lane) * 4, bits)

    def _load(self, row: Int32, word: Int32 | int) -> Int32:
        return ptx.load_shared(self.address + (row * self.shape.words + word) * 4)

    # Words of fragments.

    def store_fragments(self, target: Int64) -> None:
        """Writes the words of all fragments of 16 accumulator rows, see docs/kernels/masks.md. All warps call it.

        Args:
            target: address of the tile's bits.
        """
        config, warps = self.shape.config, self.shape.warps
        make = self._transposed_word if config.transposed else self._word

        def store(i: Int32) -> None:
            fragment = self.warp + i * warps
            for word in range(config.words):
                place = (fragment * config.words + word) * 32 + self.lane
                ptx.store_global_int(target + place * 4, make(fragment, word))

        wgmma.loop((config.own // 16 - self.warp + (warps - 1)) // warps, store)

    def _word(self, fragment: Int32, word: int) -> Int32:
        """Returns the lane's word of 16 queries and 64 keys."""
        found = Int32(0)
        for i in range(2):
            row = fragment * 16 + 8 * i + self.lane // 4
            for half in range(min(2, self.shape.words - 2 * word)):
                # Column 8 n + 2 t + e of 32 moves to 2 n + e, for the lane's t.
                bits = shifted(self._load(row, 2 * word + half), self.lane % 4 * 2) & Int32(0x03030303)
                bits = (bits | shifted(bits, 6)) & Int32(0x000F000F)
                bits = (bits | shifted(bits, 12)) & Int32(0xFF)
                found = found | (bits << (16 * i + 8 * half))
        return found

    def _transposed_word(self, fragment: Int32, word: int) -> Int32:
        """Returns the lane's word of 16 keys and 64 queries."""
        found, key = Int32(0), fragment * 16 + self.lane // 4
        for n in range(min(8, (self.shape.config.rows - 64 * word) // 8)):
            for e in range(2):
                row = 64 * word + 8 * n + e + self.lane % 4 * 2
                # Bit 0 is for the lane's first key, bit 8 for the key 8 rows below.
                bits = shifted(self._load(row, key // 32), key % 32) & Int32(0x0101)
                found = found | (((bits | (bits << 8)) & Int32(0x00010001)) << (2 * n + e))
        return found

    # Live rows.

    def live_queries(self) -> Int32:
        """Returns which of the warp's queries see some key of the tile, a bit each."""
        bits = Int32(0)
        for word in range(self.shape.words):
            bits = bits | self._load(self.warp * WARP_ROWS + self.lane, word)
        return cute.arch.vote_ballot_sync(bits != 0)

    def live_keys(self, bits: Int32) -> Int32:
        """Returns which keys some query of the warp sees: lane i has the bits of keys 32 i to 32 i + 31.

        Args:
            bits: the union of all words that the lane has had.
        """
        offset = self.shape.words
        while offset < 32:
            bits = bits | cute.arch.shuffle_sync_bfly(bits, offset=offset)
            offset *= 2
        return bits
