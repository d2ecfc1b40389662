# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Scores in registers: exponentials, and reductions along the rows of an accumulator (see `mma.py`).

A kernel keeps scores q . k unscaled and folds the scale into the exponential: one FFMA and one MUFU per score.
"""

from collections.abc import Callable

from cutlass import Float32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator, accumulator_row

Rounding = Callable[[Float32, Float32], list[Float32]]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# This is the running maximum of a row that has seen no key.
NEVER = float("-inf")


def row_maxima(acc: Accumulator, m_blocks: int, n_blocks: int, *, keep_nan: bool = False) -> list[Float32]:
    """Returns the maximum of each of the lane's `2 m_blocks` rows, over all lanes that share the row.

    It is the maximum of the row's numbers, or NaN if one is NaN and `keep_nan` is set.
    """
    maxima = []
    for row in range(2 * m_blocks):
        indices = _row_indices(row, n_blocks)
        best = acc[indices[0]]
        for index in indices[1:]:
            best = ptx.maximum(best, acc[index], keep_nan=keep_nan)
        maxima.append(_quad_maximum(best, keep_nan=keep_nan))
    return maxima


def _row_indices(row: int, n_blocks: int) -> list[int]:
    first = row // 2 * n_blocks * 4 + row % 2 * 2
    return [first + 4 * n + half for n in range(n_blocks) for half in range(2)]


def exponentials(
    acc: Accumulator,
    m_blocks: int,
    n_blocks: int,
    factor: Float32,
    shifts: list[Float32],
    rounds: Rounding | None = None,
) -> list[Float32]:
    """Replaces scores by 2^(factor * score - shift of the row) and returns this lane's sums of its rows.

    It goes column by column, as the next product consumes them, and with sums as trees: in row order with running sums
    ptxas spilled 80 bytes at 32 x 64 scores and 128 output columns. See `row_sums` for `rounds`.
    """
    for n in range(n_blocks):
        for m in range(m_blocks):
            for element in range(4):
                index = (m * n_blocks + n) * 4 + element
                shift = shifts[accumulator_row(m, element)]
                acc[index] = ptx.exp2(ptx.fma(acc[index], factor, -shift))
    return row_sums(acc, m_blocks, n_blocks, rounds)


def row_sums(acc: Accumulator, m_blocks: int, n_blocks: int, rounds: Rounding | None = None) -> list[Float32]:
    """Returns this lane's sums of its rows.

    Args:
        acc: the accumulator.
        m_blocks, n_blocks: its blocks.
        rounds: returns two neighbors as the next product has them; None if they count as they are.
    """
    sums = []
    for row in range(2 * m_blocks):
        terms = [acc[index] for index in _row_indices(row, n_blocks)]
        if rounds is not None:
            terms = [x for i in range(0, len(terms), 2) for x in rounds(terms[i], terms[i + 1])]
        sums.append(tree_sum(terms))
    return sums


def tree_sum(terms: list[Float32]) -> Float32:
    """Returns the sum of numbers, added up in pairs."""
    while len(terms) > 1:
        pairs = [terms[i] + terms[i + 1] for i in range(0, len(terms) - 1, 2)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0]


def _quad_maximum(x: Float32, *, keep_nan: bool) -> Float32:
    """Returns the maximum over the four lanes that share an accumulator row."""
    x = ptx.maximum(x, cute.arch.shuffle_sync_bfly(x, offset=1), keep_nan=keep_nan)
    return ptx.maximum(x, cute.arch.shuffle_sync_bfly(x, offset=2), keep_nan=keep_nan)


def quad_sum(x: Float32) -> Float32:
    """Returns the sum over the four lanes that share an accumulator row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)
