# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Stores of a warpgroup's accumulator to global memory, from registers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.device.products import MemoryWords, Pair


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

    def _scaled(self, x: Float32) -> Float32:
        return x if self.factor is None else x * self.factor


def strided(first: Int64, stride: Int64) -> Callable[[Int32], Int64]:
    """Returns the byte addresses of rows, given the address of row 0 and the bytes from one row to the next."""
    return lambda row: first + Int64(row) * stride


@dataclass(frozen=True, eq=False)
class RowStore:
    """Where a lane stores its two rows of a result.

    The quad stores 64 neighboring bytes of a row at once, 16 a lane; in float32 it is 32 bytes, 8 a lane.

    Attributes:
        address: returns the byte address of a row.
        columns: columns to store, a multiple of 8.
        row: the lane's first row; the other one is 8 rows below.
        end: rows from there on are not stored.
        quad_lane: index of the lane among the four that share its rows.
        words: what elements are stored as.
    """

    address: Callable[[Int32], Int64]
    columns: int
    row: Int32
    end: Int32
    quad_lane: Int32
    words: MemoryWords

    def store(self, acc: Accumulator, rows: Iterable[ResultRow]) -> None:
        """Stores an accumulator `[64, padded columns]`; all lanes call it.

        Args:
            rows: what the lane's rows become; each is taken just before its stores.
        """
        for i, result in enumerate(rows):
            row = self.row + 8 * i
            if self.words.columns(1) > 1:
                self._store_single(acc, i, row, result)
                continue
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

    def _store_single(self, acc: Accumulator, i: int, row: Int32, result: ResultRow) -> None:
        """Stores row i of the lane's two in float32."""
        address = self.address(row) + self.quad_lane * 8

        def store() -> None:
            for block in range(self.columns // 8):
                ptx.store_global_pair(address + block * 32, *self.words.numbers(self._pair(acc, block, i, result)))

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
        """Returns the lane's two elements of a block of 8 columns, in row i of its two."""
        first = 4 * block + 2 * i
        return result.pair(acc[first], acc[first + 1], self.words)
