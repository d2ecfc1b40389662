# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Pieces of the backward kernels: a factor on P, and the stores of a gradient."""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from jax_fastattn.kernels.device import mma, ptx
from jax_fastattn.kernels.device.kept import keep_number
from jax_fastattn.kernels.device.layout import SharedTile, accumulator_lane
from jax_fastattn.kernels.device.products import Words
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig


def log2_probability_factor(spec: KernelSpec, config: DkdvDqConfig) -> int:
    """Returns the binary logarithm of a factor on P, and so on dV, dS, dK and dQ until they are stored.

    One role hands P to the other in float16, which has three bits more than bfloat16. P is at most 1, so with a factor
    of 2^14 it is a normal number down to 2^-28. Float16 operands have `sums/units.py` instead. P of operands in two
    terms crosses in float32, and P that float16 does not hold in bfloat16.
    """
    crosses_in_float16 = config.roles == 2 and spec.products == "native" and spec.fits_float16
    return 14 if crosses_in_float16 and spec.operand_dtype == "bfloat16" else 0


def row_stride(heads: Int32, columns: int) -> Int64:
    """Returns the bytes from one row to the next of an operand [rows, heads, columns] of 16-bit columns."""
    return Int64(heads) * (2 * columns)


def change(dprobability: Float32, delta: Float32, mask: Int32 | None, survival: Float32 | None) -> Float32:
    """Returns what P is multiplied by in dS: dP - delta, or f dP - delta with the factor on what dropout keeps.

    Args:
        dprobability: dP of a score, as if its weight was kept.
        delta: the delta of its row.
        mask: whether it is kept, see `device/kept.py`; None if all weights are.
        survival: the factor f; None if all weights are kept.
    """
    if mask is None or survival is None:
        return dprobability - delta
    return ptx.fma(keep_number(dprobability, mask), survival, -delta)


def finish_rows(
    acc: mma.Accumulator, blocks: tuple[int, int], row: Int32, end: Int32, factor: Float32 | None = None
) -> None:
    """Multiplies an accumulator by `factor` and zeroes its rows from `end` on; the lane's c0 is in row `row`."""
    for m in range(blocks[0]):
        for n in range(blocks[1]):
            for element in range(4):
                index = (m * blocks[1] + n) * 4 + element
                x = acc[index] if factor is None else acc[index] * factor
                # It is a select, not a product: rows past the end may hold anything.
                valid = row + (16 * m + element // 2 * 8) < end
                acc[index] = ptx.where(valid, x, Float32(0.0))


def scatter(
    acc: mma.Accumulator, blocks: tuple[int, int], tile: SharedTile, shared: Int32, lane: Int32, words: Words
) -> None:
    """Stores the pairs of an accumulator to a tile, its element (0, 0) to address `shared`."""
    row, column = accumulator_lane(lane)
    address = shared + tile.offset(row, words.columns(column))
    for m in range(blocks[0]):
        for n in range(blocks[1]):
            for half in range(2):
                index = (m * blocks[1] + n) * 4 + 2 * half
                target = address + tile.offset(16 * m + 8 * half, words.columns(8 * n))
                words.store(target, words.pair(acc[index], acc[index + 1]))


class NumberRows(NamedTuple):
    """Rows `[rows, columns]` of float32 in global memory.

    Attributes:
        first: byte address of the first row.
        stride: bytes from one row to the next.
        columns: how many columns there are.
        end: rows from there on are not stored.
    """

    first: Int64
    stride: Int64
    columns: int
    end: Int32


def store_numbers(
    acc: mma.Accumulator,
    blocks: tuple[int, int],
    rows: NumberRows,
    place: tuple[Int32, Int32],
    lane: Int32,
    warps: int,
    *,
    add: bool,
) -> None:
    """Stores a warp's part of a gradient in float32 from registers, 32 neighboring bytes the quad, or adds it.

    Args:
        acc: the part.
        blocks: its block rows and columns.
        rows: where the gradient goes.
        place: row and column of the part's element (0, 0).
        lane: index of the lane in its warp.
        warps: how many warps share a row.
        add: whether to add to what the same lanes have stored there.
    """
    lane_row, lane_column = accumulator_lane(lane)
    column = place[1] + lane_column
    for m in range(blocks[0]):
        for half in range(2):
            row = place[0] + lane_row + (16 * m + 8 * half)
            address = rows.first + Int64(row) * rows.stride + column * 4
            exists = Boolean(row < rows.end)

            def store(address: Int64 = address, m: int = m, half: int = half) -> None:
                for n in range(blocks[1]):
                    index = (m * blocks[1] + n) * 4 + 2 * half

                    def store_pair(at: Int64 = address + 32 * n, i: int = index) -> None:
                        if add:
                            ptx.add_global(at, acc[i])
                            ptx.add_global(at + 4, acc[i + 1])
                        else:
                            ptx.store_global_pair(at, acc[i], acc[i + 1])

                    if 8 * blocks[1] * warps == rows.columns:
                        store_pair()
                    else:
                        cutlass.if_generate(column + 8 * n < rows.columns, store_pair)

            cutlass.if_generate(exists, store)
