# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Stores of accumulators to global memory from registers: of a warpgroup, or of a warp with blocks of 16 rows."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import MemoryWords, Native, Pair
from jax_fastattn.kernels.device.rests import Rests, transpose_quad_bytes


class ResultRow(NamedTuple):
    """What a row of an accumulator becomes when it is stored.

    Attributes:
        live: whether the row has a result; otherwise zeros are stored, no matter what the accumulator holds.
        factor: multiplies the result; None for 1.
    """

    live: Boolean
    factor: Float32 | None = None

    def value(self, x: Float32) -> Float32:
        """Returns what an element of the row is stored as."""
        # It is a select, not a product: an element of a row without a result can be NaN.
        return ptx.where(self.live, self._scaled(x), Float32(0.0))

    def pair(self, x: Float32, y: Float32, words: MemoryWords) -> Pair:
        """Returns what two elements of the row are stored as."""
        return words.select(self.live, words.pair(self._scaled(x), self._scaled(y)))

    def rests(self, elements: list[Float32], words: Native) -> Int32:
        """Returns the bytes that rounding takes from four elements of the row."""
        return Rests(words.dtype).word([self._scaled(x) for x in elements])

    def _scaled(self, x: Float32) -> Float32:
        return x if self.factor is None else x * self.factor


def strided(first: Int64, stride: Int64) -> Callable[[Int32], Int64]:
    """Returns the byte addresses of rows, given the address of row 0 and the bytes from one row to the next."""
    return lambda row: first + Int64(row) * stride


@dataclass(frozen=True, eq=False)
class RowStore:
    """Where a lane stores its rows of a result.

    In words of 16 bits a lane stores 16 bytes at a time, and the quad 64 neighboring bytes of a row. In float32 these
    are 8 and 32 bytes.

    Attributes:
        address: returns the byte address of a row.
        columns: columns to store, a multiple of 8.
        row: the lane's first row; the others follow 8 apart.
        end: rows from there on are not stored.
        quad_lane: index of the lane among the four that share its rows.
        words: what elements are stored as.
        blocks: blocks of 8 columns of the accumulator, if it has more than 16 rows of a warp.
    """

    address: Callable[[Int32], Int64]
    columns: int
    row: Int32
    end: Int32
    quad_lane: Int32
    words: MemoryWords
    blocks: int = 0

    def store(self, acc: Accumulator, rows: Iterable[ResultRow]) -> None:
        """Stores an accumulator `[64, padded columns]`, or a warp's `[rows, padded columns]`; all lanes call it.

        Args:
            rows: what the lane's rows become; each is taken just before its stores.
        """
        if self.words.columns(1) == 2:
            self._store_numbers(acc, rows)
            return
        for i, result in enumerate(rows):
            row = self.row + 8 * i
            address = self.address(row) + self.quad_lane * 16
            for block in range(0, self.columns // 8, 4):
                pairs = [self._pair(acc, j, i, result) for j in range(block, block + 4)]
                chunk = ptx.transpose_quad(pairs, self.quad_lane)
                stores = row < self.end
                if block + 4 > self.columns // 8:
                    stores = Boolean(stores & (self.quad_lane < self.columns // 8 - block))

                def store(address: Int64 = address + block * 16, chunk: list = chunk) -> None:
                    ptx.store_global_chunk(address, chunk)

                cutlass.if_generate(stores, store)

    def store_rests(self, acc: Accumulator, rows: Iterable[ResultRow]) -> None:
        """Stores what rounding takes from the elements of an accumulator that `store` rounds, a byte each."""
        assert isinstance(self.words, Native)
        count = self.columns // 8
        for i, result in enumerate(rows):
            row = self.row + 8 * i
            address = self.address(row) + self.quad_lane * 8
            for block in range(0, count, 4):
                four = [self._elements(acc, min(j, count - 1), i) for j in range(block, block + 4)]
                words = [result.rests([*four[j], *four[j + 2]], self.words) for j in range(2)]
                found = transpose_quad_bytes(*words, self.quad_lane)
                # A row without a result has zeros.
                chunk = [ptx.from_bits(ptx.where(result.live, x, Int32(0))) for x in found]
                stores = Boolean((row < self.end) & (self.quad_lane < count - block))

                def store(address: Int64 = address + block * 8, chunk: list = chunk) -> None:
                    ptx.store_global_pair(address, *chunk)

                cutlass.if_generate(stores, store)

    def _store_numbers(self, acc: Accumulator, rows: Iterable[ResultRow]) -> None:
        """Stores float32 numbers, two neighbors at once."""
        for i, result in enumerate(rows):
            row = self.row + 8 * i
            address = self.address(row) + self.quad_lane * 8
            found = [self.words.numbers(self._pair(acc, block, i, result)) for block in range(self.columns // 8)]

            def store(address: Int64 = address, found: list = found) -> None:
                for block, numbers in enumerate(found):
                    ptx.store_global_pair(address + block * 32, *numbers)

            cutlass.if_generate(row < self.end, store)

    def store_live(self, acc: Accumulator, live: copies.Rows, factor: Float32 | None = None) -> None:
        """Stores an accumulator times a factor, and zeros in rows that are not live."""
        self.store(acc, self._results(live, factor))

    def _results(self, live: copies.Rows, factor: Float32 | None) -> Iterator[ResultRow]:
        for i in range(2):
            row = self.row + 8 * i
            is_live = row < live.end
            if live.begin is not None:
                is_live = Boolean(is_live & (row >= live.begin))
            yield ResultRow(is_live, factor)

    def _pair(self, acc: Accumulator, block: int, i: int, result: ResultRow) -> Pair:
        """Returns the lane's two elements of a block of 8 columns, in row i of its rows."""
        return result.pair(*self._elements(acc, block, i), self.words)

    def _elements(self, acc: Accumulator, block: int, i: int) -> tuple[Float32, Float32]:
        """Returns these elements as the accumulator has them."""
        first = 4 * (i // 2 * self.blocks + block) + i % 2 * 2
        return acc[first], acc[first + 1]
