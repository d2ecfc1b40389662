# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Products of one warp with mma.sync.m16n8k16.

An accumulator of `m_blocks x n_blocks` C fragments is a flat sequence of Float32 (a list, or a register tensor where a
loop carries it): element e of fragment (m, n) has index `(m * n_blocks + n) * 4 + e`. It belongs to row
`accumulator_row(m, e)` of the 2 m_blocks rows of which a lane holds a part. Layouts: `layout.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cutlass import Float32, Int32

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import SharedTile

Fragment = list[Int32]
Accumulator = Any  # a list or a register tensor of Float32


def zeros(m_blocks: int, n_blocks: int) -> list[Float32]:
    """Returns a fresh accumulator."""
    return [Float32(0.0)] * (m_blocks * n_blocks * 4)


def accumulator_row(m: int, element: int) -> int:
    """Returns which of a lane's `2 m_blocks` rows element 0..3 of fragment row m lies in."""
    return 2 * m + element // 2


def gemm(
    acc: Accumulator,
    shape: tuple[int, int, int],
    load_a: Callable[[int, int], Any],
    load_b: Callable[[int, int], Any],
    dtype: str,
    terms: Sequence[tuple[int, int]] = (),
) -> None:
    """Adds A B to acc. ptxas moves each ldmatrix ahead of the products that use it; prefetching here changed no code.

    Args:
        acc: the accumulator, updated in place.
        shape: (m_blocks, n_blocks, k_steps) in units of 16, 8 and 16; n_blocks is even.
        load_a: (m, k) to the A fragment of block row m and k-step k.
        load_b: (n, k) to the B fragments of block columns n and n + 1 (n even), four registers.
        dtype: "bf16" or "f16".
        terms: which terms of A and B are multiplied, if loaders return a list of terms.
    """
    m_blocks, n_blocks, k_steps = shape
    # Each access to a register tensor is two operations to compile, so only the first and the last step access it.
    sums: dict[int, list[Float32]] = {}
    # Blocks of columns whose products come between two terms of a result, which would wait for each other.
    width = 4 if terms and m_blocks == 1 and n_blocks % 4 == 0 else 2
    for k in range(k_steps):
        a = [load_a(m, k) for m in range(m_blocks)]
        for n in range(0, n_blocks, width):
            b = [load_b(n + i, k) for i in range(0, width, 2)]
            blocks = [(m, i, (m * n_blocks + n + i) * 4) for m in range(m_blocks) for i in range(width)]
            factors = [([x[i] for x in a], [x[j] for x in b]) for i, j in terms] or [(a, b)]
            for term, (left, right) in enumerate(factors):
                for m, i, first in blocks:
                    c = sums[first] if k or term else [acc[first + e] for e in range(4)]
                    sums[first] = ptx.mma(left[m], right[i // 2][i % 2 * 2 : i % 2 * 2 + 2], c, dtype=dtype)
                    if k == k_steps - 1 and term == len(factors) - 1:
                        for e, x in enumerate(sums[first]):
                            acc[first + e] = x


def load_a(tile: SharedTile, address: Int32) -> Callable[[int, int], Fragment]:
    """Loads A from a tile stored [m, k]; `address` is the first row plus `tile.offset(*plain_lane(lane))`."""
    return lambda m, k: ptx.ldmatrix(address + tile.offset(16 * m, 16 * k))


def load_a_transposed(tile: SharedTile, address: Int32) -> Callable[[int, int], Fragment]:
    """Loads A from a tile stored [k, m]; `address` is the first row plus `tile.offset(*crossed_lane(lane))`."""
    return lambda m, k: ptx.ldmatrix(address + tile.offset(16 * k, 16 * m), transpose=True)


def load_b(tile: SharedTile, address: Int32) -> Callable[[int, int], Fragment]:
    """Loads B from a tile stored [n, k]; `address` is the first row plus `tile.offset(*crossed_lane(lane))`."""
    return lambda n, k: ptx.ldmatrix(address + tile.offset(8 * n, 16 * k))


def load_b_transposed(tile: SharedTile, address: Int32) -> Callable[[int, int], Fragment]:
    """Loads B from a tile stored [k, n]; `address` is the first row plus `tile.offset(*plain_lane(lane))`."""
    return lambda n, k: ptx.ldmatrix(address + tile.offset(16 * k, 8 * n), transpose=True)
