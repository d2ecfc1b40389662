# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of swizzled tiles in shared memory that hold nothing for products, which are zeroed before them."""

from collections.abc import Callable, Sequence

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.regions import NamedBarrier
from jax_fastattn.kernels.device.wgmma import atom_columns


def zero_hidden_rows(
    rows: int,
    operands: Callable[[], Sequence[tuple[Int32, int]]],
    live: copies.Rows,
    *,
    threads: int,
    barrier: NamedBarrier,
    together: bool = True,
) -> None:
    """Zeroes the rows of tiles that are not live, for products that read them next: 0 * NaN would be NaN.

    Args:
        rows: rows of each tile.
        operands: returns the address and the columns of each tile; called if there is something to zero.
        live: the other rows; they may lie in part or altogether outside of the tiles.
        threads: number of the threads that share the work, all of which call: the CTA's first ones, or the next ones.
        barrier: the barrier on which they meet, the first ones at its first number, the next ones at the next one.
        together: whether all of them call at the same place in the code.
    """
    begin = Int32(0) if live.begin is None else copies.clamp(live.begin, 0, rows)
    end = copies.clamp(live.end, begin, rows)
    spans = [] if live.begin is None else [(Int32(0), begin)]

    def zero() -> None:
        # It is read anew: an index that lives for this rare case takes registers of loops that have none to spare.
        thread = ptx.thread_index()
        for address, columns in operands():
            for span in [*spans, (end, Int32(rows))]:
                zero_rows(address, (rows, columns), span, thread=thread % threads, threads=threads)
        cute.arch.fence_proxy("async.shared", space="cta")
        if together:
            cute.arch.barrier(barrier_id=barrier.at(thread // threads), number_of_threads=threads)
        else:
            ptx.sync_apart(barrier.at(thread // threads), threads)

    cutlass.if_generate(end - begin < rows, zero)


def zero_dead_rows(rows: int, operands: Sequence[tuple[Int32, int]], live: list[Int32]) -> None:
    """Zeroes the rows of swizzled tiles whose bit is 0; the caller fences and synchronizes.

    A row is zeroed by one thread, whose index in the CTA is the row's up to a multiple of 128.

    Args:
        rows: rows of each tile, at most 128.
        operands: the address and the columns of each tile.
        live: a bit for each row, in words of 32.
    """
    # The index is read anew, see `zero_hidden_rows`.
    row = ptx.thread_index() % 128
    word = live[0]
    for i in range(1, (rows + 31) // 32):
        word = ptx.where(row // 32 == i, live[i], word)

    def clear() -> None:
        for address, columns in operands:
            row_nbytes = 2 * atom_columns(columns)
            for block in range(2 * columns // row_nbytes):
                start = address + row * row_nbytes + block * rows * row_nbytes
                for chunk in range(0, row_nbytes, 16):
                    ptx.store_shared_chunk(start + chunk, [Int32(0)] * 4)

    cutlass.if_generate(Boolean(Boolean(((word >> (row % 32)) & 1) == 0) & Boolean(row < rows)), clear)


def zero_rows(tile: Int32, shape: tuple[int, int], span: tuple[Int32, Int32], *, thread: Int32, threads: int) -> None:
    """Zeroes the rows [first, last) of a swizzled tile; the caller fences and synchronizes.

    Args:
        tile: address of the tile.
        shape: its (rows, columns).
        span: first and last.
        thread: index of this thread among those that call.
        threads: their number.
    """
    rows, columns = shape
    # In a swizzle atom's columns, rows follow each other.
    row_nbytes = 2 * atom_columns(columns)
    block_nbytes, start, end = rows * row_nbytes, span[0] * row_nbytes + thread * 16, span[1] * row_nbytes
    for block in range(2 * columns // row_nbytes):
        for offset in range(0, block_nbytes, 16 * threads):
            position = start + offset

            def clear(address: Int32 = tile + block * block_nbytes + position) -> None:
                ptx.store_shared_chunk(address, [Int32(0)] * 4)

            cutlass.if_generate(position < end, clear)
